"""Runs with `staleness: 1` beside those without, in pairs of equal seeds: what they end at.

    python benchmarks/run.py staleness                   all parts into RESULTS.md; hours on two cores
    python benchmarks/run.py staleness.starter --seeds 10
    STALENESS_RUNS=FOLDER python benchmarks/run.py ...   keeps the runs there, and does not repeat those that have ended

Parts: `starter`, what `insitu init` writes; `tic_tac_toe` and `real`, the examples. Nothing is timed.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).parent.parent / "examples"
INSITU = [sys.executable, "-m", "insitu"]
TRAINING = "trainer_adapters.backend.training"
STALE = {"trainers.grpo.staleness": 1}
WEIGHTED = {**STALE, f"{TRAINING}.truncated_importance": 2}
CLIPPED = {**STALE, f"{TRAINING}.old_logprobs": "rollout"}
SIX_STEPS = {f"{TRAINING}.mini_batch_size": 28}
WARM = {f"{TRAINING}.warmup": 0.3}
HALF = {f"{TRAINING}.learning_rate": 7.5e-4}
"""Of the starter's rate."""


class Arm(NamedTuple):
    name: str
    changes: Mapping[str, Any]


IN_ORDER = Arm("`staleness: 0`", {})
DEFAULT = Arm("`staleness: 1`", STALE)
WEIGHTS = Arm("`truncated_importance: 2`", WEIGHTED)
ROLLOUT = Arm("`old_logprobs: rollout`", CLIPPED)
OTHERS = (
    WEIGHTS,
    ROLLOUT,
    Arm("`staleness: 0`, six steps a job", SIX_STEPS),
    Arm("`truncated_importance: 2`, six steps a job", WEIGHTED | SIX_STEPS),
    Arm("`truncated_importance: 2`, six steps a job, `warmup: 0.3`", WEIGHTED | SIX_STEPS | WARM),
    Arm("`truncated_importance: 2`, six steps a job, half the rate", WEIGHTED | SIX_STEPS | HALF),
    Arm("`old_logprobs: rollout`, six steps a job", CLIPPED | SIX_STEPS),
)
SEEDS_OF_OTHERS = 5


class End(NamedTuple):
    """A run's last held-out score, the mean reward of its last three epochs, and its largest `logprob_gap`."""

    held_out: float
    reward: float
    gap: float


def end_of(file: Path, arm: Arm, seed: int, folder: Path, more: Mapping[str, Any]) -> End:
    """Trains into `folder`, unless a run that has ended lies there."""
    progress = folder / "progress.json"
    if not progress.exists() or json.loads(progress.read_text())["status"] != "completed":
        options = {**more, **arm.changes, "general.seed": seed, "finetuning.output_dir": str(folder)}
        overrides = [part for key, value in options.items() for part in ("--override", key, json.dumps(value))]
        subprocess.run([*INSITU, "finetune", str(file), *overrides], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "training_metrics.jsonl").read_text().splitlines())
    epochs = [line for line in lines if "avg_reward" in line]
    held_out = json.loads((folder / "validation_history.json").read_text())[-1]["avg_reward"]
    gap = max(line.get("logprob_gap") or 0.0 for line in epochs)
    return End(held_out, fmean(line["avg_reward"] for line in epochs[-3:]), gap)


def row(arm: Arm, ends: list[End]) -> str:
    held_out = [end.held_out for end in ends]
    print(arm.name, held_out, file=sys.stderr, flush=True)
    return (
        f"| {arm.name} | {len(ends)} | {fmean(held_out):.3f} | {min(held_out):.3f} | "
        f"{fmean(end.reward for end in ends):.3f} | {min(end.reward for end in ends):.3f} | "
        f"{max(end.gap for end in ends):.2f} |"
    )


def report(
    title: str, make: Callable[[Path], tuple[Path, Mapping[str, Any]]], arms: Sequence[Arm], fewest: int, seeds: int
) -> str:
    """A section of RESULTS.md. `make` returns the file of the task, and what of it is changed in all runs."""
    with contextlib.ExitStack() as stack:
        kept = os.environ.get("STALENESS_RUNS") or stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(kept).resolve() / make.__name__
        file, more = make(folder)
        rows = []
        for number, arm in enumerate(arms):
            count = max(seeds, fewest) if number < 2 else fewest if number < 4 else min(SEEDS_OF_OTHERS, fewest)
            ends = [end_of(file, arm, seed, folder / f"{number}-{seed}", more) for seed in range(count)]
            rows.append(row(arm, ends))
    table = "\n".join(rows)
    return f"""## {title} with staleness

| run | seeds | held-out, mean | lowest | last three epochs' reward, mean | lowest | largest `logprob_gap` |
|---|---|---|---|---|---|---|
{table}"""


def starter(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    if not (folder / "project").exists():
        subprocess.run([*INSITU, "init", str(folder / "project")], check=True, stdout=subprocess.DEVNULL)
    return folder / "project/config.yml", {}


def tic_tac_toe(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    return EXAMPLES / "tic_tac_toe/grpo.yml", {}


def real_model(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    import real

    changes = {"trainer_adapters.backend.model": real.model(), "finetuning.num_epochs": 6}
    return EXAMPLES / "real_model/grpo.yml", {**changes, "finetuning.validation.interval": 3}


PARTS: dict[str, Callable[[int], str]] = {
    "starter": lambda seeds: report("The starter", starter, (IN_ORDER, DEFAULT, *OTHERS), 10, seeds),
    "tic_tac_toe": lambda seeds: report("Tic-tac-toe", tic_tac_toe, (IN_ORDER, DEFAULT, WEIGHTS), 1, seeds),
    "real": lambda seeds: report(
        "SmolLM2-135M-Instruct for six epochs", real_model, (IN_ORDER, DEFAULT, WEIGHTS, ROLLOUT), 1, seeds
    ),
}
