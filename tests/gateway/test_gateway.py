"""The gateway: official clients and hostile ones against a real server, and what the episode knows afterwards."""

import asyncio
import io
import json
import socket
import sys
import threading
from asyncio.subprocess import PIPE
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anthropic
import openai
import psutil
import pytest
from aiohttp import web
from factories import model_client
from fake_openai import END, FakeOpenAI, encode, logprob
from marks import slow_after, slow_but
from processes import HANGS
from waiting import hang, until

from insitu.collect.conversations import conversations
from insitu.errors import RequestRefused
from insitu.formats.dialects import dialects
from insitu.gateway.endpoint import MAX_RECORDED, MAX_REQUESTS, EpisodeEndpoint
from insitu.gateway.proxy import translate_response
from insitu.gateway.server import MAX_BODY, MAX_CONNECTIONS, Gateway, Upstream
from insitu.integrations.dialects.responses import ResponsesTranslation
from insitu.schemas.episodes import EpisodeKey
from insitu.schemas.parts import load_named
from insitu.wire.endings import end_tasks
from insitu.wire.open_files import raise_file_limit
from insitu.wire.paced_connections import BURST, SHARE, Pace
from insitu.workflow.context import EpisodeScope
from insitu.workflow.llms import ModelClient, OpenAIConfig, connect

LOOK = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}


@asynccontextmanager
async def gateway_to(*llms: ModelClient, **options: Any) -> AsyncIterator[Gateway]:
    try:
        async with Gateway(llms, **options) as gateway:
            yield gateway
    finally:
        for llm in llms:
            await llm.aclose()


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def plain(door: EpisodeEndpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=door.openai_url, api_key=door.key)


def claude(door: EpisodeEndpoint) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=door.anthropic_url, api_key=door.key)


async def post(url: str, body: Any, **options: Any) -> tuple[int, Any]:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    async with aiohttp.ClientSession() as session, session.post(url, data=data, **options) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if answer.content_type == "application/json" else text


async def text_by(dialect: str, streamed: bool, door: EpisodeEndpoint, text: str) -> str:
    """What the official client of a dialect makes of the answer."""
    if dialect == "messages":
        async with claude(door) as client:
            asked: dict[str, Any] = {"model": "claude", "max_tokens": 9, "messages": ask(text)}
            if not streamed:
                return "".join(b.text for b in (await client.messages.create(**asked)).content)
            async with client.messages.stream(**asked) as stream:
                return await stream.get_final_text()
    async with plain(door) as client:
        if dialect == "text":
            if not streamed:
                choice = (await client.completions.create(model="gpt", prompt=text)).choices[0]
                assert choice.logprobs is None
                assert not {"token_ids", "prompt_token_ids"} & {*(choice.model_extra or {})}
                return choice.text
            parts = [c async for c in await client.completions.create(model="gpt", prompt=text, stream=True)]
            assert not any(
                choice.logprobs or (choice.model_extra or {}).get("token_ids") for c in parts for choice in c.choices
            )
            return "".join(choice.text for c in parts for choice in c.choices)
        if dialect == "responses":
            if not streamed:
                return (await client.responses.create(model="gpt", input=text)).output_text
            events = [e async for e in await client.responses.create(model="gpt", input=text, stream=True)]
            assert events[-1].type == "response.completed"
            return events[-1].response.output_text
        if not streamed:
            reply = await client.chat.completions.create(model="gpt", messages=ask(text))
            assert reply.choices[0].logprobs is None
            assert not {"token_ids", "prompt_token_ids"} & {*(reply.choices[0].model_extra or {}), *reply.model_extra}
            return reply.choices[0].message.content or ""
        chunks = [c async for c in await client.chat.completions.create(model="gpt", messages=ask(text), stream=True)]
        assert all(choice.logprobs is None for chunk in chunks for choice in chunk.choices)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


KINDS = ("chat", "text", "responses", "messages")


@pytest.mark.parametrize("streamed", slow_after(1, [False, True]))
@pytest.mark.parametrize("dialect", KINDS)
async def test_official_clients_are_recorded(server: FakeOpenAI, dialect: str, streamed: bool) -> None:
    async with gateway_to(model_client(server, temperature=0.5)) as gateway:
        with EpisodeScope(training=True, seed=1) as scope, gateway.endpoint(scope) as door:
            assert await text_by(dialect, streamed, door, "hi") == "echo: hi"
    (call,) = scope.calls
    assert (call.llm, call.model, call.messages, call.error) == ("player", "fake", ask("hi"), None)
    assert call.message == {"role": "assistant", "content": "echo: hi"}
    assert call.prompt_token_ids == encode("hi" if dialect == "text" else str(ask("hi")))
    assert call.token_ids == encode("echo: hi")
    assert call.logprobs == [logprob(c) for c in "echo: hi"]
    assert call.sampling["temperature"] == 0.5
    assert call.sampling["seed"] == server.requests[-1]["seed"]
    assert [step.event_type for step in scope.steps] == ["LLM_START", "LLM_END"]


