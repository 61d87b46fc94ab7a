"""Trajectory builders whose epochs are plans."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from insitu.collect.collector import Observer, Plan, collect_epoch
from insitu.collect.shared_run import UsesBuilder, run_of
from insitu.errors import TrajectoryError
from insitu.schemas.finetuning import TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.training.interfaces import TrajectoryBuilder
from insitu.wire.endings import end_tasks

logger = logging.getLogger(__name__)


class PlannedBuilder(UsesBuilder, TrajectoryBuilder):
    """Plans each epoch, which the built-in trainers collect.

    Trainers of plugins call `start_run` and `finalize`, which collect the plan. `start_run(run_id, meta)` reads the
    `epoch` from `meta`, by default the next one (the first is 1). Failed and unscored episodes are counted by reason
    and not returned.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._started: dict[tuple[str, int], asyncio.Task[TrajectoryCollection]] = {}
        self._expected: dict[tuple[str, int], tuple[Plan, Sequence[Observer]]] = {}
        self._last_epoch = 0

    async def unplanned(self, run_id: str, epoch: int) -> TrajectoryCollection:
        """Collects an epoch that has no plan."""
        raise NotImplementedError

    collects_itself = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """`start_run` and `finalize` have to be called if one of them is overridden."""
        super().__init_subclass__(**kwargs)
        cls.collects_itself = (cls.start_run, cls.finalize) != (PlannedBuilder.start_run, PlannedBuilder.finalize)

    def expect(self, plan: Plan, observers: Sequence[Observer]) -> None:
        self._expected[plan.run_id, plan.epoch] = plan, observers

    @property
    def evaluation_runs(self) -> dict[str, list[asyncio.Task[Any]]]:
        """The asyncio task of each run that `start_run` has started and `finalize` has not ended."""
        runs = {run_id for run_id, _ in self._started}
        return {run_id: [task for (of, _), task in self._started.items() if of == run_id] for run_id in runs}

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        self._last_epoch = epoch = (meta or {}).get("epoch", self._last_epoch + 1)
        expected = self._expected.pop((run_id, epoch), None)
        if expected is None and any(of == run_id for of, _ in self._started):
            raise TrajectoryError(f"run {run_id} is already being collected: finalize it first")
        plan, observers = expected or (self.plan(run_id, epoch), [_Unobserved(self.makes_pairs)])
        work = self.unplanned(run_id, epoch) if plan is None else self._planned(plan, observers)
        self._started[run_id, epoch] = asyncio.create_task(work, name=f"collect {run_id}")

    async def _planned(self, plan: Plan, observers: Sequence[Observer]) -> TrajectoryCollection:
        run = run_of(self._builder)
        return await run.watchdog.watch(partial(collect_epoch, plan, self._builder, run, observers))

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        started = [epoch for of, epoch in self._started if of == run_id]
        if not started:
            raise TrajectoryError(f"run {run_id} has not been started")
        epoch = (meta or {}).get("epoch")
        key = run_id, epoch if epoch in started else started[0]
        try:
            return await self._started[key]
        finally:
            await end_tasks(self._started.pop(key))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in [*self._started]:
            await end_tasks(self._started.pop(key))

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("run %s: collected %s", run_id, metrics)


class _Unobserved(Observer):
    """Warns of an epoch without trajectories, which a plugin's trainer may ignore."""

    def __init__(self, pairs: bool) -> None:
        self._what = "preference pair" if pairs else "episode"
        self._first: str | None = None

    def on_group(self, group: GroupRecord) -> None:
        self._first = next(filter(None, (self._first, *(episode.error for episode in group.episodes))), None)

    def on_end(self, collection: TrajectoryCollection) -> None:
        if collection.trajectories:
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(collection.dropped.items()))
        why = f"the first error: {self._first}" if self._first is not None else f"dropped: {reasons}"
        logger.warning("run %s: no %s can be trained on; %s", collection.run_id, self._what, why)
