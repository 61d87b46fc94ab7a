"""Selection of groups and episodes before training; every drop has a reason, which is counted.

A selection gets the groups of an epoch. It returns for each group None (keep it), the reason why it is dropped, or such
an entry for each of its episodes; with metrics of its own, a pair of that list and a mapping of numbers by name.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from insitu.errors import InsituError, TrajectoryError, describe_error
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import Trajectory, TrajectoryCollection

Groups = Sequence[Sequence[Trajectory]]


def no_variance(groups: Groups, min_reward_diff: float = 1e-9) -> list[str | None]:
    """Drops groups whose best and worst reward differ by less than `min_reward_diff`."""
    small = (has_small_range([t.reward for t in group], min_reward_diff) for group in groups)
    return [DropReason.NO_VARIANCE if is_small else None for is_small in small]


def has_small_range(rewards: Sequence[float], min_reward_diff: float) -> bool:
    # rounded because of float error: 0.3 - 0.2 is not below 0.1
    return round(max(rewards) - min(rewards), 9) < min_reward_diff


def random_subsample(groups: Groups, fraction: float, epoch: int, seed: int) -> list[str | None]:
    """Keeps a random fraction of the groups, at least one, which depends on epoch and seed only."""
    kept = {*subsample([f"{index:09d}" for index in range(len(groups))], fraction, epoch, seed)}
    return [None if f"{index:09d}" in kept else DropReason.SUBSAMPLE for index in range(len(groups))]


def apply_selection(
    collection: TrajectoryCollection, select: Callable[[Groups], Any], name: str
) -> tuple[TrajectoryCollection, Mapping[str, Any]]:
    """The collection without what a selection drops, and the metrics of the selection.

    Raises TrajectoryError naming the selection if it fails, or returns something else than a verdict for each group.
    """
    groups = collection.trajectories
    reasons: dict[int, str] = {}  # by id(): the trajectories of a plugin may have no name
    try:
        result = select(groups)
        verdicts, metrics = result if isinstance(result, tuple) else (result, {})
        for number, (group, verdict) in enumerate(_of_each(groups, verdicts, name)):
            whole = verdict is None or isinstance(verdict, str)
            of_group = [verdict] * len(group) if whole else verdict
            for trajectory, reason in _of_each(group, of_group, f"{name}, group {number}"):
                if reason is not None:
                    reasons[id(trajectory)] = str(reason)
    except InsituError:
        raise
    except Exception as error:  # code of the user may raise anything
        raise TrajectoryError(f"{name}: {describe_error(error)}") from error
    return drop_trajectories(collection, lambda t: reasons.get(id(t))), metrics


def _of_each(items: Sequence[Any], verdicts: Iterable[Any], where: str) -> Iterator[tuple[Any, Any]]:
    entries = [*verdicts]
    if len(entries) != len(items):
        raise TrajectoryError(f"{where}: {len(entries)} verdicts were returned for {len(items)}")
    return zip(items, entries, strict=True)


def subsample(examples: Sequence[str], fraction: float, epoch: int, seed: int) -> list[str]:
    """A random fraction of the examples (at least one, unless empty), deterministic given seed and epoch."""
    if not examples:
        return []
    digest = hashlib.blake2b(f"{seed}|subsample|{epoch}".encode(), digest_size=8).digest()
    size = max(1, round(fraction * len(examples)))
    return random.Random(int.from_bytes(digest, "big")).sample(sorted(examples), size)


def drop_groups(collection: TrajectoryCollection, reasons: Mapping[int, str]) -> TrajectoryCollection:
    """Returns a copy without the groups indexed by `reasons`; their trajectories are counted as dropped."""
    dropped, by_id = Counter(collection.dropped), dict(collection.drop_reasons)
    for index, reason in reasons.items():
        dropped[reason] += len(collection.trajectories[index])
        by_id |= {str(t.id): reason for t in collection.trajectories[index]}
    kept = [group for index, group in enumerate(collection.trajectories) if index not in reasons]
    return collection.model_copy(update={"trajectories": kept, "dropped": dict(dropped), "drop_reasons": by_id})


def drop_trajectories(
    collection: TrajectoryCollection, drop_reason: Callable[[Trajectory], str | None]
) -> TrajectoryCollection:
    """Returns a copy without the trajectories that have a reason, and without the groups that are then empty."""
    dropped, by_id = Counter(collection.dropped), dict(collection.drop_reasons)
    groups: list[list[Trajectory]] = []
    for group in collection.trajectories:
        verdicts = [(trajectory, drop_reason(trajectory)) for trajectory in group]
        groups.append([trajectory for trajectory, reason in verdicts if reason is None])
        dropped.update(str(reason) for _, reason in verdicts if reason is not None)
        by_id |= {str(t.id): str(reason) for t, reason in verdicts if reason is not None}
    kept = [group for group in groups if group]
    return collection.model_copy(update={"trajectories": kept, "dropped": dict(dropped), "drop_reasons": by_id})
