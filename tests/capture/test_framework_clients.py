"""The clients that frameworks use: each call goes to the configured model with its parameters, in any dialect."""

import asyncio
import gc
import threading
import weakref
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from anthropic import BadRequestError
from factories import connected
from fake_openai import FakeOpenAI, encode

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_client, sync_client
from insitu.integrations.frameworks import anthropic
from insitu.schemas.components import FunctionBaseConfig
from insitu.workflow.context import EpisodeScope
from insitu.workflow.event_loop import run_async
from insitu.workflow.functions import as_function


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def test_a_request_gets_the_configured_model_and_parameters(server: FakeOpenAI) -> None:
    async with connected(server, max_retries=0, temperature=0.5, top_p=0.9) as plain:
        with EpisodeScope(training=True) as scope:
            said = await async_client(plain).chat.completions.create(
                model="gpt-5", messages=ask("hi"), temperature=0.25
            )
    assert said.choices[0].message.content == "echo: hi"
    assert said.choices[0].logprobs is None
    (call,) = scope.calls
    assert (call.model, call.llm, call.token_ids) == ("fake", "player", encode("echo: hi"))
    assert call.sampling.items() >= {"temperature": 0.25, "top_p": 0.9}.items()


@pytest.mark.parametrize("forced", [False, True])
async def test_sampling_parameters_that_an_agent_sends_itself(server: FakeOpenAI, forced: bool) -> None:
    """They take precedence, unless the block of the model overrides them; whichever client sends them."""
    configured = {"temperature": 0.5, "max_tokens": 40, "stop": ["x"]}
    async with connected(server, max_retries=0, override_sampling=forced, **configured) as plain:
        with EpisodeScope(training=True) as scope:
            client = async_client(plain)
            await plain.complete(ask("hi"), temperature=0, top_p=0.9)
            await client.chat.completions.create(model="m", messages=ask("ho"), temperature=0, max_completion_tokens=9)
            await plain.client.chat.completions.create(model="m", messages=ask("he"), temperature=0, stop="y")
            await client.responses.create(model="m", input="ha", temperature=0, max_output_tokens=9)
            await client.completions.create(model="m", prompt="hu", temperature=0, max_tokens=9)
    sent = [{name: call.sampling.get(name) for name in ("temperature", "max_tokens", "stop")} for call in scope.calls]
    if forced:
        assert sent == [configured] * 5
        assert scope.calls[0].sampling["top_p"] == 0.9, "what the block does not set is the agent's"
        assert not any("max_completion_tokens" in call.sampling for call in scope.calls)
    else:
        assert [one["temperature"] for one in sent] == [0] * 5
        assert [one["max_tokens"] for one in sent] == [40, None, None, 9, 9]


async def test_null_is_no_parameter_that_an_agent_sends(server: FakeOpenAI) -> None:
    async with connected(server, max_retries=0, temperature=0.5, max_tokens=40) as plain:
        nulls: Any = {"temperature": None, "max_tokens": None, "max_completion_tokens": None}
        with EpisodeScope() as scope:
            await async_client(plain).chat.completions.create(model="m", messages=ask("hi"), **nulls)
            nulls["max_completion_tokens"] = 9
            await async_client(plain).chat.completions.create(model="m", messages=ask("ho"), **nulls)
    first, second = (call.sampling for call in scope.calls)
    assert (first["temperature"], first["max_tokens"]) == (0.5, 40)
    assert (second["temperature"], second["max_completion_tokens"], "max_tokens" in second) == (0.5, 9, False)


async def test_an_agent_that_closes_a_client_closes_it_for_no_other_episode(server: FakeOpenAI) -> None:
    async with connected(server, max_retries=0) as plain:
        blocking = sync_client(plain)
        for _ in range(2):
            async with plain.client as client:
                await client.chat.completions.create(model="m", messages=ask("hi"))
            with blocking:
                await asyncio.to_thread(blocking.chat.completions.create, model="m", messages=ask("hi"))
        http_client = plain.http_client
        assert (await plain.complete(ask("ho"))).choices[0].message.content == "echo: ho"
    assert http_client.is_closed


async def test_responses_are_translated(server: FakeOpenAI) -> None:
    async with connected(server, max_retries=0, temperature=0.5) as plain:
        client = async_client(plain)
        with EpisodeScope(training=True) as scope:
            said = await client.responses.create(model="gpt-5", input="hi")
            again = await client.responses.create(model="gpt-5", input="ho", previous_response_id=said.id)
            async with client.responses.stream(model="gpt-5", input="hi") as stream:
                streamed = await stream.get_final_response()
            with pytest.raises(openai.BadRequestError, match="background"):
                await client.responses.create(model="gpt-5", input="hi", background=True)
        with EpisodeScope(training=True), pytest.raises(openai.NotFoundError, match="in this episode"):
            await client.responses.create(model="gpt-5", input="ho", previous_response_id=said.id)
    assert (said.output_text, again.output_text, streamed.output_text) == ("echo: hi", "echo: ho", "echo: hi")
    assert [len(call.messages) for call in scope.calls] == [1, 3, 1]
    assert [call.token_ids for call in scope.calls] == [encode(f"echo: {text}") for text in ("hi", "ho", "hi")]
    assert all(call.sampling["temperature"] == 0.5 for call in scope.calls)


