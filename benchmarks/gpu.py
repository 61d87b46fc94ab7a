"""Models of about 0.5 B (all weights) and 7 B parameters (LoRA) on a GPU: sampling, GRPO steps beside TRL, the gap.

    python benchmarks/gpu.py             the tables
    python benchmarks/run.py gpu         the same into RESULTS.md; one of them: gpu.500M, gpu.7B, gpu.real

The first two are randomly initialised, the last is a whole run of examples/real_model. Without a GPU the same script
takes a model of a few million parameters, so that it is known to run; only the figures of a GPU say anything about one.
TRL needs a Python that has it: see learner.py.
"""

import asyncio
import contextlib
import functools
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import learner
import real
import real_runs
import torch
from models import LARGE, LARGEST, SMALL, Scale, make_model

from insitu.backend import BackendOptions
from insitu.backend.learner.batches import collate
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.learner.policy import build_policy
from insitu.backend.model import LoadedModel, load_model
from insitu.backend.server import create_backend
from insitu.schemas.lora import LoRASettings
from insitu.wire.addresses import http_url
from insitu.wire.http_server import listening

CONCURRENCY = 64
NDJSON = {"Content-Type": "application/x-ndjson"}
SHAPES = {name: learner.SHAPES[name] for name in ("mixed lengths", "shared prompts")}
SCALES = {"500M": LARGE, "7B": LARGEST} if torch.cuda.is_available() else {"4M": SMALL}
LONG_PROMPT = 1900
TRL = True
"""Whether TRL is measured too, where it is installed."""
LORA = LoRASettings(rank=learner.LORA_RANK, alpha=2 * learner.LORA_RANK)


@dataclass(frozen=True)
class Measured:
    parameters: int
    generate: float
    backend: float
    long_seconds: float
    long_memory: int
    step_seconds: float
    step_memory: float
    packed: str
    metrics: dict[str, float]


def prompts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh ", k=rng.randint(16, 32))) for _ in range(count)]


@torch.inference_mode()
def generate_rate(loaded: LoadedModel, scale: Scale) -> float:
    """Tokens a second of transformers, in padded batches as large as the backend's concurrency."""
    tokenizer = loaded.tokenizer
    tokenizer.padding_side = "left"
    length = scale.tokens - 32

    def run(batch: list[str], length: int) -> None:
        inputs = tokenizer(batch, return_tensors="pt", padding=True).to(loaded.device)
        loaded.module.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            top_k=0,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=tokenizer.pad_token_id,
        )

    run(prompts(CONCURRENCY), 4)
    texts = prompts(scale.requests)
    began = time.perf_counter()
    for start in range(0, len(texts), CONCURRENCY):
        run(texts[start : start + CONCURRENCY], length)
    learner.synchronise()
    return len(texts) * length / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def serving(loaded: LoadedModel, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """The real server, in this process because that is where its peak memory can be read."""
    backend = create_backend(loaded, BackendOptions(model=loaded.source, max_batch=CONCURRENCY), folder)
    await backend.start()
    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        listening(backend.app, ("127.0.0.1", 0)) as address,
        aiohttp.ClientSession(http_url(*address), connector=connector, timeout=timeout) as session,
    ):
        yield session
    await backend.close()


async def sample(session: aiohttp.ClientSession, texts: list[str], length: int) -> list[dict[str, Any]]:
    async def one(text: str) -> dict[str, Any]:
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": length,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
        }
        async with session.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            return await response.json()

    return await asyncio.gather(*map(one, texts))


def job(answers: list[dict[str, Any]], scale: Scale) -> bytes:
    """One GRPO job in groups of eight, all in one optimiser step; of adapters, for which memory suffices always."""
    lora = {"rank": LORA.rank, "alpha": LORA.alpha}
    settings = {"learning_rate": 1e-5, "lora": lora, "gradient_checkpointing": scale.checkpointing}
    lines: list[dict[str, Any]] = [{"settings": settings, "num_rows": len(answers)}]
    for number, answer in enumerate(answers):
        prompt, choice = answer["prompt_token_ids"], answer["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        lines.append(
            {
                "token_ids": [*prompt, *choice["token_ids"]],
                "loss_mask": [0] * len(prompt) + [1] * len(choice["token_ids"]),
                "logprobs": [0.0] * len(prompt) + logprobs,
                "advantages": 1.0 if number % 2 else -1.0,
                "episode": str(number),
            }
        )
    return "\n".join(map(json.dumps, lines)).encode()


