"""The learning rate of an optimizer step: a warmup, then a schedule, a function of the rest of the run.

A schedule gets the part of the run after the warmup that is over, from 0 to 1, and returns the factor of the peak rate.
"""

import math
from collections.abc import Callable

from insitu.errors import BackendError
from insitu.schemas.training_jobs import TrainingSettings

Schedule = Callable[[float], float]


def constant(part: float) -> float:
    return 1.0


def linear(part: float) -> float:
    return 1 - part


def cosine(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2


def learning_rate(settings: TrainingSettings, schedule: Schedule, step: int, steps: int) -> float:
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
