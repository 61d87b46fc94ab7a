"""The ART plugin's talk to servers that cut connections, answer something else, or are behind a gateway that does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from art_model import ArtModel, remote_to

from insitu.errors import BackendError, BackendUnavailable, RequestRefused

LINE = b'{"loss": 1.0, "num_gradient_steps": 2}\n'
HTML = b"<html>welcome</html>"


MODEL = ArtModel(name="agent")


def reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """It ends with the connection, whatever its body says."""
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "Connection: close", "", "")).encode() + body


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


@asynccontextmanager
async def remote(*first: bytes, **answers: bytes) -> AsyncIterator[Any]:
    """A client of a server that answers each path, less its slashes, with the same bytes; after `first`, to any."""
    waiting = [*first]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length")), "0")
        await reader.readexactly(int(length))
        path = head.split()[1].replace("/", "")
        writer.write(waiting.pop(0) if waiting else answers.get(path, reply(b"", "404 Not Found")))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found = remote_to(address, "default", read_timeout=0.3, retry_timeout=0.5)
        found.inference_url = f"{address}/v1"
        try:
            yield found
        finally:
            await found.close()


@pytest.mark.parametrize(
    "answer",
    [
        reply(LINE + LINE[:9]),
        reply(chunk(LINE + LINE[:9]) + chunk(b""), "200 OK", "Transfer-Encoding: chunked"),
        reply(chunk(LINE), "200 OK", "Transfer-Encoding: chunked"),
        reply(HTML, "502 Bad Gateway"),
        reply(HTML, "503 Service Unavailable"),
        reply(HTML, "504 Gateway Timeout"),
    ],
    ids=["half a line", "half a line in a whole answer", "no last chunk", "502", "503", "504"],
)
async def test_an_answer_that_is_lost_is_unavailable(answer: bytes) -> None:
    """It may have been trained: the adapter asks for the step before it does anything else."""
    async with remote(_train_model=answer) as backend:
        with pytest.raises(BackendUnavailable):
            await MODEL.train(backend)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("_train_model", HTML),
        ("_train_model", b"[1]\n"),
        ("_get_step", b"null"),
        ("_get_step", b"true"),
        ("_get_step", b'{"step": 1}'),
        ("_get_step", HTML),
        ("_prepare_backend_for_training", b"null"),
        ("_prepare_backend_for_training", b"[null, null]"),
        ("v1models", b"[]"),
        ("v1models", b'{"data": ["agent"]}'),
    ],
)
async def test_an_answer_of_something_else_is_named(path: str, body: bytes) -> None:
    async with remote(**{path: reply(body)}) as backend:
        asked = {
            "_train_model": lambda: MODEL.train(backend),
            "_get_step": lambda: MODEL.step(backend),
            "_prepare_backend_for_training": lambda: MODEL.prepare(backend),
            "v1models": backend.refresh_served_names,
        }
        with pytest.raises(BackendError, match=r"returned unexpected data .*; is it the right server\?") as caught:
            await asked[path]()
        assert not isinstance(caught.value, BackendUnavailable)


@pytest.mark.parametrize(
    ("names", "now"),
    [
        (["tiny", "agent", "agent@0", "agent@4"], "agent"),
        (["tiny", "agent@0", "agent@3"], "agent@4"),  # listed before the fourth step
        (["tiny"], "agent"),
    ],
)
async def test_the_name_to_sample_by_is_one_the_server_has(names: list[str], now: str) -> None:
    models = json.dumps({"data": [{"id": name} for name in names]}).encode()
    async with remote(_get_step=reply(b"4"), v1models=reply(models)) as backend:
        assert await MODEL.step(backend) == 4
        assert await backend.refresh_served_names() == set(names)
        assert MODEL.inference_name(backend) == now


async def test_a_model_that_was_not_registered_is_served_nowhere() -> None:
    backend = remote_to("http://127.0.0.1:9", "default")
    with pytest.raises(BackendError, match="initialize the adapter first"):
        await backend.refresh_served_names()


async def test_the_job_of_a_lost_reply_is_found_where_jobs_are_listed() -> None:
    jobs = [
        {"key": "art/e/p/agent/run/2/5", "status": "failed", "message": "the loss is nan"},
        {"key": "art/e/p/agent/run/1/4", "status": "completed", "message": None},
        {"key": None, "status": "failed", "message": "of another"},
    ]
    async with remote(artjobs=reply(json.dumps({"jobs": jobs, "refused": []}).encode())) as backend:
        failed, completed = [await backend.find_job(key) for key in ("run/2/5", "run/1/4")]
        assert (failed.status, failed.message, completed.status) == ("failed", "the loss is nan", "completed")
        assert await backend.find_job("run/3/5") is None
    async with remote() as backend:  # ART's own has no such page
        with pytest.raises(RequestRefused):
            await backend.find_job("run/2/5")


BUSY = [
    reply(HTML, "503 Service Unavailable"),
    reply(b"", "429 Too Many Requests"),
    reply(b"[", "200 OK", "Content-Length: 9"),
]


@pytest.mark.usefixtures("pauses")
async def test_transient_errors_are_retried() -> None:
    for path, body, request in (
        ("healthcheck", b"", lambda backend: backend.check_health()),
        ("register", b"null", lambda backend: backend.register(MODEL)),
        ("_get_step", b"5", lambda backend: MODEL.step(backend)),
        ("v1models", b'{"data": [{"id": "agent"}]}', lambda backend: backend.refresh_served_names()),
        ("_log", b"null", lambda backend: MODEL.log(backend)),
    ):
        async with remote(*BUSY, **{path: reply(body)}) as backend:
            await request(backend)


async def test_a_server_that_stays_silent_is_given_up() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    ended = asyncio.Event()
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        backend = remote_to(address, "default", read_timeout=0.1, retry_timeout=0.2)
        for request in (backend.check_health(), MODEL.step(backend)):
            with pytest.raises(BackendUnavailable, match=r"no data for 0.1 s \(read_timeout\); gave up after 0 s"):
                await request
        ended.set()
        await backend.close()
