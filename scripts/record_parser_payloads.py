"""Records what agents of the real LlamaIndex and Google ADK give their callbacks, as steps, for test_parsers.py.

Needs, beside insitu, `llama-index-llms-openai-like` or `google-adk` and `litellm`, which do not fit together:

    PYTHONPATH=src:tests python scripts/record_parser_payloads.py llama_index
    PYTHONPATH=src:tests python scripts/record_parser_payloads.py adk

Each writes tests/data/parsers/NAME.json: the versions, the episodes' steps as they are written down anywhere, and the
requests that the same package sent for them over the wire, against which the parsers are held.
"""

import argparse
import asyncio
import base64
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fake_openai import FakeOpenAI

from insitu.integrations.nat.base_parser import parse_to_conversations
from insitu.schemas.steps import IntermediateStepPayload, IntermediateStepType, StreamEventData, TraceMetadata
from insitu.wire.json_values import decode, encode
from insitu.workflow.context import Context, EpisodeScope

DATA = Path(__file__).parent.parent / "tests" / "data" / "parsers"
RED_DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
SYSTEM = "You watch the sky."
TURNS = ["tool", "again", "again"]

Episode = Callable[[str], Awaitable[None]]


def push(event_type: IntermediateStepType, key: str, framework: str, **metadata: Any) -> None:
    Context.get().intermediate_step_manager.push_intermediate_step(
        IntermediateStepPayload(
            event_type=event_type,
            UUID=key,
            framework=framework,
            data=StreamEventData(),
            metadata=TraceMetadata.model_construct(**metadata),
        )
    )


def look(at: str) -> str:
    """Looks at something."""
    return f"blue {at}"


def llama_index() -> dict[str, Episode]:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.base.llms.types import AudioBlock, ChatMessage, DocumentBlock, ImageBlock, TextBlock
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.event_handlers import BaseEventHandler
    from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
    from llama_index.core.memory import Memory
    from llama_index.llms.openai_like import OpenAILike

    class Handler(BaseEventHandler):
        def handle(self, event: Any, **others: Any) -> None:
            if isinstance(event, LLMChatStartEvent):
                tools = event.additional_kwargs.get("tools")
                inputs = list(event.messages)
                push(START, str(event.span_id), "llama_index", chat_inputs=inputs, tools_schema=tools)
            elif isinstance(event, LLMChatEndEvent):
                push(END, str(event.span_id), "llama_index", chat_responses=[event.response])

    get_dispatcher().add_event_handler(Handler())

    def llm(base_url: str, **others: Any) -> OpenAILike:
        options = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, **others}
        return OpenAILike(model="fake", api_base=base_url, api_key="none", **options)

    async def agent(base_url: str, streaming: bool) -> None:
        asked = llm(base_url, additional_kwargs={"logprobs": True})
        made = FunctionAgent(tools=[look], llm=asked, system_prompt=SYSTEM, streaming=streaming)
        memory = Memory.from_defaults()
        for turn in TURNS:
            await made.run(turn, memory=memory)

    async def image(base_url: str) -> None:
        blocks = [TextBlock(text="see"), ImageBlock(image=RED_DOT), ImageBlock(url="http://127.0.0.1/sky.png")]
        blocks += [AudioBlock(audio=b"RIFF....WAVE", format="wav")]
        blocks += [DocumentBlock(data=b"%PDF-1.4", title="sky", document_mimetype="application/pdf")]
        asked = [ChatMessage("Look.", role="system"), ChatMessage(role="user", blocks=blocks)]
        answer = await llm(base_url, additional_kwargs={"logprobs": True}).achat(asked)
        await llm(base_url).achat([*asked, answer.message, ChatMessage("and?", role="user")])

    return {
        "agent": lambda url: agent(url, streaming=False),
        "streaming": lambda url: agent(url, streaming=True),
        "image": image,
    }


