"""The trainer for NeMo Customizer: collects preference pairs, submits one job on all of them, and waits for it.

Its files besides those of any run: `data_collection_progress.jsonl` (a line per collection), `collection_history.json`
(the same as a list), `pairs.jsonl` (the pairs that are trained) and `final_metrics.json`. With `--resume`, a run whose
pairs are collected continues with them: it waits for the job that was submitted, or submits one.
"""

import asyncio
import time
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

from insitu.disk.json_files import read_object
from insitu.errors import ConfigError, JobFailed, Stalled, TrajectoryError, describe_error
from insitu.integrations.customizer.config import NeMoCustomizerTrainerAdapterConfig, NeMoCustomizerTrainerConfig
from insitu.integrations.customizer.records import pair_records, read_pairs, single_pairs
from insitu.preferences.selection import chosen_pairs
from insitu.registry import register_trainer
from insitu.runs.files import COLLECTION_HISTORY, COLLECTIONS, FINAL_METRICS, PAIRS
from insitu.schemas.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from insitu.training.interfaces import PairTrainer, SingleJobTrainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.jobs import UNFINISHED, check_completed, job_label, status_of, submit_once, wait_for_job
from insitu.training.metrics import collected_metrics
from insitu.training.report import counts
from insitu.training.run import RunTrainer, check_collected, settings_of
from insitu.training.schedule import Schedule
from insitu.wire.http_format import load_json


