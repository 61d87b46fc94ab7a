"""What a call costs a backend whose sampler is vLLM: the CPU time of its one process, which does everything but sample.

    python benchmarks/control_plane.py            measures, and prints a table
    python benchmarks/run.py control_plane        the same into RESULTS.md

vLLM is a stub in another process that answers immediately. The backend renders the chat template, tokenizes, asks,
reads token ids and log-probabilities, detokenizes, and answers the request with all of it: in the compact form, which
insitu's clients ask for, and in OpenAI's.
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp
import psutil

from insitu.wire.http_format import COMPACT, JSON

ROOT = Path(__file__).parent.parent
IN_FLIGHT, CALLS, WARM_UP = 64, 1500, 200
SIZES = ((64, 16), (1000, 128), (1000, 512), (4000, 512))
"""Prompt and completion tokens."""
LOGPROB = -1.0986123085021973
"""With as many digits as float32 has in JSON."""


async def serve_stub(model: str) -> None:
    """Answers the backend's first request by the model, so that it is accepted, and all others with a made-up token."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from fake_vllm import FakeVllm

    from insitu.backend.model import load_model

    class Stub(FakeVllm):
        def _sample(self, prompt: list[int], count: int, temperature: float, seed: int | None) -> list[dict]:
            if len(self.asked) == 1:
                return super()._sample(prompt, count, temperature, seed)
            return [{"token_id": 65, "logprob": LOGPROB, "rank": 1, "top_logprobs": []}] * count

    async with Stub(load_model(model, "cpu").module) as stub:
        print(stub.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def ask(url: str, token: str, prompt: int, completion: int, calls: int, kind: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "a" * prompt}], "max_tokens": completion}
    body |= {"logprobs": True, "return_token_ids": True}
    limit = asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}", "Accept": kind}) as session:

        async def one() -> None:
            async with limit, session.post(f"{url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
                assert (response.status, response.content_type) == (200, kind), answer
                assert len(answer["choices"][0]["token_ids"]) == completion

        await asyncio.gather(*(one() for _ in range(calls)))


def started(*command: str) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


def measure() -> list[tuple[int, int, float, float]]:
    """Prompt and completion tokens, CPU milliseconds a call in the compact form and in OpenAI's."""
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
            for size in SIZES:
                cpu = []
                for kind in (COMPACT, JSON):
                    asyncio.run(ask(url, token, *size, WARM_UP, kind))
                    before = sum(usage.cpu_times()[:2])
                    asyncio.run(ask(url, token, *size, CALLS, kind))
                    cpu.append(1000 * (sum(usage.cpu_times()[:2]) - before) / CALLS)
                rows.append((*size, *cpu))
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
        "immediately. Asked for: at most 1.5 ms of 1000 + 512 tokens.",
        "",
        "| prompt tokens | completion tokens | CPU a call | in OpenAI's form | calls a second of one core "
        "| sampled tokens a second |",
        "|---|---|---|---|---|---|",
    ]
    for prompt, completion, cpu, openai in measure():
        row = f"{cpu:.2f} ms | {openai:.2f} ms | {1000 / cpu:.0f} | {completion * 1000 / cpu:,.0f}"
        lines.append(f"| {prompt} | {completion} | {row} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stub"]:
        asyncio.run(serve_stub(sys.argv[2]))
    else:
        print(report())
