"""The trainer for NeMo Customizer: collects preference pairs, submits one job on all of them, and waits for it.

Its files besides those of any run: `data_collection_progress.jsonl` (a line per collection), `collection_history.json`
(the same as a list), `pairs.jsonl` (the pairs that are trained), `submission.json` (the state of the job) and
`final_metrics.json`. From `pairs.jsonl` and `submission.json`, a run whose process was killed continues: it is started
again by the same command, submits the same pairs if no job was submitted, and waits for the job otherwise.
"""

import asyncio
import time
import uuid
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from insitu.builder import Builder
from insitu.config.resolved import differences, without_secrets
from insitu.disk.files import load_json
from insitu.errors import ConfigError, InsituError, JobFailed, Stalled, TrajectoryError, describe_error
from insitu.integrations.customizer.config import NeMoCustomizerTrainerConfig
from insitu.integrations.customizer.records import single_pairs
from insitu.integrations.customizer.submission import (
    Submission,
    pair_records,
    read_pairs,
    read_submission,
)
from insitu.integrations.customizer.trainer_adapter import NeMoCustomizerTrainerAdapter
from insitu.preferences.selection import distinct_pairs, sampled_pairs
from insitu.runs.files import COLLECTION_HISTORY, COLLECTIONS, FINAL_METRICS, PAIRS, SUBMISSION
from insitu.runs.store import OUTPUT_DIR, RunStore
from insitu.schemas.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from insitu.training.interfaces import PairTrainer, SingleJobTrainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.jobs import wait_for_job
from insitu.training.loop import LoopTrainer
from insitu.training.metrics import collected_metrics
from insitu.training.report import counts

_ENDED_BADLY = (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)


