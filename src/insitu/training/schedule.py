"""Which epoch is collected when, and from which version of the weights."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from pydantic import Field

from insitu.builder import Builder
from insitu.capture.ledger import Activity, calls_in_flight
from insitu.collect.collector import Observer, Plan, Teach, collect_epoch, stray_completions
from insitu.collect.recovery import with_recovered_calls
from insitu.collect.shared_run import RunState
from insitu.errors import BackendError, ConfigError, PluginError, TrajectoryError, a_type
from insitu.runs import files
from insitu.runs.records import journal_record
from insitu.schemas.episodes import DropReason, Episode
from insitu.schemas.finetuning import PolicyEndpoint, TrainerConfig, TrajectoryCollection
from insitu.training.budget import KnownGroups
from insitu.training.interfaces import GroupTrainer, Trainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.metrics import collected_metrics, trained_calls, version_metrics
from insitu.training.observers import Bar, Collected, GroupFiles, Held, IdleClock, Journal, Progress
from insitu.training.run import Run
from insitu.wire.endings import end_tasks

_SHORTER = "shorter with fewer rows_per_epoch or a lower max_tokens"
_CORRECTIONS = ("truncated_importance", "token_mask", "sequence_mask")


class LoopTrainerConfig(TrainerConfig):
    """What the trainers with a job for each epoch have in common."""

    staleness: int = Field(default=0, ge=0)
    """Epochs that are collected ahead, while earlier ones are collected and trained. Their episodes are sampled from
    weights that are as many training jobs older; see [slow agents](../guides/slow-agents.md)."""
    stream: bool = False
    """Sends groups to the epoch's training job as they complete, which computes their gradients while others are still
    collected. The weights are the same, to the bit on a CPU."""
    versions: Literal["pinned", "latest"] = "pinned"
    """With `staleness`. `pinned`: the episodes of an epoch are sampled from the same version in each run. `latest`:
    calls are sampled from the newest weights, for backends that serve no others; such a run does not repeat."""

    @property
    def epochs_ahead(self) -> int:
        return self.staleness


@dataclass
class _Flight:
    """An epoch in progress. `held` has what is ahead of its turn."""

    epoch: int
    served: PolicyEndpoint | None
    plan: Plan | None
    progress: Progress
    held: Held
    task: asyncio.Task[TrajectoryCollection]


class Schedule:
    """Collects an epoch after the other; with `staleness` K, up to K epochs ahead, while earlier ones train.

    Epoch e is sampled from the version that was served after epoch e - 1 - K, whatever else is served meanwhile: a
    repeated run samples the same. If versions are not `pinned`, its calls are sampled from the newest one, which is
    that version or a later one. Its episodes begin once all of epoch e - 1 have begun. Its groups are written when it
    is its turn, each once it is complete; its episodes are journaled before, so that a resumed run need not run them
    again.
    """

    def __init__(
        self, builder: Builder, trajectory_builder: TrajectoryBuilder, run: Run, config: LoopTrainerConfig | None = None
    ) -> None:
        config = config or LoopTrainerConfig()
        self.staleness, self.pinned = config.staleness, config.versions == "pinned"
        self.teacher: Teach | None = None
        """Called with each scored episode."""
        self._builder, self._trajectory_builder, self._run = builder, trajectory_builder, run
        self._flights: dict[int, _Flight] = {}
        self._idle: IdleClock | None = None
        self._groups_in_flight: int | None = None
        self._stray_before: int | None = None

    async def collect(
        self,
        epoch: int,
        run_id: str,
        served: PolicyEndpoint | None,
        last_epoch: int | None = None,
        observers: Sequence[Observer] = (),
    ) -> Collected:
        """Collects an epoch, which observers follow. Begins those ahead of it, up to `last_epoch`."""
        stray_before, builder = self._stray_before, self._trajectory_builder
        if stray_before is None:
            stray_before = stray_completions(self._builder).total()
        shorter = _SHORTER if epoch == 1 else None
        with self._run.report.phase(f"epoch {epoch}: collecting", builder.episodes_per_epoch, shorter):
            for number in range(epoch, min(epoch + self.staleness, last_epoch or epoch) + 1):
                if number not in self._flights:
                    self._flights[number] = self._begin(number, run_id, served)
            flight = self._flights[epoch]
            try:
                files_of_epoch = GroupFiles(self._run.store, epoch, flight.plan)
                flight.held.release([Bar(self._run.report, flight.progress), files_of_epoch, *observers])
                collection = await flight.task
            except BaseException:  # re-raised
                await end_tasks(flight.task)
                raise
            finally:
                del self._flights[epoch]
        stray = stray_completions(self._builder).total()
        self._stray_before = stray if self.staleness else None  # what the next one leaves over begins here
        oldest = self._planned_version(epoch) if self.staleness and served is not None else None
        newest = served.version if served is not None else None
        ages = version_metrics(collection.trajectories, newest) if self.staleness and newest is not None else {}
        metrics = collected_metrics(collection.trajectories, flight.progress.scored)
        metrics |= {"stray_completions": stray - stray_before, **flight.progress.metrics}
        metrics |= {"policy_version": newest, **ages}
        return Collected(collection, flight.served if self.pinned else served, oldest, flight.progress, metrics)

    def settings(self) -> dict[str, Any]:
        """The settings for the header of the run; none without staleness."""
        if not self.staleness:
            return {}
        latest = {"versions": "latest", "repeats": "no: calls are sampled from the newest weights, whichever they are"}
        return {"staleness": self.staleness, **({} if self.pinned else latest)}

    def begin_epoch(self) -> None:
        """Starts the clocks of an epoch; without staleness nothing overlaps."""
        self._groups_in_flight = None
        if self._idle is None and self.staleness:
            calls_in_flight.set(calls := Activity())
            self._idle = IdleClock(calls)
        elif self._idle is not None:
            self._idle.begin()

    @contextmanager
    def training(self) -> Iterator[None]:
        """The body follows a training job, which has just been submitted."""
        if self._idle is None:
            yield
            return
        in_flight = self._run.state.episodes_in_flight
        self._groups_in_flight = sum(each.progress.incomplete_groups(in_flight) for each in self._flights.values())
        with self._idle.jobs.in_progress():
            yield

    def timings(self, trained_ahead: float = 0.0) -> dict[str, Any]:
        """What overlapped since `begin_epoch`, for the `seconds` of an epoch; nothing without staleness."""
        if self._idle is None:
            return {}
        in_flight = {} if self._groups_in_flight is None else {"groups_in_flight": self._groups_in_flight}
        return {"idle": self._idle.idle(trained_ahead), **in_flight}

    def journal(self) -> Iterator[dict[str, Any]]:
        """The journal of the epochs that are ahead."""
        for flight in self._flights.values():
            earlier = self._run.finished(flight.epoch)  # not all of them may have passed the collector again
            episodes = {episode.key.member: episode for episode in (*earlier, *flight.held.episodes)}
            yield from map(journal_record, episodes.values() if self._run.store.keeps_token_ids else [])

    async def abandon(self) -> int:
        """Cancels the epochs that are ahead; returns how many of their episodes have ended and are not trained."""
        flights, self._flights = [*self._flights.values()], {}
        await end_tasks(*(flight.task for flight in flights))
        return sum(len(flight.held.episodes) for flight in flights)

    def check(self, trainer: Trainer) -> None:
        """Raises ConfigError unless episodes are planned, earlier weights are kept, and the loss allows for them.

        Called before an earlier run is moved aside.
        """
        if not self.staleness:
            return
        key, adapter = f"{self._key}.staleness is {self.staleness}", trainer.trainer_adapter
        if not self._trajectory_builder.plans_episodes:
            kind = self._trajectory_builder.trajectory_builder_config.type
            raise ConfigError(f"{key}, but {kind} does not plan its episodes; allowed: 0")
        keep = adapter.adapter_config.keeps
        if keep is not None and "last" in keep.model_fields_set and keep.last < self.staleness + 2:
            problem = f"trainer_adapters keep.last is {keep.last}; allowed: from {self.staleness + 2}, or leave it out"
            raise ConfigError(f"{key}, but {problem}")
        adapter.correct_staleness()
        settings = {"method": "grpo", "old_logprobs": "recomputed", **adapter.training_settings()}
        is_recomputed = (settings["method"], settings["old_logprobs"]) == ("grpo", "recomputed")
        if is_recomputed and all(settings.get(name) is None for name in _CORRECTIONS):
            raise ConfigError(
                f"{key}, so episodes are of earlier weights: set training.old_logprobs to rollout or one of "
                f"{', '.join(_CORRECTIONS)}"
            )

    async def prepare(self, adapter: TrainerAdapter) -> None:
        """Has the backend keep earlier weights, and serve them if they are pinned. Raises ConfigError if it cannot."""
        if not self.staleness:
            return
        kind, endpoint = adapter.adapter_config.type, await adapter.policy_endpoint()
        key = f"{self._key}.staleness is {self.staleness}"
        if endpoint is None or endpoint.version is None:
            raise ConfigError(f"{key}, but {kind} does not say which version it serves; allowed: 0")
        if self.pinned and not endpoint.names_versions:
            raise ConfigError(
                f"{key} and versions is pinned, but {kind} serves the newest weights only here: set "
                f"{self._key}.versions to latest (such a run does not repeat), or staleness to 0"
            )
        try:
            await adapter.prepare_staleness(self.staleness, pinned=self.pinned)
        except ConfigError as error:
            raise ConfigError(f"{key}, but {error}") from None

    @property
    def pinned_epochs(self) -> int:
        """How many training jobs the weights that are sampled from are older than the newest, if they are pinned."""
        return self.staleness if self.pinned else 0

    @property
    def _key(self) -> str:
        return f"trainers.{self._builder.config.finetuning.trainer}"

    def _planned_version(self, epoch: int) -> int | None:
        """The version that was served after the last epoch before which this one does not begin."""
        return self._run.version_after(max(epoch - 1 - self.staleness, 0))

    def _begin(self, epoch: int, run_id: str, served: PolicyEndpoint | None) -> _Flight:
        if self.staleness and self.pinned and served is not None:
            served = pinned(served, self._planned_version(epoch))
        plan = self._plan(epoch, run_id, served)
        progress, held, before = Progress(plan), Held(), self._flights.get(epoch - 1)
        known = {episode.key for episode in plan.finished} if plan is not None else ()
        observers = [progress, held, Journal(self._run.store, known)]

        async def work() -> TrajectoryCollection:
            if before is not None:
                await before.progress.all_begun.wait()
            try:
                parts = self._trajectory_builder, plan, self._run.state, observers
                return await collected(*parts, run_id=run_id, epoch=epoch)
            finally:
                progress.all_begun.set()

        task = asyncio.create_task(work(), name=f"collect epoch {epoch}")
        return _Flight(epoch, served, plan, progress, held, task)

    def _plan(self, epoch: int, run_id: str, served: PolicyEndpoint | None) -> Plan | None:
        """The plan of an epoch, without the episodes that an earlier process has run as planned."""
        run = self._run
        known = KnownGroups(run.store.path / files.GROUPS, 1 + self.staleness)
        plan = self._trajectory_builder.plan(run_id, epoch, known)
        if plan is None:
            return None
        journal = run.finished(epoch)
        finished = [episode for episode in journal if not self.pinned or _is_planned(episode, plan, served)]
        if len(finished) < len(journal) and run.progress.submitted_epoch == epoch:
            raise ConfigError(
                f"--resume: staleness is {self.staleness}, but the job of epoch {epoch} was submitted with "
                "episodes of other weights: set staleness as it was until the epoch is complete"
            )
        if not run.may_be_submitted(epoch):  # those that the teacher did not score are played again
            finished = [episode for episode in finished if episode.reason is not DropReason.TEACHER_ERROR]
        vocab_size = served.vocab_size if served is not None else None
        plan = replace(plan, finished=finished, vocab_size=vocab_size, teacher=self.teacher)
        if self.staleness and self.pinned and served is not None:
            plan = replace(plan, options=replace(plan.options, sampled_from=(served.base_url, served.model)))
        return plan


async def collected(
    trajectories: TrajectoryBuilder,
    plan: Plan | None,
    run: RunState,
    observers: Sequence[Observer],
    *,
    run_id: str,
    epoch: int,
) -> TrajectoryCollection:
    """The epoch of a plan; without one, or if the builder collects itself, what its `finalize` returns.

    Trajectories that a plugin makes of messages get the calls behind them, and ids.
    """
    if plan is not None and not trajectories.collects_itself:
        return await run.watchdog.watch(partial(collect_epoch, plan, run.builder, run, observers))
    if plan is not None:
        trajectories.expect(plan, observers)
    meta = {"epoch": epoch}
    await trajectories.start_run(run_id, meta)
    collection = await trajectories.finalize(run_id, meta)
    if not isinstance(collection, TrajectoryCollection):
        name = type(trajectories).__name__
        raise PluginError(f"{name}.finalize returned {a_type(collection)}; allowed: a TrajectoryCollection")
    return with_recovered_calls(collection, run_id, epoch)


def _is_planned(episode: Episode, plan: Plan, served: PolicyEndpoint | None) -> bool:
    """Whether an episode of an earlier process was sampled as planned: `staleness` may have been another one then."""
    versions = {episode.calls[index].policy_version for index in plan.trained.of(episode)}
    return served is None or served.version is None or versions <= {served.version, None}


def pinned(served: PolicyEndpoint, version: int | None) -> PolicyEndpoint:
    """The endpoint as that of one version, whose name stays when newer ones are served."""
    weights = served.weights if version == served.version else None
    return replace(served, model=f"{served.model}@{version}", version=version, weights=weights)


def check_sampled(
    trainer: Trainer, trained: TrajectoryCollection, served: PolicyEndpoint | None, oldest: int | None = None
) -> None:
    """Raises BackendError if a call to train on was not sampled from the served policy version, and its weights.

    Versions from the `oldest` on are allowed, if it is given. If a call reports no version, its requested model name
    must match; without digests, weights are not compared.
    Recorded episodes may be of any version, except for a GroupTrainer, for which TrajectoryError is raised.
    """
    stored = trainer.trajectory_builder.stored
    if served is None or served.version is None or (stored is not None and not isinstance(trainer, GroupTrainer)):
        return
    name, first = served.model.removesuffix(f"@{served.version}"), served.version if oldest is None else oldest
    names = {name, *(f"{name}@{version}" for version in range(first, served.version + 1))}
    for trajectory in [t for group in trained.trajectories for t in group]:
        for call in trained_calls([trajectory]):
            version = call.policy_version
            is_allowed = call.model in names if version is None else first <= version <= served.version
            weights = {call.weights, served.weights} - {None} if version == served.version else set()
            if is_allowed and len(weights) < 2:
                continue
            sampled, serves = f"policy version {version}", f"version {served.version}"
            if len(weights) > 1:
                sampled, serves = f"weights {call.weights}", f"weights {served.weights} as the same version, {version}"
            if stored is not None:
                raise TrajectoryError(
                    f"the episodes of {stored.folder} cannot be trained by {trainer.trainer_config.type}, which needs "
                    f"those of the served weights: episode {trajectory.id} was sampled at {sampled}, "
                    f"the backend serves {serves}; insitu_dpo_trainer, insitu_kto_trainer and "
                    "insitu_sft_trainer train episodes of any version"
                )
            if len(weights) > 1:
                raise BackendError(
                    f"episode {trajectory.id} was sampled at {sampled}, but the backend serves {serves}: was it "
                    "started with another model or output_dir?"
                )
            raise BackendError(
                f"episode {trajectory.id}: a call to train on requested model {call.model!r} and was sampled at "
                f"policy version {version}, but the adapter trains {name!r}, which is at version "
                f"{served.version}{f' (allowed: from {first})' if first < served.version else ''}; use an llm of "
                "_type: policy"
            )
