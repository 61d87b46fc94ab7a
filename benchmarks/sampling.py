"""Tokens a second: the backend over HTTP, 32 requests at a time, against `generate()` of transformers in process."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests/support"))

QUICKSTART = HERE.parent / "examples" / "tic_tac_toe" / "model"
CONCURRENCY = 32
REQUESTS = 512
LENGTHS = range(8, 129)
ALONE = 24
"""Requests of the mix that `generate()` gets one at a time: its tokens a second do not change after so many."""


@dataclass(frozen=True)
class Job:
    prompt: str
    tokens: int


@dataclass(frozen=True)
class Rate:
    """What one way of sampling achieved."""

    way: str
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def jobs(seed: int = 0) -> list[Job]:
    """The mix: prompts of about 30 tokens, completions of 8 to 128, in one seeded order."""
    rng = random.Random(seed)
    return [Job("".join(rng.choices("abcdefgh ", k=12)), rng.choice(LENGTHS)) for _ in range(REQUESTS)]


def measure() -> dict[str, list[Rate]]:
    """By model, the rates of: generate() alone, generate() in padded batches, the backend."""
    from tiny_models import save_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        small = QUICKSTART if (QUICKSTART / "config.json").exists() else save_tiny_model(Path(folder) / "small")
        sizes = {"hidden_size": 448, "intermediate_size": 1344, "num_hidden_layers": 8, "vocab_size": 2048}
        heads = {"num_attention_heads": 7, "num_key_value_heads": 7, "initializer_range": 0.02}
        large = save_tiny_model(Path(folder) / "large", **(sizes | heads))
        return {_title(model): measure_model(model) for model in (small, large)}


def measure_model(model: Path) -> list[Rate]:
    return [alone(model, jobs()[:ALONE]), padded(model, jobs()), served(model, jobs())]


def alone(model: Path, mix: list[Job]) -> Rate:
    return _generated("generate(), one request at a time", model, mix, batch=1)


def padded(model: Path, mix: list[Job]) -> Rate:
    return _generated(f"generate(), padded batches of {CONCURRENCY}", model, mix, batch=CONCURRENCY)


def served(model: Path, mix: list[Job]) -> Rate:
    """All of `mix` over HTTP, `CONCURRENCY` at a time; the server is another process."""
    with _server(model) as address:
        asyncio.run(_send(address, mix[:CONCURRENCY]))
        began = time.perf_counter()
        tokens = asyncio.run(_send(address, mix))
        return Rate(f"insitu backend over HTTP, {CONCURRENCY} at a time", tokens, time.perf_counter() - began)


def report() -> str:
    """The section `sampling` of RESULTS.md."""
    lines = [
        f"Sampling: {REQUESTS} requests, completions of {LENGTHS[0]} to {LENGTHS[-1]} tokens mixed. Both sides have"
        f" all {os.cpu_count()} cores; the client shares them with the backend.",
        "",
        "| model | way | tokens/s | of one at a time | of padded batches |",
        "|---|---|---|---|---|",
    ]
    for model, (one, batches, ours) in measure().items():
        for rate in (one, batches, ours):
            ratios = f"{rate.rate / one.rate:.2f} | {rate.rate / batches.rate:.2f}"
            lines.append(f"| {model} | {rate.way} | {rate.rate:.0f} | {ratios} |")
    return "\n".join(lines)


def _title(model: Path) -> str:
    from insitu.backend.model import load_model

    count = sum(parameter.numel() for parameter in load_model(str(model)).module.parameters())
    return f"{count / 1e6:.1f} M parameters"


def _generated(way: str, model: Path, mix: list[Job], batch: int) -> Rate:
    """`generate()` as it comes, in arrival order; a batch ends with its longest, the rest of it is not counted."""
    from insitu.backend.model import load_model

    loaded = load_model(str(model))
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
        began = time.perf_counter()
        for start in range(0, len(mix), batch):
            run(mix[start : start + batch])
        return Rate(way, sum(job.tokens for job in mix), time.perf_counter() - began)


async def _send(address: str, mix: list[Job]) -> int:
    """Every job through `CONCURRENCY` connections; the number of tokens that came back."""
    waiting = iter(mix)
    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    async with aiohttp.ClientSession(connector=connector) as session:
        return sum(await asyncio.gather(*(_worker(session, address, waiting) for _ in range(CONCURRENCY))))


async def _worker(session: aiohttp.ClientSession, address: str, waiting: Iterator[Job]) -> int:
    tokens = 0
    for job in waiting:
        body = {"model": "policy", "messages": _messages(job), "max_tokens": job.tokens, "ignore_eos": True}
        async with session.post(f"{address}/v1/chat/completions", json=body) as response:
            tokens += (await response.json())["usage"]["completion_tokens"]
    return tokens


def _messages(job: Job) -> list[dict[str, str]]:
    return [{"role": "user", "content": job.prompt}]


@contextlib.contextmanager
def _server(model: Path) -> Iterator[str]:
    start = "import sys; from insitu.backend import BackendOptions; from insitu.cli.backend import serve;"
    start += f"sys.exit(serve(BackendOptions(model={str(model)!r}, port=0, parent_pid={os.getpid()})))"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    print(report())
