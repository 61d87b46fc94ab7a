"""What crosses the gateway: odd routes, methods, headers, encodings and sizes, and agents that read slowly or leave."""

import asyncio
import gzip
import http.client
import itertools
import json
import logging
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web
from factories import model_client
from fake_openai import FakeOpenAI, encode, texts_of
from marks import slow_after
from processes import HANGS
from test_gateway import ask, claude, gateway_to, plain, post, text_by
from waiting import until
from yarl import URL

from insitu.gateway.endpoint import EpisodeEndpoint
from insitu.gateway.server import MAX_BODY, Upstream
from insitu.workflow.context import EpisodeScope

HI = json.dumps({"model": "x", "messages": ask("hi")}).encode()
GARBLED = {
    "no choices": b'{"choices": [null]}',
    "page": b"<html>",
    "null event": b'data: {"choices": [null]}\n\n',
    "odd delta": b'data: {"choices": [{"index": 0, "delta": [7]}]}\n\n',
}
LARGE = 50_000_000


class Seen(NamedTuple):
    method: str
    path: str
    headers: Any
    body: bytes


class Watched(FakeOpenAI):
    """Keeps every request that is no completion; `sent` counts the bytes of an endless stream."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self.sent = 0

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_route("*", "/v1/models", self._see)
        super().add_routes(router)
        router.add_route("*", "/{tail:.*}", self._see)

    async def _see(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(Seen(request.method, request.rel_url.raw_path, request.headers.copy(), await request.read()))
        headers = {"Alt-Svc": 'h3=":443"', "X-Kept": "1", "Set-Cookie": "a=b"}
        return web.json_response({"object": "list", "data": [{"id": "fake"}]}, headers=headers)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if texts_of(body)[0] in GARBLED:
            kind = "text/event-stream" if body.get("stream") else "text/html"
            return web.Response(body=GARBLED[texts_of(body)[0]], content_type=kind)
        return await super()._complete(request)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = texts_of(body)[0]
        if text == "nothing":
            return web.Response(body=b"data: [DONE]\n\n", content_type="text/event-stream")
        if text != "endless":
            response = await super()._stream(request, body)
            await asyncio.sleep(0.3 if text == "lingers" else 0)  # before the last chunk of the body
            return response
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = b'data: {"choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n' % (b"x" * 65536)
        for _ in range(1000):
            await response.write(event)
            self.sent += len(event)
        return response


@pytest.fixture(scope="module")
def server() -> Iterator[Watched]:
    with Watched() as server:
        yield server


async def ask_raw(
    door: EpisodeEndpoint, path: str, method: str = "POST", body: Any = HI, **headers: str
) -> tuple[int, Any]:
    """Status and body of a request whose path below the episode's address is sent as it stands."""
    url = URL(f"{door.anthropic_url}{path}", encoded=True)
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, headers={k.replace("_", "-"): v for k, v in headers.items()}) as answer,
    ):
        text = await answer.read()
        return answer.status, json.loads(text) if answer.content_type == "application/json" and text else text


async def send_raw(door: EpisodeEndpoint, request: bytes) -> bytes:
    """The response to a request that no client library sends."""
    url = URL(door.address)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1//chat/completions",
        "//v1/chat/completions/",
        "/chat/completions",
        "/v1/chat%2Fcompletions",
        "/v1/%63hat/completions?beta=true",
    ],
)
async def test_a_call_is_recorded_however_its_address_is_put_together(server: Watched, path: str) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            assert (await ask_raw(door, path))[0] == 200
    assert [call.token_ids for call in scope.calls] == [encode("echo: hi")]


@pytest.mark.parametrize("path", ["/../x", "/v1/../../health", "/%2e%2e/x", "/v1/..%2f..%2fhealth", "/v1/./train"])
async def test_no_path_leads_out_of_the_address(server: Watched, path: str) -> None:
    before = len(server.seen)
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            status, answer = await ask_raw(door, path, "GET", None)
    assert (status, answer["error"]["code"]) == (400, "invalid_path")
    assert len(server.seen) == before


