"""Retries and silence: what is waited for, for how long, and what is logged."""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from processes import HANGS
from waiting import until

from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.wire.connection import Connection, Retry, is_transient, retry_after

pytestmark = pytest.mark.usefixtures("pauses")


class Failing:
    """A request that fails `times` times."""

    def __init__(self, times: float, error: Exception | None = None) -> None:
        self.times = times
        self.attempts = 0
        self.error = error or BackendUnavailable("no answer from the server")

    async def __call__(self) -> int:
        self.attempts += 1
        if self.attempts <= self.times:
            raise self.error
        return self.attempts


async def test_an_outage_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    retry = Retry("the server", 60)
    assert await retry("GET /a", Failing(1)) == 2
    assert caplog.messages == []  # over with the next attempt
    requests = [Failing(float("inf")) for _ in range(8)]
    waiting = [asyncio.create_task(retry(f"GET /{n}", request)) for n, request in enumerate(requests)]
    await until(lambda: min(request.attempts for request in requests) >= 3)
    for request in requests:
        request.times = 0
    await asyncio.gather(*waiting)
    begins, ends = caplog.messages
    assert begins[:5] == "GET /"
    assert begins[6:] == ": no answer from the server; retrying for up to 60 s"
    assert ends == "the server responds again after 0 s"
    await retry("GET /b", Failing(2))
    assert len(caplog.messages) == 4
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


async def test_patience_may_take_thousands_of_attempts() -> None:
    assert await Retry("the server", 600)("GET /a", Failing(1100)) == 1101


async def test_patience_ends(caplog: pytest.LogCaptureFixture) -> None:
    request = Failing(float("inf"))
    with pytest.raises(
        BackendUnavailable, match=r"^GET /a: no answer from the server; gave up after 0 s \(retry_timeout\)$"
    ):
        await Retry("the server", 0.05)("GET /a", request)
    assert request.attempts > 2
    assert len(caplog.messages) == 1
    with pytest.raises(BackendUnavailable, match=r"^GET /a: no answer from the server$"):
        await Retry("the server", 0)("GET /a", Failing(1))


async def test_other_errors_and_dead_children_are_not_waited_for() -> None:
    for error in (RequestRefused("no"), BackendError("no")):
        with pytest.raises(BackendError, match=r"^no$"):
            await Retry("the server", 60)("GET /a", Failing(1, error))
    with pytest.raises(BackendUnavailable, match="ended with exit code 3"):
        await Retry("the server", 60, lambda: "the backend process ended with exit code 3")("GET /a", Failing(1))


async def test_the_server_says_when_to_come_back(pauses: list[float]) -> None:
    await Retry("the server", 60)("GET /a", Failing(1, BackendUnavailable("busy", retry_after=7)))
    await Retry("the server", 60)("GET /a", Failing(1, BackendUnavailable("busy", retry_after=1e9)))
    assert pauses[0] == 7
    assert 59 < pauses[1] <= 60
    later = format_datetime(datetime.now(UTC) + timedelta(minutes=5), usegmt=True)
    assert 290 < retry_after({"Retry-After": later}) <= 300
    clock = {"Date": "Tue, 01 Jan 2030 00:00:00 GMT", "Retry-After": "Tue, 01 Jan 2030 00:00:07 GMT"}
    assert retry_after(clock) == 7  # whatever our own clock says
    assert [retry_after({"Retry-After": t}) for t in ("2", "0.5", "-1", "soon", "nan", "")] == [2, 0.5, 0, 0, 0, 0]
    assert retry_after({}) == 0
    assert [is_transient(s) for s in (408, 425, 429, 500, 503, 529)] == [True] * 6
    assert [is_transient(s) for s in (400, 401, 404, 409, 422)] == [False] * 5


@asynccontextmanager
async def server(answer: Any) -> AsyncIterator[str]:
    async with await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**22) as listening:
        yield "http://{}:{}".format(*listening.sockets[0].getsockname()[:2])


@asynccontextmanager
async def connection(**limits: float) -> AsyncIterator[Connection]:
    made = Connection("the server", {}, **({"read_timeout": 0.2, "retry_timeout": 0} | limits))
    yield made
    await made.close()


@pytest.mark.parametrize("body", [None, b"x" * 10, os.urandom(2**24)], ids=["none", "small", "large"])
async def test_a_server_that_takes_nothing_is_silent(body: bytes | None) -> None:
    async def stop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await ended.wait()
        writer.transport.abort()

    ended = asyncio.Event()
    async with server(stop) as address, connection() as made:
        with pytest.raises(BackendUnavailable, match=r"no answer from the server: no data for 0.2 s \(read_timeout\)"):
            async with made.open("POST", address, body):
                pass
        ended.set()


async def test_a_slow_upload_and_heartbeats_are_no_silence() -> None:
    received = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while len(received) < 2**24:
            received.extend(await reader.read(2**22))
            await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(5):
            writer.write(b": keep-alive\n\n")
            await asyncio.sleep(0.4)
        writer.close()

    data = os.urandom(2**24)
    async with server(answer) as address, connection(read_timeout=1.5) as made:
        async with made.open("POST", address, data) as response:
            assert [line async for line in made.lines(response)] == [b": keep-alive\n", b"\n"] * 5
    assert received == data


async def test_those_who_read_from_a_connection_that_is_closed_are_told() -> None:
    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf of\n")
        await ended.wait()
        writer.close()

    async def read() -> None:
        async with made.open("GET", address) as response:
            async for _ in made.lines(response):
                begun.set()

    begun, ended = asyncio.Event(), asyncio.Event()
    async with server(begin) as address, connection(read_timeout=math.inf) as made:
        reading = asyncio.create_task(read())
        await begun.wait()
        await made.close()
        with pytest.raises(BackendUnavailable, match="Connection closed"):
            await asyncio.wait_for(reading, HANGS)
        ended.set()


async def test_an_address_where_nobody_listens_is_retried_only_if_somebody_did() -> None:
    async with connection(retry_timeout=60) as made:

        async def request() -> str:
            async with made.open("GET", address) as response:
                return (await response.read()).decode()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
            writer.close()

        address = "http://127.0.0.1:9"
        with pytest.raises(BackendUnavailable, match=r"^no answer from the server: ClientConnectorError"):
            await made.retry("GET /", request)
        async with server(answer) as listening:
            address = listening
            assert await made.retry("GET /", request) == "hi"
        waiting = asyncio.create_task(made.retry("GET /", request))
        await until(lambda: made.refused >= 5)
        async with await asyncio.start_server(answer, *address.removeprefix("http://").split(":")):
            assert await waiting == "hi"
        refused, address = made.refused, "http://nowhere.invalid"
        with pytest.raises(BackendUnavailable):
            await request()
        assert made.refused == refused, "the server may be running: its name was not found"
