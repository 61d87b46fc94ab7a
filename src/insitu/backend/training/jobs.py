"""The queue of training jobs: one trains at a time, and a key is trained on at most once."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from insitu.backend.compute import ComputeThread
from insitu.backend.training.batches import Row
from insitu.backend.training.learner import Learner, TrainedVersion
from insitu.backend.training.optimizer_loop import Progress
from insitu.errors import InsituError, RequestRefused
from insitu.schemas.training_jobs import JobState, TrainingSettings

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 15.0
"""Interval without events after which `Job.events` yields None, for a keep-alive to the client."""


class Job:
    """One job: its state, and `history`, the states reported as events."""

    def __init__(self, key: str | None, learner: Learner) -> None:
        self.state = JobState(id=f"job-{uuid.uuid4().hex}", status="pending", key=key)
        self.learner = learner
        self.history: list[JobState] = [self.state]
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.state.status in ("completed", "failed", "canceled")

    def update(self, *, keep: bool = True, **changes: Any) -> None:
        """Changes the state; with `keep` it is reported as an event."""
        self.state = self.state.model_copy(update=changes)
        if keep:
            self.history.append(self.state)
            self._changed.set()
            self._changed = asyncio.Event()

    async def events(self) -> AsyncIterator[JobState | None]:
        """Yields every state from the first to the last, and None after each `HEARTBEAT_SECONDS` without one."""
        sent = 0
        while True:
            changed = self._changed
            while sent < len(self.history):
                sent += 1
                yield self.history[sent - 1]
            if self.ended:
                return
            try:
                await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS)
            except TimeoutError:
                yield None


class Jobs:
    """The jobs of this process; `learner` is the default.

    `publish(module, version, policy_name)` is called in the compute thread when a job has produced new weights.
    """

    def __init__(
        self, learner: Learner, compute: ComputeThread, publish: Callable[[nn.Module, int, str], None], output_dir: Path
    ) -> None:
        self._learner = learner
        self._compute = compute
        self._publish = publish
        self._folder = output_dir / "jobs"
        self._jobs: dict[str, Job] = {}
        self._by_key: dict[str, Job] = {}
        self._lock = asyncio.Lock()  # first come, first served

    def find_by_key(self, key: str | None) -> Job | None:
        """The job with this key; None if it failed or was canceled, because the key may then be reused."""
        job = self._by_key.get(key) if key else None
        return job if job is not None and job.state.status not in ("failed", "canceled") else None

    def submit(
        self, key: str | None, settings: TrainingSettings, rows: Sequence[Row], learner: Learner | None = None
    ) -> Job:
        """Queues the job, or returns the existing job with this key."""
        if job := self.find_by_key(key):
            return job
        learner = learner or self._learner
        learner.check(settings)
        job = Job(key, learner)
        self._jobs[job.state.id] = job
        if key:
            self._by_key[key] = job
        job.task = asyncio.create_task(self._train(job, settings, rows), name=job.state.id)
        return job

    def get(self, id: str) -> Job:
        if id not in self._jobs:
            existing = ", ".join(self._jobs) or "none"
            raise RequestRefused(
                f"there is no job {id!r}; existing: {existing}", status=404, param="id", code="job_not_found"
            )
        return self._jobs[id]

    async def cancel(self, id: str) -> Job:
        """Returns when the job no longer uses the weights; does nothing if it has ended."""
        job = self.get(id)
        if not job.ended and job.task is not None:
            job.task.cancel()
            await asyncio.wait([job.task])
            if not job.ended:  # cancelled before its task started
                job.update(status="canceled", message="canceled before it started")
        return job

    async def close(self) -> None:
        """Cancels all jobs that have not ended."""
        for job in list(self._jobs.values()):
            await self.cancel(job.state.id)

    async def _train(self, job: Job, settings: TrainingSettings, rows: Sequence[Row]) -> None:
        """Waits for earlier jobs, then for the compute thread; always ends the job."""
        finished: list[TrainedVersion] = []

        def steps() -> Generator[Progress, None, None]:
            """Trains and publishes without other work in between."""
            trained = yield from job.learner.run(settings, rows)
            self._publish(trained.module, trained.version, job.learner.policy_name)
            finished.append(trained)

        def report(event: Progress) -> None:
            metrics = {} if event.metrics is None else {"metrics": event.metrics}
            job.update(keep=event.metrics is not None, progress=event.percent, **metrics)

        try:
            async with self._lock:
                job.update(status="running", metrics={"rows": len(rows)})
                await self._compute.drive(steps(), report)
        except asyncio.CancelledError:
            # If the job finished before the cancellation, its weights are already served.
            if not finished:
                job.update(status="canceled", message="canceled; the weights are unchanged")
        except InsituError as error:
            job.update(status="failed", message=str(error))
        except Exception as error:  # errors of the model or the disk end this job only
            logger.exception("job %s failed", job.state.id)
            job.update(status="failed", message=f"{type(error).__name__}: {error}")
        for trained in finished:
            job.update(
                status="completed",
                progress=100.0,
                policy_version=trained.version,
                checkpoint=str(trained.checkpoint),
                metrics=trained.metrics,
            )
        self._write_record(job)

    def _write_record(self, job: Job) -> None:
        draft = self._folder / f".{job.state.id}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(job.state.model_dump_json(indent=2) + "\n")
            draft.rename(self._folder / f"{job.state.id}.json")
        except OSError as error:  # a full disk: the job is valid, and its state is still available over HTTP
            logger.warning("the record of job %s was not written: %s", job.state.id, error)
