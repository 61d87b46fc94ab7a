"""DPO jobs whose rows share their prompts' computation, beside the same jobs with every row computed separately.

Both take turns in one process, on the model of `models.py`; loss and metrics are asserted to agree.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch

from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner
from insitu.backend.model import LoadedModel, load_model
from insitu.schemas.training_jobs import TrainingSettings

ROUNDS = 3
SHAPES = ((64, 64, 2), (256, 64, 2), (448, 16, 2), (256, 64, 4))
"""Tokens of the prompt and of a completion, and candidates per prompt, of which each two are a pair."""
PROMPTS = 4


def pairs(prompt: int, completion: int, candidates: int) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(PROMPTS):
        start = rng.integers(0, 256, prompt)
        ends = [rng.integers(0, 256, completion) for _ in range(candidates)]
        for good in range(candidates):
            for bad in range(good + 1, candidates):
                for preferred, end in ((True, ends[good]), (False, ends[bad])):
                    tokens = np.concatenate([start, end]).astype(np.int32)
                    positions = np.arange(prompt, len(tokens), dtype=np.int32)
                    rows.append(Row(tokens, positions, pair=f"{number} {good} {bad}", preferred=preferred))
    return rows


def seconds_of_job(loaded: LoadedModel, rows: list[Row], *, share_prompts: bool) -> tuple[float, dict[str, Any]]:
    lora, attention = {"rank": 16, "alpha": 32}, "packed" if share_prompts else "padded"
    settings = TrainingSettings(method="dpo", learning_rate=1e-4, lora=lora, num_iterations=2, attention=attention)
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(loaded, Path(folder))
        # CPU time does not count what else the machine does; on a GPU it would not count the work.
        clock = time.perf_counter if torch.cuda.is_available() else time.process_time
        began = clock()
        steps = learner.run(settings, rows)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return clock() - began, end.value.metrics


def report() -> str:
    """The section `preferences` of RESULTS.md."""
    scale = models.LARGE if torch.cuda.is_available() else models.SMALL
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(str(models.make_model(Path(folder), scale)), dtype=scale.dtype)
        for shape in SHAPES:
            rows = pairs(*shape)
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(ROUNDS):
                losses = []
                for share_prompts, measured in times.items():
                    seconds, metrics = seconds_of_job(loaded, rows, share_prompts=share_prompts)
                    measured.append(seconds)
                    losses.append(metrics["loss"])
                assert abs(losses[0] - losses[1]) < (1e-5 if scale.dtype == "float32" else 1e-2), losses
            shared, separate = (statistics.median(times[flag]) for flag in (True, False))
            prompt, completion, candidates = shape
            lines.append(
                f"| {prompt} | {completion} | {candidates} | {len(rows) // 2} | {separate:.2f} s | {shared:.2f} s | "
                f"{separate / shared:.2f} |"
            )
    table = "\n".join(lines)
    return f"""## Prompts that the sides of a pair share

One DPO job of two steps over {PROMPTS} prompts, LoRA of rank 16, with a reference pass; every two candidates of a
prompt are a pair. The same rows with each prompt computed for every row, and with each computed once per micro-batch;
median of {ROUNDS} in turn, in seconds of {"wall" if scale is models.LARGE else "CPU"} time.

| prompt tokens | completion tokens | candidates | pairs | separate | shared | ratio |
|---|---|---|---|---|---|---|
{table}"""


if __name__ == "__main__":
    print(report())