async def test_other_methods_and_routes_go_on_untouched(server: Watched) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            odd = door.anthropic_url.replace(door.key, f"%{ord(door.key[0]):x}{door.key[1:]}")
            for method in ("GET", "HEAD", "OPTIONS", "DELETE", "PUT"):
                async with aiohttp.ClientSession() as session:
                    url = URL(f"{odd}/v1/models/a%2Fb?c=%20d", encoded=True)
                    async with session.request(method, url) as answer:
                        assert answer.status == 200
                        assert (answer.headers["X-Kept"], "Alt-Svc" in answer.headers) == ("1", False)
                        assert (await answer.read() == b"") == (method == "HEAD")
                assert server.seen[-1][:2] == (method, "/v1/models/a%2Fb")
            status, _ = await ask_raw(door, "/v1/chat/completions", "GET", None)
            assert (status, server.seen[-1].method) == (200, "GET")  # not a call, but perhaps a list of stored ones
            async with plain(door) as client:
                assert [m.id async for m in client.models.list()] == ["fake"]
            async with claude(door) as client:
                assert [m.id async for m in client.models.list()] == ["fake"]
    assert scope.calls == []


async def test_headers_are_those_for_the_other_side(server: Watched) -> None:
    async with gateway_to(model_client(server, api_key="real")) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            body = gzip.compress(b"anything")
            own = {"authorization": door.key, "x_api_key": door.key, "api_key": door.key, "x_goog_api_key": door.key}
            odd = {
                "connection": "keep-alive, x-hop",
                "x_hop": "1",
                "expect": "100-continue",
                "content_encoding": "gzip",
            }
            assert (await ask_raw(door, "/v1/files", body=body, **own, **odd, x_mine="2"))[0] == 200
            assert door.key not in str(server.seen[-1])
    seen = server.seen[-1]
    assert (seen.headers["Authorization"], seen.headers["X-Mine"]) == ("Bearer none", "2")
    assert not {"X-Hop", "Expect", "Api-Key", "X-Goog-Api-Key"} & {*seen.headers}
    assert (seen.headers["Content-Encoding"], seen.body) == ("gzip", b"anything")  # unpacked by the server there


async def test_agents_do_not_train(server: Watched) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            for path in (
                "/v1/train/jobs",
                "/v1//train/jobs",
                "/v1/%74rain/jobs",
                "/v1/load_lora_adapter",
                "/v1/preview/models",
            ):
                status, answer = await ask_raw(door, path)
                assert (status, answer["error"]["code"]) == (403, "not_for_agents")
    with Watched() as other:
        async with gateway_to(model_client(server), upstream=Upstream(base_url=other.base_url)) as gateway:
            with EpisodeScope() as scope, gateway.endpoint(scope) as door:
                assert (await ask_raw(door, "/v1/train/jobs"))[0] == 200  # the key there is the agents' own
        assert other.seen[-1].path == "/v1/train/jobs"


@pytest.mark.parametrize(
    ("encoding", "body", "status", "said"),
    [
        ("gzip", gzip.compress(HI), 200, ""),
        ("GZIP", gzip.compress(HI), 200, ""),
        ("deflate", zlib.compress(HI), 200, ""),
        ("identity", HI, 200, ""),
        ("gzip", HI, 400, "the body is not gzip"),
        ("gzip", gzip.compress(HI)[:-20], 400, "truncated gzip"),
        ("deflate", HI, 400, "the body is not deflate"),
        ("br", HI, 415, "'br'; allowed: gzip, deflate"),
        ("gzip, gzip", HI, 415, "allowed: gzip, deflate"),
        ("gzip", gzip.compress(b" " * (MAX_BODY + 1)), 413, "larger than"),
        ("", b"5\r\nnonsense", 400, "not JSON"),
    ],
    ids=itertools.count(),
)
async def test_compressed_requests(server: Watched, encoding: str, body: bytes, status: int, said: str) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            got, answer = await ask_raw(door, "/v1/chat/completions", body=body, content_encoding=encoding)
            assert got == status, answer
            assert status == 200 or said in answer["error"]["message"]
            assert await text_by("chat", False, door, "hi") == "echo: hi"
    assert len(scope.calls) == 1 + (status == 200)


async def test_compressed_requests_for_other_models_are_sent_on_unpacked(server: Watched) -> None:
    with Watched() as other:
        async with gateway_to(model_client(server), upstream=Upstream(base_url=other.base_url)) as gateway:
            with EpisodeScope() as scope, gateway.endpoint(scope) as door:
                packed = gzip.compress(json.dumps({"model": "another", "messages": ask("hi")}).encode())
                assert (await ask_raw(door, "/v1/chat/completions", body=packed, content_encoding="gzip"))[0] == 200
        assert other.requests == [{"model": "another", "messages": ask("hi")}]


