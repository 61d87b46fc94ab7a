"""A proxy that damages what passes through it, at random from a seed: `with ChaosProxy(address, seed) as proxy`.

What it does to a request depends on the seed, the method and path, and how many such requests there were before:

    429, 500, 503          a refusal; the first and the last come with Retry-After
    delay                  up to half a second
    hang                   no response until the client leaves
    cut                    the connection ends before the request is passed on
    half request           the backend receives half of the body
    lost                   the backend has answered, and the client gets nothing
    half                   the client gets half of the response
    garbage, wrong shape   the backend has answered, and the client gets bytes, or other JSON, with status 200
    blackout               every connection ends, for half a second
"""

import asyncio
import gzip
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import web
from waiting import hang

FAULTS = {
    "429": 2,
    "500": 2,
    "503": 2,
    "delay": 3,
    "hang": 1,
    "cut": 3,
    "half request": 1,
    "lost": 3,
    "half": 3,
    "garbage": 2,
    "wrong shape": 1,
    "blackout": 0.3,
}
"""Relative frequencies."""
_HOP_BY_HOP = ("content-length", "transfer-encoding", "connection", "keep-alive", "date", "server")


class Sample(NamedTuple):
    """A completion that a client wants trained."""

    episode: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Training(NamedTuple):
    """A training request that reached the backend; ART's protocol names no job."""

    key: str
    job_id: str | None
    samples: list[Sample]


def native_samples(body: bytes) -> list[Sample]:
    """Samples in the rows of an upload."""
    samples = []
    for line in gzip.decompress(body).splitlines()[1:]:
        row = json.loads(line)
        assert len(row["calls"]) == 1
        start = row["loss_mask"].index(1)
        assert all(row["loss_mask"][start:])
        cut = (row["token_ids"][:start], row["token_ids"][start:], row["logprobs"][start:])
        samples.append(Sample(row["episode"], *map(tuple, cut)))
    return samples


def art_samples(body: bytes) -> list[Sample]:
    """Samples in the choices of ART's trajectory groups."""
    samples = []
    for trajectory in (t for group in json.loads(body)["trajectory_groups"] for t in group["trajectories"]):
        for choice in (turn for turn in trajectory["messages_and_choices"] if "message" in turn):
            entries = choice["logprobs"]["content"]
            ids = tuple(int(entry["token"].removeprefix("token_id:")) for entry in entries)
            logprobs = tuple(entry["logprob"] for entry in entries)
            samples.append(Sample(trajectory["metadata"]["episode"], tuple(choice["prompt_token_ids"]), ids, logprobs))
    return samples


class ChaosProxy:
    """`rate` is the share of damaged requests; `trainings` are the requests that the backend may have trained."""

    def __init__(self, upstream: str, seed: int, rate: float = 0.12) -> None:
        self.address = ""
        self.faults: Counter[str] = Counter()
        self.trainings: list[Training] = []
        self._upstream = upstream
        self._seed = seed
        self._rate = rate
        self._requests: Counter[str] = Counter()
        self._blackout_until = 0.0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(
            app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True, auto_decompress=False
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = "http://{}:{}".format(*runner.addresses[0][:2])
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    def _draw(self, request: web.Request) -> tuple[str, random.Random]:
        route = f"{request.method} {re.sub(r'job-[0-9a-f]+', 'job', request.path)}"
        self._requests[route] += 1
        chance = random.Random(f"{self._seed} {route} {self._requests[route]}")
        fault = ""
        if time.monotonic() < self._blackout_until:
            fault = "cut"
        elif chance.random() < self._rate:
            (fault,) = chance.choices(list(FAULTS), list(FAULTS.values()))
        if fault:
            self.faults[fault] += 1
        return fault, chance

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault, chance = self._draw(request)
        match fault:
            case "429" | "500" | "503":
                headers = {} if fault == "500" else {"Retry-After": "0.1"}
                return web.json_response({"error": {"message": "chaos"}}, status=int(fault), headers=headers)
            case "delay":
                await asyncio.sleep(chance.uniform(0, 0.5))
            case "hang":
                await hang()
            case "blackout":
                self._blackout_until = time.monotonic() + 0.5
                return _cut(request)
            case "cut":
                return _cut(request)
            case "half request":
                return await self._half_request(request, body)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        url = self._upstream + request.path_qs
        if request.path == "/_train_model":
            self.trainings.append(Training(request.headers["Idempotency-Key"], None, art_samples(body)))
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            if request.path == "/v1/train/jobs" and answer.status == 200:
                job_id = json.loads(await answer.read())["id"]
                self.trainings.append(Training(request.headers["Idempotency-Key"], job_id, native_samples(body)))
            return await self._pass_on(request, answer, fault, chance)

    async def _half_request(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Over a socket: an HTTP client would not send half a body."""
        host, port = self._upstream.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        headers = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        writer.write(f"{request.method} {request.path_qs} HTTP/1.1\r\n{headers}\r\n".encode() + body[: len(body) // 2])
        await writer.drain()
        writer.close()
        return _cut(request)

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse, fault: str, chance: random.Random
    ) -> web.StreamResponse:
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
        if fault == "lost":
            await answer.read()
            return _cut(request)
        if fault in ("garbage", "wrong shape"):
            length = len(await answer.read())
            wrong: list[Any] = [{}, [], None, 7, {"data": None}, {"choices": []}, {"choices": [{}]}]
            body = chance.randbytes(length) if fault == "garbage" else json.dumps(chance.choice(wrong)).encode()
            return web.Response(body=body, headers=headers)
        response = web.StreamResponse(status=answer.status, headers=headers)
        if "Content-Length" in answer.headers:
            response.content_length = int(answer.headers["Content-Length"])
        await response.prepare(request)
        async for chunk in _chunks(answer):
            if fault == "half":
                await response.write(chunk[: len(chunk) // 2])
                return _cut(request)
            await response.write(chunk)
        return response


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it comes in, also if it has been read before."""
    if answer.content.at_eof():
        yield await answer.read()
    async for chunk in answer.content.iter_any():
        yield chunk


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