async def test_sessions_of_one_address_are_told_apart(server: FakeOpenAI) -> None:
    """An agent with one client for all episodes says in a header which one a request is of."""
    async with gateway_to(model_client(server)) as gateway:
        url = f"{gateway.session_url}/chat/completions"

        async def say(text: str, session: str) -> int:
            return (await post(url, {"model": "gpt", "messages": ask(text)}, headers={"X-Session-ID": session}))[0]

        with ExitStack() as episodes:
            scopes = [episodes.enter_context(EpisodeScope(training=True)) for _ in range(2)]
            for number, scope in enumerate(scopes):
                gateway.add_session(episodes.enter_context(gateway.endpoint(scope)), f"trace {number}")
            statuses = await asyncio.gather(*(say(f"hi {number}", f"trace {number}") for number in (0, 1)))
            assert [*statuses, await say("hi", "trace 2"), await say("hi", "")] == [200, 200, 401, 401]
        assert await say("hi", "trace 1") == 410
        assert gateway.unknown_keys == 2
    assert [[call.messages for call in scope.calls] for scope in scopes] == [[ask("hi 0")], [ask("hi 1")]]


async def test_what_the_agent_asked_for_it_gets(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            asked = {"model": "x", "messages": ask("hi"), "logprobs": True, "return_token_ids": True}
            status, reply = await post(f"{door.openai_url}/chat/completions", asked)
    assert status == 200
    assert reply["choices"][0]["token_ids"] == encode("echo: hi")
    assert len(reply["choices"][0]["logprobs"]["content"]) == 8


@pytest.mark.parametrize("streamed", [False, True])
async def test_tool_arguments_go_back_as_they_were_sampled(server: FakeOpenAI, streamed: bool) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            async with claude(door) as client:
                asked: dict[str, Any] = {"model": "claude", "max_tokens": 9, "tools": [LOOK]}
                if streamed:
                    async with client.messages.stream(messages=ask("tool"), **asked) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(messages=ask("tool"), **asked)
                (used,) = answer.content
                assert (used.type, used.input, answer.stop_reason) == ("tool_use", {"at": "sky"}, "tool_use")
                result = {"type": "tool_result", "tool_use_id": used.id, "content": "blue"}
                said = [
                    *ask("tool"),
                    {"role": "assistant", "content": [used.model_dump(include={"type", "id", "name", "input"})]},
                ]
                await client.messages.create(messages=[*said, {"role": "user", "content": [result]}], **asked)
                said[-1]["content"][0]["input"] = {"at": "sea"}
                await client.messages.create(messages=[*said, {"role": "user", "content": [result]}], **asked)
    first, second, third = scope.calls
    assert first.message is not None
    (sampled,) = first.message["tool_calls"]
    (returned,) = second.messages[1]["tool_calls"]
    assert returned == sampled
    assert sampled["function"]["arguments"] == '{"at": "sky"}'  # with the space that a JSON library would not write
    assert third.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"at":"sea"}'
    assert second.messages[2] == {"role": "tool", "tool_call_id": "t1", "content": "blue"}


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}),
        (None, {}),
    ],
)
def test_thinking_is_a_variable_of_the_template_beside_those_of_the_llm(thinking: Any, variables: Any) -> None:
    asked = {"model": "m", "max_tokens": 9, "messages": ask("hi"), "thinking": thinking}
    translation = dialects()["messages"](asked, {})
    for configured in ({}, {"style": "terse"}):
        params = {"extra_body": {"chat_template_kwargs": configured}} if configured else {}
        request = translation.completion_request(params, "m")
        assert request.get("chat_template_kwargs", {}) == {**configured, **variables}