async def test_chunks_that_are_none(server: Watched) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(door.address.rpartition(":")[2]))
            head = f"POST /e/{door.key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head.encode() + b"zz\r\n{}\r\n0\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()
            assert await text_by("chat", False, door, "hi") == "echo: hi"
    assert len(scope.calls) == 1


def padded(size: int) -> bytes:
    return HI + b" " * (size - len(HI))


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**20):
        yield body[start : start + 2**20]


@pytest.mark.parametrize("chunked", slow_after(1, [False, True]))
async def test_the_limit_is_exact(server: Watched, chunked: bool) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            for size, status in ((MAX_BODY, 200), (MAX_BODY + 1, 413)):
                body = padded(size)
                length = {} if chunked else {"content_length": str(size)}
                assert (await ask_raw(door, "/v1/chat/completions", body=pieces(body), **length))[0] == status
    assert len(scope.calls) == 1


@pytest.mark.parametrize("way", ["length", "chunks", "waits for 100", "unknown key"])
async def test_a_client_that_sends_all_before_it_reads_is_not_left_hanging(server: Watched, way: str) -> None:
    """As `http.client` does, and most others: the whole body first, then the status."""

    def send(url: URL) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=HANGS)
        connection.putrequest("POST", url.raw_path)
        block = b" " * 2**20
        if way == "chunks":
            connection.putheader("Transfer-Encoding", "chunked")
        else:
            connection.putheader("Content-Length", str(LARGE))
        if way == "waits for 100":
            connection.putheader("Expect", "100-continue")
        connection.endheaders()
        for start in range(0, LARGE, len(block)):
            part = block[: LARGE - start]
            connection.send(b"%x\r\n%s\r\n" % (len(part), part) if way == "chunks" else part)
        if way == "chunks":
            connection.send(b"0\r\n\r\n")
        answer = connection.getresponse()
        status, body = answer.status, json.loads(answer.read())
        connection.request("POST", url.raw_path, HI)  # the connection is as good as it was
        assert connection.getresponse().status == (401 if way == "unknown key" else 200)
        connection.close()
        return status, body

    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            url = f"{door.openai_url}/chat/completions"
            url = url.replace(door.key, "x" * 24) if way == "unknown key" else url
            status, body = await asyncio.to_thread(send, URL(url))
    wanted = (401, "unknown_episode") if way == "unknown key" else (413, "too_large")
    assert (status, body["error"]["code"]) == wanted
    assert len(scope.calls) == (way != "unknown key")


async def test_official_clients_know_what_was_too_large(server: Watched) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            async with plain(door) as client:
                for asking in (
                    client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x" * LARGE}]),
                    client.completions.create(model="x", prompt="x" * LARGE),
                    client.responses.create(model="x", input="x" * LARGE),
                ):
                    with pytest.raises(openai.APIStatusError, match="larger than") as raised:
                        await asking
                    assert (raised.value.status_code, raised.value.code) == (413, "too_large")
            async with claude(door) as other:
                with pytest.raises(anthropic.APIStatusError, match="larger than") as refused:
                    await other.messages.create(model="x", max_tokens=1, messages=ask("x" * LARGE))
                assert refused.value.type == "request_too_large"


@pytest.mark.parametrize(
    ("status", "kind"), [(403, "permission_error"), (429, "rate_limit_error"), (529, "overloaded_error")]
)
async def test_errors_have_the_names_of_anthropics(server: Watched, status: int, kind: str) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            async with claude(door).with_options(max_retries=0) as client:
                with pytest.raises(anthropic.APIStatusError) as raised:
                    await client.messages.create(model="x", max_tokens=1, messages=ask(f"status {status}"))
    assert (raised.value.status_code, raised.value.type) == (status, kind)


@pytest.mark.parametrize("asked", [{"input": "hi"}, {"messages": ask("hi"), "max_tokens": 1}])
async def test_several_choices_are_for_chats_and_texts(server: Watched, asked: dict[str, Any]) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            route = "responses" if "input" in asked else "messages"
            status, answer = await post(f"{door.openai_url}/{route}", {"model": "x", "n": 2, **asked})
    assert (status, "n cannot be passed on" in answer["error"]["message"]) == (400, True)
    assert scope.calls == []


async def test_websockets_are_refused(server: Watched) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope() as scope, gateway.endpoint(scope) as door:
            async with aiohttp.ClientSession() as session:
                for route in ("responses", "realtime"):
                    with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
                        await session.ws_connect(f"{door.openai_url}/{route}")
                    assert raised.value.status == 400


