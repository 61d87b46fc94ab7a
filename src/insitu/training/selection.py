"""What of an epoch is trained, and how it gets to its job: whole, or streamed, part by part as its groups complete.

What the job computes of a streamed epoch meanwhile and what it trains in the end is that of the epoch sent whole, to
the bit.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from itertools import chain
from typing import Any

from insitu.advantages.estimator import AdvantageEstimator, EstimatedEpoch, estimate_epoch
from insitu.algorithms.selection import CurriculumState, apply_curriculum, apply_selection
from insitu.collect.collector import Observer
from insitu.collect.conversations import collection_of
from insitu.config.code import LoadedPart, call_with
from insitu.errors import InsituError
from insitu.schemas.finetuning import TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.training.interfaces import StreamingAdapter, TrainerAdapter, TrajectoryBuilder
from insitu.training.run import RunTrainer
from insitu.training.schedule import LoopTrainerConfig
from insitu.wire.endings import end_tasks

Select = Callable[[TrajectoryCollection], EstimatedEpoch]
"""Decides what of an epoch is trained, and estimates its advantages."""


class EpochSelection(Observer):
    """Selects what is trained once the epoch is complete; `streamed`: its planned episodes, if others are streamed."""

    def __init__(self, select: Select, streamed: int | None = None) -> None:
        self._select, self._streamed = select, streamed

    async def finish(self, collected: TrajectoryCollection) -> EstimatedEpoch:
        """What is trained of the epoch."""
        estimated = self._select(collected)
        estimated.collection.streamed = self._streamed
        return estimated


class EpochStream(EpochSelection):
    """Selects, estimates and sends each part of an epoch once its groups are complete.

    `parts` has the part of each planned row; `select` looks at one group at a time. What it raises ends the collection.
    """

    def __init__(
        self,
        adapter: StreamingAdapter,
        select: Select,
        streamed: int,
        run_id: str,
        epoch: int,
        parts: Mapping[str, int],
    ) -> None:
        super().__init__(select, streamed)
        self._adapter = adapter
        self._episodes = streamed
        self._run_id, self._epoch = run_id, epoch
        self._parts = parts
        self._missing = Counter(parts.values())
        self._groups: dict[int, list[GroupRecord]] = {}
        self._selected: dict[int, EstimatedEpoch] = {}
        self._sending: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        await self._adapter.open_job(self._run_id, self._epoch, len(self._missing), self._episodes)

    def on_group(self, group: GroupRecord) -> None:
        """The last group of a part is sent with the others."""
        part = self._parts[group.row_id]
        self._groups.setdefault(part, []).append(group)
        self._missing[part] -= 1
        if self._missing[part] == 0:
            self._selected[part] = selected = self._select(
                collection_of(self._groups.pop(part), self._run_id, self._epoch)
            )
            sending = self._adapter.add_part(part, selected.collection)
            self._sending.append(asyncio.create_task(sending, name=f"send part {part}"))

    async def finish(self, collected: TrajectoryCollection) -> EstimatedEpoch:
        await asyncio.gather(*self._sending)
        if missing := sum(self._missing.values()):
            raise InsituError(f"epoch {self._epoch} is complete, but {missing} of its groups were not streamed")
        parts = [self._selected[part] for part in sorted(self._selected)]
        collections = [part.collection for part in parts]
        untrained = sum((Counter(part.metrics.get("untrained_calls", {})) for part in parts), Counter[str]())
        collection = collected.model_copy(
            update={
                "trajectories": [*chain.from_iterable(each.trajectories for each in collections)],
                "dropped": dict(sum((Counter(each.dropped) for each in collections), Counter[str]())),
                "drop_reasons": {key: reason for each in collections for key, reason in each.drop_reasons.items()},
                "streamed": self._streamed,
            }
        )
        advantages = [*chain.from_iterable(part.advantages for part in parts)]
        return EstimatedEpoch(collection, advantages, {"untrained_calls": dict(untrained)} if untrained else {})

    async def close(self) -> None:
        """Cancels what has not been submitted."""
        await end_tasks(*self._sending)
        await self._adapter.abandon_job()


class EpochSelections:
    """The selections of a run's epochs, streamed if that is `wanted` and an epoch need not be complete before.

    `compared` names what the trainer compares over the rows of an epoch.
    """

    def __init__(
        self,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
        select: Select,
        config: LoopTrainerConfig,
        *,
        compared: str | None,
    ) -> None:
        self._builder, self._adapter, self._select = builder, adapter, select
        self._wanted, self._compared = config.stream, compared

    @property
    def settings(self) -> dict[str, Any]:
        """The setting in the header of the run; none if it is not wanted."""
        if not self._wanted:
            return {}
        obstacle = self._obstacle
        return {"stream": True if obstacle is None else f"no: {obstacle}"}

    @property
    def _obstacle(self) -> str | None:
        """Why an epoch must be complete before anything of its job is computed; None if it need not be."""
        if self._compared is not None:
            return self._compared
        if not getattr(self._select, "__module__", "").startswith("insitu."):
            return f"{getattr(self._select, '__qualname__', self._select)} may compare groups"
        kind, builder = self._builder.trajectory_builder_config.type, self._builder
        if not builder.plans_episodes:
            return f"{kind} does not plan its episodes"
        if builder.collects_itself:
            return f"{kind} collects its episodes itself"
        if (obstacle := builder.streaming_obstacle()) is not None:
            return obstacle
        if not isinstance(self._adapter, StreamingAdapter):
            return f"{self._adapter.adapter_config.type} takes whole epochs"
        if (plan := builder.plan("", 1)) is None or plan.parts() is None:
            return f"an epoch of {builder.episodes_per_epoch} episodes is trained in one part"
        return self._adapter.streaming_obstacle(builder.episodes_per_epoch or 0)

    @asynccontextmanager
    async def opened(self, epoch: int, run_id: str, *, whole: bool) -> AsyncIterator[EpochSelection]:
        """The selection of an epoch, not streamed if it is `whole`, as one that may have been submitted already."""
        builder, adapter = self._builder, self._adapter
        episodes = builder.episodes_per_epoch if self._wanted and self._obstacle is None else None
        plan = builder.plan(run_id, epoch) if episodes is not None and not whole else None
        parts = plan.parts() if plan is not None else None
        if episodes is None or parts is None or not isinstance(adapter, StreamingAdapter):
            yield EpochSelection(self._select, episodes)
            return
        stream = EpochStream(adapter, self._select, episodes, run_id, epoch, parts)
        try:
            await stream.open()
            yield stream
        finally:
            await stream.close()


class EstimatingTrainer(RunTrainer):
    """Trainer that selects episodes; a subclass defines `select`, or the estimator that `select` uses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._selections: dict[str, LoadedPart] = {}  # by their keys in the file

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        if not self.curriculum_config.enabled:
            return trajectory_collection
        config, state, seed = self.curriculum_config, self._curriculum_state, self._full_config.general.seed
        return apply_curriculum(trajectory_collection, config, state, epoch, seed)

    def select(self, collection: TrajectoryCollection) -> EstimatedEpoch:
        """What the epoch trains on, with its rows."""
        metrics: dict[str, Any] = {}
        offered = {"epoch": collection.epoch or 1, "seed": self._full_config.general.seed}
        for key, (function, _) in self._selections.items():
            collection, own = apply_selection(collection, partial(call_with, function, **offered), key)
            metrics |= own
        estimated = estimate_epoch(collection, self._estimator)
        return estimated._replace(metrics={**metrics, **estimated.metrics})

    @cached_property
    def _estimator(self) -> AdvantageEstimator:
        raise NotImplementedError

    def _selection_settings(self) -> dict[str, Any]:
        """The settings that `select` depends on, for the header of the run."""
        selections = [settings for _, settings in self._selections.values()]
        return self._estimator.settings() | ({"selection": selections} if selections else {})

    def get_curriculum_state(self) -> dict[str, Any]:
        return CurriculumState(**self._curriculum_state).model_dump(mode="json")
