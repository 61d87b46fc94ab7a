"""The training queue: jobs run one at a time, a repeated key returns the job, and old checkpoints are deleted."""

import asyncio
import contextlib
import functools
import logging
import os
import uuid
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from insitu.backend.compute import ComputeThread, Parked
from insitu.backend.inference.sampler import Sampler, WeightVersion
from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner, TrainedVersion
from insitu.backend.learner.optimizer_loop import Progress
from insitu.backend.learner.parts import PartedRows
from insitu.backend.learner.policy import served_bytes
from insitu.backend.model import free_memory
from insitu.disk.files import readable_bytes, write_file
from insitu.errors import BackendError, InsituError, JobFailed, RequestRefused, format_error
from insitu.schemas.training_jobs import JobState, Retention, TrainingSettings

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 15.0
"""`TrainingJob.events` yields None after this long without an event, so that the caller can send a keep-alive."""
VERSIONS_SHARE = 0.5
"""Share of the free memory for the versions that are served; the rest is for training and for the caches of prompts."""


@dataclass(eq=False)
class TrainingJob:
    """A training job: its current `state` and `history`, the states emitted as events."""

    state: JobState
    learner: Learner
    rows: PartedRows
    method: str = "grpo"
    keep: Retention | None = None
    steps: Generator[Any, None, None] | None = None
    """The generator that trains it, once it has started."""
    task: asyncio.Task[None] | None = None
    expiry: asyncio.Task[None] | None = None  # of an open job
    reason: str | None = None  # why it is canceled, unless its client has asked for it
    was_closed: bool = False
    diverged: bool = False
    """Whether the job failed because of its rows or settings: they made the loss or a weight infinite."""
    recording: bool = False
    """Whether new weights are being published and the outcome written to disk: it is too late to cancel."""
    unserved: TrainedVersion | None = None
    """The result of a failed job that could not be served: the same job sent again serves it."""

    def __post_init__(self) -> None:
        self.history = [self.state]
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return not self.rows.closed and not self.ended

    @property
    def ended(self) -> bool:
        return self.state.status in ("completed", "failed", "canceled")

    def differs_from(self, digest: str) -> bool:
        """Whether it is known to have been submitted with other settings or rows."""
        return self.state.digest not in (None, digest)

    def update(self, *, emit: bool = True, **changes: Any) -> None:
        """Changes the state; with `emit`, also appends it to `history` and wakes `events()`."""
        self.state = self.state.model_copy(update=changes)
        if emit:
            self.history.append(self.state)
            self._changed.set()
            self._changed = asyncio.Event()

    async def events(self) -> AsyncIterator[JobState | None]:
        """Yields the states in `history` until the job ends; None after each `HEARTBEAT_SECONDS` without a new one."""
        next_index = 0
        while True:
            changed = self._changed
            while next_index < len(self.history):
                yield self.history[next_index]
                next_index += 1
            if self.ended:
                return
            try:
                await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS)
            except TimeoutError:
                yield None


def completed(trained: TrainedVersion) -> dict[str, Any]:
    """The state of a completed job."""
    return {
        "digest": trained.job.digest,
        "status": "completed",
        "progress": 100.0,
        "policy_version": trained.version,
        "checkpoint": str(trained.checkpoint),
        "metrics": trained.job.metrics,
    }


def _earlier(trained: TrainedVersion) -> JobState:
    """The state of a job of an earlier process."""
    return JobState(**trained.job.model_dump(include={"id", "key"}), **completed(trained))


