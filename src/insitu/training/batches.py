"""Collects the batches of a run, one for each epoch, up to `staleness` of them ahead of training."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from insitu.algorithms.budget import Spending
from insitu.builder import Builder
from insitu.capture.ledger import Activity
from insitu.collect.collector import Plan, Teach, collect
from insitu.collect.conversations import collection_of
from insitu.collect.recovery import with_recovered_calls
from insitu.collect.shared_run import run_of
from insitu.errors import ConfigError
from insitu.runs import files
from insitu.runs.records import journal_record
from insitu.runs.resume import ResumableRun
from insitu.schemas.episodes import DropReason, Episode
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint, TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.training.checks import Leftovers, PolicyTraffic
from insitu.training.episodes_builder import EpisodesBuilder
from insitu.training.interfaces import TrajectoryBuilder
from insitu.training.report import Report
from insitu.training.streaming import EpochStream

Warn = Callable[[int, str], None]


class Collected(NamedTuple):
    """The groups of an epoch, what their episodes left over, their errors, and where they were sampled from.

    The versions that they may have been sampled from are `oldest` and those up to that of `served`. `spending` has the
    episodes that were planned and saved, if there is a rollout budget.
    """

    collection: TrajectoryCollection
    leftovers: Leftovers
    errors: Counter[str]
    served: PolicyEndpoint | None
    spending: dict[str, int]
    oldest: int | None = None


@dataclass
class _Batch:
    """A batch that is being collected. `held` are its complete groups until it is its turn to be written."""

    epoch: int
    served: PolicyEndpoint | None
    traffic: PolicyTraffic
    is_current: bool
    stream: EpochStream | None = None
    held: list[tuple[GroupRecord, EvalInputItem | None]] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)
    rows: Counter[str] = field(default_factory=Counter)
    """Finished episodes of each group."""
    group_of: Mapping[str, str] = field(default_factory=dict)
    complete_groups: int = 0
    spending: Spending | None = None


@dataclass
class BatchCollector:
    """Collects a batch for each epoch; with `staleness` K, batches up to K epochs ahead, while earlier ones train.

    Batch b is sampled from the version that was served after batch b - 1 - K, whatever else is served meanwhile: a
    repeated run samples the same. If versions are not `pinned`, its calls are sampled from the newest one, which is
    that version or a later one. Its episodes begin once all of batch b - 1 have begun. Groups are written in the order
    of batches, each group once it is complete. Finished episodes are journaled before, so that a resumed run need not
    run them again.
    """

    builder: Builder
    trajectory_builder: TrajectoryBuilder
    durable: ResumableRun
    report: Report
    warn: Warn
    staleness: int = 0
    pinned: bool = True
    shares_policy: bool = False
    """Whether validations sample from the policy meanwhile, so that its completions cannot be counted by epoch."""
    teacher: Teach | None = None

    def __post_init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._jobs = Activity()
        self._began = (0.0, 0.0, 0.0)
        self._groups_in_flight: int | None = None

    async def collect(
        self,
        epoch: int,
        run_id: str,
        served: PolicyEndpoint | None,
        last_epoch: int | None = None,
        stream: EpochStream | None = None,
    ) -> Collected:
        """The batch of an epoch, whose groups `stream` gets. Begins those ahead of it, up to `last_epoch`."""
        builder = self.trajectory_builder
        with self.report.phase(f"epoch {epoch}: collecting", getattr(builder, "episodes_per_epoch", None)):
            for number in range(epoch, min(epoch + self.staleness, last_epoch or epoch) + 1):
                if number not in self._batches:
                    await self._begin(number, run_id, served, is_current=number == epoch)
            batch = self._batches[epoch]
            batch.stream = stream
            try:
                if not batch.is_current:
                    self._make_current(batch)
                collection = with_recovered_calls(await builder.finalize(run_id, {"epoch": epoch}), run_id, epoch)
            finally:
                del self._batches[epoch]
        leftovers, warning = await batch.traffic.finish()
        problems = [warning] if warning is not None else []
        for problem in problems + [f"{count} x {error}" for error, count in batch.errors.most_common(3)]:
            self.warn(epoch, problem)
        if (following := self._batches.get(epoch + 1)) is not None:  # what is left over while this epoch trains is its
            await following.traffic.start()
        oldest = self._planned_version(epoch) if self.staleness and served is not None else None
        spending = asdict(batch.spending) if batch.spending is not None else {}
        return Collected(collection, leftovers, batch.errors, batch.served if self.pinned else served, spending, oldest)

    def settings(self) -> dict[str, Any]:
        """The settings of the batches, for the header of the run; none without staleness."""
        if not self.staleness:
            return {}
        latest = {"versions": "latest", "repeats": "no: calls are sampled from the newest weights, whichever they are"}
        return {"staleness": self.staleness, **({} if self.pinned else latest)}

    def begin_epoch(self) -> None:
        """Starts the clocks of an epoch; without staleness nothing overlaps."""
        run = run_of(self.builder)
        if self.staleness and run.calls is None:
            run.calls = Activity()
        self._began, self._groups_in_flight = self._clocks(), None

    @contextmanager
    def training(self) -> Iterator[None]:
        """The body follows a training job, which has just been submitted."""
        self._groups_in_flight = sum(map(self._incomplete_groups, self._batches.values()))
        with self._jobs.in_progress():
            yield

    def timings(self, trained_ahead: float = 0.0) -> dict[str, Any]:
        """What overlapped since `begin_epoch`, for the `seconds` of an epoch; nothing without staleness.

        `trained_ahead` are the seconds in which a streamed epoch trained before its job was submitted.
        """
        if not self.staleness:
            return {}
        wall, calls, jobs = (now - then for now, then in zip(self._clocks(), self._began, strict=True))
        idle = {"sampler": max(0.0, wall - calls), "learner": max(0.0, wall - jobs - trained_ahead)}
        in_flight = {} if self._groups_in_flight is None else {"groups_in_flight": self._groups_in_flight}
        return {"idle": idle, **in_flight}

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds: the time, those with a model call of an episode in flight, and those with a job in progress."""
        calls = run_of(self.builder).calls
        return time.monotonic(), calls.seconds if calls is not None else 0.0, self._jobs.seconds

    def _incomplete_groups(self, batch: _Batch) -> int:
        """Groups of a batch that have begun and are not complete."""
        in_flight = run_of(self.builder).episodes_in_flight
        ids = {key.row_id for key in in_flight if key.epoch == batch.epoch}
        begun = batch.rows.keys() | {batch.group_of.get(row_id, row_id) for row_id in ids}
        return len(begun) - batch.complete_groups

    def _planned_version(self, epoch: int) -> int | None:
        """The version that was served after the last epoch before which this one does not begin."""
        return self.durable.version_after(max(epoch - 1 - self.staleness, 0))

    def journal(self) -> Iterator[dict[str, Any]]:
        """The journal of the batches that are ahead."""
        for batch in self._batches.values():
            earlier = self.durable.finished(batch.epoch)  # not all of them may have passed the collector again
            episodes = {episode.key.member: episode for episode in (*earlier, *batch.episodes)}
            yield from map(journal_record, episodes.values() if self.durable.store.keeps_token_ids else [])

    async def abandon(self, run_id: str) -> int:
        """Cancels the batches that are ahead; returns how many of their episodes have ended and are not trained."""
        builder = self.trajectory_builder
        tasks = builder.evaluation_runs.get(run_id, []) if isinstance(builder, EpisodesBuilder) else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        count = sum(len(batch.episodes) for batch in self._batches.values())
        self._batches.clear()
        return count

    async def _begin(self, epoch: int, run_id: str, served: PolicyEndpoint | None, *, is_current: bool) -> None:
        if self.staleness and self.pinned and served is not None:
            served = pinned(served, self._planned_version(epoch))
        counted = None if self.staleness or self.shares_policy else served
        batch = _Batch(epoch, served, PolicyTraffic(self.builder, counted), is_current)
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

        recorded = {"groups": self.durable.store.path / files.GROUPS, "lag": 1 + self.staleness}
        await self.trajectory_builder.start_run(run_id, {"epoch": epoch, "gather": gather, **recorded})

    async def _gather(self, plan: Plan, batch: _Batch) -> TrajectoryCollection:
        served, batch.group_of = batch.served, plan.group_of
        journal = self.durable.finished(batch.epoch)
        finished = [episode for episode in journal if not self.pinned or _is_planned(episode, plan, served)]
        if len(finished) < len(journal) and self.durable.progress.submitted_epoch == batch.epoch:
            raise ConfigError(
                f"--resume: staleness is {self.staleness}, but the job of epoch {batch.epoch} was submitted with "
                "episodes of other weights: set staleness as it was until the epoch is complete"
            )
        if not self.durable.may_be_submitted(batch.epoch):  # those that the teacher did not score are played again
            finished = [episode for episode in finished if episode.reason is not DropReason.TEACHER_ERROR]
        journaled = {episode.key for episode in finished}
        vocab_size = served.vocab_size if served is not None else None
        plan = replace(plan, finished=finished, vocab_size=vocab_size, teacher=self.teacher)
        if self.staleness and self.pinned and served is not None:
            plan = replace(plan, options=replace(plan.options, sampled_from=(served.base_url, served.model)))

        ended, is_next_waiting = 0, self.staleness > 0
        if plan.budget is not None:
            batch.spending = Spending.of(plan.budget, len(plan.members))
            self._note_spending(batch)

        def check_begun() -> None:
            planned = len(plan.members) if batch.spending is None else batch.spending.episodes
            if planned - ended <= plan.limit:
                batch.all_begun.set()

        def on_episode(episode: Episode) -> None:
            nonlocal ended
            ended += 1
            batch.rows[plan.group_of.get(episode.key.row_id, episode.key.row_id)] += 1
            if is_next_waiting:
                check_begun()
            batch.traffic.add(episode)
            if batch.is_current:
                self.report.advance()
            else:
                batch.episodes.append(episode)
            if episode.key not in journaled and self.durable.store.keeps_token_ids:
                self.durable.store.append(files.JOURNAL, [journal_record(episode)])

        check_begun()
        groups, rows = [], plan.rows
        async with aclosing(collect(plan, self.builder, run_of(self.builder), on_episode)) as completed:
            async for group in completed:
                batch.errors.update(f"{e.reason}: {e.error}" for e in group.episodes if e.error is not None)
                if batch.spending is not None:
                    extra = len(group.episodes) + group.saved if group.replaced_by is not None else 0
                    batch.spending.add(group.saved, extra)
                    check_begun()
                    self._note_spending(batch)
                batch.held.append((group, rows.get(group.row_id) or rows.get(group.episodes[0].key.row_id)))
                batch.complete_groups += 1
                if batch.is_current:
                    self._write(batch)
                groups.append(group._replace(episodes=[]))  # an epoch of steps would not fit into memory
        collection = collection_of(groups, plan.run_id, batch.epoch)
        return collection.model_copy(update={"parts": plan.parts()})

    def _make_current(self, batch: _Batch) -> None:
        batch.is_current = True
        for _ in batch.episodes:
            self.report.advance()
        batch.episodes.clear()
        self._note_spending(batch)
        self._write(batch)

    def _note_spending(self, batch: _Batch) -> None:
        if batch.spending is not None and batch.is_current:
            self.report.expect(batch.spending.episodes)

    def _write(self, batch: _Batch) -> None:
        for group, row in batch.held:
            self.durable.store.append_group(group, batch.epoch, row)
            if batch.stream is not None:
                batch.stream.add(group)
        batch.held.clear()


def _is_planned(episode: Episode, plan: Plan, served: PolicyEndpoint | None) -> bool:
    """Whether an episode of an earlier process was sampled as planned: `staleness` may have been another one then."""
    versions = {episode.calls[index].policy_version for index in plan.trained.of(episode)}
    return served is None or served.version is None or versions <= {served.version, None}


def pinned(served: PolicyEndpoint, version: int | None) -> PolicyEndpoint:
    """The endpoint as that of one version, whose name stays when newer ones are served."""
    weights = served.weights if version == served.version else None
    return replace(served, model=f"{served.model}@{version}", version=version, weights=weights)
