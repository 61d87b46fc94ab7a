"""What the gateway costs beside a direct connection to the same endpoint: latency, CPU and memory.

    python benchmarks/gateway.py            measures, and prints a table
    python benchmarks/run.py gateway        the same into RESULTS.md

Endpoint, gateway and agents are separate processes. The agents ask as plain HTTP clients do; the gateway asks the
endpoint for token ids and logprobs, records the call and takes both out of the answer. An episode makes 16 calls; the
calls before memory is looked at are those of more episodes than the gateway remembers the ends of.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import psutil

HERE = Path(__file__).parent
PAIRS, IN_FLIGHT, CALLS, WARM_UP, CALLS_AN_EPISODE = 2000, 64, 100_000, 40_000, 16
LIMITS = "median added latency at most 2 ms, CPU at most 1.2 ms a call, no growth of memory"
BODY = json.dumps(
    {"model": "stub", "messages": [{"role": "user", "content": "The board is empty. Your move?"}]}
).encode()
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}


async def serve(url: str) -> None:
    """The gateway: a line `end URL` ends an episode, any other begins one; answered with its address."""
    from insitu.gateway.server import Gateway
    from insitu.workflow.context import EpisodeScope
    from insitu.workflow.llms import OpenAIConfig, connect

    llm = connect("player", OpenAIConfig(model_name="stub"), "stub", url, "none")
    open_doors: dict[str, Any] = {}
    async with Gateway([llm]) as gateway:
        while line := await asyncio.to_thread(sys.stdin.readline):
            word, _, url = line.strip().partition(" ")
            if word == "end":
                scope, admitted = open_doors.pop(url)
                admitted.__exit__(None, None, None)
                assert len(scope.calls) <= CALLS_AN_EPISODE
                assert all(call.token_ids and call.logprobs for call in scope.calls)
            else:
                scope = EpisodeScope(training=True)
                admitted = gateway.endpoint(scope)
                url = admitted.__enter__().openai_url
                open_doors[url] = scope, admitted
            print(url, flush=True)
    await llm.aclose()


class Doors:
    """Episodes' addresses, asked of the gateway's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lock = asyncio.Lock()
        self.usage = psutil.Process(process.pid)

    async def begin(self) -> str:
        return await self._tell("begin")

    async def end(self, url: str) -> None:
        await self._tell(f"end {url}")

    async def _tell(self, what: str) -> str:
        async with self._lock:
            self._process.stdin.write(f"{what}\n".encode())
            return (await self._process.stdout.readline()).decode().strip()

    def cpu(self) -> float:
        times = self.usage.cpu_times()
        return times.user + times.system


@asynccontextmanager
async def gateway_to(url: str) -> AsyncIterator[Doors]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", url, stdin=pipe, stdout=pipe)
    try:
        yield Doors(process)
    finally:
        process.stdin.close()
        await process.wait()


async def call(session: aiohttp.ClientSession, url: str) -> float:
    """Milliseconds of a call."""
    started = time.perf_counter()
    async with session.post(f"{url}/chat/completions", data=BODY, headers=HEADERS) as answer:
        text = await answer.read()
    assert answer.status == 200, text
    return 1000 * (time.perf_counter() - started)


async def latencies(session: aiohttp.ClientSession, direct: str, doors: Doors) -> tuple[float, float]:
    """The medians of a direct call and one through the gateway, in turn, one at a time."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(PAIRS):
        if number % CALLS_AN_EPISODE == 0:
            url = await doors.begin()
        times[False].append(await call(session, direct))
        times[True].append(await call(session, url))
        if number % CALLS_AN_EPISODE == CALLS_AN_EPISODE - 1:
            await doors.end(url)
    return statistics.median(times[False]), statistics.median(times[True])


async def many(session: aiohttp.ClientSession, doors: Doors, calls: int) -> None:
    """`calls` calls through the gateway, 64 in flight, each agent in separate episodes."""
    left = iter(range(calls))

    async def agent() -> None:
        while mine := list(islice(left, CALLS_AN_EPISODE)):
            url = await doors.begin()
            for _ in mine:
                await call(session, url)
            await doors.end(url)

    await asyncio.gather(*(agent() for _ in range(IN_FLIGHT)))


async def measure(direct: str) -> str:
    connector = aiohttp.TCPConnector(limit=0)
    async with gateway_to(direct) as doors, aiohttp.ClientSession(connector=connector) as session:
        plain, through = await latencies(session, direct, doors)
        await many(session, doors, WARM_UP)
        memory, cpu, started = doors.usage.memory_info().rss, doors.cpu(), time.perf_counter()
        await many(session, doors, CALLS)
        seconds, cpu = time.perf_counter() - started, doors.cpu() - cpu
        grown = (doors.usage.memory_info().rss - memory) / 2**20
    return f"""## The gateway beside a direct connection

The same endpoint in the same run, which answers after 5 ms. Limits: {LIMITS}.

| what | measured |
|---|---|
| a direct call, one at a time (median of {PAIRS}) | {plain:.2f} ms |
| a call through the gateway, in turn with the former | {through:.2f} ms |
| added | {through - plain:.2f} ms |
| CPU of the gateway's process a call, {IN_FLIGHT} in flight | {1000 * cpu / CALLS:.2f} ms |
| calls a second | {CALLS / seconds:.0f} |
| its memory after {WARM_UP:,} calls | {memory / 2**20:.1f} MB |
| growth over the next {CALLS:,} | {grown:+.1f} MB |
"""


def report() -> str:
    stub = [sys.executable, str(HERE / "stub_endpoint.py"), "--latency", "0.005"]
    with subprocess.Popen(stub, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            return asyncio.run(measure(process.stdout.readline().strip()))
        finally:
            process.stdin.close()


if __name__ == "__main__":
    import uvloop

    if sys.argv[1:2] == ["--serve"]:
        uvloop.run(serve(sys.argv[2]))
    else:
        print(report())