def adk() -> dict[str, Episode]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
    import litellm
    from google.adk.agents import LlmAgent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.models.base_llm import BaseLlm
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.models.llm_response import LlmResponse
    from google.adk.plugins.base_plugin import BasePlugin
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    litellm.suppress_debug_info = True

    class Handler(BasePlugin):
        """One call at a time in an invocation, as these agents make them."""

        def __init__(self) -> None:
            super().__init__("steps")
            self.open: dict[str, str] = {}

        async def before_model_callback(self, *, callback_context: Any, llm_request: Any) -> None:
            key = self.open[callback_context.invocation_id] = str(uuid.uuid4())
            push(START, key, "adk", chat_inputs=llm_request.model_copy(deep=True))

        async def after_model_callback(self, *, callback_context: Any, llm_response: Any) -> None:
            if not llm_response.partial:
                push(END, self.open.pop(callback_context.invocation_id), "adk", chat_responses=[llm_response])

    class OwnModel(BaseLlm):
        """Needs no network; like Gemini it thinks, gives calls no ids, and returns logprobs with token ids."""

        async def generate_content_async(self, llm_request: Any, stream: bool = False) -> AsyncIterator[LlmResponse]:
            if len(llm_request.contents) == 1:
                calls = [types.FunctionCall(name="look", args={"at": at}) for at in ("sky", "sea")]
                parts = [types.Part(text="Both, then.", thought=True)]
                parts += [types.Part(function_call=call) for call in calls]
                yield LlmResponse(content=types.Content(role="model", parts=parts), finish_reason="STOP")
            else:
                sampled = [("all", 7, -0.5), (" bl", 8, -0.25)]
                tokens = [
                    types.LogprobsResultCandidate(token=token, token_id=number, log_probability=logprob)
                    for token, number, logprob in sampled
                ]
                yield LlmResponse(
                    content=types.Content(role="model", parts=[types.Part(text="all bl")]),
                    finish_reason="MAX_TOKENS",
                    logprobs_result=types.LogprobsResult(chosen_candidates=tokens),
                )

    def hosted(base_url: str) -> LiteLlm:
        return LiteLlm("openai/fake", api_base=base_url, api_key="none", max_retries=0)

    async def talk(model: BaseLlm, turns: list[list[Any]], mode: StreamingMode = StreamingMode.NONE) -> None:
        agent = LlmAgent(name="watcher", model=model, instruction=SYSTEM, tools=[look])
        runner = InMemoryRunner(agent, app_name="sky", plugins=[Handler()])
        session = await runner.session_service.create_session(app_name="sky", user_id="u")
        for parts in turns:
            said = types.Content(role="user", parts=parts)
            config = RunConfig(streaming_mode=mode)
            events = runner.run_async(user_id="u", session_id=session.id, new_message=said, run_config=config)
            async for _ in events:
                pass
        await runner.close()

    def text(said: str) -> Any:
        return types.Part(text=said)

    picture = types.Part(inline_data=types.Blob(mime_type="image/png", data=RED_DOT))
    linked = types.Part(file_data=types.FileData(file_uri="http://127.0.0.1/sky.png", mime_type="image/png"))
    return {
        "agent": lambda url: talk(hosted(url), [[text(turn)] for turn in TURNS]),
        "streaming": lambda url: talk(hosted(url), [[text(turn)] for turn in TURNS], StreamingMode.SSE),
        "image": lambda url: talk(hosted(url), [[text("see"), picture, linked], [text("and?")]]),
        "own model": lambda _: talk(OwnModel(model="own"), [[text("where?")]]),
    }


START, END = IntermediateStepType.LLM_START, IntermediateStepType.LLM_END
FRAMEWORKS = {
    "llama_index": (llama_index, ("llama-index-core", "llama-index-llms-openai", "openai")),
    "adk": (adk, ("google-adk", "google-genai", "litellm")),
}


async def record(name: str) -> dict[str, Any]:
    make, packages = FRAMEWORKS[name]
    episodes = {}
    for title, run in make().items():
        with FakeOpenAI() as server:
            with EpisodeScope() as scope:
                await run(server.base_url)
        steps = [decode(encode(step)) for step in scope.steps]
        assert parse_to_conversations(steps) == parse_to_conversations(scope.steps), "live objects mean something else"
        requests = [{key: r.get(key) for key in ("messages", "tools")} for r in server.requests]
        episodes[title] = {"steps": steps, "requests": requests}
    return {"packages": {package: version(package) for package in packages}, "episodes": episodes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    name = parser.parse_args().framework
    DATA.mkdir(parents=True, exist_ok=True)
    recorded = asyncio.run(record(name))
    (DATA / f"{name}.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
