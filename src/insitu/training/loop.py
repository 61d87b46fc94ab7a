"""The loop of the built-in trainers, read downwards: collect, select, submit, wait, validate, record."""

import time
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from insitu.algorithms.selection import CurriculumState
from insitu.builder import Builder
from insitu.errors import ConfigError
from insitu.schemas.finetuning import FinetuneConfig, TrainerConfig, TrainingJobRef, TrainingJobStatus
from insitu.training.interfaces import PairTrainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.jobs import check_completed, job_label, submit_once, wait_for_job
from insitu.training.metrics import metrics_of_run
from insitu.training.run import Stage, check_collected, settings_of
from insitu.training.schedule import LoopTrainerConfig, Schedule, check_sampled
from insitu.training.selection import EpochSelections, EstimatingTrainer
from insitu.training.validation import Validation


class LoopTrainer(EstimatingTrainer):
    """Trains one epoch after the other; validates before the first, every `interval` epochs and after the last."""

    compared: str | None = None
    """What it compares over the rows of an epoch, so that a job can compute nothing before the epoch is complete."""

    def __init__(self, trainer_config: TrainerConfig, builder: Builder | None = None, **kwargs: Any) -> None:
        super().__init__(trainer_config, builder, **kwargs)
        self._config = trainer_config if isinstance(trainer_config, LoopTrainerConfig) else LoopTrainerConfig()
        self._stages: list[Stage] = []  # before the first epoch
        self.validation: Validation | None = None
        self._num_epochs: int | None = None

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        await super().bind_components(trajectory_builder, trainer_adapter)
        self._schedule = Schedule(self._builder, trajectory_builder, self._run, self._config)
        self._schedule.check(self)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        run, adapter = self._run, self.trainer_adapter
        await run.open(self, self._builder, run_config)
        run.draws_plot()
        with run.recorded_failure(ConfigError) if run.continues else nullcontext():
            await super().initialize(run_config)
            await adapter.check_settings()
            await self._schedule.prepare(adapter)
            run.check_code(self._settings(run_config.num_epochs))
            fresh = CurriculumState(current_percentile=self.curriculum_config.initial_percentile)
            self._curriculum_state = dict(run.progress.curriculum or fresh)
            if run_config.validation is not None:
                self.validation = await Validation.opened(run_config, self._builder, adapter, run)
            ahead = self._schedule.pinned_epochs
            await run.check_served(adapter, trains_before=bool(self._stages), epochs_ahead=ahead)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Returns the job status of each epoch that trained.

        Ends early if the held-out score has not improved for as long as the `patience` of the validation. Raises if an
        epoch collects no trainable episode, a job fails or leaves the weights unchanged, no epoch trained, or a
        validation failed.
        """
        self._num_epochs, run = num_epochs, self._run
        async with run.recorded(self, self._builder, self._settings(num_epochs)):
            try:
                await self._before_epochs(num_epochs)
                while run.progress.trains_further(num_epochs, self.run_config.validation):
                    await self._next_epoch(num_epochs)
            finally:
                if self.validation is not None:
                    await self.validation.cancel()
            self.ended_early = run.progress.stop is not None
            await run.conclude(self.validation.best if self.validation is not None else None)
        return [*run.jobs]

    async def resume(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Like `run`, which continues the run that `initialize` has opened."""
        return await self.run(num_epochs)

    async def _before_epochs(self, num_epochs: int) -> None:
        """Validates the initial weights and runs the stages, unless an earlier process has done so."""
        run = self._run
        run.report.begin_run(num_epochs, run.progress.epoch)
        pending = [stage for stage in self._stages if stage.is_pending(run.progress)]
        if self.validation is not None:
            follows = run.progress.trains_further(num_epochs, self.run_config.validation)
            await self.validation.begin(run.progress, can_overlap=follows and not pending)
        for stage in pending:
            await stage.run(run, self.trainer_adapter)

    async def _next_epoch(self, num_epochs: int) -> None:
        """Trains an epoch and makes its end the point from which the run continues; begins its validation if beside."""
        run, validation, stop = self._run, self.validation, None
        epoch = run.next_epoch
        with run.reported_failure(epoch, num_epochs):
            status = await self._complete_epoch(epoch, num_epochs)
        version = run.results[epoch].metrics["policy_version"]
        if validation is not None and validation.unbeaten is not None:
            stop = validation.end_early(epoch, num_epochs, await self._schedule.abandon())
        await run.commit(
            epoch=epoch,
            policy_version=version,
            curriculum=CurriculumState(**self._curriculum_state),
            job=status,
            due_validation=validation.due if validation is not None else None,
            stop=stop,
            journal=self._schedule.journal(),
        )
        if validation is not None:
            validation.start(version)

    async def _complete_epoch(self, epoch: int, num_epochs: int) -> TrainingJobStatus | None:
        """Runs, records and reports one epoch, with its validation if due."""
        self._schedule.begin_epoch()
        ref = await self.run_epoch(epoch, self._run.id)
        metrics = self._run.results[epoch].metrics
        try:
            status = await self._wait(epoch, ref) if ref is not None else None
            if self.validation is not None:
                metrics["seconds"]["validate"] = await self.validation.after(epoch, is_last=epoch == num_epochs)
        finally:  # record the epoch even if its job or its validation fails
            metrics["seconds"] |= self._schedule.timings(metrics["seconds"].get("ahead", 0.0))
            self.log_progress(epoch, metrics)
        await self._run.draw()
        trained = "preference pairs" if isinstance(self, PairTrainer) else "episodes"
        ends = self.validation is not None and self.validation.unbeaten is not None
        self._run.report.epoch(epoch, num_epochs, metrics, trained, ends=ends)
        return status

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects the epoch's groups and submits what can be trained; None if nothing can."""
        run, started = self._run, time.perf_counter()
        whole = run.may_be_submitted(epoch)
        async with self._epoch_selections.opened(epoch, run_id, whole=whole) as selection:
            served = run.served_before(epoch, await self.trainer_adapter.policy_endpoint())
            observers = [selection, *run.watches_rewards(self, epoch)]
            collected = await self._schedule.collect(epoch, run_id, served, self._num_epochs, observers)
            run.note_errors(epoch, collected)
            check_collected(self, epoch, collected, run.store.folder)
            run.note_rewards(epoch, collected)
            check_sampled(self, collected.collection, collected.served, collected.oldest)
            estimated = await selection.finish(self.apply_curriculum_learning(collected.collection, epoch))
            await run.record_selection(self, epoch, collected, estimated, time.perf_counter() - started)
            if not any(estimated.collection.trajectories):
                return None
            resumed = await run.record_submission(epoch)
            return await submit_once(self.trainer_adapter, estimated.collection, run.progress.policy_version, resumed)

    @cached_property
    def _epoch_selections(self) -> EpochSelections:
        compared = "finetuning.curriculum_learning" if self.curriculum_config.enabled else self.compared
        parts = self.trajectory_builder, self.trainer_adapter, self.select
        return EpochSelections(*parts, self._config, compared=compared or next(iter(self._selections), None))

    def _settings(self, num_epochs: int) -> dict[str, Any]:
        own = self._selection_settings() | self._schedule.settings() | self._epoch_selections.settings
        return settings_of(self, self._full_config, num_epochs, own)

    async def _wait(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        """Waits for the epoch's job, and verifies that the backend serves a new version of the weights."""
        run, adapter, started = self._run, self.trainer_adapter, time.perf_counter()
        with run.report.phase(f"epoch {epoch}: training"), self._schedule.training():
            status = await wait_for_job(adapter, ref, run.state.watchdog)
        run.results[epoch].add_job(status, time.perf_counter() - started)
        check_completed(f"epoch {epoch}: training {job_label(ref)}", status)
        version = run.note_version(epoch, status, await adapter.policy_endpoint())
        if self.validation is not None:
            self.validation.checkpoints[version] = (status.metadata or {}).get("checkpoint")
        return status

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        self._run.record(epoch, metrics, self.get_curriculum_state())

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return metrics_of_run(run_id, self._run.results, self._run.rewards, self._run.validations)

    async def cleanup(self) -> None:
        try:
            await self._schedule.abandon()
        finally:
            await super().cleanup()
