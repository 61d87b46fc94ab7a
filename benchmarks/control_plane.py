"""What a call costs a backend whose sampler is vLLM: the CPU time of its one process, which does everything but sample.

    python benchmarks/control_plane.py            measures, and prints a table
    python benchmarks/run.py control_plane        the same into RESULTS.md

vLLM is a stub in another process that answers immediately. The backend renders the chat template, tokenizes, asks,
reads token ids and log-probabilities, detokenizes, and answers the request with all of it.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

ROOT = Path(__file__).parent.parent
IN_FLIGHT, CALLS, WARM_UP = 64, 1500, 200
SIZES = ((64, 16), (1000, 128), (1000, 512), (4000, 512))
"""Prompt and completion tokens."""


async def serve_stub(model: str) -> None:
    """Answers the backend's first request by the model, so that it is accepted, and all others with a made-up token."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from fake_vllm import FakeVllm

    from insitu.backend.model import load_model

    class Stub(FakeVllm):
        def _sample(self, prompt: list[int], count: int) -> list[dict]:
            if len(self.asked) == 1:
                return super()._sample(prompt, count)
            return [{"token_id": 65, "logprob": -1.25, "rank": 1, "top_logprobs": []}] * count

    async with Stub(load_model(model, "cpu").module) as stub:
        print(stub.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def ask(url: str, token: str, prompt: int, completion: int, calls: int) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "a" * prompt}], "max_tokens": completion}
    body |= {"logprobs": True, "return_token_ids": True}
    limit = asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:

        async def one() -> None:
            async with limit, session.post(f"{url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                assert len(answer["choices"][0]["token_ids"]) == completion

        await asyncio.gather(*(one() for _ in range(calls)))


def started(*command: str) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


def measure() -> list[tuple[int, int, float, float]]:
    """Prompt and completion tokens, CPU milliseconds a call, calls a second."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from tiny_models import save_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = str(save_tiny_model(Path(folder) / "model", max_position_embeddings=8192))
        stub, address = started(__file__, "--stub", model)
        token = "benchmark"
        options = ["--port", "0", "--sampler", "vllm", "--sampler_addresses", address, "--token", token]
        backend, url = started("-m", "insitu", "backend", "--model", model, *options)
        try:
            usage, rows = psutil.Process(backend.pid), []
            for prompt, completion in SIZES:
                asyncio.run(ask(url, token, prompt, completion, WARM_UP))
                before, start = sum(usage.cpu_times()[:2]), time.monotonic()
                asyncio.run(ask(url, token, prompt, completion, CALLS))
                cpu, wall = sum(usage.cpu_times()[:2]) - before, time.monotonic() - start
                rows.append((prompt, completion, 1000 * cpu / CALLS, CALLS / wall))
            return rows
        finally:
            for process in (backend, stub):
                process.terminate()
                process.communicate()


def report() -> str:
    lines = [
        "## The backend's process beside vLLM",
        "",
        f"{CALLS} chat completions with token ids and logprobs, {IN_FLIGHT} in flight, against a stub that answers",
        "immediately.",
        "",
        "| prompt tokens | completion tokens | CPU a call | calls a second of one core | sampled tokens a second |",
        "|---|---|---|---|---|",
    ]
    for prompt, completion, cpu, _ in measure():
        lines.append(f"| {prompt} | {completion} | {cpu:.2f} ms | {1000 / cpu:.0f} | {completion * 1000 / cpu:,.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stub"]:
        asyncio.run(serve_stub(sys.argv[2]))
    else:
        print(report())
