"""Advantages within a group: how much better each member did than the others that were given the same row."""

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from insitu.errors import TrajectoryError


class AdvantageConfig(BaseModel):
    """How a group's rewards become advantages."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    baseline: Literal["mean", "leave_one_out", "leave_one_function_out"] = "mean"
    """What is subtracted: the mean of the group; the mean of the other members (RLOO, arXiv:2402.14740); or, with
    credit: function, the mean of the other members that differ in that function's part only."""
    scale: Literal["none", "sample_std", "population_std"] = "sample_std"
    """What the difference is divided by: nothing (Dr. GRPO, arXiv:2503.20783), or the standard deviation of the
    group's rewards with denominator n - 1 or n."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


def group_advantages(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """One advantage per reward; all 0 for a group of one member or without variance."""
    return [a for (a,) in member_advantages([[reward] for reward in rewards], config)]


def member_advantages(
    returns: Sequence[Sequence[float]], config: AdvantageConfig, situations: Sequence[Hashable] | None = None
) -> list[list[float]]:
    """One advantage for each return of each member of a group; members without returns are left out.

    A member counts once, however many returns it has: means are taken over the members' means, and the variance is
    the mean over members of their mean squared deviation from the group's mean. So only the baseline `mean` depends on
    the member itself. For `leave_one_function_out`, members in the same of `situations` are compared with one another,
    and one that is alone in its situation with all the others.
    """
    for index, member in enumerate(returns):
        for value in member:
            if not math.isfinite(value):
                raise TrajectoryError(f"reward {index} of the group is {value}; allowed: finite numbers")
    members = [index for index, member in enumerate(returns) if member]
    if len(members) < 2 or len({value for member in returns for value in member}) < 2:
        return [[0.0] * len(member) for member in returns]
    means = {index: fmean(returns[index]) for index in members}
    mean = math.fsum(means.values()) / len(means)
    baselines = dict.fromkeys(members, mean)
    if config.baseline != "mean":
        if situations is None or config.baseline == "leave_one_out":
            situations = [None] * len(returns)
        baselines = {index: _mean_of_others(index, means, situations) for index in members}
    divisor = 1.0 if config.scale == "none" else _deviation(returns, mean, config) + config.epsilon
    return [[(value - baselines[index]) / divisor for value in member] for index, member in enumerate(returns)]


def _mean_of_others(index: int, means: Mapping[int, float], situations: Sequence[Hashable]) -> float:
    others = [other for other in means if other != index]
    alike = [other for other in others if situations[other] == situations[index]]
    return fmean(means[other] for other in alike or others)


def _deviation(returns: Sequence[Sequence[float]], mean: float, config: AdvantageConfig) -> float:
    squares = [fmean((value - mean) ** 2 for value in member) for member in returns if member]
    freedom = len(squares) - 1 if config.scale == "sample_std" else len(squares)
    return math.sqrt(math.fsum(squares) / freedom)
