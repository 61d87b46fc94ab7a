"""Streamed epochs: the groups of an epoch go to its training job as they complete, part by part.

What the job computes of them meanwhile and what it trains in the end is that of the epoch sent whole, to the bit.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

from insitu.advantages.estimator import EstimatedEpoch
from insitu.collect.conversations import collection_of
from insitu.errors import InsituError
from insitu.schemas.finetuning import TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.training.episodes_builder import EpisodesBuilder
from insitu.training.interfaces import StreamingAdapter, TrainerAdapter, TrajectoryBuilder


class EpochStream:
    """Selects, estimates and sends each part of an epoch once its groups are complete.

    `parts` has the part of each planned row; `select` decides what is trained, within a group. What it raises ends the
    collection.
    """

    def __init__(
        self,
        adapter: StreamingAdapter,
        select: Callable[[TrajectoryCollection], EstimatedEpoch],
        run_id: str,
        epoch: int,
        parts: Mapping[str, int],
    ) -> None:
        self._adapter = adapter
        self._select = select
        self._run_id, self._epoch = run_id, epoch
        self._parts = parts
        self._missing = Counter(parts.values())
        self._groups: dict[int, list[GroupRecord]] = {}
        self._selected: dict[int, EstimatedEpoch] = {}
        self._sending: list[asyncio.Task[None]] = []

    async def open(self, episodes: int) -> None:
        await self._adapter.open_job(self._run_id, self._epoch, len(self._missing), episodes)

    def add(self, group: GroupRecord) -> None:
        """Takes a complete group; the last one of a part is sent with the others."""
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
        """Waits until all parts are sent; returns what is trained of the epoch."""
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
            }
        )
        advantages = [*chain.from_iterable(part.advantages for part in parts)]
        return EstimatedEpoch(collection, advantages, {"untrained_calls": dict(untrained)} if untrained else {})

    async def close(self) -> None:
        """Cancels what has not been submitted."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._adapter.abandon_job()


class EpochStreams:
    """The streams of a run's epochs, if the file asks for them and an epoch need not be complete before it is trained.

    `compared` names what the trainer compares over the rows of an epoch.
    """

    def __init__(
        self,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
        select: Callable[[TrajectoryCollection], EstimatedEpoch],
        *,
        compared: str | None,
    ) -> None:
        self._builder, self._adapter, self._select = builder, adapter, select
        self._compared = compared

    @property
    def settings(self) -> dict[str, Any]:
        """The setting in the header of the run."""
        obstacle = self._obstacle
        return {"stream": True if obstacle is None else f"no: {obstacle}"}

    @property
    def episodes(self) -> int | None:
        """The planned episodes of an epoch that is streamed; None if epochs are not."""
        return self._builder.episodes_per_epoch if self._obstacle is None else None

    @property
    def _obstacle(self) -> str | None:
        """Why an epoch must be complete before anything of its job is computed; None if it need not be."""
        if self._compared is not None:
            return self._compared
        if not getattr(self._select, "__module__", "").startswith("insitu."):
            return f"{getattr(self._select, '__qualname__', self._select)} may compare groups"
        kind, builder = self._builder.trajectory_builder_config.type, self._builder
        if not isinstance(builder, EpisodesBuilder) or not builder.plans_episodes:
            return f"{kind} does not plan its episodes"
        if (type(builder).start_run, type(builder).finalize) != (EpisodesBuilder.start_run, EpisodesBuilder.finalize):
            return f"{kind} collects its episodes itself"
        budget = builder.budget
        if budget is not None and (budget.replace or budget.retry_solved < 1):
            return f"{builder.block}.budget: which rows an epoch has depends on their rewards"
        if not isinstance(self._adapter, StreamingAdapter):
            return f"{self._adapter.adapter_config.type} takes whole epochs"
        if builder.plan("", 1).parts() is None:
            return f"an epoch of {builder.episodes_per_epoch} episodes is trained in one part"
        return self._adapter.streaming_obstacle(builder.episodes_per_epoch or 0)

    @asynccontextmanager
    async def opened(self, epoch: int, run_id: str, *, whole: bool) -> AsyncIterator[EpochStream | None]:
        """The stream of an epoch; None if it is sent whole, as one that an earlier process may have submitted."""
        builder, adapter = self._builder, self._adapter
        if whole or self._obstacle is not None:
            yield None
            return
        assert isinstance(builder, EpisodesBuilder)
        assert isinstance(adapter, StreamingAdapter)
        parts = builder.plan(run_id, epoch).parts()
        if parts is None:
            yield None
            return
        stream = EpochStream(adapter, self._select, run_id, epoch, parts)
        try:
            await stream.open(builder.episodes_per_epoch or 0)
            yield stream
        finally:
            await stream.close()
