"""Leaves groups and trajectories out of a collection; every drop is counted with its reason."""

from collections import Counter
from collections.abc import Callable, Mapping

from insitu.schemas.finetuning import Trajectory, TrajectoryCollection


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
