"""Collects the batches of a run, one for each epoch, up to `staleness` of them ahead of training."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from insitu.builder import Builder
from insitu.collect.collector import Plan, collect
from insitu.collect.conversations import GroupRecord, collection_of
from insitu.collect.recovery import with_recovered_calls
from insitu.collect.shared_run import run_of
from insitu.errors import ConfigError
from insitu.runs import files
from insitu.runs.records import journal_record
from insitu.runs.resume import ResumableRun
from insitu.schemas.episodes import Episode
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint, TrajectoryCollection
from insitu.training.checks import Leftovers, PolicyTraffic
from insitu.training.interfaces import TrajectoryBuilder
from insitu.training.report import Report

Warn = Callable[[int, str], None]


class Collected(NamedTuple):
    """The groups of an epoch, what their episodes left over, their errors, and where they were sampled from."""

    collection: TrajectoryCollection
    leftovers: Leftovers
    errors: Counter[str]
    served: PolicyEndpoint | None


@dataclass
class _Batch:
    """A batch that is being collected. `held` are its complete groups until it is its turn to be written."""

    epoch: int
    served: PolicyEndpoint | None
    traffic: PolicyTraffic
    is_current: bool
    held: list[tuple[GroupRecord, EvalInputItem | None]] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class BatchCollector:
    """Collects a batch for each epoch; with `staleness` K, batches up to K epochs ahead, while earlier ones train.

    Batch b is sampled from the version that was served after batch b - 1 - K, whatever else is served meanwhile: a
    repeated run samples the same. Its episodes begin once all of batch b - 1 have begun. Groups are written in the
    order of batches, each group once it is complete. Finished episodes are journaled before, so that a resumed run need
    not run them again.
    """

    builder: Builder
    trajectory_builder: TrajectoryBuilder
    durable: ResumableRun
    report: Report
    warn: Warn
    staleness: int = 0

    def __post_init__(self) -> None:
        self._batches: dict[int, _Batch] = {}

    async def collect(
        self, epoch: int, run_id: str, served: PolicyEndpoint | None, last_epoch: int | None = None
    ) -> Collected:
        """The batch of an epoch. Begins those ahead of it, up to `last_epoch`."""
        builder = self.trajectory_builder
        with self.report.phase(f"epoch {epoch}: collecting", getattr(builder, "episodes_per_epoch", None)):
            for number in range(epoch, min(epoch + self.staleness, last_epoch or epoch) + 1):
                if number not in self._batches:
                    await self._begin(number, run_id, served, is_current=number == epoch)
            batch = self._batches[epoch]
            try:
                if not batch.is_current:
                    await self._make_current(batch)
                collection = with_recovered_calls(await builder.finalize(run_id, {"epoch": epoch}), run_id, epoch)
            finally:
                del self._batches[epoch]
        leftovers, warning = await batch.traffic.finish()
        problems = [warning] if warning is not None else []
        for problem in problems + [f"{count} x {error}" for error, count in batch.errors.most_common(3)]:
            self.warn(epoch, problem)
        return Collected(collection, leftovers, batch.errors, batch.served)

    def journal(self) -> Iterator[dict[str, Any]]:
        """The journal of the batches that are ahead."""
        for batch in self._batches.values():
            episodes = batch.episodes or self.durable.finished(batch.epoch)  # it may not have begun
            yield from map(journal_record, episodes if self.durable.store.keeps_token_ids else [])

    async def _begin(self, epoch: int, run_id: str, served: PolicyEndpoint | None, *, is_current: bool) -> None:
        if self.staleness and served is not None:
            served = _pinned(served, self.durable.version_after(max(epoch - 1 - self.staleness, 0)))
        batch = _Batch(epoch, served, PolicyTraffic(self.builder, None if self.staleness else served), is_current)
        if is_current:
            await batch.traffic.start()
        before = self._batches.get(epoch - 1)
        self._batches[epoch] = batch

        async def gather(plan: Plan) -> TrajectoryCollection:
            if before is not None:
                await before.all_begun.wait()
            try:
                return await self._gather(plan, batch)
            finally:
                batch.all_begun.set()

        await self.trajectory_builder.start_run(run_id, {"epoch": epoch, "gather": gather})

    async def _gather(self, plan: Plan, batch: _Batch) -> TrajectoryCollection:
        served = batch.served
        journal = self.durable.finished(batch.epoch)
        finished = [episode for episode in journal if _is_planned(episode, plan, served)]
        if len(finished) < len(journal) and self.durable.progress.submitted_epoch == batch.epoch:
            raise ConfigError(
                f"--resume: staleness is {self.staleness}, but the job of epoch {batch.epoch} was submitted with "
                "episodes of other weights: set staleness as it was until the epoch is complete"
            )
        journaled = {episode.key for episode in finished}
        plan = replace(plan, finished=finished, vocab_size=served.vocab_size if served is not None else None)
        if self.staleness and served is not None:
            plan = replace(plan, options=replace(plan.options, sampled_from=(served.base_url, served.model)))

        left = len(plan.members)

        def on_episode(episode: Episode) -> None:
            nonlocal left
            left -= 1
            if left <= plan.limit:
                batch.all_begun.set()
            batch.traffic.add(episode)
            if batch.is_current:
                self.report.advance()
            else:
                batch.episodes.append(episode)
            if episode.key not in journaled and self.durable.store.keeps_token_ids:
                self.durable.store.append(files.JOURNAL, [journal_record(episode)])

        if left <= plan.limit:
            batch.all_begun.set()
        groups, rows = [], {str(row.id): row for row, _ in plan.members}
        async with aclosing(collect(plan, self.builder, run_of(self.builder), on_episode)) as completed:
            async for group in completed:
                batch.errors.update(f"{e.reason}: {e.error}" for e in group.episodes if e.error is not None)
                batch.held.append((group, rows.get(group.row_id)))
                if batch.is_current:
                    self._write(batch)
                groups.append(group._replace(episodes=[]))  # an epoch of steps would not fit into memory
        return collection_of(groups, plan.run_id, batch.epoch)

    async def _make_current(self, batch: _Batch) -> None:
        await batch.traffic.start()
        batch.is_current = True
        for _ in batch.episodes:
            self.report.advance()
        batch.episodes.clear()
        self._write(batch)

    def _write(self, batch: _Batch) -> None:
        for group, row in batch.held:
            self.durable.store.append_group(group, batch.epoch, row)
        batch.held.clear()


def _is_planned(episode: Episode, plan: Plan, served: PolicyEndpoint | None) -> bool:
    """Whether an episode of an earlier process was sampled as planned: `staleness` may have been another one then."""
    versions = {episode.calls[index].policy_version for index in plan.trained.of(episode)}
    return served is None or served.version is None or versions <= {served.version, None}


def _pinned(served: PolicyEndpoint, version: int | None) -> PolicyEndpoint:
    """The endpoint as that of one version, whose name stays when newer ones are served."""
    weights = served.weights if version == served.version else None
    return replace(served, model=f"{served.model}@{version}", version=version, weights=weights)