async def test_a_slow_reader_slows_the_server_down(server: Watched) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            asked = {"model": "x", "messages": ask("endless"), "stream": True}
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{door.openai_url}/chat/completions", json=asked) as answer:
                    await answer.content.readany()
                    held = -1
                    while held != server.sent:  # what fits between the two
                        held = server.sent
                        await asyncio.sleep(0.3)
                    assert 0 < held < 20_000_000
            await until(lambda: scope.calls)
            assert [call.error for call in scope.calls] == ["the agent closed the connection"]


@pytest.mark.parametrize("dialect", ["chat", "text"])
async def test_an_agent_may_leave_after_the_last_piece(server: Watched, dialect: str) -> None:
    """Clients close the connection at `[DONE]`, which may be a while before the server ends the body."""
    what = {"prompt": "lingers"} if dialect == "text" else {"messages": ask("lingers")}
    route = "completions" if dialect == "text" else "chat/completions"
    async with gateway_to(model_client(server)) as gateway, aiohttp.ClientSession() as session:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            async with session.post(f"{door.openai_url}/{route}", json={"stream": True, **what}) as answer:
                await answer.content.readuntil(b"[DONE]")
                scope.close()  # with the connection still open
    (call,) = scope.calls
    assert (call.error, call.token_ids, call.finish_reason) == (None, encode("echo: lingers"), "stop")
    assert scope.ledger.late_calls == 0


async def test_a_stream_that_brings_nothing(server: Watched) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            async with claude(door) as client:
                with pytest.raises(anthropic.APIError, match="ended before all choices were finished"):
                    async with client.messages.stream(model="x", max_tokens=9, messages=ask("nothing")) as stream:
                        await stream.get_final_message()
            assert "ended before all choices were finished" in (door.failure or "")
            assert await text_by("chat", True, door, "nothing") == ""
            assert await text_by("chat", True, door, "hi") == "echo: hi"
    assert scope.ledger.failed_attempts == {"empty stream": 2}
    assert [call.index for call in scope.calls] == [0]


@pytest.mark.parametrize("dialect", slow_after(1, ["chat", "responses", "messages"]))
@pytest.mark.parametrize("text", GARBLED)
async def test_what_a_server_garbles_is_nobodys_answer(server: Watched, text: str, dialect: str) -> None:
    stream = GARBLED[text].startswith(b"data")
    route = {"chat": "chat/completions"}.get(dialect, dialect)
    asked = {"model": "x", "stream": stream} | ({"input": text} if dialect == "responses" else {"messages": ask(text)})
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            status, answer = await post(f"{door.openai_url}/{route}", asked)
            assert await text_by("chat", False, door, "hi") == "echo: hi"
    assert [call.message["content"] for call in scope.calls if call.error is None] == ["echo: hi"]
    if dialect != "chat":
        assert status == (200 if stream else 502)
        assert "error" in str(answer)
    assert stream or scope.ledger.failed_attempts == {"malformed response": 1}


async def test_logprobs_of_a_streamed_response(server: Watched) -> None:
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            async with plain(door) as client:
                asked: Any = {"model": "x", "input": "hi", "include": ["message.output_text.logprobs"]}
                async with client.responses.stream(**asked) as events:
                    deltas = [e.logprobs async for e in events if e.type == "response.output_text.delta"]
                    whole = (await events.get_final_response()).output[0].content[0].logprobs
                assert (await client.responses.create(**asked)).output[0].content[0].logprobs == whole
                await client.responses.create(model="x", input="hi", top_logprobs=2)
    assert [t.logprob for delta in deltas for t in delta] == [t.logprob for t in whole] == scope.calls[0].logprobs
    assert "top_logprobs" not in server.requests[-1]


async def test_no_key_is_logged(server: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with gateway_to(model_client(server)) as gateway:
        with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
            for path in ("/v1/chat/completions", "/v1/models", "/v1/../x", "/v1/train/jobs", "/nothing"):
                await ask_raw(door, path)
                await ask_raw(door, path, body=b"{nope")
            path = f"/e/{door.key}/v1/x"
            for target in (f"http://[x{path}", f"http://h:99999999{path}", f"{path} y", f"{path}\xff", path[1:]):
                await send_raw(door, f"GET {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode("latin-1"))
        await ask_raw(door, "/v1/chat/completions")
    assert "which has ended" in caplog.text
    assert caplog.text.count("refused a malformed request") == 5
    assert door.key not in caplog.text
    assert door.key not in repr(door) + repr(gateway)
