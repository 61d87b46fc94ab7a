"""LangChain's own model object: the same capture, and its callbacks as intermediate steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from factories import connected
from fake_openai import TOOL_CALL, FakeOpenAI, encode, logprob
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from insitu.errors import CaptureError
from insitu.integrations.frameworks.langchain import make_llm
from insitu.schemas.steps import TraceMetadata
from insitu.workflow.context import Context, EpisodeScope
from insitu.workflow.steps import call_metadata


@asynccontextmanager
async def model(server: FakeOpenAI, **settings: Any) -> AsyncIterator[ChatOpenAI]:
    async with connected(server, **settings) as plain:
        yield make_llm(plain)


@tool
async def look(at: str) -> str:
    """Looks."""
    Context.get().reward(0.5)
    return f"blue {at}"


async def test_a_call_and_its_steps(server: FakeOpenAI) -> None:
    async with model(server, temperature=0.5, top_p=0.9, max_tokens=9, stop=["x"], max_retries=0) as chat:
        with EpisodeScope(training=True, seed=1) as scope:
            answer = await chat.ainvoke("hi")
    assert answer.content == "echo: hi"
    assert answer.response_metadata["logprobs"] is None
    (call,) = scope.calls
    assert call.token_ids == encode("echo: hi")
    assert call.logprobs == [logprob(c) for c in "echo: hi"]
    assert (call.llm, call.policy_version, call.finish_reason) == ("player", 3, "stop")
    wanted = {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 9, "stop": ["x"]}
    assert call.sampling.items() >= wanted.items()
    start, end = scope.steps
    assert (start.event_type, end.event_type) == ("LLM_START", "LLM_END")
    assert start.UUID == end.UUID
    assert (start.name, start.framework) == ("fake", "langchain")
    assert isinstance(start.metadata, TraceMetadata)
    assert start.metadata.chat_inputs == [HumanMessage("hi")]
    assert end.data is not None
    assert (end.data.input, end.data.output) == ([HumanMessage("hi")], "echo: hi")
    assert end.data.payload.message == answer
    assert end.usage_info is not None
    assert end.usage_info.token_usage["completion_tokens"] == 8
    assert isinstance(end.metadata, TraceMetadata)
    assert end.metadata.model_extra == call_metadata(call)


async def test_a_tool_loop(server: FakeOpenAI) -> None:
    async with model(server) as chat:
        with EpisodeScope(training=True) as scope:
            asked = await chat.bind_tools([look]).ainvoke("tool")
            result = await look.ainvoke(asked.tool_calls[0])
            await chat.ainvoke([HumanMessage("tool"), asked, result])
    first, second = scope.calls
    assert first.message is not None
    assert first.message["tool_calls"] == [TOOL_CALL]
    assert first.tools is not None
    assert first.tools[0]["function"]["name"] == "look"
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[2]["tool_call_id"] == "t1"
    assert scope.rewards.by_call == {0: 0.5}
    start, end = (s for s in scope.steps if s.event_category == "TOOL")
    assert (start.name, end.name, start.UUID) == ("look", "look", end.UUID)
    assert start.data is not None
    assert start.data.input == {"at": "sky"}
    assert end.data is not None
    assert end.data.input == {"at": "sky"}
    assert end.data.output.content == "blue sky"
    assert isinstance(scope.steps[0].metadata, TraceMetadata)
    assert scope.steps[0].metadata.tools_schema == first.tools


async def test_a_failing_tool_ends_its_step() -> None:
    @tool
    async def broken(at: str) -> str:
        """Breaks."""
        raise KeyError(at)

    with EpisodeScope() as scope:
        with pytest.raises(KeyError):
            await broken.ainvoke({"at": "sky"})
    assert [s.event_type for s in scope.steps] == ["TOOL_START", "TOOL_END"]
    assert scope.steps[1].metadata == {"error": "KeyError('sky')"}


async def test_a_model_inside_a_tool_is_a_step_inside_its_step(server: FakeOpenAI) -> None:
    async with model(server) as chat:

        @tool
        async def expert(question: str) -> str:
            """Asks an expert."""
            return (await chat.ainvoke(question)).text

        with EpisodeScope() as scope:
            await expert.ainvoke({"question": "why"})
    by_type = {s.event_type.value: s for s in scope.steps}
    assert by_type["LLM_START"].parent_id == by_type["TOOL_START"].UUID
    assert by_type["TOOL_END"].parent_id == "root"


async def test_streaming(server: FakeOpenAI) -> None:
    async with model(server) as chat:
        with EpisodeScope(training=True) as scope:
            assert "".join([piece.text async for piece in chat.astream("hi")]) == "echo: hi"
    assert scope.calls[0].token_ids == encode("echo: hi")
    assert scope.calls[0].error is None
    tokens = [s.data.chunk for s in scope.steps if s.event_type == "LLM_NEW_TOKEN" and s.data is not None]
    assert "".join(tokens) == "echo: hi"
    assert [s.event_type for s in scope.steps if s.event_type != "LLM_NEW_TOKEN"] == ["LLM_START", "LLM_END"]
    assert isinstance(scope.steps[-1].metadata, TraceMetadata)
    assert scope.steps[-1].metadata.model_extra == call_metadata(scope.calls[0])


async def test_synchronous_calls(server: FakeOpenAI) -> None:
    async with model(server, max_retries=1) as chat:
        with EpisodeScope(training=True) as scope:
            assert (await asyncio.to_thread(chat.invoke, "hi")).content == "echo: hi"
            assert await asyncio.to_thread(lambda: "".join(p.text for p in chat.stream("ho"))) == "echo: ho"
            assert (await asyncio.to_thread(chat.invoke, "fail 1")).content == "echo: fail 1"
            with pytest.raises(openai.BadRequestError):
                await asyncio.to_thread(chat.invoke, "status 400")
        assert (await asyncio.to_thread(chat.invoke, "gzip")).content == "echo: gzip"
        assert (await asyncio.to_thread(chat.invoke, "outside")).content == "echo: outside"
    assert [c.token_ids for c in scope.calls] == [encode(f"echo: {text}") for text in ("hi", "ho", "fail 1")]
    assert scope.ledger.failed_attempts == {"http 500": 1, "http 400": 1}
    ends = [step for step in scope.steps if step.event_type == "LLM_END"]
    assert [getattr(end.metadata, "call", None) for end in ends[:3]] == [0, 1, 2]
    assert isinstance(ends[3].metadata, dict)
    assert "refused: status 400" in ends[3].metadata["error"]
    assert len(ends) == 4


async def test_a_server_without_token_ids_is_told_even_if_the_agent_swallows_it() -> None:
    async def careless(question: str) -> str:
        try:
            return (await chat.ainvoke(question)).text
        except Exception:  # as agents do
            return "no idea"

    with FakeOpenAI(token_ids=False) as server:
        async with model(server) as chat:
            with EpisodeScope(training=True) as scope:
                assert await RunnableLambda(careless).ainvoke("hi") == "no idea"
    assert isinstance(scope.ledger.capture_error, CaptureError)
    assert len(server.requests) == 1


async def test_parallel_episodes(server: FakeOpenAI) -> None:
    async def episode(n: int) -> EpisodeScope:
        with EpisodeScope(training=True, seed=n) as scope:
            await asyncio.gather(chat.ainvoke(f"{n} a"), chat.ainvoke(f"{n} b"))
        return scope

    async with model(server) as chat:
        scopes = await asyncio.gather(*(episode(n) for n in range(32)))
    for n, scope in enumerate(scopes):
        assert sorted(c.messages[0]["content"] for c in scope.calls) == [f"{n} a", f"{n} b"]
        assert len(scope.steps) == 4


async def test_outside_an_episode_nothing_is_reported(server: FakeOpenAI) -> None:
    seen: list[Any] = []
    subscription = Context.get().intermediate_step_manager.subscribe(seen.append)
    async with model(server) as chat:
        await chat.ainvoke("hi")
        await look.ainvoke({"at": "sky"})
    subscription.unsubscribe()
    assert seen == []


async def test_all_candidates_of_a_request_are_known(server: FakeOpenAI) -> None:
    async with model(server) as chat:
        with EpisodeScope(training=True) as scope:
            await chat.agenerate([[HumanMessage("best of three")]], n=3)
    end = scope.steps[-1]
    assert isinstance(end.metadata, TraceMetadata)
    known = [call_metadata(call) for call in scope.calls]
    assert [call.choice for call in scope.calls] == [0, 1, 2]
    assert end.metadata.model_extra == {**known[0], "choices": known}
    assert len(scope.steps) == 2