@dataclass(eq=False)
class TrainingQueue:
    """The training jobs of this process, and those of earlier ones whose checkpoints `learner` continues.

    `learner` trains jobs submitted without one; `sampler` serves the weights.
    """

    max_unfinished = 64
    """Jobs that may be pending or running; each holds its rows in memory."""
    open_seconds = 60.0
    """An open job is canceled if its client has not been heard of for this long."""
    max_ended = 256
    """Ended jobs that can be looked up; the records of all are in files."""

    learner: Learner
    compute: ComputeThread
    sampler: Sampler
    output_dir: Path

    def __post_init__(self) -> None:
        self._jobs: dict[str, TrainingJob] = {}
        self._by_idempotency_key: dict[str, TrainingJob] = {}
        self._lock = asyncio.Lock()  # FIFO: jobs run in submission order
        # an open job delays only jobs of the same learner
        self._learner_locks = WeakKeyDictionary[Learner, asyncio.Lock]()
        for state in self._earlier_jobs():
            self._add(TrainingJob(state, self.learner, PartedRows.whole(())))

    def adopt(self, learner: Learner) -> None:
        """The jobs that earlier processes have trained for a learner can be looked up."""
        for trained in learner.earlier_jobs:
            self._add(TrainingJob(_earlier(trained), learner, PartedRows.whole(())))

    def _earlier_jobs(self) -> list[JobState]:
        """The latest jobs of earlier processes: from their checkpoints, or from their records if these were deleted."""
        states = [_earlier(trained) for trained in self.learner.earlier_jobs]
        for path in (self.output_dir / "jobs").glob("job-*.json"):
            try:
                state = JobState.model_validate_json(path.read_bytes())
            except (OSError, ValueError) as error:
                logger.warning("%s cannot be read: %s", path, error)
                continue
            version = state.policy_version
            if version is not None and self.learner.saved.was_deleted(version):
                folder = self.learner.saved.folder_of(version)
                if state.checkpoint == os.path.relpath(folder, self.output_dir):
                    states.append(state.model_copy(update={"checkpoint": str(folder)}))
        return sorted(states, key=lambda state: state.policy_version or 0)[-self.max_ended :]

    def find_by_idempotency_key(self, idempotency_key: str | None) -> TrainingJob | None:
        """The job with this key; None if there is none, or it failed or was canceled (the key may then be reused)."""
        job = self._by_idempotency_key.get(idempotency_key) if idempotency_key else None
        return job if job is not None and job.state.status not in ("failed", "canceled") else None

    async def check(self, settings: TrainingSettings) -> None:
        """Raises RequestRefused if no job with these settings could be trained."""
        await self.compute.call(self.learner.verify, settings)
        self.sampler.check(self.learner.adapters(settings))

    async def check_memory(self, settings: TrainingSettings, versions: int) -> None:
        """Raises RequestRefused if so many versions of the weights do not fit into the memory of this process."""
        learner, loaded = self.learner, self.learner.loaded
        if not learner.served_here:
            return
        size = versions * await self.compute.call(served_bytes, loaded, learner.adapters(settings))
        free = free_memory(loaded.device)
        if free is not None and size > free * VERSIONS_SHARE:
            problem = f"{versions} versions of the weights take {readable_bytes(size)} of the backend's memory"
            allowed = f"allowed: {readable_bytes(free * VERSIONS_SHARE)}, half of what is free"
            raise RequestRefused(f"{problem} ({loaded.device}); {allowed}", status=409, param="versions")

    def submit(
        self,
        idempotency_key: str | None,
        settings: TrainingSettings,
        rows: Sequence[Row] | PartedRows,
        learner: Learner | None = None,
        keep: Retention | None = None,
        repeats: TrainingJob | None = None,
        digest: str | None = None,
    ) -> TrainingJob:
        """Queues the job, or returns the existing job with this idempotency key, which may have another `digest`.

        Rows that are not closed make an open job (see the native protocol). A job that was trained and not served
        (`repeats`, or that of the key) is only served. Once it has completed, the checkpoints that `keep` does not keep
        are deleted; None: all are kept.
        """
        if job := self.find_by_idempotency_key(idempotency_key):
            return job
        self.check_room()
        learner = learner or self.learner
        learner.check(settings)
        self.sampler.check(learner.adapters(settings))
        self._forget_oldest()
        repeats = repeats or self._by_idempotency_key.get(idempotency_key or "")
        unserved = repeats.unserved if repeats is not None and repeats.learner is learner else None
        if repeats is not None and unserved is not None:
            digest = repeats.state.digest
        state = JobState(id=f"job-{uuid.uuid4().hex}", status="pending", key=idempotency_key, digest=digest)
        parts = rows if isinstance(rows, PartedRows) else PartedRows.whole([rows])
        if not parts.closed and learner.group is not None:
            raise RequestRefused("several processes train here: they take whole jobs", status=409, param="num_parts")
        job = TrainingJob(state, learner, parts, settings.method, keep, unserved=unserved)
        job.update(emit=False, open=job.is_open)
        self._add(job)
        job.task = asyncio.create_task(self._train(job, settings), name=job.state.id)
        return job

    def apply_keep(self, job: TrainingJob) -> None:
        if job.keep is not None:
            job.learner.keep = job.keep
            self.sampler.keep_loaded(job.keep.loaded)

    def _add(self, job: TrainingJob) -> None:
        self._jobs[job.state.id] = job
        if job.state.key:
            self._by_idempotency_key[job.state.key] = job

    def check_room(self) -> None:
        """Raises RequestRefused (429) if no further job can be queued."""
        unfinished = sum(not job.ended for job in self._jobs.values())
        if unfinished >= self.max_unfinished:
            raise RequestRefused(f"{unfinished} training jobs are queued already", status=429, code="queue_full")

    def _forget_oldest(self) -> None:
        ended = [job for job in self._jobs.values() if job.ended]
        for job in ended[: max(0, len(ended) - self.max_ended)]:
            del self._jobs[job.state.id]
            if job.state.key and self._by_idempotency_key.get(job.state.key) is job:
                del self._by_idempotency_key[job.state.key]

    def trains(self, learner: Learner) -> bool:
        """Whether a job of a learner is pending or running."""
        return any(job.learner is learner and not job.ended for job in self._jobs.values())

    def forget_keys(self, learner: Learner) -> None:
        """Makes the idempotency keys of a learner's jobs those of new ones."""
        others = {key: job for key, job in self._by_idempotency_key.items() if job.learner is not learner}
        self._by_idempotency_key = others

    def get(self, job_id: str) -> TrainingJob:
        if job_id not in self._jobs:
            problem = f"no such job: {job_id!r}; known jobs: {', '.join(list(self._jobs)[-20:]) or 'none'}"
            raise RequestRefused(problem, status=404, param="id", code="job_not_found")
        return self._jobs[job_id]

    async def cancel(self, job_id: str) -> TrainingJob:
        """Cancels the job and waits until it has stopped using the weights; a no-op if it has ended."""
        job = self.get(job_id)
        if not job.ended and job.task is not None:
            if not job.recording and not job.task.cancelling():  # once: a second one would not wait for its end
                job.task.cancel()
            await asyncio.wait([job.task])
            if not job.ended:  # canceled before its task started
                job.update(status="canceled", open=False, message="canceled before it started")
        return job

    async def close(self) -> None:
        """Cancels all jobs that have not ended."""
        for job in list(self._jobs.values()):
            await self.cancel(job.state.id)

    async def _train(self, job: TrainingJob, settings: TrainingSettings) -> None:
        """Runs the job after all earlier ones; leaves it in a final state, which is on disk before it is shown."""
        trained = job.unserved
        outcome: dict[str, Any] = {}

        def train() -> Generator[Progress | Parked | None, None, None]:
            nonlocal trained
            if not job.is_open:  # otherwise what is kept comes when it is closed
                self.apply_keep(job)
            trained = yield from job.learner.run(settings, job.rows, job.state.id, job.state.key, job.state.digest)

        def report(event: Progress) -> None:
            metrics = {} if event.metrics is None else {"metrics": event.metrics}
            job.update(emit=event.metrics is not None, progress=event.percent, **metrics)

        try:
            async with self._turn(job):
                job.update(status="running", metrics={"rows": len(job.rows)})
                try:
                    if trained is None:
                        job.steps = train()
                        await self.compute.run_interleaved(job.steps, report)
                except asyncio.CancelledError:
                    if trained is None:
                        raise
                    # The new weights are those that training continues from, so they are served.
                job.recording = True
                assert trained is not None
                await self._serve(job, trained)
                outcome = completed(trained)
                if job.keep is not None:
                    await self.apply_retention(job.learner, job.keep)
        except asyncio.CancelledError:
            reason = f" ({job.reason})" if job.reason else ""
            unchanged = {"status": "canceled", "message": f"canceled{reason}; the weights are unchanged"}
            outcome = unchanged if trained is None else completed(trained)
        except InsituError as error:
            job.diverged = isinstance(error, JobFailed)
            outcome = outcome or {"status": "failed", "message": str(error)}
        except Exception as error:  # e.g. a model or disk error: fail this job, keep the server running
            logger.exception("job %s failed", job.state.id)
            outcome = outcome or {"status": "failed", "message": f"{type(error).__name__}: {error}"}
        job.recording = True
        job.rows = PartedRows.whole(())  # they take memory
        outcome |= {"open": False}
        await asyncio.to_thread(self._write_record, job.state.model_copy(update=outcome))
        job.update(**outcome)

    @contextlib.asynccontextmanager
    async def _turn(self, job: TrainingJob) -> AsyncIterator[None]:
        """Waits for earlier jobs of the same learner; for those of others too, unless the job is open."""
        async with self._learner_locks.setdefault(job.learner, asyncio.Lock()):
            async with contextlib.nullcontext() if job.is_open else self._lock:
                yield

    async def _serve(self, job: TrainingJob, trained: TrainedVersion) -> None:
        """Raises BackendError if the weights cannot be served: then they are kept, for the same job sent again."""
        latest = job.learner.version  # a later job may have continued from them
        module = trained.module if trained.version == latest else None
        try:
            await self.sampler.publish(WeightVersion(latest, job.learner.policy_name), module)
        except Exception as error:  # re-raised
            job.unserved = trained._replace(module=None)
            reason = str(error) if isinstance(error, InsituError) else format_error(error)
            raise BackendError(
                f"version {latest} is trained and saved, but not served: {reason}; send the job again to serve it, "
                "which does not train it again"
            ) from error
        job.unserved = None

    def _write_record(self, state: JobState) -> None:
        """The record names its checkpoint relative to the output_dir, which may be moved."""
        if state.checkpoint is not None:
            state = state.model_copy(update={"checkpoint": os.path.relpath(state.checkpoint, self.output_dir)})
        folder = self.output_dir / "jobs"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / f"{state.id}.json", state.model_dump_json(indent=2).encode() + b"\n")
        except (OSError, InsituError) as error:  # e.g. disk full: the job itself is fine
            logger.warning("could not write the record of job %s: %s", state.id, error)

    async def write_version(self, version: int, *, complete: bool = False) -> None:
        """Returns once a version of the own policy has a checkpoint, see `Learner.write`.

        Raises RequestRefused if there is no such version, and JobFailed if the checkpoint cannot be written.
        """
        write = functools.partial(self.learner.write, version, complete=complete)
        while (writing := await self.compute.call(write)) is not None:  # one in progress may be of the weights alone
            await asyncio.shield(asyncio.wrap_future(writing))

    async def delete_versions(self, learner: Learner, versions: Iterable[int]) -> list[int]:
        """Deletes checkpoints except the latest and the loaded model (version 0); returns the deleted versions.

        Raises OSError if one cannot be deleted.
        """
        deleted: list[int] = []

        def delete() -> None:
            for version in sorted(set(versions) & set(learner.versions) - {0, learner.version}):
                learner.saved.delete(version)
                deleted.append(version)

        try:
            await self.compute.call(delete)  # where no other request deletes meanwhile
        finally:
            for version in deleted:
                await self.sampler.retire(WeightVersion(version, learner.policy_name))
        return deleted

    async def apply_retention(self, learner: Learner, keep: Retention) -> None:
        """Deletes what `keep` does not keep, except versions in use.

        A folder that cannot be deleted is reported and tried again after the next job.
        """
        expired = set(learner.saved.expired(keep)) - await self.sampler.versions_in_use(learner.policy_name)
        try:
            await self.delete_versions(learner, expired)
        except OSError as error:
            logger.warning("an old checkpoint cannot be deleted: %s", error)