@register_trainer(config_type=NeMoCustomizerTrainerConfig)
class NeMoCustomizerTrainer(RunTrainer, PairTrainer, SingleJobTrainer):
    """Runs `num_runs` collections, then one customization job on their pairs."""

    method = "dpo"
    run_prefix = "customizer_run"
    trainer_config: NeMoCustomizerTrainerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.collection_history: list[dict[str, Any]] = []
        self.final_metrics: dict[str, Any] = {}
        self._submits_again = False
        """Whether the pairs are submitted again if their job was canceled."""

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        await super().bind_components(trajectory_builder, trainer_adapter)
        self._schedule = Schedule(self._builder, trajectory_builder, self._run)
        finetuning = self._full_config.finetuning
        if finetuning.curriculum_learning.enabled:
            problem = f"{self.trainer_config.type} trains once, on all pairs; set enabled: false"
            raise ConfigError(f"finetuning.curriculum_learning: {problem}")
        adapter = trainer_adapter.adapter_config
        deploys = isinstance(adapter, NeMoCustomizerTrainerAdapterConfig) and adapter.deploy_on_completion
        if deploys and not self.trainer_config.wait_for_completion:
            problem = "is false, but the adapter's deploy_on_completion is true"
            reason = "a model is deployed by the run that waits for its job"
            raise ConfigError(f"trainers.{finetuning.trainer}.wait_for_completion {problem}: {reason}")

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await self._run.open(self, self._builder, run_config)
        with self._run.recorded_failure(ConfigError) if self._run.continues else nullcontext():
            await self._prepare(run_config)

    async def _prepare(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        await self.trainer_adapter.check_settings()
        self._run.check_code(self._settings())
        if run_config.num_epochs > 1:
            problem = f"finetuning.num_epochs is {run_config.num_epochs}, but {self.trainer_config.type} trains once"
            self._run.report.note(f"{problem}; see num_runs, and the hyperparameter epochs")
        if self._run.progress.phase is not None:
            self.final_metrics = await asyncio.to_thread(read_object, self._run.store.folder / FINAL_METRICS)
            history = self._run.store.folder / COLLECTION_HISTORY
            self.collection_history = load_json(await asyncio.to_thread(history.read_bytes))
            is_forced = self._builder.request is not None and self._builder.request.force
            self._submits_again = is_forced or self.final_metrics.get("submits_again") is True

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Returns the status of the one job: its last, or its first with `wait_for_completion: false`.

        Raises if nothing was collected, or if the job or the deployment fails.
        """
        if jobs := self._run.jobs:
            self._run.report.note(f"run {self._run.id} is complete: {job_label(jobs[0])} has trained its pairs")
            return [*jobs]
        started, status = time.perf_counter(), None
        try:
            async with self._run.recorded(self, self._builder, self._settings()):
                status = await self._status_of(await self.run_epoch(1, self._run.id))
        except BaseException as error:  # recorded, then re-raised
            if not isinstance(error, Exception) and self.final_metrics.get("status") in (None, "canceled"):
                self.final_metrics["submits_again"] = True  # the run has canceled the job itself
            self._write_final_metrics(seconds=time.perf_counter() - started, error=describe_error(error))
            where = f"{self._run.store.folder}/ (the same command with --resume continues the run)"
            self._run.report.note(f"the run did not complete; results so far are in {where}")
            raise
        self._write_final_metrics(seconds=time.perf_counter() - started)
        model = (status.metadata or {}).get("output_model")
        self._run.report.note(f"{job_label(status)} is {status.status.value}: model {model}")
        self._run.report.note(f"files: {self._run.store.folder}/")
        return [status]

    async def resume(self, num_epochs: int) -> list[TrainingJobStatus]:
        return await self.run(num_epochs)

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        """Collects the pairs, unless this run has them already, and submits the job."""
        resumed = self._run.progress.phase is not None
        if resumed:
            collection = await asyncio.to_thread(read_pairs, self._run.store.folder, run_id)
            self._run.report.note(f"run {run_id} continues: its pairs have been collected")
        else:
            collected = await self._collect_all(run_id)
            collection = self._selected(collected)
            self._run.store.append(PAIRS, pair_records(collection))
            sizes = {"collected": _size(collected), "trained": _size(collection)}
            self._write_final_metrics(pairs=sizes, dropped=collection.dropped)
            await self._run.commit(phase="collected")
        with self._run.report.phase("submitting the job"):
            ref = await submit_once(self.trainer_adapter, collection, None, resumed and not self._submits_again)
        self._write_final_metrics(job=ref.metadata, submits_again=False)
        self._run.enter("submitted")
        self._run.report.note(f"{job_label(ref)} trains on dataset {(ref.metadata or {}).get('dataset')}")
        return ref

    async def _collect_all(self, run_id: str) -> TrajectoryCollection:
        """The pairs of all collections. Raises TrajectoryError if none succeeded."""
        collections: list[TrajectoryCollection] = []
        last_error: BaseException | None = None
        runs = self.trainer_config.num_runs
        for number in range(1, runs + 1):
            started = time.perf_counter()
            try:
                collected = await self._schedule.collect(number, run_id, await self.trainer_adapter.policy_endpoint())
                self._run.note_errors(number, collected)
                check_collected(self, number, collected, self._run.store.folder)
                collection = single_pairs(collected.collection)
            except Exception as error:  # a plugin's builder or agent may raise anything
                self.log_progress(number, {"error": describe_error(error), "seconds": time.perf_counter() - started})
                if not self.trainer_config.continue_on_collection_error or isinstance(error, ConfigError | Stalled):
                    raise
                last_error = error
                self._run.report.note(f"collection {number}/{runs} FAILED: {describe_error(error)}")
                continue
            collections.append(collection)
            metrics = collected_metrics(collection.trajectories, collected.progress.scored)
            result = {**metrics, "dropped": collection.dropped}
            self.log_progress(number, result | {"seconds": time.perf_counter() - started})
            dropped = f"; dropped: {counts(collection.dropped)}" if collection.dropped else ""
            pairs = f"{metrics['num_trajectories']} pairs, mean reward {metrics['avg_reward']:.4g}"
            self._run.report.note(f"collection {number}/{runs}: {pairs}{dropped}")
        if not collections:
            raise TrajectoryError(f"all {runs} collections failed; the last: {last_error}") from last_error
        return TrajectoryCollection(
            trajectories=[group for collection in collections for group in collection.trajectories],
            run_id=run_id,
            epoch=1,
            dropped=dict(sum((Counter(collection.dropped) for collection in collections), Counter[str]())),
        )

    def _selected(self, collected: TrajectoryCollection) -> TrajectoryCollection:
        """The pairs to train on."""
        config, seed = self.trainer_config, self._full_config.general.seed
        distinct, count = config.deduplicate_pairs, config.max_pairs
        chosen = chosen_pairs(collected, distinct=distinct, count=count, seed=seed, as_text=True)
        left_out = Counter(chosen.dropped) - Counter(collected.dropped)
        reasons = f"; left out: {counts(left_out)}" if left_out else ""
        self._run.report.note(f"training on {_size(chosen)} of {_size(collected)} pairs{reasons}")
        return chosen

    async def _status_of(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Waits for the job, if configured. Raises JobFailed if it has failed or was canceled."""
        if not self.trainer_config.wait_for_completion:
            status = await status_of(self.trainer_adapter, ref)
        else:
            with self._run.report.phase(f"waiting for {job_label(ref)}"):
                status = await wait_for_job(self.trainer_adapter, ref, self._run.state.watchdog, self._note)
        self._write_final_metrics(status=status.status.value, job=status.metadata, message=status.message)
        if status.status is TrainingStatusEnum.CANCELED:
            problem = f"{job_label(status)} ended as canceled: {status.message or 'no reason given'}"
            raise JobFailed(f"{problem}; --resume with --force submits its pairs again")
        if status.status not in UNFINISHED:
            check_completed(job_label(ref), status)
            await self._run.commit(epoch=1, job=status)
        return status

    def _note(self, status: TrainingJobStatus) -> None:
        """Reports a change of the job's status."""
        percent = None if status.progress is None else f"{status.progress:.0f} %"
        line = ", ".join(filter(None, (status.status.value, percent, status.message)))
        self._run.report.note(f"{job_label(status)}: {line}")
        self._write_final_metrics(status=status.status.value)

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Records a collection."""
        record = {"run": epoch, "run_id": self._run.id, "timestamp": datetime.now(UTC).isoformat(), **metrics}
        self.collection_history.append(record)
        self._run.store.append(COLLECTIONS, [record])
        self._run.store.sync()
        self._run.store.write(COLLECTION_HISTORY, self.collection_history)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id, "collections": self.collection_history, "final": self.final_metrics}

    async def cleanup(self) -> None:
        try:
            await self._schedule.abandon()
        finally:
            await super().cleanup()

    def _settings(self) -> dict[str, Any]:
        own = self.trainer_config.model_dump(include={"num_runs", "deduplicate_pairs", "max_pairs"})
        settings = settings_of(self, self._full_config, 1, own)
        return {name: value for name, value in settings.items() if name not in ("epochs", "on_failure")}

    def _write_final_metrics(self, **metrics: Any) -> None:
        """Updates `final_metrics.json` with what has become known of the run."""
        unknown = dict.fromkeys(("status", "pairs", "job", "message", "seconds"))
        failed = sum("error" in record for record in self.collection_history)
        collections = {"collections": len(self.collection_history), "collections_failed": failed}
        first: dict[str, Any] = {"run_id": self._run.id, **unknown, "dropped": {}, "submits_again": False}
        self.final_metrics = {**first, **self.final_metrics, "error": None, **metrics, **collections}
        self._run.store.write(FINAL_METRICS, self.final_metrics)


def _size(collection: TrajectoryCollection) -> int:
    return sum(map(len, collection.trajectories))
