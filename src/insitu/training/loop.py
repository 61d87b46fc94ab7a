"""The loop of the built-in trainers: collects, trains and validates, epoch by epoch."""

import asyncio
import logging
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from insitu import __version__
from insitu.advantages.credit import credit_by_function, credited_calls
from insitu.advantages.estimator import AdvantageEstimator, EstimatedEpoch, estimate_epoch
from insitu.algorithms.curriculum import CurriculumState, apply_curriculum
from insitu.builder import Builder
from insitu.collect.collector import Plan, collect
from insitu.collect.groups import GroupRecord, collection_of
from insitu.collect.recovery import with_recovered_calls
from insitu.collect.shared_run import UsesBuilder, builder_of_run, run_of
from insitu.config.resolved import resolved_config, without_secrets
from insitu.runs import files
from insitu.runs.records import journal_record, new_run_id
from insitu.runs.resume import ResumableRun
from insitu.runs.store import RewardPlot, RunStore
from insitu.runs.stored import provenance
from insitu.schemas.episodes import Episode
from insitu.schemas.finetuning import (
    FinetuneConfig,
    PolicyEndpoint,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryCollection,
)
from insitu.training.checks import (
    EPISODES,
    PAIRS,
    Leftovers,
    PolicyTraffic,
    check_collected,
    check_components,
    check_results,
    check_sampled,
    new_version,
)
from insitu.training.episodes_builder import EpisodesBuilder
from insitu.training.interfaces import PairTrainer, ResumableTrainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.jobs import check_completed, job_label, submit_once, wait_for_job
from insitu.training.metrics import (
    EpochResult,
    collected_metrics,
    likely_causes,
    why_no_pairs,
    without_variance,
)
from insitu.training.report import Report
from insitu.training.validation import Validation
from insitu.training.warm_up import WarmUp

logger = logging.getLogger(__name__)


