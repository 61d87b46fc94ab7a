"""The backend over HTTP, 32 requests at a time, against `generate()` of transformers in process.

Tokens a second, and the CPU of the process that samples: all its threads, without the client's.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests/support"))

QUICKSTART = HERE.parent / "examples" / "tic_tac_toe" / "model"
CONCURRENCY = 32
REQUESTS = 512
LENGTHS = range(8, 129)
STRUCTURE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["small", "large"]},
            "amounts": {"type": "array", "items": {"type": "number", "minimum": 0}, "maxItems": 4},
        },
        "required": ["name", "kind", "amounts"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""More than fits into a completion, so that all have the length they would have without it."""
ROUNDS = 5
"""Of the small model, whose rounds take seconds; the large one has a single round, of minutes."""
ALONE = 24
"""Requests of the mix that `generate()` gets one at a time: its tokens a second do not change after so many."""


@dataclass(frozen=True)
class Job:
    prompt: str
    tokens: int


@dataclass(frozen=True)
class Cost:
    """What one way of sampling took, in seconds a token."""

    wall: float
    cpu: float


def jobs(seed: int = 0) -> list[Job]:
    """The mix: prompts of about 30 tokens, completions of 8 to 128, in one seeded order."""
    rng = random.Random(seed)
    return [Job("".join(rng.choices("abcdefgh ", k=12)), rng.choice(LENGTHS)) for _ in range(REQUESTS)]


def measure() -> dict[str, dict[str, Cost]]:
    """By model and way, the medians of rounds in which the ways take turns."""
    from tiny_models import save_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        small = QUICKSTART if (QUICKSTART / "config.json").exists() else save_tiny_model(Path(folder) / "small")
        sizes = {"hidden_size": 448, "intermediate_size": 1344, "num_hidden_layers": 8, "vocab_size": 2048}
        heads = {"num_attention_heads": 7, "num_key_value_heads": 7, "initializer_range": 0.02}
        large = save_tiny_model(Path(folder) / "large", **(sizes | heads))
        return {_title(small): measure_model(small, ROUNDS), _title(large): measure_model(large, 1)}


def measure_model(model: Path, rounds: int) -> dict[str, Cost]:
    with server(model) as (address, usage):
        ways: dict[str, Callable[[], Cost]] = {
            "generate(), one request at a time": lambda: _generated(model, jobs()[:ALONE], 1),
            f"generate(), padded batches of {CONCURRENCY}": lambda: _generated(model, jobs(), CONCURRENCY),
            f"insitu backend over HTTP, {CONCURRENCY} at a time": lambda: _served(address, usage, jobs()),
            "the same, with a JSON schema": lambda: _served(
                address, usage, jobs(), structured_outputs={"json": STRUCTURE}, ignore_eos=False
            ),
        }
        costs = [[measured() for measured in ways.values()] for _ in range(rounds)]
    return {
        way: Cost(median(cost.wall for cost in column), median(cost.cpu for cost in column))
        for way, column in zip(ways, zip(*costs, strict=True), strict=True)
    }


def _served(address: str, usage: psutil.Process, mix: list[Job], **options: Any) -> Cost:
    """All of `mix` over HTTP, `CONCURRENCY` at a time; the server is another process."""
    asyncio.run(_send(address, mix[:CONCURRENCY], options))

    def cpu() -> float:
        times = usage.cpu_times()
        return float(times.user + times.system)

    began, used = time.perf_counter(), cpu()
    tokens = asyncio.run(_send(address, mix, options))
    return Cost((time.perf_counter() - began) / tokens, (cpu() - used) / tokens)


def report() -> str:
    """The section `sampling` of RESULTS.md."""
    lines = [
        f"Sampling: {REQUESTS} requests, completions of {LENGTHS[0]} to {LENGTHS[-1]} tokens mixed; medians of {ROUNDS}"
        " rounds in turn for the first model, one round for the second. Below 5 M parameters both sides have one torch"
        f" thread, above all {os.cpu_count()} cores; the client shares them with the backend, and its CPU is not"
        " counted. Ratios are times as fast, and times less CPU a token.",
        "",
        "| model | way | tokens/s | of padded batches | CPU a token | of padded batches |",
        "|---|---|---|---|---|---|",
    ]
    for model, costs in measure().items():
        batches = list(costs.values())[1]
        for way, cost in costs.items():
            wall = f"{1 / cost.wall:.0f} | {batches.wall / cost.wall:.2f}"
            cpu = f"{cost.cpu * 1e6:.0f} us | {batches.cpu / cost.cpu:.2f}"
            lines.append(f"| {model} | {way} | {wall} | {cpu} |")
    return "\n".join(lines)


def _title(model: Path) -> str:
    from insitu.backend.model import load_model

    count = sum(parameter.numel() for parameter in load_model(str(model)).module.parameters())
    return f"{count / 1e6:.1f} M parameters"


def _generated(model: Path, mix: list[Job], batch: int) -> Cost:
    """`generate()` as it comes, in arrival order; a batch ends with its longest, the rest of it is not counted."""
    from insitu.algorithms.memory_budget import SMALL_MODEL
    from insitu.backend.model import load_model

    loaded = load_model(str(model))
    torch.set_num_threads(1 if loaded.module.num_parameters() < SMALL_MODEL else os.cpu_count() or 1)
    tokenizer = loaded.tokenizer
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def run(part: list[Job]) -> None:
        texts = [
            tokenizer.apply_chat_template(_messages(job), tokenize=False, add_generation_prompt=True) for job in part
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        longest = max(job.tokens for job in part)
        loaded.module.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=1.0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=tokenizer.pad_token_id,
        )

    with torch.inference_mode():
        run(mix[:batch])
        began, used = time.perf_counter(), time.process_time()
        for start in range(0, len(mix), batch):
            run(mix[start : start + batch])
        tokens = sum(job.tokens for job in mix)
        return Cost((time.perf_counter() - began) / tokens, (time.process_time() - used) / tokens)


async def _send(address: str, mix: list[Job], options: dict[str, Any]) -> int:
    """Every job through `CONCURRENCY` connections; the number of tokens that came back."""
    waiting = iter(mix)
    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    async with aiohttp.ClientSession(connector=connector) as session:
        return sum(await asyncio.gather(*(_worker(session, address, waiting, options) for _ in range(CONCURRENCY))))


async def _worker(session: aiohttp.ClientSession, address: str, waiting: Iterator[Job], options: dict[str, Any]) -> int:
    tokens = 0
    for job in waiting:
        body = {"model": "policy", "messages": _messages(job), "max_tokens": job.tokens, "ignore_eos": True, **options}
        async with session.post(f"{address}/v1/chat/completions", json=body) as response:
            tokens += (await response.json())["usage"]["completion_tokens"]
    return tokens


def _messages(job: Job) -> list[dict[str, str]]:
    return [{"role": "user", "content": job.prompt}]


@contextlib.contextmanager
def server(model: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`insitu backend` with a model: its address, and its process."""
    start = "import sys; from insitu.backend import BackendOptions; from insitu.cli.backend import serve;"
    start += f"sys.exit(serve(BackendOptions(model={str(model)!r}, port=0, parent_pid={os.getpid()})))"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = re.search(r"ready at (\S+)", process.stdout.readline())
            assert ready is not None
            yield ready[1], psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    print(report())
