"""Servers that spell their answers in their own ways, or wrongly: what is recorded, and what clients make of it."""

import asyncio
import codecs
import json
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web
from test_gateway import KINDS, ask, claude, gateway_to, plain, post, text_by
from waiting import hang, until

from insitu.agents.frameworks import sync_client
from insitu.collect.episodes import AttemptResult, EpisodeOptions, in_process
from insitu.gateway.endpoint import EpisodeEndpoint
from insitu.integrations.frameworks.anthropic import make_llm as claude_of
from insitu.integrations.frameworks.anthropic import sync_client as blocking_claude
from insitu.schemas.episodes import EpisodeKey
from insitu.schemas.evaluation import EvalInputItem
from insitu.wire.http_format import COMPACT
from insitu.workflow.context import EpisodeScope
from insitu.workflow.functions import as_function
from insitu.workflow.llms import ModelClient, OpenAIConfig, connect


def sampled(text: str) -> dict[str, Any]:
    content = [{"token": c, "logprob": -1.0, "bytes": None, "top_logprobs": []} for c in text]
    return {"token_ids": [ord(c) for c in text], "logprobs": {"content": content}}


def piece(delta: Any, text: str = "", finish: str | None = None, **others: Any) -> dict[str, Any]:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **(sampled(text) if text else {})}
    return {**head, "choices": [choice], **others}


