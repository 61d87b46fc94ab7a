"""Capture at the wire: the official client against a real server, and what the episode knows afterwards."""

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from factories import connected
from fake_openai import TOOL_CALL, FakeOpenAI, encode, logprob
from processes import HANGS
from waiting import until

from insitu.capture.recorder import Exchange, Recorder
from insitu.capture.transport import recording_transport
from insitu.errors import CaptureError, ConfigError
from insitu.plugin_api import Builder
from insitu.schemas.components import FunctionBaseConfig
from insitu.schemas.episodes import EpisodeKey, Needs
from insitu.schemas.steps import IntermediateStepPayload, IntermediateStepType, TraceMetadata
from insitu.workflow.context import Context, EpisodeScope
from insitu.workflow.functions import as_function
from insitu.workflow.llms import ModelClient, NIMConfig, OpenAIConfig, http_library
from insitu.workflow.steps import call_metadata


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def text_of(plain: ModelClient, text: str, **overrides: Any) -> str:
    return (await plain.complete(ask(text), **overrides)).choices[0].message.content or ""


async def test_an_episode_may_set_the_temperature(server: FakeOpenAI) -> None:
    async with connected(server, temperature=0.5) as plain:
        for temperature, sent in ((None, 0.5), (0.0, 0.0)):
            with EpisodeScope(temperature=temperature):
                await plain.complete(ask("hi"), **({} if temperature is None else {"temperature": 2.0}))
            assert server.requests[-1]["temperature"] == sent


async def test_a_call_of_a_training_episode(server: FakeOpenAI) -> None:
    async with connected(server, temperature=0.5, max_tokens=9) as plain:
        with EpisodeScope(training=True, seed=1) as scope:
            answer = await plain.complete(ask("hi"), tools=[{"type": "function", "function": {"name": "look"}}])
    (call,) = scope.calls
    assert (call.index, call.choice, call.model, call.llm) == (0, 0, "fake", "player")
    assert call.messages == ask("hi")
    assert call.tools == [{"type": "function", "function": {"name": "look"}}]
    assert call.message == {"role": "assistant", "content": "echo: hi"}
    assert call.prompt_token_ids == encode(str(ask("hi")))
    assert call.token_ids == encode("echo: hi")
    assert call.logprobs == [logprob(c) for c in "echo: hi"]
    assert (call.finish_reason, call.policy_version, call.error) == ("stop", 3, None)
    assert call.usage is not None
    assert call.usage["completion_tokens"] == 8
    assert 0 <= call.ended - call.started < 5
    sent = server.requests[-1]
    assert call.sampling == {name: sent[name] for name in sent if name not in ("messages", "model", "tools")}
    assert (sent["temperature"], sent["max_tokens"], sent["logprobs"], sent["return_token_ids"]) == (0.5, 9, True, True)
    assert answer.choices[0].logprobs is None
    assert not {"prompt_token_ids", "token_ids"} & set(answer.model_extra or {}) | set(
        answer.choices[0].model_extra or {}
    )


async def test_a_call_is_a_pair_of_steps_where_it_was_made(server: FakeOpenAI) -> None:
    async with connected(server) as plain:

        async def ask_twice(text: str) -> str:
            tool = IntermediateStepPayload(event_type=IntermediateStepType.TOOL_START, name="asking")
            Context.get().intermediate_step_manager.push_intermediate_step(tool)
            await plain.complete(ask(text), n=2)
            await plain.complete(ask("fail 1"))
            return tool.UUID

        with EpisodeScope(training=True) as scope:
            asking = await as_function("asker", None, ask_twice).ainvoke("hi")  # type: ignore[arg-type]
    steps = [step for step in scope.steps if step.event_category == "LLM"]
    assert [step.event_type for step in steps] == ["LLM_START", "LLM_END"] * 3
    for call, start, end in zip(scope.calls, steps[::2], steps[1::2], strict=True):
        assert start.UUID == end.UUID
        assert start.event_timestamp == call.started <= call.ended == end.event_timestamp
        assert start.parent_id == end.parent_id == asking
        assert start.function_ancestry.function_name == "asker"
        assert start.data is not None
        assert start.data.input == call.messages
        assert end.data is not None
        assert call.message is not None
        assert end.data.output == call.message["content"]
        assert end.data.payload == call.message
        assert isinstance(end.metadata, TraceMetadata)
        assert end.metadata.chat_inputs == call.messages
        assert end.metadata.chat_responses == [call.message]
        assert end.metadata.model_extra == call_metadata(call)
        assert end.metadata.model_extra["logprobs"] == call.logprobs


