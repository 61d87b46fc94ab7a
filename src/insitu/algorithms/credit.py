"""Credit below the episode: the returns of its steps, and how a group's advantages fell to the functions."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Weighed(NamedTuple):
    """A trained call: the function that made it, its sampled tokens, and its advantage."""

    function: str
    tokens: int
    advantage: float


def step_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """G_k = sum over j >= k of discount^(j-k) r_j, for the steps of one episode."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def spread(calls: Iterable[Weighed]) -> dict[str, dict[str, float]]:
    """For each function its `calls` and `tokens`, the mean |advantage| of a token, and its share of their sum.

    The shares add up to 1, or are all 0 where every advantage is. What counts is the token, the unit of the loss, so
    nothing changes when an episode is cut into other rows.
    """
    found: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for call in calls:
        of = found.setdefault(call.function, {"calls": 0, "tokens": 0})
        of["calls"] += 1
        of["tokens"] += call.tokens
        weights[call.function] = weights.get(call.function, 0.0) + abs(call.advantage) * call.tokens
    total = sum(weights.values())
    for name, of in found.items():
        of["mean_abs_advantage"] = weights[name] / of["tokens"] if of["tokens"] else 0.0
        of["share"] = weights[name] / total if total else 0.0
    return dict(sorted(found.items()))
