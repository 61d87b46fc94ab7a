"""The loop of the built-in trainers: collects, selects, trains and validates, epoch by epoch."""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from insitu import __version__
from insitu.advantages.credit import credit_by_function, credited_calls
from insitu.advantages.distillation import teacher_metrics
from insitu.advantages.estimator import AdvantageEstimator, EstimatedEpoch, estimate_epoch
from insitu.algorithms.selection import CurriculumState, apply_curriculum, apply_selection
from insitu.builder import Builder
from insitu.collect.shared_run import UsesBuilder, builder_of_run
from insitu.config.code import LoadedPart, call_with
from insitu.runs import files
from insitu.runs.records import new_run_id, training_records
from insitu.runs.resume import ResumableRun
from insitu.runs.store import RewardPlot, RunStore
from insitu.schemas.finetuning import (
    FinetuneConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryCollection,
)
from insitu.training import checks
from insitu.training.batches import BatchCollector
from insitu.training.interfaces import GroupTrainer, PairTrainer, ResumableTrainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.jobs import check_completed, job_label, submit_once, wait_for_job
from insitu.training.metrics import (
    EpochResult,
    collected_metrics,
    likely_causes,
    metrics_of_run,
    selection_metrics,
    teaches_nothing,
    untrained_causes,
    version_metrics,
    without_variance,
)
from insitu.training.report import Report, counts
from insitu.training.run_file import origin_of, run_record, settings_of
from insitu.training.streaming import EpochStream, EpochStreams
from insitu.training.teacher import Teacher
from insitu.training.validation import Validation
from insitu.training.warm_up import WarmUp

logger = logging.getLogger(__name__)


