"""Chooses what a preference job trains on: distinct pairs, desirable and undesirable episodes, or the best of a row."""

import random
from collections.abc import Mapping, Sequence

from insitu.algorithms.dropping import drop_trajectories
from insitu.errors import TrajectoryError
from insitu.preferences.rows import episode_rows
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import DPOItem, Trajectory, TrajectoryCollection


def distinct_pairs(collection: TrajectoryCollection) -> TrajectoryCollection:
    """Drops pairs with the texts of an earlier one."""
    seen: set[str] = set()

    def reason(pair: Trajectory) -> DropReason | None:
        text = pair_item(pair).model_dump_json()
        if text in seen:
            return DropReason.DUPLICATE_PAIR
        seen.add(text)
        return None

    return drop_trajectories(collection, reason)


def sampled_pairs(collection: TrajectoryCollection, count: int, seed: int) -> TrajectoryCollection:
    """At most `count` pairs, a random sample in their order."""
    pairs = [id(pair) for group in collection.trajectories for pair in group]
    kept = set(random.Random(f"{seed}|pairs|{collection.epoch}").sample(pairs, min(count, len(pairs))))
    return drop_trajectories(collection, lambda pair: None if id(pair) in kept else DropReason.MAX_PAIRS)


def pair_item(pair: Trajectory) -> DPOItem:
    """The documented form of a pair. Raises TrajectoryError if a trajectory is not a pair."""
    if len(pair.episode) != 1 or not isinstance(pair.episode[0], DPOItem):
        raise TrajectoryError(f"trajectory {pair.id} is not a preference pair: its episode must be one DPOItem")
    return pair.episode[0]


def labeled_episodes(collection: TrajectoryCollection, threshold: float | None) -> TrajectoryCollection:
    """Episodes with rows for KTO: desirable above the threshold, undesirable below, dropped at it.

    Without a threshold an episode is compared with the mean reward of its group.
    """
    limits = {
        id(t): sum(m.reward for m in group) / len(group) if threshold is None else threshold
        for group in collection.trajectories
        for t in group
    }
    kept = drop_trajectories(collection, lambda t: DropReason.NO_VARIANCE if _equal(t.reward, limits[id(t)]) else None)
    return _with_rows(kept, {id(t): t.reward > limits[id(t)] for group in kept.trajectories for t in group})


def best_episodes(collection: TrajectoryCollection, count: int, min_reward: float | None) -> TrajectoryCollection:
    """The `count` best episodes of each row, if their reward is at least `min_reward`: rejection sampling.

    Of episodes with equal rewards the first are kept.
    """
    kept = set()
    for group in collection.trajectories:
        ranked: Sequence[Trajectory] = sorted(group, key=lambda t: -t.reward)
        kept |= {id(t) for t in ranked[:count] if min_reward is None or t.reward >= min_reward}
    best = drop_trajectories(collection, lambda t: None if id(t) in kept else DropReason.NOT_BEST)
    return _with_rows(best, {})


def _equal(reward: float, limit: float) -> bool:
    return abs(reward - limit) <= 1e-9 * max(abs(reward), abs(limit), 1.0)


def _with_rows(collection: TrajectoryCollection, preferred: Mapping[int, bool]) -> TrajectoryCollection:
    groups = [
        [t.model_copy(update={"rows": episode_rows(t, preferred=preferred.get(id(t)))}) for t in group]
        for group in collection.trajectories
    ]
    return collection.model_copy(update={"trajectories": groups})
