"""Functions of the file as tools of each framework, whose agent calls one, in the framework's environment."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from fake_openai import FakeOpenAI
from harness import HERE
from test_frameworks import python_of

FRAMEWORKS = (
    *("langgraph", "llama_index", "adk", "crewai", "semantic_kernel", "agno", "autogen", "strands"),
    *("openai_agents", "pydantic_ai", "smolagents"),
)
SEEN = "blue skyblue sky"
"""What the tool answers to its only call."""


class Looker(FakeOpenAI):
    """A model that calls the tool `look` once, and answers with what it has seen."""

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        offered = [tool["function"]["name"] for tool in body.get("tools") or []]
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if SEEN not in json.dumps(body["messages"]):
            name = next(name for name in offered if name.endswith("look"))  # Semantic Kernel has the plugin in front
            call = {"name": name, "arguments": json.dumps({"at": "sky", "times": 2})}
        elif "final_answer" in offered:  # of smolagents
            call = {"name": "final_answer", "arguments": json.dumps({"answer": f"echo: {SEEN}"})}
        else:
            call, message["content"] = None, f"echo: {SEEN}"
        if call is not None:
            message["tool_calls"] = [{"id": "t1", "type": "function", "function": call}]
        reason = "stop" if call is None else "tool_calls"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        head = {"id": "c1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**head, "choices": [choice], "usage": usage})


@pytest.fixture
def looker() -> Iterator[Looker]:
    with Looker() as server:
        yield server


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_agent_calls_a_function_of_the_file(name: str, looker: Looker) -> None:
    """The call is one step of a tool with the function's inside, whether the framework reports tools or not."""
    command = [python_of(name), HERE / "function_tools.py", name, looker.base_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert SEEN in said["answer"]
    assert said["steps"] == [
        ["TOOL_START", "look"],
        ["FUNCTION_START", "look"],
        ["FUNCTION_END", "look"],
        ["TOOL_END", "look"],
    ]
    assert SEEN in said["outputs"][0]
    offered = (tool["function"] for tool in looker.requests[0]["tools"])
    (look,) = (function for function in offered if function["name"].endswith("look"))
    assert look["description"].startswith("Looks at a place.")
    assert set(look["parameters"]["properties"]) == {"at", "times"}
    assert look["parameters"]["required"] == (["at", "times"] if name == "crewai" else ["at"])  # CrewAI demands all