class LoopTrainer(UsesBuilder, ResumableTrainer):
    """Runs each epoch: collect, select, submit, wait, record.

    Validates before the first epoch, every `interval` epochs and after the last. A subclass defines `select`, or the
    estimator that `select` uses, and names its `training.method`.
    """

    method = "grpo"
    run_prefix = "insitu_run"
    compared: str | None = None
    """What it compares over the rows of an epoch, so that a job can compute nothing before the epoch is complete."""
    teacher: Teacher | None = None
    computes_advantages = False
    """Whether it decides what each row weighs, so that the backend must not."""

    def __init__(self, trainer_config: TrainerConfig, builder: Builder | None = None, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._given_builder = builder or builder_of_run()
        self.run_id = new_run_id(self.run_prefix)
        self.reward_history: list[dict[str, Any]] = []
        self.results: dict[int, EpochResult] = {}
        self.validation: Validation | None = None
        self._plot: RewardPlot | None = None
        self._warnings: dict[int, list[str]] = {}
        self._causes: list[str] = []  # why the latest epoch that trained nothing had no variance
        self._durable = ResumableRun(self.run_id)
        self._selections: dict[str, LoadedPart] = {}  # by their keys in the file
        self._warm_up: WarmUp | None = None
        self._last_epoch: int | None = None
        self._staleness: int = getattr(trainer_config, "staleness", 0)

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        await super().bind_components(trajectory_builder, trainer_adapter)
        self._given_builder = self._given_builder or builder_of_run() or Builder()  # outside a run: without a file
        checks.check_components(self, self.method, computes_advantages=self.computes_advantages)
        checks.check_staleness(self, self._full_config, self._staleness)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        folder = Path(run_config.output_dir)
        self.report.notes(await asyncio.to_thread(self._open_run, folder))
        self.store.keeps_token_ids = "token_ids" not in run_config.redact
        progress = self._durable.progress
        if self._durable.continues:
            self.run_id, self.reward_history = progress.run_id, [*progress.rewards]
        self._plot = RewardPlot(self.store.path / files.PLOT)
        plan = self.trainer_adapter.memory_plan()
        starting = ["starting the backend ..."] * self.trainer_adapter.starts_backend
        self.report.notes([*([plan.summary()] if plan is not None else []), *starting])
        await super().initialize(run_config)
        await self.trainer_adapter.check_settings()
        await checks.check_versions(self, self._full_config, self._staleness, pinned=self._batches.pinned)
        self.report.notes(self._durable.check_code(self._run_settings(run_config.num_epochs)))
        fresh = CurriculumState(current_percentile=self.curriculum_config.initial_percentile)
        self._curriculum_state = dict(progress.curriculum or fresh)
        if run_config.validation is not None:
            if run_config.validation.beside:
                await checks.check_beside(self.trainer_adapter)
            self.validation = Validation(run_config, self._builder, self.trainer_adapter, self.report, self.store)
            if self._durable.continues:
                await asyncio.to_thread(self.validation.restore, progress)
        if self._durable.continues:
            self._durable.check_served(await self._served_version(), warms_up=self._warm_up is not None)
            self._durable.check_versions(self._staleness if self._batches.pinned else 0)

    def _open_run(self, folder: Path) -> list[str]:
        return self._durable.open(folder, self._builder, origin_of(self._builder, self.trajectory_builder, folder))

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

        Ends early if the held-out score has not improved for as long as the `patience` of the validation. Raises if an
        epoch collects no trainable episode, a job fails or leaves the weights unchanged, no epoch trained, or a
        validation failed.
        """
        self._last_epoch = num_epochs
        with self._durable.recorded_end():
            if not self._durable.continues:
                await self._start_new(num_epochs)
            self._durable.mark_running()
            try:
                await self._before_training(num_epochs)
                while self._durable.progress.trains_further(num_epochs, self.run_config.validation):
                    await self._train_next(num_epochs)
            finally:
                if self.validation is not None:
                    await self.validation.cancel()
            progress = self._durable.progress
            self.ended_early = progress.stop is not None
            statuses = [*progress.jobs]
            await self._conclude(statuses)
        return statuses

    async def _train_next(self, num_epochs: int) -> None:
        """Trains an epoch and makes its end the point from which the run continues; begins its validation if beside."""
        epoch = self._durable.next_epoch
        status = await self._complete_epoch(epoch, num_epochs)
        validation, version = self.validation, self.results[epoch].metrics["policy_version"]
        stop = None
        if validation is not None and validation.unbeaten is not None:
            stop = validation.end_early(epoch, num_epochs, await self._batches.abandon(self.run_id))
        await self._durable.commit(
            epoch=epoch,
            policy_version=version,
            curriculum=CurriculumState(**self._curriculum_state),
            rewards=[*self.reward_history],
            jobs=[*self._durable.progress.jobs, *([status] if status is not None else [])],
            due_validation=validation.due if validation is not None else None,
            stop=stop,
            journal=self._batches.journal(),
        )
        if validation is not None:
            validation.start(version)

    async def resume(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Like `run`, which continues the run that `initialize` has opened."""
        return await self.run(num_epochs)

    async def _start_new(self, num_epochs: int) -> None:
        """Records the settings of a new run, and plays one row."""
        self._write_run_file(num_epochs)
        await self._durable.commit(run_id=self.run_id, policy_version=await self._served_version())
        with self.report.phase("playing one row before the first epoch"):
            problem = await self.trajectory_builder.rehearse(self.run_id)
        if problem is not None:
            self.report.note(problem)

    async def _before_training(self, num_epochs: int) -> None:
        """Validates the initial weights, and trains on demonstrations, unless an earlier process has done so."""
        progress = self._durable.progress
        self.report.begin_run(num_epochs, progress.epoch)
        if self.validation is not None:
            follows = progress.trains_further(num_epochs, self.run_config.validation)
            can_overlap = follows and (self._warm_up is None or progress.warmed_up)
            await self.validation.begin(progress, can_overlap=can_overlap)
        if self._warm_up is not None and not progress.warmed_up:
            result = await self._warm_up.run(self.trainer_adapter, self.run_id, progress.policy_version, self.report)
            self.store.write(files.WARM_UP, result | {"checkpoint": self.store.relative(result["checkpoint"])})
            await self._durable.commit(warmed_up=True, policy_version=result["policy_version"])

    async def _complete_epoch(self, epoch: int, num_epochs: int) -> TrainingJobStatus | None:
        """Runs, records and reports one epoch, with its validation if due."""
        self._batches.begin_epoch()
        try:
            ref = await self.run_epoch(epoch, self.run_id)
            metrics = self.results[epoch].metrics
            try:
                status = await self._wait(epoch, ref) if ref is not None else None
                if self.validation is not None:
                    seconds = await self.validation.after(epoch, is_last=epoch == num_epochs)
                    metrics["seconds"]["validate"] = seconds
            finally:  # record the epoch even if its job or its validation fails
                metrics["seconds"] |= self._batches.timings(metrics["seconds"].get("ahead", 0.0))
                self.log_progress(epoch, metrics)
            if self._plot is not None:
                await self._plot.update(self.reward_history, self._validations)
            what = checks.PAIRS if isinstance(self, PairTrainer) else checks.EPISODES
            self.report.epoch(epoch, num_epochs, metrics, what)
            return status
        except BaseException:  # reported, then re-raised
            self.report.end_run()
            self.report.note(
                f"epoch {epoch}/{num_epochs} did not complete; results so far are in {self.store.folder}/ (the "
                "same command with --resume, or call with resume=True, continues the run)"
            )
            raise

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects the epoch's groups and submits what can be trained; None if nothing can."""
        if self._streams is None:
            return await self._collect_and_submit(epoch, run_id, None)
        async with self._streams.opened(epoch, run_id, whole=self._durable.may_be_submitted(epoch)) as stream:
            return await self._collect_and_submit(epoch, run_id, stream)

    async def _collect_and_submit(self, epoch: int, run_id: str, stream: EpochStream | None) -> TrainingJobRef | None:
        started = time.perf_counter()
        endpoint = await self.trainer_adapter.policy_endpoint()
        newest = endpoint.version if endpoint is not None else None
        if endpoint is not None and self._durable.finished(epoch):  # an earlier process may even have trained the epoch
            newest = self._durable.progress.policy_version
            weights = endpoint.weights if newest == endpoint.version else None
            endpoint = replace(endpoint, version=newest, weights=weights)
        batch = await self._batches.collect(epoch, run_id, endpoint, self._last_epoch, stream)
        collected, leftovers, errors, endpoint, spending, oldest = batch
        checks.check_collected(self, epoch, collected, errors, self.store.folder)
        statistics = {"epoch": epoch, "timestamp": datetime.now(UTC).isoformat(), "run_id": run_id}
        statistics |= collected_metrics(collected.trajectories)
        rewards = ("epoch", "avg_reward", "min_reward", "max_reward", "num_trajectories")
        self.reward_history.append({key: statistics[key] for key in rewards})
        checks.check_sampled(self, collected, endpoint, oldest)
        chosen = self.apply_curriculum_learning(collected, epoch)
        collection, advantages, reported = self.select(chosen) if stream is None else await stream.finish(chosen)
        if isinstance(self, GroupTrainer):
            trained = {str(t.id) for t, _ in advantages}
            statistics["frac_reward_zero_std"] = teaches_nothing(collected, trained, collection.drop_reasons)
        untrained = untrained_causes(reported)
        for cause in untrained:
            self._warn(epoch, str(cause))
        everything, selected = (chain.from_iterable(each.trajectories) for each in (collected, collection))
        records = training_records(epoch, everything, collection.drop_reasons, advantages, selected)
        self.store.append(files.ADVANTAGES, records)
        await asyncio.to_thread(self.store.sync)
        state = self.get_curriculum_state() if self.curriculum_config.enabled else None
        credit = credit_by_function(credited_calls(advantages, self.run_config.target_functions))
        statistics |= {**leftovers._asdict(), **spending, **selection_metrics(collection, state, credit)}
        statistics |= teacher_metrics(advantages) if self.teacher is not None else {}
        seconds = {"collect": time.perf_counter() - started, "train": 0.0, "validate": 0.0}
        self.results[epoch] = EpochResult(statistics | {"policy_version": newest, "job": None, "seconds": seconds})
        if self._staleness and newest is not None:
            self.results[epoch].metrics |= version_metrics(collected.trajectories, newest)
        self.results[epoch].add_reported("selection", reported)
        if not any(collection.trajectories):
            causes = likely_causes(without_variance(collected, collection.drop_reasons))
            self._causes = [*map(str, (*causes, *untrained))]
            dropped = f"nothing to train on; every group was dropped: {counts(collection.dropped)}"
            self._warn(epoch, "; ".join([dropped, *self._causes]))
            return None
        resumed = await self._durable.record_submission(epoch)
        collection.streamed = self._streams.episodes if self._streams is not None else None
        return await submit_once(self.trainer_adapter, collection, self._durable.progress.policy_version, resumed)

    @cached_property
    def _streams(self) -> EpochStreams | None:
        if not getattr(self.trainer_config, "stream", False):
            return None
        compared = "finetuning.curriculum_learning" if self.curriculum_config.enabled else self.compared
        parts = self.trajectory_builder, self.trainer_adapter, self.select
        return EpochStreams(*parts, compared=compared or next(iter(self._selections), None))

    @cached_property
    def _batches(self) -> BatchCollector:
        validation, pinned = self.run_config.validation, getattr(self.trainer_config, "versions", "pinned") == "pinned"
        beside = validation is not None and validation.beside
        parts = self._builder, self.trajectory_builder, self._durable, self.report, self._warn
        return BatchCollector(*parts, self._staleness, pinned, shares_policy=beside, teacher=self.teacher)

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

    async def _wait(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        """Waits for the epoch's job, and verifies that the backend serves a new version of the weights."""
        started, result = time.perf_counter(), self.results[epoch]
        with self.report.phase(f"epoch {epoch}: training"), self._batches.training():
            status = await wait_for_job(self.trainer_adapter, ref, self._full_config)
        result.add_job(status)
        result.metrics["seconds"]["train"] = time.perf_counter() - started
        if result.not_finite:
            self._warn(epoch, f"these metrics are not finite: {', '.join(result.not_finite)}")
        check_completed(f"epoch {epoch}: training {job_label(ref)}", status)
        before, endpoint = result.metrics["policy_version"], await self.trainer_adapter.policy_endpoint()
        result.metrics["policy_version"] = version = checks.new_version(epoch, before, endpoint)
        is_newest = result.metrics.get("sampled_version", before) == before  # else a gap is expected
        gap = result.metrics.get("logprob_gap") if is_newest else None
        for warning in checks.job_warnings(status, gap, endpoint):
            self._warn(epoch, warning)
        if self.validation is not None:
            self.validation.checkpoints[version] = (status.metadata or {}).get("checkpoint")
        return status

    def _warn(self, epoch: int, problem: str) -> None:
        """Reports what is wrong with an epoch, and records it with its metrics."""
        self.report.note(f"epoch {epoch}: {problem}")
        self._warnings.setdefault(epoch, []).append(problem)

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        warnings = self._warnings.pop(epoch, None)
        self.store.append(files.METRICS, [metrics | ({"warnings": warnings} if warnings else {})])
        self.store.sync()
        self.store.write(files.REWARDS, self.reward_history)
        self.store.write(files.CURRICULUM, self.get_curriculum_state())

    def get_curriculum_state(self) -> dict[str, Any]:
        return CurriculumState(**self._curriculum_state).model_dump(mode="json")

    @property
    def _validations(self) -> list[dict[str, Any]]:
        return self.validation.history if self.validation else []

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return metrics_of_run(run_id, self.results, self.reward_history, self._validations)

    async def _conclude(self, statuses: list[TrainingJobStatus]) -> None:
        """Draws the plot and prints the summary. Raises InsituError if no epoch trained, or a validation failed."""
        self.report.end_run()
        if self._plot is not None:
            await self._plot.finish(self.reward_history, self._validations)
        self.report.summary(self._validations, self.validation.best if self.validation else None, self.store)
        dropped = sum((Counter(result.metrics["dropped"]) for result in self.results.values()), Counter[str]())
        checks.check_results(statuses, self._validations, dropped, self._causes, self.store.folder)

    async def cleanup(self) -> None:
        self.report.end_run()
        try:
            if self._plot is not None:  # also after a failed or interrupted run
                await self._plot.finish(self.reward_history, self._validations)
        finally:
            self._durable.close()

    def _write_run_file(self, num_epochs: int) -> None:
        settings, planned = self._run_settings(num_epochs), getattr(self.trajectory_builder, "episodes_per_epoch", None)
        origin = origin_of(self._builder, self.trajectory_builder, self.store.folder)
        self.store.write(files.RUN, run_record(self.run_id, self._full_config, planned, origin, settings))
        self.store.record_event("started", insitu=__version__)
        self.report.header(self.run_id, settings)

    def _run_settings(self, num_epochs: int) -> dict[str, Any]:
        ahead = self._batches.settings() | (self._streams.settings if self._streams is not None else {})
        return settings_of(self, self._full_config, num_epochs, self._selection_settings() | ahead)
