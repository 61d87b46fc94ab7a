"""Advantages, a selection and a reward shape."""

from collections.abc import Sequence
from typing import Any

from insitu.plugin_api import ModelCall, Trajectory


def advantages(rewards: Sequence[float], episodes: Sequence[Trajectory], margin: float = 0.0) -> list[list[float]]:
    """How much better an episode is than the best of the others; the last call gets all of it, earlier ones half."""
    result = []
    for index, episode in enumerate(episodes):
        others = [*rewards[:index], *rewards[index + 1 :]]
        advantage = rewards[index] - max(others, default=0.0) + margin
        calls = len(episode.trained_calls)
        result.append([advantage / 2] * (calls - 1) + [advantage] * min(calls, 1))
    return result


def selection(groups: Sequence[Sequence[Trajectory]], epoch: int, most: int = 4) -> tuple[list[Any], dict[str, float]]:
    """Drops the last group of the first epoch, and the episodes with more than `most` calls."""
    verdicts: list[Any] = [["too_long" if len(t.calls) > most else None for t in group] for group in groups]
    if epoch == 1:
        verdicts[-1] = "warming_up"
    lengths = [len(t.calls) for group in groups for t in group]
    return verdicts, {"longest_episode": max(lengths, default=0)}


def shape(score: float, calls: Sequence[ModelCall], cost: float = 0.001) -> float:
    """Takes a little off for every sampled token."""
    return score - cost * sum(len(call.token_ids or ()) for call in calls)
