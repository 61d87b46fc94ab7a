"""Advantages of a group: how much better each member did than the others that were given the same row."""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from insitu.errors import TrajectoryError


class AdvantageConfig(BaseModel):
    """Which of the conventions in use turns a group's rewards into advantages."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted: the mean of the group, or for each member the mean of the others (RLOO, arXiv:2402.14740)."""
    scale: Literal["none", "sample_std", "population_std"] = "sample_std"
    """What the difference is divided by: nothing (Dr. GRPO, arXiv:2503.20783), or the standard deviation of the
    group's rewards with n - 1 or with n in its denominator."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


def group_advantages(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """One advantage for each reward; all 0 where the group has one member or no variance."""
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise TrajectoryError(f"reward {index} of the group is {reward}; allowed: finite numbers")
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    count = len(rewards)
    total = math.fsum(rewards)
    mean = total / count
    if config.baseline == "leave_one_out":
        centred = [reward - (total - reward) / (count - 1) for reward in rewards]
    else:
        centred = [reward - mean for reward in rewards]
    if config.scale == "none":
        return centred
    freedom = count - 1 if config.scale == "sample_std" else count
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / freedom)
    return [value / (deviation + config.epsilon) for value in centred]
