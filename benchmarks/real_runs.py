"""Whole runs of examples/real_model, `insitu finetune` beside TRL's GRPOTrainer: seconds, memory, time to a score.

Both train on rows of the same file, each in its own order, with the same rewards and as many generations, tokens and
steps, from the command to its end. The memory is that of all processes at one time. `pool` has the growth of a
backend's memory by requests.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import memory
import sampling
import yaml

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples/real_model"
EPOCHS, EPOCHS_TO_SCORE = 6, 4
ROWS, ROWS_TO_SCORE = 8, 16
"""Of an epoch, each with as many generations as the example has."""
SHORT_REQUESTS = 200
LONG_TEXT = 15_200
"""Characters of the prompt of about 3,000 tokens."""


@dataclass(frozen=True)
class Case:
    """A run of a file of the example, with so many rows an epoch; `scored` after each epoch on the held-out rows."""

    model: str
    file: str = "grpo.yml"
    rows: int = ROWS
    epochs: int = EPOCHS
    scored: bool = False
    seed: int = 0


class Run(NamedTuple):
    """What a run took, in seconds and bytes; its held-out scores, each at a number of seconds without scoring."""

    seconds: float
    memory: int
    points: list[tuple[float, float]]


def settings(case: Case) -> dict[str, Any]:
    """The file of the run."""
    config: dict[str, Any] = yaml.safe_load((EXAMPLE / case.file).read_text())
    config["general"]["seed"] = case.seed
    config["trajectory_builders"]["episodes"]["rows_per_epoch"] = case.rows
    config["trainer_adapters"]["backend"]["model"] = case.model
    validation = config["finetuning"].pop("validation")
    config["finetuning"] |= {"num_epochs": case.epochs, "output_dir": "run"}
    if case.scored:
        config["finetuning"]["validation"] = validation | {"interval": 1}
    return config


def insitu_run(case: Case) -> Run:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("agent.py", "train.jsonl", "held_out.jsonl"):
            shutil.copy(EXAMPLE / file, folder)
        (folder / "config.yml").write_text(yaml.safe_dump(settings(case), sort_keys=False))
        command = [sys.executable, "-m", "insitu", "finetune", "config.yml"]
        began, seconds, peak, _ = _measured(command, folder)
        return Run(seconds, peak, _points(folder / "run", began) if case.scored else [])


def trl_run(case: Case, python: str) -> Run:
    command = [python, str(HERE / "real_trl.py"), json.dumps(asdict(case)), json.dumps(settings(case))]
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
    lines = []
    for file, trained in (("grpo.yml", "all weights"), ("lora.yml", "LoRA")):
        case = Case(model, file, rows, epochs)
        lines.append(run_row(trained, insitu_run(case), trl_run(case, python)))
    table = "\n".join(lines)
    return f"""## Whole runs of a real model beside TRL

SmolLM2-135M-Instruct in float32, examples/real_model: {epochs} epochs of {rows} rows with 8 generations of at most 12
tokens, from the command to its end, in turn. Memory is the most that all processes held at one time. Asked for: 45 s
and 4.8 GB with all weights, 35 s and 3.2 GB with LoRA.

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


def curve(side: str, seed: int, run: Run) -> str:
    points = " | ".join(f"{score:.2f} ({seconds:.0f} s)" for seconds, score in run.points)
    return f"| {side} | {seed} | {points} |"


def report_scores(
    model: str, python: str, seeds: int = 1, epochs: int = EPOCHS_TO_SCORE, rows: int = ROWS_TO_SCORE
) -> str:
    """The section `real.score` of RESULTS.md."""
    lines, curves, ratios = [], [], []
    for seed in range(seeds):
        case = Case(model, rows=rows, epochs=epochs, scored=True, seed=seed)
        ours, trl = insitu_run(case), trl_run(case, python)
        line, ratio = score_row(seed, ours, trl)
        lines.append(line)
        curves += [curve("insitu", seed, ours), curve("TRL", seed, trl)]
        print(line, *curves[-2:], sep="\n", file=sys.stderr, flush=True)
        ratios.append(ratio)
    newline = "\n"
    return f"""## Time to the same held-out score as TRL

examples/real_model/grpo.yml on both sides: {epochs} epochs of {rows} rows with 8 generations, two steps in each, scored
after each on the 100 held-out rows. The score is the best that both sides reach; the seconds to it begin with the
command and do not count scoring. Median of the ratios: {median(ratios):.2f}; asked for: at least 4.

| seed | score | insitu | TRL | ratio | insitu's last score | TRL's |
|---|---|---|---|---|---|---|
{newline.join(lines)}

Held-out scores after each epoch, and the seconds to it:

| side | seed |{"".join(f" {epoch} |" for epoch in range(1, epochs + 1))}
|---|---|{"---|" * epochs}
{newline.join(curves)}"""


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