async def test_the_synchronous_client(server: FakeOpenAI) -> None:
    async with connected(server, max_retries=0, max_tokens=50) as plain:
        client = sync_client(plain)
        with EpisodeScope(training=True) as scope:
            said = client.chat.completions.create(model="gpt-5", messages=ask("hi"))
            with client.responses.stream(model="gpt-5", input="ho") as stream:
                streamed = stream.get_final_response()
    assert (said.choices[0].message.content, streamed.output_text) == ("echo: hi", "echo: ho")
    assert [call.token_ids for call in scope.calls] == [encode("echo: hi"), encode("echo: ho")]


async def test_the_clients_of_anthropic(server: FakeOpenAI) -> None:
    """They use another HTTP library than `openai` of release 2 does."""
    asked: Any = {"model": "claude", "max_tokens": 50, "messages": ask("hi")}
    async with connected(server, max_retries=0, temperature=0.5) as plain:
        client, blocking = anthropic.make_llm(plain), anthropic.sync_client(plain)
        with EpisodeScope(training=True) as scope:
            said = [await client.messages.create(**asked), blocking.messages.create(**asked)]
            async with client.messages.stream(**asked) as stream:
                said.append(await stream.get_final_message())
            with blocking.messages.stream(**asked) as sync_stream:
                said.append(sync_stream.get_final_message())
            with pytest.raises(BadRequestError, match="400"):
                blocking.messages.create(**{**asked, "messages": ask("status 400")})
    assert [message.content[0].text for message in said] == ["echo: hi"] * 4
    assert [call.token_ids for call in scope.calls] == [encode("echo: hi")] * 4
    assert all((call.llm, call.model, call.error) == ("player", "fake", None) for call in scope.calls)
    assert all(call.sampling.items() >= {"temperature": 0.5, "max_tokens": 50}.items() for call in scope.calls)
    assert scope.ledger.failed_attempts == {"http 400": 1}


async def test_synchronous_calls_are_as_many_at_once_as_are_made(server: FakeOpenAI) -> None:
    async with connected(server, max_retries=0, timeout=25) as plain:
        client = sync_client(plain)
        with EpisodeScope(training=True), ExitStack() as streams:
            for _ in range(101):  # one more than a pool of connections usually has
                said = client.chat.completions.create(model="gpt-5", messages=ask("stall"), stream=True)
                assert next(iter(streams.enter_context(said))).choices


def test_blocking_agents_are_as_many_at_once_as_episodes() -> None:
    together = threading.Barrier(100)

    async def episodes() -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(together.wait, 20) for _ in range(100)))

    assert sorted(run_async(episodes())) == list(range(100))


def test_tool_runs_are_steps_of_the_episode_they_began_in() -> None:
    tools = ToolSteps("mine")
    with EpisodeScope() as other:
        tools.start("b", "look", {"at": "sea"})
        with EpisodeScope() as one:
            tools.start("a", "look", {"at": "sky"})
            tools.end("b", "black")
        tools.start("c", "look", {"at": "snow"})
    with EpisodeScope() as scope:
        with tools.around("look", {"at": "grass"}) as returned:
            returned("green")
        with pytest.raises(ValueError, match="dark"), tools.around("look", {"at": "night"}):
            raise ValueError("dark")
        with tools.around("look", {"at": "fog"}) as returned:
            returned("no more than this", error="foggy")
        tools.end("a", "too late for its episode")
        tools.end("never begun", "nothing")
    assert [(step.event_type, step.payload.data.input["at"]) for step in one.steps] == [("TOOL_START", "sky")]
    began_here = [("TOOL_START", "sea"), ("TOOL_END", "sea"), ("TOOL_START", "snow")]
    assert [(step.event_type, step.payload.data.input["at"]) for step in other.steps] == began_here
    contents = [(step.event_type, step.payload.data.input, step.payload.data.output) for step in scope.steps]
    assert contents == [
        ("TOOL_START", {"at": "grass"}, None),
        ("TOOL_END", {"at": "grass"}, "green"),
        ("TOOL_START", {"at": "night"}, None),
        ("TOOL_END", {"at": "night"}, None),
        ("TOOL_START", {"at": "fog"}, None),
        ("TOOL_END", {"at": "fog"}, "no more than this"),
    ]
    assert [scope.steps[number].payload.metadata["error"] for number in (3, 5)] == ["ValueError('dark')", "'foggy'"]
    with tools.around("look", {}) as returned:
        returned("outside an episode it goes nowhere")


def test_a_tool_run_that_does_not_end_keeps_no_episode_in_memory() -> None:
    tools = ToolSteps("mine")
    with EpisodeScope() as scope:
        tools.start("a", "look", {"at": "sea"})
    episode = weakref.ref(scope)
    del scope
    gc.collect()
    assert episode() is None
    tools.end("a", "blue")


async def name_of(record: dict) -> str:  # type: ignore[type-arg]
    return repr(record)


async def untyped(x) -> str:  # type: ignore[no-untyped-def]
    return repr(x)


async def optional(x: str | None = None) -> str:
    return repr(x)


@pytest.mark.parametrize(
    ("function", "arguments", "got"),
    [
        (name_of, {"record": {"a": 1}}, {"a": 1}),
        (untyped, {"x": "Bern"}, "Bern"),
        (optional, {"x": "Bern"}, "Bern"),
        (optional, {}, None),
    ],
)
async def test_a_tool_gets_its_arguments_by_name(function: Any, arguments: dict[str, Any], got: Any) -> None:
    tool = FunctionTool(as_function("f", FunctionBaseConfig(), function), "mine")
    assert await tool.run(**arguments) == repr(got)
