"""Whole runs on the real model, `insitu finetune` beside TRL's GRPOTrainer: seconds, memory, time to a held-out score.

Both train on the same rows and rewards with as many generations, tokens and steps, from the command to its end. The
memory is that of all processes at one time. `pool` has the growth of a backend's memory by requests.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from shutil import copy
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import learner
import memory
import real_task
import sampling
import yaml

HERE = Path(__file__).parent
ROWS, GENERATIONS, EPOCHS = 8, 8, 6
EPOCHS_TO_SCORE, HELD_OUT = 6, 64
LEARNING_RATES = {False: 1e-5, True: 1e-4}
"""Of all weights, and of LoRA."""
SHORT_REQUESTS = 200
LONG_TEXT = 15_200
"""Characters of the prompt of about 3,000 tokens."""


@dataclass(frozen=True)
class Case:
    """A run; it is scored after each epoch if there are rows that are held out."""

    model: str
    rows: list[dict[str, Any]]
    held_out: Sequence[dict[str, Any]] = ()
    lora: bool = False
    epochs: int = EPOCHS
    generations: int = GENERATIONS
    seed: int = 0
    learning_rate: float = LEARNING_RATES[False]


class Run(NamedTuple):
    """What a run took, in seconds and bytes; its held-out scores, each at a number of seconds without scoring."""

    seconds: float
    memory: int
    points: list[tuple[float, float]]


def settings(case: Case) -> dict[str, Any]:
    """The file of the run."""
    lora = {"rank": learner.LORA_RANK, "alpha": 2 * learner.LORA_RANK}
    training = {"learning_rate": case.learning_rate, **({"lora": lora} if case.lora else {})}
    return {
        "general": {"seed": case.seed},
        "llms": {"student": {"_type": "policy", "max_tokens": real_task.MAX_TOKENS}},
        "workflow": {"_type": "python", "function": "real_task:answer", "model": "student"},
        "eval": {
            "general": {
                "max_concurrency": 64,
                "episode_timeout": 600,
                "dataset": {"_type": "jsonl", "file_path": "rows.jsonl"},
            },
            "evaluators": {"score": {"_type": "python", "function": "real_task:score"}},
        },
        "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder", "num_generations": case.generations}},
        "trainer_adapters": {"backend": {"_type": "insitu_trainer_adapter", "model": case.model, "training": training}},
        "trainers": {"grpo": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "grpo",
            "trajectory_builder": "episodes",
            "trainer_adapter": "backend",
            "reward_function": {"name": "score"},
            "num_epochs": case.epochs,
            "output_dir": "run",
            **({"validation": {"dataset": "held_out.jsonl", "interval": 1}} if case.held_out else {}),
        },
    }


def insitu_run(case: Case) -> Run:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(HERE / "real_task.py", folder)
        for file, rows in (("rows.jsonl", case.rows), ("held_out.jsonl", case.held_out)):
            (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yml").write_text(yaml.safe_dump(settings(case), sort_keys=False))
        command = [sys.executable, "-m", "insitu", "finetune", "--config_file", "config.yml"]
        began, seconds, peak, _ = _measured(command, folder)
        return Run(seconds, peak, _points(folder / "run", began) if case.held_out else [])


def trl_run(case: Case, python: str) -> Run:
    command = [python, str(HERE / "real_trl.py"), json.dumps(asdict(case))]
    began, seconds, peak, output = _measured(command, HERE)
    lines = [line for line in output.splitlines() if line.startswith("[")]
    return Run(seconds, peak, [(at - began, score) for at, score in json.loads(lines[-1])])


def _measured(command: list[str], folder: Path) -> tuple[float, float, int, str]:
    """When it began, the seconds that it took, the memory of all its processes, and what it printed."""
    with tempfile.TemporaryFile("w+") as out:
        began = time.time()
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True)
        peak = memory.peak_of_all(process)
        seconds = time.time() - began
        out.seek(0)
        output = out.read()
    if process.returncode:
        raise RuntimeError(f"{command[:4]}: exit code {process.returncode}: {output[-3000:]}")
    return began, seconds, peak, output


def _points(run: Path, began: float) -> list[tuple[float, float]]:
    """After each epoch: seconds until its training had ended, without validations, and the held-out score."""
    from insitu.runs import files
    from insitu.runs.reader import RunReader

    reader = RunReader(run)
    validations = {each["epoch"]: each for each in reader.validations()}
    away, points = validations[0]["seconds"], []
    for metrics in (line for line in reader.records(files.METRICS) if "seconds" in line):
        ended = datetime.fromisoformat(metrics["timestamp"]).timestamp() + metrics["seconds"]["train"]
        validation = validations[metrics["epoch"]]
        points.append((ended - began - away, validation["avg_reward"]))
        away += validation["seconds"]
    return points


def run_row(trained: str, ours: Run, trl: Run) -> str:
    return (
        f"| {trained} | {ours.seconds:.0f} s | {ours.memory / 1e9:.1f} GB | {trl.seconds:.0f} s | "
        f"{trl.memory / 1e9:.1f} GB | {trl.seconds / ours.seconds:.2f} |"
    )


def report_runs(model: str, python: str, epochs: int = EPOCHS, rows: int = ROWS) -> str:
    """The section `real.run` of RESULTS.md."""
    case = Case(model, real_task.rows(real_task.TRAINED, rows), epochs=epochs)
    lines = []
    for lora in (False, True):
        each = replace(case, lora=lora, learning_rate=LEARNING_RATES[lora])
        trained = f"LoRA of rank {learner.LORA_RANK}" if lora else "all weights"
        lines.append(run_row(trained, insitu_run(each), trl_run(each, python)))
    table = "\n".join(lines)
    return f"""## Whole runs of a real model beside TRL

