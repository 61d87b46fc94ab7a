"""Chooses what a preference job trains on: distinct pairs, desirable and undesirable episodes, or the best of a row."""

import hashlib
import random
from collections.abc import Mapping, Sequence

from insitu.algorithms.selection import drop_trajectories
from insitu.errors import TrajectoryError
from insitu.preferences.rows import episode_rows
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import DPOItem, Trajectory, TrajectoryCollection


class Duplicates:
    """Recognises pairs with the texts of an earlier one."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def repeats(self, pair: DPOItem) -> bool:
        text = hashlib.blake2b(pair.model_dump_json().encode(), digest_size=16).digest()
        found = text in self._seen
        self._seen.add(text)
        return found


def distinct_pairs(collection: TrajectoryCollection) -> TrajectoryCollection:
    """Drops pairs with the texts of an earlier one."""
    seen = Duplicates()
    reason = DropReason.DUPLICATE_PAIR
    return drop_trajectories(collection, lambda pair: reason if seen.repeats(pair_item(pair)) else None)


def sampled_pairs(collection: TrajectoryCollection, count: int, seed: int) -> TrajectoryCollection:
    """At most `count` pairs, a random sample in their order."""
    pairs = [id(pair) for group in collection.trajectories for pair in group]
    kept = set(random.Random(f"{seed}|pairs|{collection.epoch}").sample(pairs, min(count, len(pairs))))
    return drop_trajectories(collection, lambda pair: None if id(pair) in kept else DropReason.MAX_PAIRS)


def chosen_pairs(
    collection: TrajectoryCollection, *, distinct: bool, count: int | None, seed: int
) -> TrajectoryCollection:
    """At most `count` pairs, without repetitions if they have to be `distinct`."""
    collection = distinct_pairs(collection) if distinct else collection
    return collection if count is None else sampled_pairs(collection, count, seed)


def pair_item(pair: Trajectory) -> DPOItem:
    """The documented form of a pair. Raises TrajectoryError if a trajectory is not a pair."""
    if len(pair.episode) != 1 or not isinstance(pair.episode[0], DPOItem):
        raise TrajectoryError(f"trajectory {pair.id} is not a preference pair: its episode must be one DPOItem")
    return pair.episode[0]


def desirable(group: Sequence[Trajectory], threshold: float | None) -> list[bool | None]:
    """Whether each episode is desirable for KTO: above the threshold, or without one above the group's mean reward.

    None: at it.
    """
    limit = sum(t.reward for t in group) / len(group) if threshold is None else threshold
    return [None if _equal(t.reward, limit) else t.reward > limit for t in group]


def labeled_episodes(collection: TrajectoryCollection, threshold: float | None) -> TrajectoryCollection:
    """Episodes with rows for KTO: desirable above the threshold, undesirable below, dropped at it.

    Without a threshold an episode is compared with the mean reward of its group.
    """
    labels: dict[int, bool | None] = {}
    for group in collection.trajectories:
        labels |= zip(map(id, group), desirable(group, threshold), strict=True)
    kept = drop_trajectories(collection, lambda t: DropReason.NO_VARIANCE if labels[id(t)] is None else None)
    return _with_rows(kept, labels)


def best_of_group(group: Sequence[Trajectory], count: int, min_reward: float | None) -> list[Trajectory]:
    """The `count` best episodes, if their reward is at least `min_reward`; of equal ones the first."""
    ranked = sorted(group, key=lambda t: -t.reward)
    return [t for t in ranked[:count] if min_reward is None or t.reward >= min_reward]


def best_episodes(collection: TrajectoryCollection, count: int, min_reward: float | None) -> TrajectoryCollection:
    """The `count` best episodes of each row, if their reward is at least `min_reward`: rejection sampling."""
    kept = {id(t) for group in collection.trajectories for t in best_of_group(group, count, min_reward)}
    best = drop_trajectories(collection, lambda t: None if id(t) in kept else DropReason.NOT_BEST)
    return _with_rows(best, {})


def _equal(reward: float, limit: float) -> bool:
    return abs(reward - limit) <= 1e-9 * max(abs(reward), abs(limit), 1.0)


def _with_rows(collection: TrajectoryCollection, preferred: Mapping[int, bool | None]) -> TrajectoryCollection:
    groups = [
        [t.model_copy(update={"rows": episode_rows(t, preferred=preferred.get(id(t)))}) for t in group]
        for group in collection.trajectories
    ]
    return collection.model_copy(update={"trajectories": groups})
