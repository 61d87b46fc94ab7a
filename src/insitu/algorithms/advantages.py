"""Advantages of a group: how much better each member did than the others that were given the same row."""

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from insitu.errors import TrajectoryError


class AdvantageConfig(BaseModel):
    """Which of the conventions in use turns a group's rewards into advantages."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    baseline: Literal["mean", "leave_one_out", "leave_one_function_out"] = "mean"
    """What is subtracted: the mean of the group; for each member the mean of the others (RLOO, arXiv:2402.14740); or,
    with credit: function, that of the others in which all but the function's own part was the same."""
    scale: Literal["none", "sample_std", "population_std"] = "sample_std"
    """What the difference is divided by: nothing (Dr. GRPO, arXiv:2503.20783), or the standard deviation of the
    group's rewards with n - 1 or with n in its denominator."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


def group_advantages(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """One advantage for each reward; all 0 where the group has one member or no variance."""
    return [a for (a,) in member_advantages([[reward] for reward in rewards], config)]


def member_advantages(
    returns: Sequence[Sequence[float]], config: AdvantageConfig, contexts: Sequence[Hashable] | None = None
) -> list[list[float]]:
    """One advantage for each return of each member of a group; a member without returns is none.

    A member counts once, however many returns it has: means are taken over the members' means, and the variance
    is the mean over members of theirs around the group's mean. So no baseline but `mean` depends on the member itself.
    `contexts` says for `leave_one_function_out` which members were in the same situation: they are compared with one
    another, and one that is alone in its own with all the others.
    """
    for index, member in enumerate(returns):
        for value in member:
            if not math.isfinite(value):
                raise TrajectoryError(f"reward {index} of the group is {value}; allowed: finite numbers")
    places = [place for place, member in enumerate(returns) if member]
    if len(places) < 2 or len({value for member in returns for value in member}) < 2:
        return [[0.0] * len(member) for member in returns]
    means = {place: fmean(returns[place]) for place in places}
    mean = math.fsum(means.values()) / len(means)
    baselines = dict.fromkeys(places, mean)
    if config.baseline != "mean":
        told = contexts if config.baseline == "leave_one_function_out" else None
        situations = told if told is not None else [None] * len(returns)
        baselines = {place: _mean_of_others(place, means, situations) for place in places}
    divisor = 1.0 if config.scale == "none" else _deviation(returns, mean, config) + config.epsilon
    return [[(value - baselines[place]) / divisor for value in member] for place, member in enumerate(returns)]


def _mean_of_others(place: int, means: Mapping[int, float], situations: Sequence[Hashable]) -> float:
    others = [other for other in means if other != place]
    alike = [other for other in others if situations[other] == situations[place]]
    return fmean(means[other] for other in alike or others)


def _deviation(returns: Sequence[Sequence[float]], mean: float, config: AdvantageConfig) -> float:
    spreads = [fmean((value - mean) ** 2 for value in member) for member in returns if member]
    freedom = len(spreads) - 1 if config.scale == "sample_std" else len(spreads)
    return math.sqrt(math.fsum(spreads) / freedom)
