"""Weighing an epoch: which of its trajectories are trained, and with what advantages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from insitu.algorithms.advantages import AdvantageConfig
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import Trajectory, TrajectoryCollection
from insitu.trajectories.curriculum import mark_dropped, without
from insitu.trajectories.groups import Credit, build_rows, call_advantages, has_step_rewards

CallAdvantages = Mapping[int, float | None]
"""By place in a trajectory's `calls`, the advantages of those that are trained; None: it is made by what trains."""

Weighed = list[tuple[Trajectory, CallAdvantages]]


class Weigher(Protocol):
    """How a trainer weighs what it has collected."""

    def conventions(self) -> dict[str, Any]:
        """How rewards become advantages, for the head of a run."""

    def unfit(self, trajectory: Trajectory) -> DropReason | None:
        """Why a trajectory cannot be trained."""

    def weigh(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        """What the calls of each trajectory are trained with, and its rows, if it gets any here.

        None for a group that teaches nothing.
        """


def weigh(collection: TrajectoryCollection, weigher: Weigher) -> Weighed:
    """Make each group ready for its adapter; what cannot be trained, or teaches nothing, goes and is counted."""
    _leave_out_unfit(collection, weigher)
    weighed: Weighed = []
    flat: dict[int, str] = {}
    for place, group in enumerate(collection.trajectories):
        advantages = weigher.weigh(group) if len(group) > 1 else None
        if advantages is None:
            flat[place] = str(DropReason.NO_VARIANCE if len(group) > 1 else DropReason.SINGLE_MEMBER)
        else:
            weighed += zip(group, advantages, strict=True)
    kept = without(collection, flat)
    collection.trajectories, collection.dropped = kept.trajectories, kept.dropped
    return weighed


def _leave_out_unfit(collection: TrajectoryCollection, weigher: Weigher) -> None:
    dropped = Counter(collection.dropped)
    groups: list[list[Trajectory]] = []
    for group in collection.trajectories:
        groups.append([])
        for trajectory in group:
            reason = weigher.unfit(trajectory)
            if reason is None:
                groups[-1].append(trajectory)
            else:
                mark_dropped(trajectory, str(reason))
                dropped[str(reason)] += 1
    collection.trajectories, collection.dropped = [group for group in groups if group], dict(dropped)


@dataclass(frozen=True)
class CallWeigher:
    """Gives every trained call its advantage, as the configuration of a trainer says."""

    advantages: AdvantageConfig
    credit: Credit

    def conventions(self) -> dict[str, Any]:
        credit = self.credit
        return {"advantages": self.advantages.model_dump(), "credit": credit.unit, "discount": credit.discount}

    def unfit(self, trajectory: Trajectory) -> DropReason | None:
        """What is judged by step rewards needs one for each trained call."""
        needed = {"episode": False, "step": True, "function": trajectory.shaped_rewards is not None}
        missing = needed[self.credit.unit] and not has_step_rewards(trajectory)
        return DropReason.NO_STEP_REWARDS if missing else None

    def weigh(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        """Trajectories that a plugin's builder made of text alone have no calls to weigh: what trains them has to."""
        if not any(t.trained_calls for t in group):
            return weighed_by_server(group)
        found = call_advantages(group, self.advantages, self.credit)
        if not any(advantage for of_episode in found for advantage in of_episode.values()):
            return None
        build_rows(group, found)
        return [*found]


def weighed_by_server(group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
    """For what is sent with the rewards of its episodes, from which the server makes advantages of its own."""
    if len({t.reward for t in group}) < 2:
        return None
    return [dict.fromkeys(t.trained_calls) for t in group]