class LoopTrainer(UsesBuilder, ResumableTrainer):
    """Runs each epoch: collect, select, submit, wait, record.

    Validates before the first epoch, every `interval` epochs and after the last. A subclass defines `select`, or the
    estimator that `select` uses, and names its `training.method`.
    """

    method = "grpo"

    def __init__(self, trainer_config: TrainerConfig, builder: Builder | None = None, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._given_builder = builder or builder_of_run()
        self.run_id = new_run_id()
        self.reward_history: list[dict[str, Any]] = []
        self.results: dict[int, EpochResult] = {}
        self.validation: Validation | None = None
        self._plot: RewardPlot | None = None
        self._causes: list[str] = []  # why the latest epoch that trained nothing had no variance
        self._durable = ResumableRun(self.run_id)
        self._earlier_curriculum: dict[str, Any] | None = None  # that this run's curriculum continues
        self._warm_up: WarmUp | None = None

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        await super().bind_components(trajectory_builder, trainer_adapter)
        check_components(self, self.method)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        folder = Path(run_config.output_dir)
        self.report.notes(await asyncio.to_thread(self._open_run, folder))
        if self._durable.continues:
            self.run_id, self.reward_history = self._durable.progress.run_id, [*self._durable.progress.rewards]
        self._plot = RewardPlot(folder / files.PLOT)
        self.report.note("starting the backend ...")
        await super().initialize(run_config)
        await self.trainer_adapter.check_settings()
        self.report.notes(self._durable.check_code(self._run_settings(run_config.num_epochs)))
        fresh = CurriculumState(current_percentile=self.curriculum_config.initial_percentile)
        self._curriculum_state = dict(self._durable.progress.curriculum or self._earlier_curriculum or fresh)
        if run_config.validation is not None:
            self.validation = Validation(run_config, self._builder, self.trainer_adapter, self.report, self.store)
            if self._durable.continues:
                await asyncio.to_thread(self.validation.restore, self._durable.progress)
        if self._durable.continues:
            self._durable.check_served(await self._served_version(), warms_up=self._warm_up is not None)

    def _open_run(self, folder: Path) -> list[str]:
        return self._durable.open(folder, self._builder, self._origin()["dataset"])

    async def _served_version(self) -> int | None:
        endpoint = await self.trainer_adapter.policy_endpoint()
        return endpoint.version if endpoint is not None else None

    @cached_property
    def report(self) -> Report:
        return Report(self._builder.console)

    @property
    def store(self) -> RunStore:
        return self._durable.store

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Returns the job status of each epoch that trained.

        Raises if an epoch collects no trainable episode, a job fails or leaves the weights unchanged, no epoch trained,
        or a validation failed.
        """
        if not self._durable.continues:
            await self._start_new(num_epochs)
        with self._durable.recorded_end():
            self._durable.mark_running()
            statuses = await self._run_epochs(num_epochs)
            await self._conclude(statuses)
        return statuses

    async def _start_new(self, num_epochs: int) -> None:
        self._write_run_file(num_epochs)
        before = self._earlier_curriculum["epoch"] if self._earlier_curriculum is not None else 0
        version = await self._served_version()
        await self._durable.commit(run_id=self.run_id, epochs_before=before, policy_version=version)
        await self._rehearse()

    async def resume(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Like `run`, which continues the run that `initialize` has opened."""
        return await self.run(num_epochs)

    async def _run_epochs(self, num_epochs: int) -> list[TrainingJobStatus]:
        progress = self._durable.progress
        statuses = [*progress.jobs]
        self.report.begin_run(num_epochs, progress.epoch)
        if self.validation is not None:
            await self.validation.run(0)
        if self._warm_up is not None and not progress.warmed_up:
            result = await self._warm_up.run(self.trainer_adapter, self.run_id, progress.policy_version, self.report)
            self.store.write(files.WARM_UP, result)
            await self._durable.commit(warmed_up=True, policy_version=result["policy_version"])
        for epoch in range(progress.epoch + 1, num_epochs + 1):
            try:
                status = await self._complete_epoch(epoch, num_epochs)
            except BaseException:  # reported, then re-raised
                self.report.end_run()
                self.report.note(
                    f"epoch {epoch}/{num_epochs} did not complete; results so far are in {self.store.folder}/ (the "
                    "same command with --resume continues the run)"
                )
                raise
            if status is not None:
                statuses.append(status)
            await self._durable.commit(
                epoch=epoch,
                policy_version=self.results[epoch].policy_version,
                curriculum=CurriculumState(**self._curriculum_state),
                rewards=[*self.reward_history],
                jobs=[*statuses],
            )
        self.report.end_run()
        return statuses

    async def _rehearse(self) -> None:
        with self.report.phase("playing one row before the first epoch"):
            problem = await self.trajectory_builder.rehearse(self.run_id)
        if problem is not None:
            self.report.note(problem)

    async def _complete_epoch(self, epoch: int, num_epochs: int) -> TrainingJobStatus | None:
        """Runs, records and reports one epoch, with its validation if due."""
        ref = await self.run_epoch(epoch, self.run_id)
        try:
            status = await self._wait(epoch, ref) if ref is not None else None
            if self.validation is not None and (epoch % self.validation.config.interval == 0 or epoch == num_epochs):
                record = await self.validation.run(epoch)
                self.results[epoch] = self.results[epoch].with_seconds("validate", record["seconds"])
        finally:  # record the epoch even if its job or its validation fails
            self.log_progress(epoch, self.results[epoch].metrics())
        if self._plot is not None:
            await self._plot.update(self.reward_history, self._validations)
        self.report.epoch(
            epoch, num_epochs, self.results[epoch].metrics(), PAIRS if isinstance(self, PairTrainer) else EPISODES
        )
        return status

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects the epoch's groups and submits what can be trained; None if nothing can."""
        started = time.perf_counter()
        endpoint = await self.trainer_adapter.policy_endpoint()
        if endpoint is not None and self._durable.finished(epoch):  # an earlier process may even have trained the epoch
            endpoint = replace(endpoint, version=self._durable.progress.policy_version)
        collection, leftovers = await self._collect(epoch, run_id, endpoint)
        trajectories = [t for group in collection.trajectories for t in group]
        result = self.results[epoch] = EpochResult(
            collected=self._record_rewards(epoch, run_id, collection) | leftovers._asdict(),
            trained={},
            dropped=collection.dropped,
            policy_version=endpoint.version if endpoint is not None else None,
            seconds={"collect": time.perf_counter() - started, "train": 0.0, "validate": 0.0},
        )
        check_sampled(self, collection, endpoint)
        everything = collection
        collection, advantages, reported = self.select(self.apply_curriculum_learning(collection, epoch))
        self.store.append_advantages(epoch, trajectories, collection.drop_reasons, advantages)
        state = self.get_curriculum_state() if self.curriculum_config.enabled else None
        trained = {
            "curriculum_percentile": state and state["current_percentile"],
            "curriculum_state": state and {k: v for k, v in state.items() if k != "reward_sums"},
            "filtered_trajectories": sum(map(len, collection.trajectories)),
            "filtered_groups": len(collection.trajectories),
            "credit_by_function": credit_by_function(credited_calls(advantages, self.run_config.target_functions)),
        }
        await asyncio.to_thread(self.store.sync)
        result = replace(result, trained=trained, dropped=collection.dropped, reported={"selection": reported})
        self.results[epoch] = result.with_seconds("collect", time.perf_counter() - started)
        if not any(collection.trajectories):
            alike = without_variance(everything, collection.drop_reasons)
            causes = why_no_pairs(collection.dropped) if isinstance(self, PairTrainer) else likely_causes(alike)
            self._causes = [str(cause) for cause in causes]
            nothing = f"epoch {epoch}: nothing to train on; every group was dropped"
            self.report.note("; ".join([nothing, *self._causes]))
            return None
        resumed = await self._durable.record_submission(epoch)
        return await submit_once(self.trainer_adapter, collection, self._durable.progress.policy_version, resumed)

    async def _collect(
        self, epoch: int, run_id: str, served: PolicyEndpoint | None
    ) -> tuple[TrajectoryCollection, Leftovers]:
        builder, traffic = self.trajectory_builder, PolicyTraffic(self._builder, served)
        errors: Counter[str] = Counter()
        with self.report.phase(f"epoch {epoch}: collecting", builder.episodes_per_epoch):
            await traffic.start()

            async def gather(plan: Plan) -> list[GroupRecord]:
                vocab_size = served.vocab_size if served is not None else None
                plan = replace(plan, vocab_size=vocab_size, finished=self._durable.finished(epoch))
                return await self._store_groups(plan, traffic, errors)

            if isinstance(builder, EpisodesBuilder) and builder.is_planned:
                plan = builder.plan(run_id, epoch)
                groups = await run_of(self._builder).watchdog.watch(lambda: gather(plan))
                collection = collection_of(groups, run_id, epoch)
            else:
                await builder.start_run(run_id, {"epoch": epoch, "gather": gather})
                collection = await builder.finalize(run_id, {"epoch": epoch})
                collection = with_recovered_calls(collection, run_id, epoch)
        leftovers, warning = await traffic.finish()
        if warning is not None:
            self.report.note(f"epoch {epoch}: {warning}")
        for error, count in errors.most_common(3):
            self.report.note(f"epoch {epoch}: {count} x {error}")
        check_collected(self, epoch, collection, errors, self.store.folder)
        return collection, leftovers

    async def _store_groups(self, plan: Plan, traffic: PolicyTraffic, errors: Counter[str]) -> list[GroupRecord]:
        """Collects the groups of an epoch and writes each to the run's files; returns them without their episodes.

        Finished episodes are journaled before their group is complete, so that a resumed run need not run them again.
        """
        journaled = {episode.key for episode in plan.finished}

        def on_episode(episode: Episode) -> None:
            self.report.advance()
            traffic.add(episode)
            if episode.key not in journaled:
                self.store.append(files.JOURNAL, [journal_record(episode)])

        stored = []
        async with aclosing(collect(plan, self._builder, run_of(self._builder), on_episode)) as groups:
            async for group in groups:
                self.store.append_group(group, plan.epoch)
                errors.update(f"{e.reason}: {e.error}" for e in group.episodes if e.error is not None)
                stored.append(group._replace(episodes=[]))  # an epoch of steps would not fit into memory
        return stored

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        number, seed = self._durable.progress.epochs_before + epoch, self._full_config.general.seed
        return apply_curriculum(trajectory_collection, self.curriculum_config, self._curriculum_state, number, seed)

    async def _wait(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        """Waits for the epoch's job, and verifies that the backend serves a new version of the weights."""
        started = time.perf_counter()
        with self.report.phase(f"epoch {epoch}: training"):
            status = await wait_for_job(self.trainer_adapter, ref, self._full_config)
        metadata = status.metadata or {}
        result = self.results[epoch].with_job(status).with_seconds("train", time.perf_counter() - started)
        self.results[epoch] = result
        if result.not_finite:
            self.report.note(f"epoch {epoch}: these metrics are not finite: {', '.join(result.not_finite)}")
        check_completed(f"epoch {epoch}: training {job_label(ref)}", status)
        version = new_version(epoch, result.policy_version, await self.trainer_adapter.policy_endpoint())
        self.results[epoch] = replace(result, policy_version=version)
        if self.validation is not None:
            self.validation.checkpoints[version] = metadata.get("checkpoint")
        return status

    def _record_rewards(self, epoch: int, run_id: str, collection: TrajectoryCollection) -> dict[str, Any]:
        statistics = {
            "epoch": epoch,
            "timestamp": datetime.now(UTC).isoformat(),
            "run_id": run_id,
            **collected_metrics(collection.trajectories),
        }
        self.reward_history.append(
            {k: statistics[k] for k in ("epoch", "avg_reward", "min_reward", "max_reward", "num_trajectories")}
        )
        return statistics

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        self.store.append(files.METRICS, [metrics])
        self.store.sync()
        self.store.write(files.REWARDS, self.reward_history)
        self.store.write(files.CURRICULUM, self.get_curriculum_state())

    def get_curriculum_state(self) -> dict[str, Any]:
        return CurriculumState(**self._curriculum_state).model_dump(mode="json")

    @property
    def _validations(self) -> list[dict[str, Any]]:
        return self.validation.history if self.validation else []

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        last = self.results[max(self.results)].metrics() if self.results else {}
        return {"run_id": run_id, "rewards": self.reward_history, "validations": self._validations, "last": last}

    async def cleanup(self) -> None:
        self.report.end_run()
        try:
            if self._plot is not None:  # also after a failed or interrupted run
                await self._plot.finish(self.reward_history, self._validations)
        finally:
            self._durable.close()

    def _write_run_file(self, num_epochs: int) -> None:
        settings = self._run_settings(num_epochs)
        source = Path(self._full_config.source)  # absolute, for commands that read the run in another directory
        file = str(source.absolute()) if source.is_file() else str(source)
        about = {"run_id": self.run_id, "insitu": __version__, "source": file}
        self.store.write(files.RUN, about | self._origin() | settings | {"config": resolved_config(self._full_config)})
        self.store.record_event("started", insitu=__version__)
        self.report.header(self.run_id, settings)

    def _origin(self) -> dict[str, Any]:
        builder = self.trajectory_builder
        return provenance(self._builder, builder.stored if isinstance(builder, EpisodesBuilder) else None)

    def _run_settings(self, num_epochs: int) -> dict[str, Any]:
        settings = {
            "epochs": num_epochs,
            "seed": self._full_config.general.seed,
            **self._selection_settings(),
            "on_failure": self.run_config.reward_function.on_failure if self.run_config.reward_function else None,
        }
        if (shape := getattr(self.trajectory_builder, "shape", None)) is not None:
            settings["reward_shape"] = shape.settings
        if training := self.trainer_adapter.training_settings():
            settings["training"] = without_secrets(training)
        return settings

    def select(self, collection: TrajectoryCollection) -> EstimatedEpoch:
        """What the epoch trains on, with its rows."""
        return estimate_epoch(collection, self._estimator())

    def _selection_settings(self) -> dict[str, Any]:
        """The settings that `select` depends on, for the header of the run."""
        return self._estimator().settings()

    def _estimator(self) -> AdvantageEstimator:
        raise NotImplementedError

    async def _conclude(self, statuses: list[TrainingJobStatus]) -> None:
        """Draws the plot and prints the summary. Raises InsituError if no epoch trained, or a validation failed."""
        history = self._validations
        if self._plot is not None:
            await self._plot.finish(self.reward_history, history)
        self.report.summary(history, self.validation.best if self.validation else None, self.store.folder)
        dropped = sum((Counter(result.dropped) for result in self.results.values()), Counter[str]())
        check_results(statuses, history, dropped, self._causes, self.store.folder)
