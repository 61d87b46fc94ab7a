"""An epoch is a plan: `collect_epoch` makes groups of it, and observers follow.

    collection = await collect_epoch(plan, builder, run, [journal, bar])

Training, evaluations, the rehearsal and `insitu doctor` collect here.
"""

from collections.abc import Sequence
from contextlib import aclosing

from insitu.builder import Builder
from insitu.collect.collector import Plan, collect
from insitu.collect.conversations import collection_of
from insitu.collect.shared_run import RunState
from insitu.schemas.episodes import Episode
from insitu.schemas.finetuning import TrajectoryCollection
from insitu.schemas.groups import GroupRecord


class Observer:
    """Follows the collection of an epoch. Every method does nothing by default; what one raises ends the collection."""

    def on_episode(self, episode: Episode) -> None:
        """Called with every episode as it ends, also with those that an earlier process has run."""

    def on_group(self, group: GroupRecord) -> None:
        """Called with every group as it becomes complete, after its last episode."""

    def on_end(self, collection: TrajectoryCollection) -> None:
        """Called with the trajectories of the epoch."""


async def collect_epoch(
    plan: Plan, builder: Builder, run: RunState, observers: Sequence[Observer] = ()
) -> TrajectoryCollection:
    """The trajectories of a plan. If it is cancelled, so are the episodes in flight."""

    def on_episode(episode: Episode) -> None:
        for observer in observers:
            observer.on_episode(episode)

    groups = []
    async with aclosing(collect(plan, builder, run, on_episode)) as completed:
        async for group in completed:
            for observer in observers:
                observer.on_group(group)
            groups.append(group._replace(episodes=[]))  # an epoch of steps would not fit into memory
    collection = collection_of(groups, plan.run_id, plan.epoch)
    collection = collection.model_copy(update={"parts": plan.parts()})
    for observer in observers:
        observer.on_end(collection)
    return collection
