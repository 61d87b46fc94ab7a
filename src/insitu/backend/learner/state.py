"""The state of training from job to job: policy, optimizer and workers; and the schedule of the learning rate."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from insitu.backend.learner.batches import ALONE, MicroBatch, Ranks
from insitu.backend.learner.code import NO_CODE, CodeFolder
from insitu.backend.learner.logprobs import LogprobComputer, TokenLogprobs
from insitu.backend.learner.policy import ReferenceWeights, TrainablePolicy
from insitu.backend.model import LoadedModel
from insitu.errors import BackendError
from insitu.schemas.parts import Part
from insitu.schemas.training_jobs import TrainingSettings

T = TypeVar("T")
R = TypeVar("R")

SMALL_MODEL = 5_000_000
"""Parameters below which operations are too short to be split over threads."""


def constant(part: float) -> float:
    """The factor of the peak learning rate when a `part` of the run, from 0 to 1, is over; the warmup not counted."""
    return 1.0


def linear(part: float) -> float:
    return 1 - part


def cosine(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2


def learning_rate(settings: TrainingSettings, schedule: Callable[[float], float], step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`, each an equal part of the job's `schedule_range`."""
    first, last = settings.schedule_range
    start, end = (first + (last - first) * number / steps for number in (step, step + 1))
    if start < settings.warmup:  # by the end of the step, so that the first step is not wasted
        return settings.learning_rate * min(1.0, end / settings.warmup)
    part = (start - settings.warmup) / (1 - settings.warmup)
    factor = schedule(part)
    if not (math.isfinite(factor) and factor >= 0):
        raise BackendError(f"schedule: it returned {factor!r} for {part:g}; allowed: finite numbers from 0")
    return settings.learning_rate * factor


class Workers:
    """Uses a CPU's cores: `count` micro-batches in parallel for a small model, else threads within each operation."""

    def __init__(self, loaded: LoadedModel, ranks: Ranks = ALONE) -> None:
        cores = max(1, (os.cpu_count() or 1) // ranks.count)
        self.is_small = sum(parameter.numel() for parameter in loaded.module.parameters()) < SMALL_MODEL
        self.count = cores if self.is_small and loaded.device.type == "cpu" and not ranks.shards_weights else 1
        self._threads = cores // self.count if loaded.device.type == "cpu" else None
        self._pool = ThreadPoolExecutor(self.count, "insitu-training") if self.count > 1 else None

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Results in the order of `items`, at most `count` of them."""
        if self._pool is None or len(items) < 2:
            return [fn(item) for item in items]

        def run(item: T) -> R:
            with self.threads():
                return fn(item)

        return list(self._pool.map(run, items))

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """Sets torch's thread count for training within the block."""
        before = torch.get_num_threads()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@dataclass
class TrainState:
    """State kept from job to job; `reference` loads the weights that a job can be compared with.

    `forward` computes the log-probabilities of a micro-batch under the policy, `compute_logprobs` under any module.
    `optimizer` was made by `optimizer_part`.
    """

    policy: TrainablePolicy
    forward: Callable[[MicroBatch], TokenLogprobs]
    optimizer: torch.optim.Optimizer
    compute_logprobs: LogprobComputer
    workers: Workers
    reference: Callable[[], ReferenceWeights]
    ranks: Ranks = ALONE
    code: CodeFolder = NO_CODE
    optimizer_part: str | Part | None = None

    @property
    def optimizer_prefix(self) -> str:
        """Before the names of the optimizer's state in a checkpoint; "" for AdamW."""
        part = self.optimizer_part
        name = part if part is None or isinstance(part, str) else part.function or part.type
        return "" if name in (None, "adamw") else f"{name}/".replace(".", "_")


def reference_module(code: CodeFolder, settings: TrainingSettings, weights: ReferenceWeights) -> nn.Module | None:
    """The model that the loss compares with; None for the weights at the start of the job, or if it compares with none.

    Raises BackendError if it cannot be loaded.
    """
    if settings.reference is None:
        return None
    module = code.function("reference", settings.reference)(weights)
    if module is not None and not isinstance(module, nn.Module):
        raise BackendError(f"reference: it returned {type(module).__name__}; allowed: a torch module, or None")
    return module