async def train(session: aiohttp.ClientSession, body: bytes) -> dict[str, Any]:
    async with session.post("/v1/train/jobs", data=body, headers=NDJSON) as response:
        response.raise_for_status()
        id = (await response.json())["id"]
    async with session.get(f"/v1/train/jobs/{id}/events") as response:
        states = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: ")]
    if states[-1]["status"] != "completed":
        raise RuntimeError(states[-1]["message"])
    return states[-1]["metrics"]


def packed_beside_padded(loaded: LoadedModel, lora: bool) -> str:
    """How far log-probabilities and gradients of a group with a shared prompt are from those of padded rows."""
    compute = LogprobComputer(loaded)
    if not compute.can_pack:
        return "not available on this device"
    samples = learner.samples(learner.SHAPES["shared prompts"], groups=1)
    rows = learner.training_rows(samples)
    weights = torch.tensor([sample.advantage for sample in samples], device=loaded.device)[:, None]
    results = []
    for packed in (False, True):
        policy = build_policy(loaded, LORA if lora else None, seed=0)
        batch = collate(rows, loaded.device, packed=packed)
        logprobs_BK = batch.to_rows(compute(policy.module, batch).logprobs_N)
        (logprobs_BK * weights).sum().div(batch.mask_BK.sum()).backward()
        gradients = [p.grad.float().cpu() for p in policy.trainable.values() if p.grad is not None]
        results.append([[logprobs_BK.detach().float().cpu()], gradients])
    differences = []
    for padded, packed_values in zip(*results, strict=True):
        whole = torch.stack([tensor.norm() for tensor in padded]).norm()
        parts = [(a - b).norm() for a, b in zip(padded, packed_values, strict=True)]
        differences.append(float(max(parts) / whole))
    return f"{differences[0]:.1e} and {differences[1]:.1e}"


async def measure(scale: Scale, model: Path, folder: Path) -> Measured:
    loaded = load_model(str(model), dtype=scale.dtype)
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    generated = generate_rate(loaded, scale)
    async with serving(loaded, folder) as session:
        length = scale.tokens - 32
        await sample(session, prompts(CONCURRENCY), 4)
        began = time.perf_counter()
        await sample(session, prompts(scale.requests), length)
        rate = scale.requests * length / (time.perf_counter() - began)
        await sample(session, prompts(200), 16)
        learner.synchronise(reset=True)
        before, began = learner.peak(), time.perf_counter()
        await sample(session, ["a" * LONG_PROMPT], 16)
        long_seconds, long_memory = time.perf_counter() - began, learner.peak() - before
        episodes = await sample(session, [text for text in prompts(8) for _ in range(8)], length)
        learner.synchronise(reset=True)
        metrics = await train(session, job(episodes, scale))
    peak = learner.peak() / 1e9
    packed = packed_beside_padded(loaded, scale.lora)
    return Measured(parameters, generated, rate, long_seconds, long_memory, metrics["seconds"], peak, packed, metrics)


def step_row(scale: Scale, model: Path, name: str, shape: learner.Shape, groups: int, rounds: int) -> str:
    """One row: a step of insitu, and of TRL where it is installed, on equal rows."""
    python = learner.python_with_trl() if TRL else None
    case = learner.Case("insitu", str(model), shape, scale.dtype, scale.lora, scale.checkpointing, groups)
    cases = [case, replace(case, side="TRL")] if python else [case]
    sides = [*learner.in_turn(cases, python or sys.executable, rounds)]
    tokens = sum(len(row.prompt) + len(row.completion) for row in learner.samples(shape, groups))
    cells = [name]
    for side in sides:
        if side.error:
            cells += [side.error, "", ""]
            continue
        seconds = side.median("unsaved_seconds")
        cells += [f"{seconds:.2f} s", f"{tokens / seconds:.0f}", f"{side.steps[-1]['peak'] / 1e9:.1f} GB"]
    if not python:
        cells += ["TRL is not installed", "", ""]
    losses = [side.steps[0]["loss"] for side in sides if not side.error]
    cells.append(f"{abs(losses[0] - losses[1]):.0e}" if len(losses) == 2 else "")
    return f"| {' | '.join(cells)} |"


def say(found: Any) -> Any:
    """A GPU is lent for minutes: what has been measured must not be lost when they are over."""
    print(found, file=sys.stderr, flush=True)
    return found