SmolLM2-135M-Instruct in float32: {epochs} epochs of {rows} rows with {GENERATIONS} generations of at most
{real_task.MAX_TOKENS} tokens, from the command to its end, in turn. Memory is the most that all processes held at one
time. Asked for: 45 s and 4.8 GB with all weights, 35 s and 3.2 GB with LoRA.

| trained | insitu | memory | TRL | memory | ratio |
|---|---|---|---|---|---|
{table}"""


def time_to(score: float, points: list[tuple[float, float]]) -> float:
    return next(seconds for seconds, reached in points if reached >= score)


def score_row(seed: int, ours: Run, trl: Run) -> tuple[str, float]:
    """A row of the table, and how many times longer TRL takes to the best score that both reach."""
    score = min(max(reached for _, reached in run.points) for run in (ours, trl))
    seconds, theirs = (time_to(score, run.points) for run in (ours, trl))
    finals = [f"{run.points[-1][1]:.3f}" for run in (ours, trl)]
    ratio = theirs / seconds
    return (
        f"| {seed} | {score:.3f} | {seconds:.0f} s | {theirs:.0f} s | {ratio:.2f} | {finals[0]} | {finals[1]} |",
        ratio,
    )


def report_scores(
    model: str, python: str, seeds: int = 1, epochs: int = EPOCHS_TO_SCORE, rows: int = ROWS, held_out: int = HELD_OUT
) -> str:
    """The section `real.score` of RESULTS.md."""
    lines, ratios = [], []
    case = Case(
        model,
        real_task.rows(real_task.TRAINED, rows),
        real_task.rows(real_task.HELD_OUT, held_out),
        epochs=epochs,
    )
    for seed in range(seeds):
        each = replace(case, seed=seed)
        line, ratio = score_row(seed, insitu_run(each), trl_run(each, python))
        lines.append(line)
        ratios.append(ratio)
    table = "\n".join(lines)
    return f"""## Time to the same held-out score as TRL

The same task and settings with all weights, {epochs} epochs, scored after each on {held_out} rows about products that
are not trained. The score is the best that both sides reach; the seconds to it begin with the command and do not count
scoring. Median of the ratios: {median(ratios):.2f}; asked for: at least 4.

| seed | score | insitu | TRL | ratio | insitu's last score | TRL's |
|---|---|---|---|---|---|---|
{table}"""


def text(characters: int, number: int = 0) -> str:
    """A part of the licence; that of another number begins elsewhere."""
    whole = (HERE.parent / "LICENSE").read_text()
    return (whole * (2 + characters // len(whole)))[13 * number :][:characters]


async def ask(session: aiohttp.ClientSession, prompt: str) -> int:
    """Returns the tokens of the prompt."""
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "ignore_eos": True}
    async with session.post("/v1/chat/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"the backend responds with {response.status}: {answer}")
    return int(answer["usage"]["prompt_tokens"])


async def fill(address: str, requests: int, characters: int) -> dict[str, float]:
    """Seconds of many short requests at once, then of a long one; the tokens of the long prompt."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(address, timeout=timeout, connector=connector) as session:
        began = time.perf_counter()
        await asyncio.gather(*(ask(session, text(200, number)) for number in range(requests)))
        short = time.perf_counter() - began
        began = time.perf_counter()
        tokens = await ask(session, text(characters, requests))
        return {"short": short, "long": time.perf_counter() - began, "tokens": tokens}


async def first(address: str) -> None:
    async with aiohttp.ClientSession(address) as session:
        await ask(session, text(200, 500))


def report_pool(model: str, requests: int = SHORT_REQUESTS, characters: int = LONG_TEXT) -> str:
    """The section `real.pool` of RESULTS.md."""
    with sampling.server(Path(model)) as (address, process):
        asyncio.run(first(address))
        before = memory.resident(process.pid)
        memory.reset_peak(process.pid)
        took = asyncio.run(fill(address, requests, characters))
        peak, after = memory.peak(process.pid), memory.resident(process.pid)
    return f"""## Memory of a backend that serves many requests, then a long one

`insitu backend` with SmolLM2-135M-Instruct in float32, after its first request: {requests} requests of about 70 + 16
tokens at once, then one of {took["tokens"]:,.0f} + 16. Asked for: at most 1 GB more afterwards, and at most 12 s for
the long one.

| what | measured |
|---|---|
| memory before | {before / 1e9:.2f} GB |
| at most | {peak / 1e9:.2f} GB, {(peak - before) / 1e9:+.2f} GB |
| after | {after / 1e9:.2f} GB |
| the short requests | {took["short"]:.1f} s |
| the long one | {took["long"]:.1f} s |"""