@pytest.mark.parametrize("streamed", [False, True])
async def test_ids_that_are_spelt_in_the_logprobs(streamed: bool) -> None:
    with FakeOpenAI(token_ids=False, tokens_as_ids=True) as server:
        async with connected(server) as plain:
            with EpisodeScope(training=True, needs=Needs.LOGPROBS) as scope:
                if streamed:
                    request: Any = {"model": "fake", "messages": ask("hi"), "stream": True}
                    async for _ in await plain.client.chat.completions.create(**request):
                        pass
                else:
                    await plain.complete(ask("hi"))
    (call,) = scope.calls
    assert (call.token_ids, call.prompt_token_ids) == (encode("echo: hi"), None)
    assert call.logprobs == [logprob(c) for c in "echo: hi"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("synchronous", [False, True])
async def test_what_a_server_refuses_is_left_out_where_training_does_without(streamed: bool, synchronous: bool) -> None:
    """Of each request that is refused, and of all later ones once one was accepted without it."""
    with FakeOpenAI(refuses=("return_token_ids", "logprobs")) as server:
        async with connected(server) as plain:
            request: Any = {"model": "fake", "messages": ask("hi"), "stream": streamed}

            def ask_in_a_thread() -> None:
                http = http_library()
                client = http.Client(transport=recording_transport(http)(plain.recorder))
                with openai.OpenAI(base_url=server.base_url, api_key="none", http_client=client) as sync:
                    answer = sync.chat.completions.create(**request)
                    assert not streamed or [*answer]

            with EpisodeScope(training=True, needs=Needs.GIVEN) as scope:
                for _ in range(2):
                    if synchronous:
                        await asyncio.to_thread(ask_in_a_thread)
                    elif streamed:
                        async for _chunk in await plain.client.chat.completions.create(**request):
                            pass
                    else:
                        await plain.complete(ask("hi"))
    assert [(c.message or {}).get("content") for c in scope.calls] == ["echo: hi"] * 2
    asked = [{"return_token_ids", "logprobs"} & body.keys() for body in server.requests]
    assert asked == [{"return_token_ids", "logprobs"}, {"logprobs"}, set(), set()]


async def test_another_fault_of_a_request_is_not_taken_for_a_refusal() -> None:
    """Servers may quote the whole request; what training needs is asked for by every request that needs it."""
    recorder = Recorder("http://server", "m")

    def begun(needs: Needs) -> tuple[Exchange, dict[str, Any]]:
        with EpisodeScope(training=True, needs=needs):
            body = {"model": "m", "messages": ask("what are logprobs?"), "temperature": 9}
            exchange = recorder.begin("POST", "/v1/chat/completions", orjson.dumps(body))
            assert exchange is not None
            return exchange, orjson.loads(exchange.content)

    exchange, sent = begun(Needs.GIVEN)
    not_allowed = b'{"error": {"message": "You are not allowed to request logprobs from this model"}}'
    assert not begun(Needs.LOGPROBS)[0].must_resend(403, not_allowed)
    assert begun(Needs.GIVEN)[0].must_resend(403, not_allowed)
    assert not exchange.must_resend(422, orjson.dumps({"detail": [{"msg": "temperature", "input": sent}]}))
    for _ in range(2):
        assert exchange.must_resend(422, orjson.dumps({"detail": "temperature", "body": sent}))
        sent = orjson.loads(exchange.content)
    assert not exchange.must_resend(422, orjson.dumps({"detail": "temperature", "body": sent}))
    assert recorder.refused == frozenset()
    recorder.note_refusal("token ids", b"")
    assert "return_token_ids" not in begun(Needs.LOGPROBS)[1]
    assert begun(Needs.TOKEN_IDS)[1]["return_token_ids"] is True


@pytest.mark.parametrize("inside", [True, False])
async def test_the_statuses_that_are_retried(server: FakeOpenAI, inside: bool) -> None:
    async with connected(server, retry_on_status_codes=[418], max_retries=2) as plain:
        for text, attempts in (("status 418", 3), ("status 500", 1)):
            before = len(server.requests)
            with EpisodeScope() if inside else contextlib.nullcontext(), pytest.raises(openai.APIStatusError):
                await plain.complete(ask(text))
            assert len(server.requests) - before == attempts


async def test_what_the_agent_asked_for_it_gets(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True):
            answer = await plain.complete(ask("hi"), logprobs=True, extra_body={"return_token_ids": True})
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == 8
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == encode("echo: hi")


async def test_an_evaluation_asks_for_nothing_but_a_seed(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(is_evaluating=True) as scope:
            await text_of(plain, "hi")
            await text_of(plain, "hi", seed=4)
    assert set(server.requests[-2]) == {"model", "messages", "seed"}
    assert server.requests[-1]["seed"] == 4
    assert [c.token_ids for c in scope.calls] == [None, None]


async def test_outside_an_episode_nothing_changes(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        assert await text_of(plain, "hi") == "echo: hi"
        assert [m.id async for m in plain.client.models.list()] == ["fake"]
    assert set(server.requests[-1]) == {"model", "messages"}


async def test_seeds_do_not_depend_on_the_ids_of_tool_calls(server: FakeOpenAI) -> None:
    """Servers choose them at random, and two runs of an agent with tools would sample differently."""

    async def seed(call_id: str, item: str = "lamp") -> Any:
        called = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": item}}
        history: Any = [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call_id, "content": "on"},
        ]
        with EpisodeScope(training=True, seed=1) as scope:
            await plain.complete([*ask("hi"), *history])
        assert server.requests[-1]["messages"][1:] == history, "the server gets them as they are"
        return scope.calls[0].sampling["seed"]

    async with connected(server) as plain:
        assert await seed("call_a") == await seed("call_b")
        assert await seed("call_a") != await seed("call_a", item="stove")


async def test_seeds_depend_on_episode_and_messages_and_not_on_order(server: FakeOpenAI) -> None:
    async def seeds(texts: list[str], seed: int) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        with EpisodeScope(training=True, seed=seed) as scope:
            await asyncio.gather(*(text_of(plain, text) for text in texts))
        for call in scope.calls:
            found.setdefault(call.messages[0]["content"], set()).add(call.sampling["seed"])
        return found

    async with connected(server) as plain:
        first = await seeds(["a", "b", "a", "c"], seed=1)
        again = await seeds(["c", "a", "a", "b"], seed=1)
        other = await seeds(["a", "b", "a", "c"], seed=2)
    assert first == again
    assert len(first["a"]) == 2
    assert not set.union(*first.values()) & set.union(*other.values())


async def test_failed_attempts_are_counted_and_are_the_same_call(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            assert await text_of(plain, "fail 2") == "echo: fail 2"
            assert await text_of(plain, "hi") == "echo: hi"
    assert scope.ledger.failed_attempts == {"http 500": 2}
    assert [c.index for c in scope.calls] == [0, 1]
    tried = [r["seed"] for r in server.requests if r["messages"] == ask("fail 2")]
    assert len(tried) == 3
    assert len(set(tried)) == 1


@pytest.mark.parametrize(
    ("text", "error", "counted"),
    [
        ("status 400", openai.BadRequestError, "http 400"),
        ("status 503", openai.InternalServerError, "http 503"),
        ("hang up", openai.APIConnectionError, "RemoteProtocolError"),
        ("slow 5", openai.APITimeoutError, "ReadTimeout"),
    ],
)
async def test_errors_are_the_clients_own(server: FakeOpenAI, text: str, error: type[Exception], counted: str) -> None:
    async with connected(server, max_retries=0, timeout=0.2) as plain:
        with EpisodeScope(training=True) as scope:
            with pytest.raises(error):
                await text_of(plain, text)
    assert scope.calls == []
    assert scope.ledger.failed_attempts == {counted: 1}


async def test_nobody_listening_is_a_connection_error() -> None:
    async with connected("http://127.0.0.1:9/v1", max_retries=1) as plain:
        with EpisodeScope() as scope:
            with pytest.raises(openai.APIConnectionError) as caught:
                await text_of(plain, "hi")
    assert type(caught.value.__cause__).__name__ == "ConnectError"
    assert scope.ledger.failed_attempts == {"ConnectError": 2}


async def test_a_cancelled_call_is_an_attempt(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope() as scope:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await text_of(plain, "slow 5")
    assert scope.ledger.failed_attempts == {"CancelledError": 1}


async def test_compressed_answers(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            assert await text_of(plain, "gzip") == "echo: gzip"
        assert await text_of(plain, "gzip") == "echo: gzip"
    assert scope.calls[0].token_ids == encode("echo: gzip")


async def test_each_choice_is_a_call(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            answer = await plain.complete(ask("hi"), n=3)
            await text_of(plain, "next")
    assert [c.message.content for c in answer.choices] == ["echo: hi", "echo 1: hi", "echo 2: hi"]
    assert [(c.index, c.choice) for c in scope.calls] == [(0, 0), (1, 1), (2, 2), (3, 0)]
    assert scope.calls[2].token_ids == encode("echo 2: hi")


async def test_tool_calls(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            message = (await plain.complete(ask("tool"))).choices[0].message
            history = [*ask("tool"), message, {"role": "tool", "tool_call_id": "t1", "content": "blue"}]
            await plain.complete(history)
    first, second = scope.calls
    assert first.message == {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    assert first.finish_reason == "tool_calls"
    assert second.messages[1]["tool_calls"] == [TOOL_CALL]


async def test_functions_and_order_of_parallel_calls(server: FakeOpenAI) -> None:
    class Config(FunctionBaseConfig, name="test_capture"):
        pass

    async def child(text: str) -> str:
        return await text_of(plain, text)

    async def parent(text: str) -> None:
        await asyncio.gather(inner.ainvoke("slow 0.2"), inner.ainvoke("quick"), text_of(plain, text))

    inner = as_function("child", Config(), child)
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            await as_function("<workflow>", Config(), parent).ainvoke("own")
    assert [(c.index, c.messages[0]["content"], c.functions) for c in scope.calls] == [
        (0, "slow 0.2", ("<workflow>", "child")),
        (1, "quick", ("<workflow>", "child")),
        (2, "own", ("<workflow>",)),
    ]


async def test_sixty_four_episodes_never_mix(server: FakeOpenAI) -> None:
    async def episode(n: int) -> EpisodeScope:
        key = EpisodeKey("run", 1, str(n), 0)
        with EpisodeScope(key=key, seed=key.seed(0), training=True) as scope:
            await text_of(plain, f"{n} first")
            await asyncio.gather(text_of(plain, f"{n} left"), stream_text(plain, f"{n} right"))
        return scope

    async with connected(server) as plain:
        scopes = await asyncio.gather(*(episode(n) for n in range(64)))
    for n, scope in enumerate(scopes):
        assert [c.messages[0]["content"] for c in scope.calls] == [f"{n} first", f"{n} left", f"{n} right"]
        assert [c.token_ids for c in scope.calls] == [encode(f"echo: {n} {w}") for w in ("first", "left", "right")]
    assert len({c.sampling["seed"] for scope in scopes for c in scope.calls}) == 192


async def stream_text(plain: ModelClient, text: str, **overrides: Any) -> str:
    pieces = []
    async for chunk in await plain.client.chat.completions.create(
        model="fake", messages=ask(text), stream=True, **overrides
    ):
        assert chunk.model_extra is None or "prompt_token_ids" not in chunk.model_extra
        for choice in chunk.choices:
            assert choice.logprobs is None
            assert "token_ids" not in (choice.model_extra or {})
            pieces.append(choice.delta.content or "")
    return "".join(pieces)


async def test_streaming(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            assert await stream_text(plain, "hi", stream_options={"include_usage": True}) == "echo: hi"
    (call,) = scope.calls
    assert call.message == {"role": "assistant", "content": "echo: hi"}
    assert (call.token_ids, call.prompt_token_ids) == (encode("echo: hi"), encode(str(ask("hi"))))
    assert call.logprobs == [logprob(c) for c in "echo: hi"]
    assert (call.finish_reason, call.policy_version, call.error) == ("stop", 3, None)
    assert call.usage == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


async def test_streamed_tool_calls_and_choices(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            await stream_text(plain, "tool")
            await stream_text(plain, "hi", n=2)
    tool, *choices = scope.calls
    assert tool.message == {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}
    assert tool.finish_reason == "tool_calls"
    assert [(c.index, c.choice, c.token_ids) for c in choices] == [
        (1, 0, encode("echo: hi")),
        (2, 1, encode("echo 1: hi")),
    ]


async def test_pieces_pass_on_as_they_come_and_a_stream_closed_early_has_an_error(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            stream = await plain.client.chat.completions.create(model="fake", messages=ask("stall"), stream=True)
            async with asyncio.timeout(25):  # the server sends the rest after 30 s
                async for chunk in stream:
                    if chunk.choices[0].delta.content == "ech":
                        break
            await stream.close()
    (call,) = scope.calls
    assert call.error == "the stream ended before all choices were finished"
    assert (call.token_ids, call.finish_reason) == (encode("ech"), None)
    assert scope.ledger.capture_error is None


async def test_a_stream_that_the_agent_leaves_is_recorded_as_far_as_it_read(server: FakeOpenAI) -> None:
    async def agent(client: Any) -> None:
        async for chunk in await client.chat.completions.create(model="fake", messages=ask("stall"), stream=True):
            if chunk.choices[0].delta.content == "ech":
                return  # the client closes the stream as late as by the garbage collection

    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            await asyncio.create_task(agent(plain.client))
            assert scope.calls == []
        (call,) = scope.calls
        assert call.error == "the stream ended before all choices were finished"
        assert (call.token_ids, scope.ledger.late_calls, scope.ledger.running_callers()) == (encode("ech"), 0, [])
        begun, goes_on = asyncio.Event(), asyncio.Event()
        with EpisodeScope(training=True) as other:
            task = asyncio.create_task(_read_slowly(plain.client, begun, goes_on))
            await begun.wait()
        assert other.calls == []
        goes_on.set()
        await task
        assert other.ledger.late_calls == 1


async def test_what_training_needs_is_missing_in_a_stream_that_the_agent_leaves() -> None:
    async def agent(client: Any) -> None:
        async for chunk in await client.chat.completions.create(model="fake", messages=ask("linger"), stream=True):
            if chunk.choices[0].finish_reason is not None:
                return

    with FakeOpenAI(logprobs=False) as server:
        async with connected(server) as plain:
            with EpisodeScope(training=True) as scope:
                await asyncio.create_task(agent(plain.client))
    assert scope.ledger.closed
    assert "training needs the logprobs" in str(scope.ledger.capture_error)


async def _read_slowly(client: Any, begun: asyncio.Event, goes_on: asyncio.Event) -> None:
    stream = await client.chat.completions.create(model="fake", messages=ask("stall"), stream=True)
    await anext(stream)
    begun.set()
    await goes_on.wait()
    await stream.close()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("lacking", ["token_ids", "logprobs"])
async def test_an_answer_without_what_training_needs(lacking: str, streamed: bool) -> None:
    with FakeOpenAI(**{lacking: False}) as server:
        async with connected(server) as plain:
            with EpisodeScope(training=True) as scope:
                words = lacking.replace("_", " ")
                for _ in range(2):
                    with pytest.raises(CaptureError) as caught:
                        await (stream_text(plain, "hi") if streamed else text_of(plain, "hi"))
            asked = len(server.requests)
            with EpisodeScope() as evaluation:
                await text_of(plain, "hi")
    message = str(caught.value)
    assert message.startswith(f"training needs the {words} of every model call, but {server.base_url} (model 'fake')")
    assert ("return_token_ids" if lacking == "token_ids" else "logprobs: true") in message
    assert scope.ledger.capture_error is caught.value
    assert asked == 1
    assert evaluation.ledger.capture_error is None


async def test_a_late_call_belongs_to_nobody(server: FakeOpenAI, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True, key=EpisodeKey("r", 1, "x", 0)) as scope:
            received = len(server.requests)
            late = [asyncio.create_task(text_of(plain, f"slow 0.{n}")) for n in (2, 3)]
            await until(lambda: len(server.requests) == received + 2)
            later = asyncio.create_task(text_of(plain, "later"))
        asked = len(server.requests)
        with pytest.raises(CaptureError, match="was refused because its episode r/1/x/0/0 had ended"):
            await later
        assert len(server.requests) == asked
        assert await asyncio.gather(*late) == ["echo: slow 0.2", "echo: slow 0.3"]
    assert scope.calls == []
    assert scope.ledger.late_calls == 3
    late = [(r.levelname, r.message) for r in caplog.records if "a model call was" in r.message]
    assert [level for level, _ in late] == ["WARNING"]
    assert "refused" in late[0][1]
    assert "because r/1/x/0/0 had ended" in caplog.text


def test_a_planned_version_gets_the_requests_to_the_policy_and_no_others() -> None:
    scope = EpisodeScope(sampled_from=("http://127.0.0.1:8700/v1", "policy@3"))

    def requested(server: str, model: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        exchange = Recorder(server).begin("POST", "/v1/chat/completions", json.dumps(body).encode())
        assert exchange is not None
        return str(json.loads(exchange.content)["model"])

    with scope:
        assert requested("http://localhost:8700/v1/", "policy") == "policy@3"
        assert requested("http://127.0.0.1:8700/v1", "judge") == "judge"
        assert requested("http://127.0.0.1:8701/v1", "policy") == "policy"


async def test_messages_are_kept_and_not_copied(server: FakeOpenAI) -> None:
    recorder = Recorder("here")
    with EpisodeScope() as scope:
        body = json.dumps({"model": "m", "messages": ask("hi")}).encode()
        exchange = recorder.begin("POST", "/v1/chat/completions", body)
        assert exchange is not None
        exchange.complete(200, {"x-policy-version": "7"}, b'{"choices": [{"message": {"content": "a"}}]}')
    assert scope.calls[0].messages is exchange._body["messages"]
    assert scope.calls[0].policy_version == 7


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": "no"}', b'{"messages": []}'])
def test_a_body_that_is_no_chat_completion_passes_through(body: bytes) -> None:
    with EpisodeScope():
        exchange = Recorder("here").begin("POST", "/v1/chat/completions", body)
        assert (exchange is None) == (body != b'{"messages": []}')
        assert Recorder("here").begin("POST", "/v1/embeddings", body) is None


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"choices": null}', b"<html>"])
def test_an_unreadable_answer_is_a_failed_attempt(answer: bytes) -> None:
    with EpisodeScope() as scope:
        exchange = Recorder("here").begin("POST", "/v1/chat/completions", b'{"messages": []}')
        assert exchange is not None
        assert exchange.complete(200, {}, answer) == answer
    assert scope.ledger.failed_attempts == {"malformed response": 1}


def test_event_lines_may_be_cut_anywhere() -> None:
    events = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\r\n\r\n: ping\n\ndata: nonsense\n\n'
    events += (
        b'data: {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    )
    for cut in range(1, len(events)):
        with EpisodeScope() as scope:
            exchange = Recorder("here").begin("POST", "/v1/chat/completions", b'{"messages": [], "stream": true}')
            assert exchange is not None
            assert exchange.feed(events[:cut]) + exchange.feed(events[cut:]) == events
            exchange.end({})
        assert scope.calls[0].message == {"role": "assistant", "content": "ab"}


async def test_connections_are_kept_and_closed(server: FakeOpenAI) -> None:
    before = len(server.connections)
    async with connected(server) as plain:
        for _ in range(5):
            await text_of(plain, "hi")
    assert len(server.connections) == before + 1
    del plain
    gc.collect()  # an open session would warn, and warnings are errors


async def ask_from_threads(server: FakeOpenAI, asked: Any) -> EpisodeScope:
    async with connected(server) as plain:

        def in_a_thread(text: str) -> Any:
            return asyncio.to_thread(lambda: asyncio.run(asked(plain, text)))

        with EpisodeScope(training=True) as scope:
            await asked(plain, "first")
            before = len(server.connections)
            texts = [f"thread {number}" for number in range(4)]
            assert await asyncio.gather(*map(in_a_thread, texts)) == [f"echo: {text}" for text in texts]
            assert len(server.connections) == before + 4
            with pytest.raises(openai.BadRequestError):
                await in_a_thread("status 400")
            await asked(plain, "last")
            # the first loop's connection serves again, unless it was idle for longer than httpx keeps one (5 s)
            assert len(server.connections) in (before + 5, before + 6)
    return scope


@pytest.mark.parametrize("asked", [text_of, stream_text])
async def test_loops_in_threads_leave_nothing_open(server: FakeOpenAI, asked: Any) -> None:
    """As of frameworks whose synchronous methods run a loop for each call; the first loop's connection is kept."""
    scope = await ask_from_threads(server, asked)
    gc.collect()  # an open session or connection would warn, and warnings are errors
    assert sorted(call.index for call in scope.calls) == list(range(6))
    assert all(call.error is None for call in scope.calls)


async def test_the_builder_makes_and_closes_models(server: FakeOpenAI) -> None:
    config = OpenAIConfig(model_name="fake", base_url=server.base_url, temperature=0.5, stop=["x"], max_retries=0)
    async with Builder() as builder:
        plain = await builder.add_llm("player", config)
        assert (plain.name, plain.model, plain.params) == ("player", "fake", {"temperature": 0.5, "stop": ["x"]})
        with EpisodeScope() as scope:
            assert await text_of(plain, "hi") == "echo: hi"
        assert scope.calls[0].llm == "player"
    assert plain.http_client.is_closed


async def test_a_missing_key_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_API_KEY", raising=False)
    async with Builder() as builder:
        with pytest.raises(ConfigError, match="set api_key, or the variable NVIDIA_API_KEY"):
            await builder.add_llm("player", NIMConfig(model_name="m"))
    assert "secret" not in repr(OpenAIConfig(model_name="m", api_key="secret"))


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (aiohttp.ServerTimeoutError(), "ReadTimeout"),
        (aiohttp.ConnectionTimeoutError(), "ConnectTimeout"),
        (TimeoutError(), "ReadTimeout"),
        (aiohttp.ServerDisconnectedError(), "RemoteProtocolError"),
        (aiohttp.ClientPayloadError(), "RemoteProtocolError"),
        (aiohttp.ClientOSError(), "ReadError"),
        (ConnectionResetError(), "ReadError"),
        (aiohttp.InvalidURL("x"), "UnsupportedProtocol"),
    ],
)
def test_each_error_has_its_name_in_the_library(error: Exception, name: str) -> None:
    from insitu.capture.transport import _error_name

    assert _error_name(error) == name
    assert issubclass(getattr(http_library(), name), http_library().TransportError)


def test_transports_are_of_the_library_in_use() -> None:
    http = http_library()
    assert http.__name__ == ("httpx2" if int(openai.__version__.split(".")[0]) >= 3 else "httpx")
    assert issubclass(recording_transport(http), http.AsyncBaseTransport)
    assert issubclass(recording_transport(http), http.BaseTransport)


IN_RELEASE_2 = os.environ.get("TEST_OPENAI_RELEASE") == "2"
OPENAI_2 = Path(__file__).parents[2] / ".venv" / "openai2"


@pytest.mark.slow
def test_the_same_over_release_2_of_the_client() -> None:
    """This file and that of the clients again, in a process whose `openai` is release 2, which uses `httpx`.

    `make test` installs it.
    """
    assert OPENAI_2.exists(), f"{OPENAI_2} is missing: run `make test`"
    if IN_RELEASE_2:
        assert openai.__version__.startswith("2."), f"{openai.__version__} of {openai.__file__}"
        return
    clients = Path(__file__).with_name("test_framework_clients.py")
    paths = os.pathsep.join([str(OPENAI_2), str(Path(__file__).parents[1] / "support")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, str(clients)],
        env={**os.environ, "PYTHONPATH": paths, "TEST_OPENAI_RELEASE": "2"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