def section(scale: Scale, shapes: dict[str, learner.Shape], groups: int, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", scale)
        found = asyncio.run(measure(scale, model, folder / "out"))
        say(found)
        gc.collect()
        torch.cuda.empty_cache()  # the steps are taken by other processes
        rows = [say(step_row(scale, model, name, shape, groups, rounds)) for name, shape in shapes.items()]
        steps = "\n".join(rows)
    trained = f"LoRA of rank {LORA.rank}" if scale.lora else "all weights"
    return f"""### {found.parameters / 1e6:.0f} M parameters, {scale.dtype}, {trained}

| what | measured |
|---|---|
| `generate()`, padded batches of {CONCURRENCY} | {found.generate:.0f} tokens/s |
| `insitu backend` over HTTP, {CONCURRENCY} at a time | {found.backend:.0f} tokens/s |
| ratio | {found.backend / found.generate:.2f} |
| a prompt of {LONG_PROMPT} tokens after 200 short ones, with 16 sampled tokens | {found.long_seconds:.2f} s |
| what it took at most beside the store | {found.long_memory / 1e9:.2f} GB |
| one GRPO step of 64 episodes of {scale.tokens} tokens, LoRA | {found.step_seconds:.1f} s |
| peak memory in it | {found.step_memory:.1f} GB |
| mean absolute gap between sampled and learner's logprobs | {found.metrics["logprob_gap"]:.1e} |
| norm of the difference, packed from padded: logprobs and gradients | {found.packed} |

| one GRPO step | insitu | tokens/s | peak memory | TRL | tokens/s | peak memory | losses differ by |
|---|---|---|---|---|---|---|---|
{steps}"""


def report(
    scales: Sequence[Scale] = (*SCALES.values(),),
    shapes: dict[str, learner.Shape] = SHAPES,
    groups: int = learner.GROUPS,
    rounds: int = learner.ROUNDS,
) -> str:
    """Sections of RESULTS.md."""
    sections = "\n\n".join(section(scale, shapes, groups, rounds) for scale in scales)
    on_gpu = torch.cuda.is_available()
    note = "" if on_gpu else "\n\nNo GPU was at hand: these figures are a CPU's, and the GPU's are missing."
    return f"""## Sampling and training on a GPU

Randomly initialised Qwen2 models. Steps beside TRL are over {groups} groups of {learner.GENERATIONS} rows in the shapes
of the section on TRL, medians of {rounds}, without writing a checkpoint; tokens/s are those of the rows, padding not
counted. Peak memory is {"what was allocated on the GPU in a step" if on_gpu else "the process's"}. The difference in
norm is the largest of a tensor, by the norm of all.

{sections}{note}"""


def _part(scale: Scale, seeds: int) -> str:
    return report([scale])


def real_row(case: real_runs.Case, python: str) -> list[str]:
    """A row of each side: the seconds of the whole command, held-out scores and the seconds to them."""
    sides = {"insitu": real_runs.insitu_run(case), "TRL": real_runs.trl_run(case, python)}
    rows = []
    for side, run in sides.items():
        points = " | ".join(f"{score:.2f} ({seconds:.0f} s)" for seconds, score in run.points)
        rows.append(say(f"| {case.file} | {case.seed} | {side} | {run.seconds:.0f} s | {points} |"))
    return rows


def report_real(
    seeds: int = 1, files: Sequence[str] = ("grpo.yml", "lora.yml"), epochs: int = 6, rows: int = 16
) -> str:
    model, python = real.model(), real.python_with_trl()
    cases = [
        real_runs.Case(model, file, rows, epochs, scored=True, seed=seed) for seed in range(seeds) for file in files
    ]
    table = "\n".join(row for case in cases for row in real_row(case, python))
    return f"""## Whole runs of a real model on a GPU beside TRL

SmolLM2-135M-Instruct in float32, examples/real_model with its settings on both sides: {epochs} epochs of {rows} rows
with 8 generations, scored on the 100 held-out rows after each. The seconds of a command count scoring, those to a
score do not.

| file | seed | side | command |{"".join(f" epoch {epoch} |" for epoch in range(1, epochs + 1))}
|---|---|---|---|{"---|" * epochs}
{table}"""


PARTS: dict[str, Callable[[int], str]] = {name: functools.partial(_part, scale) for name, scale in SCALES.items()}
PARTS["real"] = report_real


if __name__ == "__main__":
    print(report())