class NeMoCustomizerTrainer(LoopTrainer, PairTrainer, SingleJobTrainer):
    """Runs `num_runs` collections, then one customization job on their pairs."""

    method = "dpo"

    def __init__(
        self, trainer_config: NeMoCustomizerTrainerConfig, builder: Builder | None = None, **kwargs: Any
    ) -> None:
        super().__init__(trainer_config, builder, **kwargs)
        self.customizer_config = trainer_config
        self.run_id = f"customizer_run_{uuid.uuid4().hex[:8]}"
        self.collection_history: list[dict[str, Any]] = []
        self.final_metrics: dict[str, Any] = {}
        self._submission: Submission | None = None

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        await super().bind_components(trajectory_builder, trainer_adapter)
        finetuning = self._full_config.finetuning
        where = f"trainers.{finetuning.trainer}"
        if finetuning.curriculum_learning.enabled:
            raise ConfigError(
                f"finetuning.curriculum_learning: {self.trainer_config.type} trains once, on all pairs; set enabled: "
                "false"
            )
        if not self.customizer_config.wait_for_completion and getattr(
            trainer_adapter.adapter_config, "deploy_on_completion", False
        ):
            raise ConfigError(
                f"{where}.wait_for_completion is false, but the adapter's deploy_on_completion is true: a model is "
                "deployed by the run that waits for its job"
            )

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Takes over the unfinished run in `output_dir`, if there is one; moves any other run aside.

        With `--resume`, a completed run is left as it is.
        """
        self._submission = await asyncio.to_thread(_to_continue, run_config)
        await super().initialize(run_config)
        self._plot = None  # its rewards are those of epochs
        if run_config.num_epochs > 1:
            self.report.note(
                f"finetuning.num_epochs is {run_config.num_epochs}, but {self.trainer_config.type} trains once; see "
                "num_runs, and the hyperparameter epochs"
            )
        if self._submission is not None and not self._submission.is_completed:
            await self._take_over(self._submission, Path(run_config.output_dir))

    def _open_run(self, folder: Path) -> list[str]:
        if self._submission is None:
            return self._durable.open_new(folder, self._full_config)
        self._durable.attach(RunStore(folder))
        return []

    async def _take_over(self, submission: Submission, folder: Path) -> None:
        """Goes on with an unfinished run if it can be; otherwise moves it aside."""
        different = differences(submission.settings, self._job_settings())
        job = await self._find_job(submission)
        ended = job is not None and job.status in _ENDED_BADLY
        if ended or (job is None and not all(key.startswith("training.") for key in different)):
            await self._set_aside(submission, job, folder)
            return
        if job is not None and different:
            changes = ", ".join(f"{key} was {then!r} and is {now!r}" for key, (then, now) in different.items())
            raise ConfigError(
                f"{OUTPUT_DIR}: {folder} holds the unfinished run {submission.run_id} with job {_job_id(job)}, and "
                f"other settings: {changes}; set these as they were, move the folder away, or use another one"
            )
        self.run_id = submission.run_id
        self._submission = submission.model_copy(update={"settings": self._job_settings()})
        history = await asyncio.to_thread((folder / COLLECTION_HISTORY).read_bytes)
        self.collection_history = load_json(history)
        state = f"job {_job_id(job)}" if job is not None else "its pairs have been collected"
        self.report.note(f"run {self.run_id} continues: {state}")

    async def _find_job(self, submission: Submission) -> TrainingJobStatus | None:
        """The state of the job of an unfinished run; FAILED if the service no longer has it."""
        adapter, ref = self.trainer_adapter, submission.job
        if ref is None and isinstance(adapter, NeMoCustomizerTrainerAdapter):
            ref = await adapter.find(submission.run_id, 1, None)  # the process may have been killed after it submitted
        if ref is None:
            return None
        try:
            return await adapter.status(ref)
        except JobFailed as error:
            return TrainingJobStatus(
                run_id=ref.run_id,
                backend=ref.backend,
                status=TrainingStatusEnum.FAILED,
                message=str(error),
                metadata=ref.metadata,
            )

    async def _set_aside(self, submission: Submission, job: TrainingJobStatus | None, folder: Path) -> None:
        state = "its pairs were collected with other settings"
        if job is not None:
            state = f"job {_job_id(job)} is {job.status.value}: {job.message or 'no reason given'}"
        self.report.note(f"the unfinished run {submission.run_id} does not continue: {state}")
        self._record(submission, phase="ended", status=job.status if job is not None else None)
        self.store.close()
        self._submission = None
        for note in await asyncio.to_thread(self._durable.open_new, folder, self._full_config):
            self.report.note(note)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Returns the status of the one job: its last, or its first with `wait_for_completion: false`.

        Raises if nothing was collected, or if the job or the deployment fails.
        """
        if self._submission is not None and self._submission.is_completed and (job := self._submission.job) is not None:
            self.report.note(f"run {job.run_id} is complete: job {_job_id(job)} has trained its pairs")
            return [TrainingJobStatus(**job.model_dump(), status=TrainingStatusEnum.COMPLETED, progress=100.0)]
        started = time.perf_counter()
        status: TrainingJobStatus | None = None
        try:
            if self._submission is None:
                self._write_run_file(num_epochs)
                await self._rehearse()
            ref = await self.run_epoch(1, self.run_id)
            status = await self._status_of(ref)
        except BaseException as error:  # recorded, then re-raised
            self._write_final_metrics(time.perf_counter() - started, status, describe_error(error))
            self.report.end()
            self.report.note(f"the run did not complete; results so far are in {self.store.folder}/")
            raise
        self._write_final_metrics(time.perf_counter() - started, status, None)
        metadata = status.metadata or {}
        self.report.note(f"job {_job_id(status)} is {status.status.value}: model {metadata.get('output_model')}")
        self.report.note(f"files: {self.store.folder}/")
        return [status]

    async def resume(self, num_epochs: int) -> list[TrainingJobStatus]:
        return await self.run(num_epochs)

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        """Collects the pairs, unless this run has them already, and submits the job."""
        if self._submission is None:
            collected = await self._collect_all(run_id)
            collection = self._selected(collected)
            self.store.append(PAIRS, pair_records(collection))
            await asyncio.to_thread(self.store.sync)
            sizes = {"collected": _size(collected), "trained": _size(collection)}
            submission = Submission(
                run_id=run_id, settings=self._job_settings(), pairs=sizes, dropped=collection.dropped
            )
            self._record(submission, phase="collected")
        else:
            submission = self._submission
            collection = await asyncio.to_thread(read_pairs, self.store.folder / PAIRS, run_id)
        if submission.job is not None:
            return submission.job
        self.report.begin("submitting the job", None)
        try:
            ref = await self.trainer_adapter.submit(collection)
        except asyncio.CancelledError:
            self._record_canceled()
            raise
        except TrajectoryError:  # these pairs cannot be trained
            self._record(submission, phase="ended")
            raise
        finally:
            self.report.end()
        self._record(submission, phase="submitted", job=ref)
        metadata = ref.metadata or {}
        self.report.note(f"job {_job_id(ref)} trains on dataset {metadata.get('dataset')}")
        return ref

    async def _collect_all(self, run_id: str) -> TrajectoryCollection:
        """The pairs of all collections. Raises TrajectoryError if none succeeded."""
        collections: list[TrajectoryCollection] = []
        last_error: BaseException | None = None
        runs = self.customizer_config.num_runs
        for number in range(1, runs + 1):
            started = time.perf_counter()
            try:
                collection, _ = await self._collect(number, run_id, await self.trainer_adapter.policy_endpoint())
                collection = single_pairs(collection)
            except Exception as error:  # a plugin's builder or agent may raise anything
                self.log_progress(number, {"error": describe_error(error), "seconds": time.perf_counter() - started})
                if not self.customizer_config.continue_on_collection_error or isinstance(error, ConfigError | Stalled):
                    raise
                last_error = error
                self.report.note(f"collection {number}/{runs} FAILED: {describe_error(error)}")
                continue
            collections.append(collection)
            metrics = collected_metrics(collection.trajectories)
            self.log_progress(
                number, {**metrics, "dropped": collection.dropped, "seconds": time.perf_counter() - started}
            )
            dropped = f"; dropped: {counts(collection.dropped)}" if collection.dropped else ""
            self.report.note(
                f"collection {number}/{runs}: {metrics['num_trajectories']} pairs, mean reward "
                f"{metrics['avg_reward']:.4g}{dropped}"
            )
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
        config, seed = self.customizer_config, self._full_config.general.seed
        chosen = distinct_pairs(collected) if config.deduplicate_pairs else collected
        chosen = chosen if config.max_pairs is None else sampled_pairs(chosen, config.max_pairs, seed)
        left_out = Counter(chosen.dropped) - Counter(collected.dropped)
        reasons = f"; left out: {counts(left_out)}" if left_out else ""
        self.report.note(f"training on {_size(chosen)} of {_size(collected)} pairs{reasons}")
        return chosen

    async def _status_of(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Waits for the job, if configured. Raises JobFailed if it has failed or was canceled."""
        assert self._submission is not None
        if not self.customizer_config.wait_for_completion:
            status = await self.trainer_adapter.status(ref)
        else:
            status = await self._waited_for(ref)
        if status.status not in (TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING):
            self._record(self._submission, phase="ended", status=status.status)
        if status.status in _ENDED_BADLY:
            raise JobFailed(f"job {_job_id(ref)} ended as {status.status.value}: {status.message or 'no reason given'}")
        return status

    async def _waited_for(self, ref: TrainingJobRef) -> TrainingJobStatus:
        assert self._submission is not None
        adapter = self.trainer_adapter
        if isinstance(adapter, NeMoCustomizerTrainerAdapter):
            adapter.on_progress = self.report.note
        self.report.begin(f"waiting for job {_job_id(ref)}", None)
        try:
            return await wait_for_job(adapter, ref, self._full_config)
        except (asyncio.CancelledError, Stalled):
            self._record_canceled()
            raise
        except JobFailed:
            self._record(self._submission, phase="ended", status=TrainingStatusEnum.FAILED)
            raise
        except InsituError as error:
            self.report.note(f"{error}\nthe same command continues from here")
            raise
        finally:
            self.report.end()

    def _record_canceled(self) -> None:
        """After an interruption, if the adapter has canceled the job; the next run waits for one that continues."""
        adapter, submission = self.trainer_adapter, self._submission
        if submission is not None and isinstance(adapter, NeMoCustomizerTrainerAdapter) and adapter.canceled_jobs:
            self._record(submission, phase="ended", status=TrainingStatusEnum.CANCELED)

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Records a collection."""
        record = {"run": epoch, "run_id": self.run_id, "timestamp": datetime.now(UTC).isoformat(), **metrics}
        self.collection_history.append(record)
        self.store.append(COLLECTIONS, [record])
        self.store.sync()
        self.store.write(COLLECTION_HISTORY, self.collection_history)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id, "collections": self.collection_history, "final": self.final_metrics}

    def _job_settings(self) -> dict[str, Any]:
        """What must be the same for a run to continue."""
        selection = self.customizer_config.model_dump(include={"num_runs", "deduplicate_pairs", "max_pairs"})
        seed = self._full_config.general.seed
        return {"seed": seed, **selection, "training": without_secrets(self.trainer_adapter.training_settings())}

    def _run_settings(self, num_epochs: int) -> dict[str, Any]:
        return self._job_settings()

    def _record(self, submission: Submission, **changes: Any) -> None:
        self._submission = submission.model_copy(update=changes)
        self.store.write(SUBMISSION, self._submission.model_dump(mode="json"))

    def _write_final_metrics(self, seconds: float, status: TrainingJobStatus | None, error: str | None) -> None:
        submission = self._submission
        ref = submission.job if submission is not None else None
        ended = (status.status if status is not None else None) or (submission.status if submission else None)
        self.final_metrics = {
            "run_id": self.run_id,
            "status": ended.value if ended is not None else None,
            "error": error,
            "collections": len(self.collection_history),
            "collections_failed": sum("error" in record for record in self.collection_history),
            "pairs": submission.pairs if submission is not None else None,
            "dropped": submission.dropped if submission is not None else {},
            "job": (status.metadata if status is not None else None) or (ref.metadata if ref is not None else None),
            "message": status.message if status is not None else None,
            "seconds": seconds,
        }
        self.store.write(FINAL_METRICS, self.final_metrics)


def _to_continue(run_config: FinetuneConfig) -> Submission | None:
    """The submission of the run in `output_dir` if its job may not have ended; with `--resume`, also if it completed.

    Raises ConfigError if `--resume` names a run of which there is nothing to continue.
    """
    folder, asked = Path(run_config.output_dir), run_config.run_configuration
    submission, resume = read_submission(folder), asked.resume if asked is not None else False
    if submission is not None and (submission.phase != "ended" or (resume and submission.is_completed)):
        return submission
    if isinstance(resume, Path):
        problem = "had not collected all its pairs" if submission is None else "had a job that failed or was canceled"
        raise ConfigError(f"--resume: the run in {folder} {problem}: start another one, without --resume")
    return None


def _size(collection: TrajectoryCollection) -> int:
    return sum(map(len, collection.trajectories))


def _job_id(of: TrainingJobRef | TrainingJobStatus) -> str:
    return str((of.metadata or {}).get("job_id", of.run_id))