def called(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return piece({"tool_calls": list(calls)}, text)


def call(name: str | None, arguments: str | None, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **others}


def written(*pieces: Any, indent: int | None = None) -> bytes:
    events = ["\n".join(f"data: {line}" for line in json.dumps(p, indent=indent).split("\n")) for p in pieces]
    return "".join(f"{event}\n\n" for event in [*events, "data: [DONE]"]).encode()


FIRST = piece({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2])
SAID = (FIRST, piece({"content": "ab"}, "ab"), piece({"content": "c"}, "c"), piece({}, finish="stop"))
PLAIN = written(*SAID)
NULLS = {"role": "assistant", "content": "", "tool_calls": None, "reasoning_content": None}
CALLS_END = piece({}, finish="tool_calls")


@asynccontextmanager
async def server_of(answer: Any) -> AsyncIterator[str]:
    """The address of a server that answers everything by `answer`."""
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def model_at(body: bytes, kind: str = "text/event-stream", status: int = 200) -> AsyncIterator[ModelClient]:
    """A model whose server answers everything with `body`."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type=kind, status=status)

    app = web.Application()
    app.router.add_post("/v1/{tail:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    config = OpenAIConfig(model_name="m", base_url=address, max_retries=0)
    try:
        async with aclosing(connect("player", config, "m", address, "none")) as client:
            yield client
    finally:
        await runner.cleanup()


@asynccontextmanager
async def door_to(body: bytes, kind: str = "text/event-stream") -> AsyncIterator[tuple[EpisodeScope, EpisodeEndpoint]]:
    """An episode at a server that answers everything with `body`."""
    async with model_at(body, kind) as llm, gateway_to(llm) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            yield scope, door


async def attempted(body: bytes, kind: str, status: int = 200, **request: Any) -> AttemptResult:
    """A training episode whose agent sends one request to a server that answers `body`."""
    async with model_at(body, kind, status) as llm:

        async def agent(text: str) -> str:
            if kind == "text/event-stream":
                request["stream"] = True
                create: Any = llm.client.chat.completions.create
                chunks = await create(model="m", messages=ask(text), **request)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            return (await llm.complete(ask(text), **request)).choices[0].message.content or ""

        workflow = as_function("<workflow>", None, agent)  # type: ignore[arg-type]
        item, key = EvalInputItem(id="r", input_obj="hi"), EpisodeKey("run", 1, "r", 0)
        result = await in_process(workflow)(item, key, EpisodeOptions(training=True))
        await llm.aclose()
        return result


STREAMS = {
    "CRLF": PLAIN.replace(b"\n", b"\r\n"),
    "byte order mark": codecs.BOM_UTF8 + PLAIN,
    "comments": b": ping\n\n" + PLAIN.replace(b"data", b": x\nevent: m\nid: 1\ndata"),
    "several lines an event": written(*SAID, indent=1),
    "no [DONE]": PLAIN.replace(b"data: [DONE]\n\n", b""),
    "no space": PLAIN.replace(b"data: ", b"data:"),
    "error null": written(*({**p, "error": None} for p in SAID)),
    "usage null": written(*({**p, "usage": None} for p in SAID)),
    "usage in part": written(*SAID, {"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": None}}),
    "choices null": written({"choices": None}, *SAID),
    "delta null": written(*SAID[:3], piece(None, finish="stop")),
}


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "text"])
@pytest.mark.parametrize("name", STREAMS)
async def test_odd_streams_are_understood(name: str, kind: str) -> None:
    async with door_to(STREAMS[name]) as (scope, door):
        if kind == "chat":
            _, text = await post(f"{door.openai_url}/chat/completions", {"messages": ask("hi"), "stream": True})
            assert text.startswith((": ", "data:", "event"))
            assert "token_ids" not in text
            assert '"logprob"' not in text
        if kind != "chat" or name not in ("choices null", "delta null"):  # which its client hands on as they are
            assert await text_by(kind, True, door, "hi") == "abc"
    assert scope.ledger.failed_attempts == {}
    for recorded in scope.calls:
        assert (recorded.message, recorded.error) == ({"role": "assistant", "content": "abc"}, None)
        assert (recorded.prompt_token_ids, recorded.token_ids, recorded.logprobs) == ([1, 2], [97, 98, 99], [-1.0] * 3)


LOOK, TURN = call("look", '{"at": "sky"}', id="t"), call("turn", "{}", id="u")
TOOLS = {
    "nulls first": [
        piece(NULLS, prompt_token_ids=[1]),
        called("a", {**call("look", None, id="t"), "index": 0}),
        called("b", {**call(None, '{"at": "sky"}', id=None), "index": 0}),
        called("c", {**TURN, "index": 1}),
    ],
    "no index": [FIRST, called("a", LOOK), called("b", TURN)],
    "no index, in pieces": [
        FIRST,
        called("a", call("look", '{"at"', id="t")),
        called("b", {"function": {"arguments": ': "sky"}'}}),
        called("c", call("turn", "", id="u")),
        called("d", {"function": {"arguments": "{}"}, "index": None}),
    ],
    "no index, ids repeated": [
        FIRST,
        called("a", call("look", '{"at"', id="t"), TURN),
        called("b", {**call(None, ': "sky"}'), "index": 0}),
    ],
    "counted from 1": [FIRST, called("a", {**LOOK, "index": 1}), called("b", {**TURN, "index": 2})],
    "at once": [
        FIRST,
        called("a", {**call("look", '{"at"', id="t"), "index": 0}, {**call("turn", "", id="u"), "index": 1}),
        called("b", {**call(None, ': "sky"}'), "index": 0}, {**call(None, "{}"), "index": 1}),
    ],
}


@pytest.mark.parametrize("name", TOOLS)
async def test_tool_calls_in_odd_pieces(name: str) -> None:
    expected = [("t", "look", {"at": "sky"}), ("u", "turn", {})]
    async with door_to(written(*TOOLS[name], CALLS_END)) as (scope, door):
        async with plain(door) as client, claude(door) as other:
            if name != "counted from 1":  # its own client does not understand it
                async with client.chat.completions.stream(model="x", messages=ask("hi")) as chunks:
                    (choice,) = (await chunks.get_final_completion()).choices
                made = choice.message.tool_calls or ()
                assert [(c.id, c.function.name, json.loads(c.function.arguments)) for c in made] == expected
            async with client.responses.stream(model="x", input="hi") as events:
                items = [i for i in (await events.get_final_response()).output if i.type == "function_call"]
            assert [(i.call_id, i.name, json.loads(i.arguments)) for i in items] == expected
            async with other.messages.stream(model="x", max_tokens=9, messages=ask("hi")) as stream:
                blocks = [b for b in (await stream.get_final_message()).content if b.type == "tool_use"]
            assert [(b.id, b.name, b.input) for b in blocks] == expected
    for recorded in scope.calls:
        assert recorded.message is not None
        assert recorded.message["tool_calls"] == [LOOK, TURN]
        assert recorded.error is None


async def test_text_after_a_call_is_of_the_same_message() -> None:
    body = written(FIRST, called("a", {**LOOK, "index": 0}), piece({"content": "hm"}, "b"), CALLS_END)
    async with door_to(body) as (scope, door), plain(door) as client:
        async with client.responses.stream(model="x", input="hi") as events:
            first = await events.get_final_response()
        result = {"type": "function_call_output", "call_id": "t", "output": "blue"}
        async with client.responses.stream(model="x", input=[result], previous_response_id=first.id) as events:
            await events.until_done()
    _, answer, tool = scope.calls[1].messages
    assert (answer["content"], answer["tool_calls"], tool["role"]) == ("hm", [LOOK], "tool")


@pytest.mark.parametrize("kind", ["responses", "messages"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (PLAIN[: PLAIN.index(b'"finish_reason": "stop"')], "ended before all choices were finished"),
        (b"<html>", "ended before all choices were finished"),
        (b'{"error": {"message": "boom"}}', "boom"),
        (written(*SAID[:2], {"error": {"message": "boom", "code": 500}}), "boom"),
        (written(*SAID[:2], {"error": "boom"}), "boom"),
        (written(FIRST, {"choices": [{"index": "0", "delta": {"content": "a"}}]}), "cannot be parsed"),
        (written({"choices": [{"delta": {}, "finish_reason": "stop", "logprobs": {"content": [{}]}}]}), "KeyError"),
    ],
)
async def test_half_an_answer_is_none(kind: str, body: bytes, said: str) -> None:
    async with door_to(body) as (scope, door):
        asked = {"input": "hi"} if kind == "responses" else {"messages": ask("hi")}
        _, text = await post(f"{door.openai_url}/{kind}", {**asked, "stream": True})
        *_, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert last["type"] == "error"
        assert said in str(last)
        assert said in (door.failure or "")
        error = anthropic.APIError if kind == "messages" else AssertionError
        with pytest.raises(error):
            await text_by(kind, True, door, "hi")
    assert not [c for c in scope.calls if c.error is None]


CHOICE = {"index": 0, "message": {"role": "assistant", "content": "abc"}, "finish_reason": "stop", **sampled("abc")}


@pytest.mark.parametrize("kind", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "boom"}},
        {"choices": []},
        {"choices": [{**CHOICE, "message": "abc"}]},
        {"choices": [{**CHOICE, "logprobs": {"content": [{}]}}]},
        {"choices": [{**CHOICE, "logprobs": {"content": 7}}]},
    ],
)
async def test_an_answer_that_is_no_completion(kind: str, body: dict[str, Any]) -> None:
    async with door_to(json.dumps({"prompt_token_ids": [1], **body}).encode(), "application/json") as (scope, door):
        asked = {"input": "hi"} if kind == "responses" else {"messages": ask("hi")}
        status, answer = await post(f"{door.openai_url}/{kind}", asked)
        assert (status, "not a completion" in answer["error"]["message"]) == (502, True)
        assert "error" not in body or "boom" in answer["error"]["message"]
    assert (scope.calls, scope.ledger.failed_attempts) == ([], {"malformed response": 1})


async def test_a_failure_told_in_a_stream_reaches_an_agent_of_this_process() -> None:
    from insitu.agents.translation import translating_transport
    from insitu.workflow.llms import http_library

    async with door_to(written(*SAID[:2], {"error": {"message": "boom"}})) as (_, door):
        llm = connect("player", OpenAIConfig(model_name="m", base_url=door.openai_url), "m", door.openai_url, "k")
        http = http_library()
        transport = translating_transport(http)(llm)
        async with openai.AsyncOpenAI(
            base_url=door.openai_url, api_key="k", http_client=http.AsyncClient(transport=transport)
        ) as client:
            events = [e async for e in await client.responses.create(model="m", input="hi", stream=True)]
        await llm.aclose()
    assert [e.type for e in events][-2:] == ["response.output_text.delta", "error"]
    assert events[-1].message == "boom"


@pytest.mark.parametrize("blocking", [False, True])
async def test_half_an_answer_is_none_for_an_agent_of_this_process(blocking: bool) -> None:
    def read(client: anthropic.Anthropic) -> None:
        with client.messages.stream(**asked) as events:
            events.until_done()

    async def read_async(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(**asked) as events:
            await events.until_done()

    asked: Any = {"model": "m", "max_tokens": 9, "messages": ask("hi")}
    async with model_at(PLAIN[: PLAIN.index(b'"finish_reason": "stop"')]) as llm:
        reading = asyncio.to_thread(read, blocking_claude(llm)) if blocking else read_async(claude_of(llm))
        with EpisodeScope(), pytest.raises(anthropic.APIError, match="ended before all choices were finished"):
            await reading


def logprobs(*values: Any) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": value, "bytes": None, "top_logprobs": []} for value in values]}


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"logprobs": logprobs(-1.0, math.nan, -1.0)}, "returned the logprob nan; allowed: finite, at most 0"),
        ({"logprobs": logprobs(-1.0, None, -1.0)}, "returned the logprob None"),
        ({"logprobs": logprobs(-1.0, 0.5, -1.0)}, "returned the logprob 0.5"),
        ({"logprobs": logprobs(-1.0, -math.inf, -1.0)}, "returned the logprob -inf"),
        ({"logprobs": logprobs(-1.0, "-1", -1.0)}, "returned the logprob '-1'"),
        ({"logprobs_temperature": 0}, "returned logprobs_temperature 0; allowed: finite numbers above 0"),
        ({"logprobs_temperature": "1"}, "returned logprobs_temperature '1'"),
        ({"logprobs": logprobs(-1.0)}, "returned 1 for 3 token ids"),
        ({"token_ids": [97, 98]}, "returned 3 for 2 token ids"),
        ({"token_ids": [97, -1, 99]}, "returned the token id -1"),
        ({"token_ids": [97, 1.5, 99]}, "returned the token id 1.5"),
        ({"token_ids": [97, None, 99]}, "returned the token id None"),
        ({"prompt_token_ids": [1, True]}, "returned the token id True"),
    ],
)
async def test_what_cannot_be_trained_fails_its_episode_with_the_reason(
    kind: str, wrong: dict[str, Any], says: str
) -> None:
    head, choice = {"prompt_token_ids": [1], **wrong}, {**CHOICE, **wrong}
    if kind == "application/json":
        body = json.dumps({**head, "choices": [choice]}).encode()
    else:
        body = written(FIRST, {**head, "choices": [{**choice, "delta": {"content": "abc"}}]})
    episode, transient = await attempted(body, kind)
    assert (episode.outcome, episode.reason, transient) == ("failed", "capture_error", False)
    assert says in str(episode.error)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"token_ids": "AAA="}, "returned token_ids as a JSON str; expected a list"),
        ({"prompt_token_ids": 7}, "returned prompt_token_ids as a JSON int; expected a list"),
        ({"logprobs": {"token_logprobs": "AAA="}}, "returned logprobs as a JSON str; expected a list"),
        ({"logprobs": {"token_logprobs": {"a": -1.0}}}, "returned logprobs as a JSON dict"),
        ({"logprobs": {"token_logprobs": [-1.0, -1.0]}}, "returned 2 for 3 token ids"),
        ({"logprobs": {"token_logprobs": [-1.0, None, -1.0]}}, "returned the logprob None; allowed: finite, at most 0"),
        ({"logprobs": {}}, "training needs the logprobs of every model call"),
    ],
)
async def test_broken_lists_of_the_compact_form_are_named(wrong: dict[str, Any], says: str) -> None:
    choice = {**CHOICE, "logprobs": {"token_logprobs": [-1.0] * 3}}
    whole = json.dumps({"prompt_token_ids": [1], "choices": [choice]}).encode()
    assert (await attempted(whole, COMPACT))[0].outcome == "ok"
    body = json.dumps({"prompt_token_ids": [1], **wrong, "choices": [{**choice, **wrong}]}).encode()
    episode, transient = await attempted(body, COMPACT)
    assert (episode.outcome, episode.reason, transient) == ("failed", "capture_error", False)
    assert says in str(episode.error)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"<html>"),
        ("application/json", b'{"choices": [{"mess'),
        ("application/json", b'{"choices": []}'),
        ("application/json", b'{"choices": null}'),
        ("application/json", b'{"choices": [7]}'),
        ("application/json", b"[" * 100_000),
        ("text/event-stream", b"data: {nope}\n\n"),
        ("text/event-stream", written(*SAID[:2])[: -len("data: [DONE]\n\n")] + b'data: {"choices"\n\n'),
        ("text/event-stream", written(*SAID[:2], {"error": {"message": "boom"}})),
    ],
)
async def test_an_unreadable_answer_is_the_servers_fault(kind: str, body: bytes) -> None:
    episode, transient = await attempted(body, kind)
    assert (episode.outcome, episode.reason, transient) == ("failed", "backend_error", True)


@pytest.mark.parametrize("indent", [None, 1])
async def test_an_error_in_place_of_a_stream_is_quoted(indent: int | None) -> None:
    body = json.dumps({"error": {"message": "boom", "code": 500}}, indent=indent).encode()
    episode, transient = await attempted(body, "text/event-stream")
    assert (episode.outcome, episode.reason, transient) == ("failed", "backend_error", True)
    assert "its model's server: boom" in str(episode.error)

    def read(client: openai.OpenAI) -> None:
        deque(client.chat.completions.create(model="m", messages=ask("hi"), stream=True), maxlen=0)  # type: ignore[call-overload]

    async with model_at(body) as llm:
        with EpisodeScope(), pytest.raises(openai.APIError, match="boom"):
            await asyncio.to_thread(read, sync_client(llm))


QUOTED = (
    "[{'type': 'value_error', 'loc': ('body',), 'msg': 'Value error, `tools` must be set.', "
    "'input': {'messages': [], 'logprobs': True, 'return_token_ids': True}}]"
)
"""As vLLM quotes the whole request, with what insitu has added."""


@pytest.mark.parametrize(
    ("request_", "message", "reason"),
    [
        ({"logprobs": True, "top_logprobs": 50}, "Requested sample logprobs of 50, greater than 20", "workflow_error"),
        ({"top_logprobs": 50}, "top_logprobs: at most 20", "workflow_error"),
        ({"extra_body": {"return_token_ids": 7}}, "return_token_ids must be a boolean", "workflow_error"),
        ({}, "this model's maximum context length is 9 tokens", "workflow_error"),
        ({}, "a message is wrong (quoted: 'return_token_ids and logprobs')", "workflow_error"),
        ({}, "logprobs are not enabled", "capture_error"),
        ({}, QUOTED, "workflow_error"),
        ({}, "unknown field return_token_ids", "capture_error"),
    ],
)
async def test_a_bad_request_is_the_fault_of_whoever_made_it(
    request_: dict[str, Any], message: str, reason: str
) -> None:
    error = {"message": message, "param": "messages"} if "quoted" in message else {"message": message}
    body = json.dumps({"error": error}).encode()
    episode, transient = await attempted(body, "application/json", 400, **request_)
    assert (episode.reason, transient) == (reason, False)
    assert message in str(episode.error)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by", ["an agent of this process", "the gateway"])
async def test_a_redirect_to_another_server_gets_no_prompt(by: str, streamed: bool) -> None:
    async def note(request: web.Request) -> web.Response:
        got.append(await request.text())
        return web.json_response({})

    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": f"{elsewhere}/v1/chat/completions"})

    got: list[str] = []
    async with server_of(note) as elsewhere, server_of(redirect) as url:
        config = OpenAIConfig(model_name="m", base_url=f"{url}/v1", max_retries=0)
        llm = connect("player", config, "m", f"{url}/v1", "none")
        async with aclosing(llm), gateway_to(llm) as gateway:
            with EpisodeScope() as scope, gateway.endpoint(scope) as endpoint:
                client = llm.client if by == "an agent of this process" else plain(endpoint).with_options(max_retries=0)
                with pytest.raises(openai.APIError):
                    await client.chat.completions.create(model="m", messages=ask("secret"), stream=streamed)
                if client is not llm.client:
                    await client.close()
    assert got == []


async def test_a_model_server_gets_no_cookies_of_another_episode() -> None:
    async def answer(request: web.Request) -> web.Response:
        got.append(request.headers.get("Cookie"))
        response = web.json_response({"choices": [CHOICE]})
        response.set_cookie("replica", "1")
        return response

    got: list[str | None] = []
    async with server_of(answer) as url:
        config = OpenAIConfig(model_name="m", base_url=f"{url}/v1", max_retries=0)
        async with aclosing(connect("player", config, "m", f"{url}/v1", "none")) as llm:
            for _ in range(2):
                with EpisodeScope():
                    await llm.complete(ask("hi"))
    assert got == [None, None]


@pytest.mark.parametrize("by", ["an agent of this process", "the gateway"])
async def test_a_stream_that_its_agent_leaves_is_no_fault_of_the_server(by: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": not yet\n\n")
        await hang()
        return response

    async with server_of(answer) as url:
        config = OpenAIConfig(model_name="m", base_url=f"{url}/v1", max_retries=0)
        async with aclosing(connect("player", config, "m", f"{url}/v1", "none")) as llm, gateway_to(llm) as gateway:
            with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
                async with plain(door) if by == "the gateway" else nullcontext(llm.client) as client:
                    await (await client.chat.completions.create(model="m", messages=ask("hi"), stream=True)).close()
                await until(lambda: scope.ledger.failed_attempts)
    assert (scope.ledger.failed_attempts, scope.ledger.server_failure) == ({"empty stream": 1}, None)


async def test_a_stream_without_line_ends_has_a_limit() -> None:
    async with model_at(b"data: " + b"x" * (2**24 + 1)) as llm:
        with EpisodeScope():
            stream = await llm.client.chat.completions.create(model="m", messages=ask("hi"), stream=True)
            with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)) as raised:  # as of openai 2
                await anext(aiter(stream))
    assert "more than 16777216 bytes" in f"{raised.value!r} {raised.value.__cause__!r}"
