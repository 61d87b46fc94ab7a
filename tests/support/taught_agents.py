"""Agents of three turns in each dialect, with official clients, and what a model of a family must have said in them."""

import gzip
import json
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anthropic
import openai
from message_formats import TOOLS, Family
from taught_models import Turn, dialogue

from insitu.gateway.endpoint import EpisodeEndpoint


class Answer(NamedTuple):
    """What a client made of an answer. `ended` is the finish reason in the words of chat completions."""

    content: str
    reasoning: str
    calls: list[tuple[str, dict[str, Any]]]
    ids: list[str]
    ended: str | None


def expected(family: Family) -> list[Answer]:
    ended = ["tool_calls", "tool_calls", "stop"]
    return [
        Answer(turn.content, turn.reasoning, turn.calls, [], end)
        for turn, end in zip(dialogue(family), ended, strict=True)
    ]


async def chat(door: EpisodeEndpoint, question: str, turns: list[Turn], streamed: bool) -> list[Answer]:
    """A message for each of the turns, whose results it sends back."""
    messages: list[Any] = [{"role": "user", "content": question}]
    answers = []
    async with openai.AsyncOpenAI(base_url=door.openai_url, api_key=door.key, max_retries=0) as client:
        for turn in turns:
            asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": TOOLS}
            if streamed:
                message, ended = await _streamed_chat(client, asked)
            else:
                choice = (await client.chat.completions.create(**asked)).choices[0]
                message, ended = choice.message.model_dump(exclude_none=True), choice.finish_reason
            calls = message.get("tool_calls") or []
            named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
            ids = [call["id"] for call in calls]
            content, reasoning = message.get("content") or "", message.get("reasoning_content", "")
            answers.append(Answer(content, reasoning, named, ids, ended))
            messages.append(message)
            for called, result in zip(ids, turn.results, strict=False):
                messages.append({"role": "tool", "tool_call_id": called, "content": result})
    return answers


async def _streamed_chat(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    ended = None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            if reasoning := getattr(delta, "reasoning_content", None):
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
                assert not calls
            for call in delta.tool_calls or []:
                known = calls.setdefault(call.index, {"id": call.id, "type": "function"})
                function = known.setdefault("function", {"name": call.function.name, "arguments": ""})
                function["arguments"] += call.function.arguments or ""
            ended = choice.finish_reason or ended
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, ended


async def responses(door: EpisodeEndpoint, question: str, turns: list[Turn], streamed: bool) -> list[Answer]:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    items: list[Any] = [{"role": "user", "content": question}]
    answers = []
    async with openai.AsyncOpenAI(base_url=door.openai_url, api_key=door.key, max_retries=0) as client:
        for turn in turns:
            asked: dict[str, Any] = {"model": "m", "input": items, "tools": tools}
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    response = [event async for event in stream][-1].response  # of an incomplete one, too
            else:
                response = await client.responses.create(**asked)
            calls = [item for item in response.output if item.type == "function_call"]
            thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content]
            named = [(call.name, json.loads(call.arguments)) for call in calls]
            cut = response.incomplete_details and response.incomplete_details.reason
            ended = "length" if cut == "max_output_tokens" else "tool_calls" if calls else "stop"
            assert response.status == ("incomplete" if cut else "completed")
            ids = [call.call_id for call in calls]
            answers.append(Answer(response.output_text, "".join(thoughts), named, ids, ended))
            items += [item.to_dict() for item in response.output]
            for called, result in zip(ids, turn.results, strict=False):
                items.append({"type": "function_call_output", "call_id": called, "output": result})
    return answers


async def messages(door: EpisodeEndpoint, question: str, turns: list[Turn], streamed: bool) -> list[Answer]:
    """Of Anthropic."""
    tools: list[Any] = [
        {"name": f["name"], **({"description": f["description"]} if "description" in f else {}), "input_schema": schema}
        for f, schema in ((tool["function"], tool["function"]["parameters"]) for tool in TOOLS)
    ]
    said: list[Any] = [{"role": "user", "content": question}]
    answers = []
    async with anthropic.AsyncAnthropic(base_url=door.anthropic_url, api_key=door.key, max_retries=0) as client:
        for turn in turns:
            asked: dict[str, Any] = {"model": "m", "max_tokens": 500, "messages": said, "tools": tools}
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            used = [block for block in answer.content if block.type == "tool_use"]
            content = "".join(block.text for block in answer.content if block.type == "text")
            thoughts = "".join(block.thinking for block in answer.content if block.type == "thinking")
            named = [(block.name, block.input) for block in used]
            ended = {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}.get(answer.stop_reason or "")
            ids = [block.id for block in used]
            answers.append(Answer(content, thoughts, named, ids, ended))
            said.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            results = [
                {"type": "tool_result", "tool_use_id": called, "content": result}
                for called, result in zip(ids, turn.results, strict=False)
            ]
            said.append({"role": "user", "content": results})
    return answers


AGENTS: dict[str, Callable[[EpisodeEndpoint, str, list[Turn], bool], Awaitable[list[Answer]]]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
}


def post_job(address: str, token: str, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """The last state of a training job of these rows."""
    lines = [{"settings": settings, "num_rows": len(rows)}, *rows]
    body = gzip.compress("\n".join(map(json.dumps, lines)).encode())
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Content-Encoding": "gzip"}
    request = urllib.request.Request(f"{address}/v1/train/jobs", body, headers)
    with urllib.request.urlopen(request) as answer:
        job = json.loads(answer.read())
    events = urllib.request.Request(f"{address}/v1/train/jobs/{job['id']}/events", headers=headers)
    with urllib.request.urlopen(events) as lines_of:
        states = [json.loads(line[6:]) for line in lines_of if line.startswith(b"data: ")]
    return dict(states[-1])
