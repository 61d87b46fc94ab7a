"""Completions and a training job that share one device: tokens a second, and the job's seconds, by their shares.

python benchmarks/one_device.py             the table, which is a part of that of never_wait.py
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import learner
from models import Scale, make_model

from insitu.backend import BackendOptions
from insitu.backend.compute import SAMPLING_SHARE
from insitu.backend.inference.sampler import GenerationRequest, SamplingParams
from insitu.backend.server import Backend, load_backend
from insitu.schemas.training_jobs import TrainingSettings

CONCURRENCY, PROMPT, TOKENS = 16, 32, 32
SHARES = (0.0, SAMPLING_SHARE)
"""With a share of 0, each micro-batch is followed by a single sampling step."""
ROUNDS = 2
"""Of the large model; the small one has three times as many."""
ALONE = 2.0
"""Seconds for which completions are sampled without a job."""
HELP_DESK = Path(__file__).parent.parent / "examples/help_desk/model"


class Measured(NamedTuple):
    """Tokens a second while the job trains, its seconds, and the longest time without a token of any completion."""

    rate: float
    seconds: float
    gap: float


@asynccontextmanager
async def started(model: str, folder: Path) -> AsyncIterator[Backend]:
    backend = load_backend(BackendOptions(model=model), folder)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def sampling(backend: Backend) -> AsyncIterator[list[float]]:
    """The times of the tokens that are sampled within the block, which begins when all clients have one."""
    times: list[float] = []

    async def keep_sampling(first: asyncio.Event) -> None:
        for seed in count():
            prompt = [(seed + position) % 256 for position in range(PROMPT)]
            request = GenerationRequest(prompt, SamplingParams(seed=seed, max_tokens=TOKENS, ignore_eos=True))
            async for _, piece in backend.sampler.stream([request]):
                times.extend([time.perf_counter()] * len(piece.tokens))
                first.set()

    events = [asyncio.Event() for _ in range(CONCURRENCY)]
    clients = [asyncio.create_task(keep_sampling(event)) for event in events]
    try:
        await asyncio.gather(*(event.wait() for event in events))
        yield times
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def train(backend: Backend, groups: int) -> tuple[float, float]:
    """When a job began and ended."""
    rows = learner.training_rows(learner.samples(learner.SHAPES["mixed lengths"], groups))
    began = time.perf_counter()
    job = backend.jobs.submit(None, TrainingSettings(learning_rate=learner.LEARNING_RATE), rows)
    assert job.task is not None
    await job.task
    if job.state.status != "completed":
        raise RuntimeError(job.state.message)
    return began, time.perf_counter()


async def measure(backend: Backend, share: float, groups: int) -> Measured:
    backend.compute.sampling_share = share
    async with sampling(backend) as times:
        began, ended = await train(backend, groups)
    seen = [began, *(each for each in times if began <= each <= ended), ended]
    gap = max(after - before for before, after in pairwise(seen))
    return Measured((len(seen) - 2) / (ended - began), ended - began, gap)


async def measure_alone(backend: Backend, groups: int) -> tuple[float, float]:
    """Tokens a second without a job, and a job's seconds without completions."""
    async with sampling(backend) as times:
        before, began = len(times), time.perf_counter()
        await asyncio.sleep(ALONE)
        rate = (len(times) - before) / (time.perf_counter() - began)
    began, ended = await train(backend, groups)
    return rate, ended - began


async def compare(title: str, model: str, groups: int, rounds: int, shares: Sequence[float] = SHARES) -> list[str]:
    """Rows of the table: medians of rounds in which the shares take turns, after a first job that is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        async with started(model, Path(folder)) as backend:
            parameters = sum(each.numel() for each in backend.learner.loaded.module.parameters())
            title = f"{title}, {parameters / 1e6:.1f} M"
            await train(backend, groups)
            alone, shared = [], []
            for _ in range(rounds):
                alone.append(await measure_alone(backend, groups))
                shared.append([await measure(backend, share, groups) for share in shares])
    rate, seconds = (statistics.median(each) for each in zip(*alone, strict=True))
    lines = [f"| {title} | each alone | {rate:.0f} | {seconds:.2f} s | |"]
    for share, column in zip(shares, zip(*shared, strict=True), strict=True):
        rate, seconds, gap = (statistics.median(each) for each in zip(*column, strict=True))
        lines.append(f"| {title} | {share:.0%} | {rate:.0f} | {seconds:.2f} s | {gap:.2f} s |")
    return lines


def report(groups: int = learner.GROUPS, rounds: int = ROUNDS, scale: Scale = learner.SCALE) -> str:
    with tempfile.TemporaryDirectory() as folder:
        models = {"help desk": (str(HELP_DESK), 3 * rounds), "random": (str(make_model(Path(folder), scale)), rounds)}
        lines = []
        for title, (model, own_rounds) in models.items():
            lines += asyncio.run(compare(title, model, groups, own_rounds))
    table = "\n".join(lines)
    return f"""### Sampling while a job trains on the same device

{CONCURRENCY} completions at a time while a job of {groups * learner.GENERATIONS} rows trains, by the share of the time
that sampling gets after each micro-batch; at 0 %, one sampling step.

| model, parameters | sampling's share | tokens/s | job | longest time without a token |
|---|---|---|---|---|
{table}"""


if __name__ == "__main__":
    print(report())