@pytest.mark.parametrize("depth", [3, 300, 2000])
def test_deep_tool_arguments_of_a_model_reach_the_agent(depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": text}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    translation = dialects()["messages"]({"model": "m", "max_tokens": 9, "messages": ask("hi")}, {})
    body = {"id": "c", "model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": {}}
    (used,) = json.loads(translate_response(translation, 200, json.dumps(body).encode()))["content"]
    assert used["input"] == (json.loads(text) if depth == 3 else {"arguments": text})


def test_a_refusal_in_the_history_of_responses_is_the_text_of_its_message() -> None:
    refused = [{"type": "output_text", "text": "No. "}, {"type": "refusal", "refusal": "I will not."}]
    asked = {"model": "m", "input": [*ask("how?"), {"role": "assistant", "content": refused}]}
    messages = dialects()["responses"](asked, {}).request["messages"]
    assert messages == [*ask("how?"), {"role": "assistant", "content": "No. I will not."}]


async def test_responses_go_on_from_the_previous_one(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            async with plain(door) as client:
                first = await client.responses.create(model="x", input="hi", instructions="Be brief")
                await client.responses.create(model="x", input="again", previous_response_id=first.id)
                with pytest.raises(openai.NotFoundError, match="no response 'resp_other'"):
                    await client.responses.create(model="x", input="again", previous_response_id="resp_other")
    said = [(m["role"], m["content"]) for m in scope.calls[1].messages]
    assert said == [("user", "hi"), ("assistant", "echo: hi"), ("user", "again")]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_completion_without_text_stays_in_the_history(server: FakeOpenAI, streamed: bool) -> None:
    """Of an agent that sends back what it got."""
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            async with claude(door) as client:
                asked: dict[str, Any] = {"model": "claude", "max_tokens": 9}
                if streamed:
                    async with client.messages.stream(messages=ask("nothing"), **asked) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(messages=ask("nothing"), **asked)
                said = [*ask("nothing"), {"role": "assistant", "content": answer.content}, *ask("well?")]
                await client.messages.create(messages=said, **asked)
            async with plain(door) as other:
                if streamed:
                    async with other.responses.stream(model="gpt", input="nothing") as events:
                        response = await events.get_final_response()
                else:
                    response = await other.responses.create(model="gpt", input="nothing")
                assert response.output_text == ""
                await other.responses.create(model="gpt", input=[*ask("nothing"), *response.output, *ask("well?")])
    history = [*ask("nothing"), {"role": "assistant", "content": ""}, *ask("well?")]
    assert [call.messages for call in scope.calls] == [ask("nothing"), history] * 2
    assert [call.token_ids for call in scope.calls[::2]] == [encode(END)] * 2
    assert [len(turns) for turns in conversations(scope.calls[:2])] == [4]


async def test_a_small_request_that_goes_on_from_a_long_one_counts_as_long(
    server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is translated in a thread, and many at once are refused."""
    translated = []

    class Watched(ResponsesTranslation):
        def __init__(self, request: dict[str, Any], memory: dict[str, Any]) -> None:
            translated.append(threading.current_thread() is threading.main_thread())
            super().__init__(request, memory)

    monkeypatch.setitem(dialects(), "responses", Watched)
    long = [{"role": "user", "content": "hi" * 1_100_000}]
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            async with plain(door) as client:
                first = await client.responses.create(model="x", input="hi")
                again = await client.responses.create(model="x", input="again", previous_response_id=first.id)
                first = await client.responses.create(model="x", input=long, previous_response_id=again.id)
                await client.responses.create(model="x", input="again", previous_response_id=first.id)
            assert translated == [True, True, False, False]
            with ExitStack() as requests:
                many = (requests.enter_context(door.request(door.remembered)) for _ in range(MAX_REQUESTS // 2))
                with pytest.raises(RequestRefused, match="too many requests"):
                    deque(many, maxlen=0)
    assert len(scope.calls) == 4


async def test_a_dialect_that_is_not_installed_is_refused(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "insitu.integrations.dialects.responses", None)
    for cached in (dialects, load_named):
        cached.cache_clear()
    try:
        async with gateway_to(model_client(server)) as gateway:
            with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
                status, reply = await post(f"{door.openai_url}/responses", {"model": "x", "input": "hi"})
                assert await text_by("messages", False, door, "hi") == "echo: hi"
    finally:
        dialects.cache_clear()
    assert status == 501
    message = reply["error"]["message"]
    assert "cannot translate requests to responses" in message
    assert "insitu.integrations.dialects.responses" in message
    assert "available: chat/completions, completions" in message
    assert len(scope.calls) == 1


async def test_several_models(server: FakeOpenAI) -> None:
    with FakeOpenAI(policy_version=None) as judge_server, FakeOpenAI() as other:
        judge = connect("judge", OpenAIConfig(model_name="big"), "big", judge_server.base_url, "none")
        options = {"aliases": {"gpt-4o": "judge"}, "upstream": Upstream(base_url=other.base_url)}
        async with gateway_to(model_client(server), judge, **options) as gateway:
            with EpisodeScope(training=frozenset({"player"})) as scope, gateway.endpoint(scope) as door:
                async with plain(door) as client:
                    for name in ("player", "fake", "judge", "big", "gpt-4o", "stranger"):
                        await client.chat.completions.create(model=name, messages=ask(name))
        assert [(c.llm, c.model, c.token_ids is not None) for c in scope.calls] == [
            *[("player", "fake", True)] * 2,
            *[("judge", "big", False)] * 3,
        ]
        assert other.requests == [{"model": "stranger", "messages": ask("stranger")}]  # untouched, not recorded


async def test_what_is_no_call_is_forwarded(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            async with plain(door) as client:
                assert [m.id async for m in client.models.list()] == ["fake"]
                with pytest.raises(openai.NotFoundError):  # the server's own 404: it has no such route
                    await client.embeddings.create(model="x", input="hi")
    assert scope.calls == []


async def test_small_requests_that_are_forwarded_are_many_at_once() -> None:
    """Without a body, or with one whose length is unknown at first; the server does not get the episode's key."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        got.append("X-Session-ID" in request.headers)
        if len(got) == 20:
            all_there.set()
        async with asyncio.timeout(20):
            await all_there.wait()
        return web.Response()

    async def status(session: aiohttp.ClientSession, method: str, body: AsyncIterator[bytes] | None = None) -> int:
        headers = {"X-Session-ID": "trace"}
        async with session.request(method, f"{gateway.session_url}/files", data=body, headers=headers) as response:
            return response.status

    got: list[bool] = []
    all_there = asyncio.Event()
    app = web.Application()
    app.router.add_route("*", "/v1/files", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    llm = model_client(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    async with gateway_to(llm) as gateway, aiohttp.ClientSession() as session:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            gateway.add_session(door, "trace")
            asked = [status(session, "GET") for _ in range(10)]
            asked += [status(session, "POST", _pieces(b"hi")) for _ in range(10)]
            assert await asyncio.gather(*asked) == [200] * 20
    await runner.cleanup()
    assert not any(got)


@pytest.mark.parametrize("dialect", KINDS)
async def test_a_refusal_has_the_shape_of_the_dialect(server: FakeOpenAI, dialect: str) -> None:
    error = anthropic.APIStatusError if dialect == "messages" else openai.APIStatusError
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            with pytest.raises(error, match="refused: status 418") as raised:
                await text_by(dialect, False, door, "status 418")
    assert raised.value.status_code == 418
    assert scope.ledger.failed_attempts == {"http 418": 1}
    assert scope.calls == []


@pytest.mark.parametrize("streamed", slow_but([True], [False, True]))
@pytest.mark.parametrize("dialect", KINDS)
async def test_a_client_that_tries_again_makes_one_call(server: FakeOpenAI, dialect: str, streamed: bool) -> None:
    number = 1 + 2 * KINDS.index(dialect)
    text = f"fail {'0' * (number + streamed)}1"  # the server fails once for each text
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            assert await text_by(dialect, streamed, door, text) == f"echo: {text}"
    first, second = server.requests[-2:]
    assert first["seed"] == second["seed"]
    assert [c.index for c in scope.calls] == [0]
    assert scope.ledger.failed_attempts == {"http 500": 1}


async def test_a_request_that_cannot_be_trained_is_refused_and_the_episode_continues(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            status, answer = await post(f"{door.openai_url}/completions", {"prompt": "hi", "echo": True})
            assert (status, "does not support `echo`" in answer["error"]["message"]) == (400, True)
            assert await text_by("text", False, door, "hi") == "echo: hi"
    assert scope.ledger.capture_error is None
    assert len(scope.calls) == 1


async def test_a_silent_server_is_given_up_on_forwarded_requests_too() -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(2**16):  # until the gateway hangs up
            pass
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as silent:
        base_url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/v1"
        config = OpenAIConfig(model_name="fake", base_url=base_url, timeout=0.1)
        async with gateway_to(connect("player", config, "fake", base_url, "none")) as gateway:
            with EpisodeScope() as scope, gateway.endpoint(scope) as door:
                async with asyncio.timeout(60):
                    status, answer = await post(f"{door.openai_url}/embeddings", {"input": "hi"})
    assert (status, answer["error"]["code"]) == (504, "upstream")


async def test_what_training_lacks_is_told() -> None:
    with FakeOpenAI(token_ids=False) as server:
        async with gateway_to(model_client(server)) as gateway:
            for streamed in (False, True):
                with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
                    async with plain(door) as client:
                        asked: Any = {"model": "x", "messages": ask("hi"), "stream": streamed}
                        status, body = await post(f"{door.openai_url}/chat/completions", asked)
                        assert "token ids" in str(body)
                        assert status == (200 if streamed else 424)
                        with pytest.raises(openai.APIStatusError, match="training needs the token ids") as raised:
                            await client.chat.completions.create(model="x", messages=ask("hi"))
                        assert raised.value.status_code == 424
                assert scope.ledger.capture_error is not None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{nope", "is not JSON"),
        (b"[1]", "a JSON list"),
        (b"\xff\xfe", "is not JSON"),
        (b"", "is not JSON"),
        (b'{"model": "x"}', "messages is missing"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", "nested more than 128 levels"),
        (b'{"messages": ["\\ud800"]}', "is not JSON"),
        (b'{"messages": [], "n": 1000000000}', "allowed: 1 to 128"),
        (b'{"messages": [], "n": "many"}', "allowed: 1 to 128"),
    ],
)
async def test_a_body_that_is_no_request(server: FakeOpenAI, body: bytes, said: str) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            status, answer = await post(f"{door.openai_url}/chat/completions", body)
            assert status == 400
            assert said in answer["error"]["message"]
            for prompt in (b"7", b"[]", b"null", b'{"a": 1}'):
                status, answer = await post(f"{door.openai_url}/completions", b'{"prompt": %s}' % prompt)
                assert (status, answer["error"]["param"]) == (400, "prompt")
            status, answer = await post(f"{door.anthropic_url}/v1/messages", b'{"messages": [7]}')
            assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert (scope.calls, scope.ledger.failed_attempts) == ([], {})


async def test_a_body_too_large(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            body = b" " * 50_000_000
            status, answer = await post(f"{door.openai_url}/chat/completions", io.BytesIO(body))
            assert (status, answer["error"]["code"]) == (413, "too_large")
            status, answer = await post(f"{door.openai_url}/chat/completions", _pieces(body))
            assert (status, answer["error"]["code"]) == (413, "too_large")
            assert str(MAX_BODY) in answer["error"]["message"]
            lists = io.BytesIO(b'{"a": [' + b"[]," * 8_000_000 + b"1]}")
            status, answer = await post(f"{door.openai_url}/chat/completions", lists)
            assert (status, answer["error"]["code"]) == (413, "too_large")
            assert "commas and brackets; allowed: 524288" in answer["error"]["message"]
            long = "x" * 2_000_000
            assert await text_by("chat", False, door, long) == f"echo: {long}"
    assert len(scope.calls) == 1


async def test_what_an_episode_sends_is_limited(server: FakeOpenAI) -> None:
    """In all, because it is kept: also what the server ignores, and for each choice."""
    body = {"messages": ask("hi"), "user": "x" * (MAX_RECORDED // 120)}

    def of(n: int) -> io.BytesIO:
        return io.BytesIO(json.dumps(body | {"n": n}).encode())

    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            url = f"{door.openai_url}/chat/completions"
            assert [(await post(url, of(n)))[0] for n in (1, 128, 1)] == [200, 413, 413]
            assert (await post(url, io.BytesIO(b"no JSON")))[0] == 413, "refused before it is read"
        with EpisodeScope() as other, gateway.endpoint(other) as door:
            assert (await post(f"{door.openai_url}/chat/completions", of(1)))[0] == 200
    assert len(scope.calls) == 1


async def test_small_values_count_as_what_they_take_in_memory(server: FakeOpenAI) -> None:
    body = {"messages": ask("hi"), "x": [{}] * 100_000}
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            url = f"{door.openai_url}/chat/completions"
            statuses = [(await post(url, io.BytesIO(json.dumps(body | {"n": 20}).encode())))[0] for _ in range(3)]
            assert statuses == [200, 200, 413]


async def test_an_error_repeats_no_long_key(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            body = json.dumps({"model": "x", "input": "a", "k" * 10**6: 1}).encode()
            status, answer = await post(f"{door.openai_url}/responses", io.BytesIO(body))
    assert status == 400
    assert len(json.dumps(answer)) < 5000


def test_parsing_has_a_share_of_the_time() -> None:
    parsing = Pace(SHARE, BURST)
    assert parsing.wait(0.0) == 0
    parsing.spend(1.0, now=0.0)  # a second; the next is due when they are the share
    assert parsing.wait(1.0) == pytest.approx((1.0 - BURST) / SHARE - 1.0)
    assert parsing.wait(100.0) == 0


async def test_a_body_in_tiny_chunks_arrives_whole(server: FakeOpenAI) -> None:
    """Also when its connection was not read for a while."""
    body = json.dumps({"messages": ask("hi"), "user": "x" * 100_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            path = urlsplit(f"{door.openai_url}/chat/completions").path
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
            )

            async def ask_once() -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head + chunks)
                answer = await reader.read()
                writer.close()
                return answer

            async with gateway.serving(listener):
                answers = await asyncio.gather(*(ask_once() for _ in range(4)))
    assert all(b"200 OK" in answer and b"echo: hi" in answer for answer in answers)
    assert len(scope.calls) == 4


@pytest.mark.slow
async def test_the_memory_of_large_requests_is_returned() -> None:
    """In a fresh interpreter: a forked one shares pages with the fork server."""
    command = (
        sys.executable,
        Path(__file__).parents[1] / "support" / "hostile_gateway.py",
        "http://127.0.0.1:9/v1",
        "t",
    )
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin
    assert process.stdout
    pid, address = (await process.stdout.readline()).decode().split()
    server, url = psutil.Process(int(pid)), f"{address}/v1/completions"
    assert (await post(url, {"prompt": "a"}))[0] == 502
    before = server.memory_info().rss
    large = b'{"prompt": "' + b"a" * 4 * 2**20 + b'"}'
    await asyncio.gather(*(post(url, io.BytesIO(large)) for _ in range(8)))
    async with asyncio.timeout(60):
        await until(lambda: server.memory_info().rss <= before + 20 * 2**20)
    process.stdin.close()
    await process.wait()


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**20):
        yield body[start : start + 2**20]


async def test_keys_are_good_for_one_episode(server: FakeOpenAI) -> None:
    key = EpisodeKey("r", 0, "7", 0)
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as other, gateway.endpoint(other) as wrong:
            with EpisodeScope(key=key, training=True) as scope, gateway.endpoint(scope) as door:
                await text_by("chat", False, door, "hi")
                assert door.key not in repr(door)
            for dialect, error in (("chat", openai.APIStatusError), ("messages", anthropic.APIStatusError)):
                with pytest.raises(error, match="r/0/7/0/0 of this address has ended") as raised:
                    await text_by(dialect, True, door, "late")
                assert raised.value.status_code == 410
            url = wrong.openai_url.replace(wrong.key, wrong.key[:-1] + "!")
            status, answer = await post(f"{url}/chat/completions", {"model": "x", "messages": ask("hi")})
            assert (status, answer["error"]["code"]) == (401, "unknown_episode")
        assert (gateway.late_calls, gateway.unknown_keys) == (2, 1)
    assert (len(scope.calls), scope.ledger.late_calls, other.calls) == (1, 2, [])


async def test_an_answer_that_comes_after_the_end_is_nobodys(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            asked = {"model": "x", "messages": ask("slow 0.3")}
            received = len(server.requests)
            late = asyncio.create_task(post(f"{door.openai_url}/chat/completions", asked))
            await until(lambda: len(server.requests) > received)
        with EpisodeScope(training=True) as following, gateway.endpoint(following):
            assert (await late)[0] == 200
    assert (scope.calls, scope.ledger.late_calls, following.calls) == ([], 1, [])


@pytest.mark.parametrize("dialect", KINDS)
async def test_a_server_killed_in_mid_stream(server: FakeOpenAI, dialect: str) -> None:
    kinds = (openai.APIError, anthropic.APIError)
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            known = set(server.connections)
            asking = asyncio.create_task(text_by(dialect, True, door, "stall"))
            await until(lambda: server.connections - known)
            await asyncio.sleep(0.5)  # the first piece is on its way
            server.abort(server.connections - known)
            if dialect == "responses":  # its client gives the event as it is
                with pytest.raises(AssertionError):
                    await asking
            else:
                with pytest.raises(kinds, match="was cut off"):
                    await asking
            assert "was cut off" in (door.failure or "")
            assert await text_by(dialect, True, door, "hi") == "echo: hi"
            assert door.failure is None
    cut, whole = scope.calls
    assert "was cut off" in (cut.error or "")
    assert cut.token_ids == encode("ech")
    assert whole.error is None


async def test_a_server_that_is_gone(server: FakeOpenAI) -> None:
    dead = connect("player", OpenAIConfig(model_name="x"), "x", "http://127.0.0.1:9/v1", "none")
    async with gateway_to(dead) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            status, answer = await post(f"{door.openai_url}/chat/completions", {"messages": ask("hi")})
            assert (status, answer["error"]["code"]) == (502, "upstream")
            assert door.failure is not None
            status, _ = await post(f"{door.openai_url}/embeddings", {"input": "hi"})
            assert status == 502
    assert scope.ledger.failed_attempts == {"ClientConnectorError": 1}
    async with gateway_to(model_client(server, timeout=0.1)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            status, answer = await post(f"{door.openai_url}/chat/completions", {"messages": ask("slow 2")})
            assert (status, answer["error"]["code"]) == (504, "upstream")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_that_hangs_up(server: FakeOpenAI, streamed: bool) -> None:
    text = "stall" if streamed else "slow 0.4"
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            port = int(door.address.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"model": "x", "messages": ask(text), "stream": streamed}).encode()
            head = f"POST /e/{door.key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            received = len(server.requests)
            writer.write(head.encode() + body)
            await (reader.readuntil(b'"ech"') if streamed else until(lambda: len(server.requests) > received))
            writer.transport.abort()
            await until(lambda: scope.calls or scope.ledger.failed_attempts)
            if streamed:
                assert [(c.error, c.token_ids) for c in scope.calls] == [
                    ("the agent closed the connection", encode("ech"))
                ]
            else:
                assert (scope.calls, scope.ledger.failed_attempts) == ([], {"CancelledError": 1})
            assert await text_by("chat", False, door, "hi") == "echo: hi"
    assert len(scope.calls) == 1 + streamed


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /e/ HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /e/%00/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_noise(server: FakeOpenAI, raw: bytes) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(door.address.rpartition(":")[2]))
            writer.write(raw)
            assert (await reader.readline()).split()[1:2][0] in (b"400", b"401", b"404")
            writer.close()
            assert await text_by("chat", False, door, "hi") == "echo: hi"
    assert len(scope.calls) == 1


async def test_episodes_at_once_keep_to_themselves(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:

        async def episode(number: int) -> EpisodeScope:
            with EpisodeScope(training=True, seed=number) as scope, gateway.endpoint(scope) as door:
                texts = [f"{number}.{n}" for n in range(4)]
                await asyncio.gather(*(text_by(k, number % 2 == 0, door, t) for k, t in zip(KINDS, texts, strict=True)))
            return scope

        scopes = await asyncio.gather(*map(episode, range(4)))
    for number, scope in enumerate(scopes):
        assert sorted(c.messages[0]["content"] for c in scope.calls) == [f"{number}.{n}" for n in range(4)]
        assert all(c.token_ids == encode(f"echo: {c.messages[0]['content']}") for c in scope.calls)
    seeds = {c.sampling["seed"] for scope in scopes for c in scope.calls}
    assert len(seeds) == 16


async def test_many_may_connect_at_once(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        where = ("127.0.0.1", int(gateway.address.rpartition(":")[2]))
        with ExitStack() as waiting:  # none is accepted before all have come
            connections = [waiting.enter_context(socket.create_connection(where, timeout=HANGS)) for _ in range(400)]
            for connection in connections:
                connection.sendall(b"GET /e/key/v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            for connection in connections:
                assert await asyncio.to_thread(connection.recv, 12) == b"HTTP/1.1 401"


async def test_an_episode_may_not_have_every_request(server: FakeOpenAI) -> None:
    """More at once, or larger bodies, are refused, and others are not."""
    async with gateway_to(model_client(server)) as gateway, AsyncExitStack() as episodes:
        scopes = [episodes.enter_context(EpisodeScope(training=True)) for _ in range(2)]
        door, other = (episodes.enter_context(gateway.endpoint(scope)) for scope in scopes)
        slow = {"model": "m", "messages": ask("slow 1")}
        url = f"{door.openai_url}/chat/completions"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            answers = await asyncio.gather(*(session.post(url, json=slow) for _ in range(MAX_REQUESTS + 20)))
            assert Counter(answer.status for answer in answers) == {200: MAX_REQUESTS, 429: 20}
            refused = next(answer for answer in answers if answer.status == 429)
            said = "this episode has too many requests; allowed at once: 256 requests, and 256 MiB of bodies"
            assert said in await refused.text()
        endless: list[asyncio.Task[Any]] = []

        def one_is_refused() -> bool:
            endless.append(asyncio.create_task(post(url, slowly())))
            return any(task.done() for task in endless)

        await until(one_is_refused, every=0.02)
        assert await has_status(url, 429), "as its length is unknown"
        assert (await post(f"{other.openai_url}/chat/completions", slow))[0] == 200
        await end_tasks(*endless)
        await until(lambda: has_status(url, 200))


async def test_a_flood_holds_up_its_own_episode(server: FakeOpenAI) -> None:
    """Whatever it asks for; another episode, and a request of none, are answered before the flood has passed."""
    async with gateway_to(model_client(server)) as gateway, AsyncExitStack() as episodes:
        scopes = [episodes.enter_context(EpisodeScope(training=True)) for _ in range(2)]
        door, other = (episodes.enter_context(gateway.endpoint(scope)) for scope in scopes)
        door.pace = Pace(rate=20, burst=10)
        body = {"model": "m", "messages": ask("hi")}
        odd = [asyncio.create_task(post(f"{door.openai_url}/chat/completions", {"messages": 1})) for _ in range(30)]
        await until(lambda: sum(task.done() for task in odd) >= 10, every=0.01)
        assert (await post(f"{other.openai_url}/chat/completions", body))[0] == 200
        assert (await post(f"{gateway.address}/e/none/v1/chat/completions", body))[0] == 401
        assert not all(task.done() for task in odd)
        assert {status for status, _ in await asyncio.gather(*odd)} == {400}
        assert (await post(f"{door.openai_url}/chat/completions", body))[0] == 200


async def has_status(url: str, status: int) -> bool:
    """Of a small request whose length is unknown at first."""

    async def body() -> AsyncIterator[bytes]:
        yield json.dumps({"model": "m", "messages": ask("hello")}).encode()

    return (await post(url, body()))[0] == status


async def slowly() -> AsyncIterator[bytes]:
    """A body that does not end."""
    yield b" "
    await hang()


async def test_a_further_socket_has_so_many_connections(server: FakeOpenAI) -> None:
    """Those that come too many are closed, and others get their place when they have gone."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    where = listener.getsockname()
    async with gateway_to(model_client(server)) as gateway, gateway.serving(listener):
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.create_connection(where)) for _ in range(MAX_CONNECTIONS)]
            await asyncio.to_thread(exchanged, connections[-1])
            with socket.create_connection(where, timeout=HANGS) as further, pytest.raises(ConnectionError):
                await asyncio.to_thread(exchanged, further)
            assert await asyncio.to_thread(exchanged, connections[0]) == b"HTTP/1.1 401"
        await until(lambda: asyncio.to_thread(has_place, where))


async def test_further_sockets_share_the_files_that_may_be_open(server: FakeOpenAI) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=2048) for _ in range(128)]
    where, share = listeners[0].getsockname(), raise_file_limit() // 4 // len(listeners)
    assert 0 < share < MAX_CONNECTIONS
    async with gateway_to(model_client(server)) as gateway, AsyncExitStack() as serving:
        for listener in listeners:
            await serving.enter_async_context(gateway.serving(listener))
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.create_connection(where)) for _ in range(share)]
            await asyncio.to_thread(exchanged, connections[-1])
            with socket.create_connection(where, timeout=HANGS) as further, pytest.raises(ConnectionError):
                await asyncio.to_thread(exchanged, further)
            await asyncio.to_thread(exchanged, connections[0])


def has_place(where: tuple[str, int]) -> bool:
    with socket.create_connection(where, timeout=HANGS) as connection, suppress(ConnectionError):
        return exchanged(connection) == b"HTTP/1.1 401"
    return False


def exchanged(connection: socket.socket) -> bytes:
    """The beginning of the answer to a request of no episode."""
    connection.sendall(b"GET /e/key/v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = connection.recv(2**16)
    if not answer:
        raise ConnectionResetError
    return answer[:12]


async def test_what_says_nothing_of_the_answer_is_left_out(server: FakeOpenAI) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            asked: Any = {"model": "x", "max_tokens": 9, "messages": ask("hi"), "cache_control": {"type": "ephemeral"}}
            status, _ = await post(f"{door.anthropic_url}/v1/messages", asked)
    assert (status, len(scope.calls)) == (200, 1)
    assert "cache_control" not in server.requests[-1]
