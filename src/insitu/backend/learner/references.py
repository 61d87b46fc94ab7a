"""The reference weights of a job: those that its loss compares with."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn


class ReferenceWeights(NamedTuple):
    """The weights that a reference can choose from; each function returns a frozen model.

    `initial`: those that training started from. `load_version`: those of a version whose checkpoint is kept; `version`
    is that at the start of the job.
    """

    initial: Callable[[], nn.Module]
    version: int
    load_version: Callable[[int], nn.Module]


def initial(weights: ReferenceWeights) -> nn.Module:
    return weights.initial()


def job_start(weights: ReferenceWeights) -> None:
    """Returns None: the weights at the start of the job, whose log-probabilities need no second model."""
