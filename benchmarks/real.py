"""A real pretrained model: sampling, training jobs, whole runs and memory, beside `generate()` and TRL in turn.

    python benchmarks/run.py real                        all parts into RESULTS.md, on a quiet machine
    python benchmarks/run.py real.sampling real.job      some of them
    python benchmarks/run.py real.score --seeds 5

The model is SmolLM2-135M-Instruct (tests/support/real_model.py). The parts are described where they are made:
`sampling` in real_sampling.py, `run`, `score` and `pool` in real_runs.py; `job` is of the steps of learner.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import learner
import real_runs
import real_sampling

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests/support"))

JOB, LONG_JOB = learner.Shape(70, 16, 16), learner.Shape(1500, 70, 70)
"""70 + 16 and 1,500 + 70 tokens."""
ROUNDS = 3


def model() -> str:
    from real_model import real_model

    return str(real_model())


def python_with_trl() -> str:
    python = learner.python_with_trl()
    if python is None:
        raise SystemExit(f"real needs TRL, which this installs: {learner.HOW_TO_GET_TRL}")
    return python


def job_rows(folder: str, python: str, shape: learner.Shape, groups: int, rounds: int) -> list[str]:
    """A row for all weights and for LoRA: a job, its time without the checkpoint, and TRL's step on the same rows."""
    rows = []
    for lora in (False, True):
        batch = 1 if shape == LONG_JOB else learner.GENERATIONS  # eight long rows would take 20 GB
        cases = [
            learner.Case(side, folder, shape, lora=lora, groups=groups, trl_batch=batch) for side in ("insitu", "TRL")
        ]
        ours, trl = learner.in_turn(cases, python, rounds)
        metrics = ours.steps[-1]
        difference = abs(ours.steps[0]["loss"] - trl.steps[0]["loss"])
        rows.append(
            f"| {'LoRA' if lora else 'all weights'} | {groups * learner.GENERATIONS} of {shape.prompt} + "
            f"{shape.longest} | {metrics.get('computed_tokens', 0)} | {ours.median('seconds'):.1f} s | "
            f"{ours.median('unsaved_seconds'):.1f} s | {trl.median('seconds'):.1f} s | "
            f"{ours.steps[-1]['peak'] / 1e9:.1f} | {trl.steps[-1]['peak'] / 1e9:.1f} | {difference:.0e} |"
        )
    return rows


def job(groups: tuple[int, ...] = (learner.GROUPS, 1), rounds: int = ROUNDS) -> str:
    """The section `real.job` of RESULTS.md."""
    folder, python = model(), python_with_trl()
    shapes = [*((JOB, number) for number in groups), (LONG_JOB, 1)]
    table = "\n".join(row for shape, number in shapes for row in job_rows(folder, python, shape, number, rounds))
    return f"""## A training job of a real model

SmolLM2-135M-Instruct in float32, one GRPO step over rows of a prompt and a completion, in tokens, in groups of
{learner.GENERATIONS}, LoRA of rank {learner.LORA_RANK}; each side in a process of its own, in turn, medians of
{rounds}. A job computes a shared prompt once, and ends when its checkpoint is written; TRL writes none, and computes
long rows one by one. Peak memory is the process's, in GB. Asked for: at most 2 s for the few tokens.

| trained | rows | computed tokens | a job | without the checkpoint | TRL | insitu's memory | TRL's | losses differ by |
|---|---|---|---|---|---|---|---|---|
{table}"""


PARTS: dict[str, Callable[[int], str]] = {
    "sampling": lambda seeds: real_sampling.report(model()),
    "job": lambda seeds: job(),
    "run": lambda seeds: real_runs.report_runs(model(), python_with_trl()),
    "pool": lambda seeds: real_runs.report_pool(model()),
    "score": lambda seeds: real_runs.report_scores(model(), python_with_trl(), seeds),
}
"""Each returns its section of RESULTS.md, for a number of seeds."""
