"""Training jobs over HTTP: submit, watch, cancel; one trains at a time, and none twice."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from torch import nn

from insitu.backend.compute import Compute
from insitu.backend.training.batches import Row
from insitu.backend.training.learner import Learner, Trained
from insitu.backend.training.updates import Progress
from insitu.backend.training.uploads import Limits, read_job
from insitu.errors import InsituError, RequestRefused
from insitu.schemas.training_jobs import JobState, TrainingSettings

logger = logging.getLogger(__name__)

HEARTBEAT = 15.0
"""Seconds without an event after which a comment is sent, so that neither side takes the other for dead."""


class Job:
    """One job: its state, every state it went through since the last optimiser step, and who waits for the next."""

    def __init__(self, key: str | None, learner: Learner) -> None:
        self.state = JobState(id=f"job-{uuid.uuid4().hex}", status="pending", key=key)
        self.learner = learner
        self.history: list[JobState] = [self.state]
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.state.status in ("completed", "failed", "canceled")

    def update(self, *, remember: bool = True, **changes: Any) -> None:
        """`remember` makes an event of it."""
        self.state = self.state.model_copy(update=changes)
        if remember:
            self.history.append(self.state)
            self._changed.set()
            self._changed = asyncio.Event()

    async def events(self) -> AsyncIterator[JobState | None]:
        """Every event from the first to the last; None when nothing has happened for a while."""
        seen = 0
        while True:
            changed = self._changed
            while seen < len(self.history):
                seen += 1
                yield self.history[seen - 1]
            if self.ended:
                return
            try:
                await asyncio.wait_for(changed.wait(), HEARTBEAT)
            except TimeoutError:
                yield None


class Jobs:
    """The jobs of this process, those of `learner` where no other is named.

    `publish(module, version, lineage)` is called in the compute thread when a job has made new weights.
    """

    def __init__(
        self, learner: Learner, compute: Compute, publish: Callable[[nn.Module, int, str], None], output_dir: Path
    ) -> None:
        self._learner = learner
        self._compute = compute
        self._publish = publish
        self._folder = output_dir / "jobs"
        self._jobs: dict[str, Job] = {}
        self._by_key: dict[str, Job] = {}
        self._turn = asyncio.Lock()  # first come, first served

    @property
    def limits(self) -> Limits:
        loaded = self._learner.loaded
        return Limits(vocabulary=loaded.vocabulary, max_length=loaded.max_length)

    def known(self, key: str | None) -> Job | None:
        """The job of this key, unless it trained nothing: then the key may be used again."""
        job = self._by_key.get(key) if key else None
        return job if job is not None and job.state.status not in ("failed", "canceled") else None

    def submit(
        self, key: str | None, settings: TrainingSettings, rows: Sequence[Row], learner: Learner | None = None
    ) -> Job:
        """Starts or queues the job, or gives the one that has this key already."""
        if job := self.known(key):
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
            known = ", ".join(self._jobs) or "none yet"
            raise RequestRefused(
                f"there is no job {id!r}; there are: {known}", status=404, param="id", code="job_not_found"
            )
        return self._jobs[id]

    async def cancel(self, id: str) -> Job:
        """Returns when the job has let go of the weights; one that has ended stays as it is."""
        job = self.get(id)
        if not job.ended and job.task is not None:
            job.task.cancel()
            await asyncio.wait([job.task])
            if not job.ended:  # cancelled before its task had begun
                job.update(status="canceled", message="canceled before it began")
        return job

    async def close(self) -> None:
        """Cancels what has not ended."""
        for job in list(self._jobs.values()):
            await self.cancel(job.state.id)

    async def _train(self, job: Job, settings: TrainingSettings, rows: Sequence[Row]) -> None:
        """Waits for the jobs before it, then for the compute thread; ends the job whatever happens."""
        finished: list[Trained] = []
        try:
            async with self._turn:
                job.update(status="running", metrics={"rows": len(rows)})
                await self._compute.drive(
                    self._steps(job.learner, settings, rows, finished), lambda event: _note(job, event)
                )
        except asyncio.CancelledError:
            # A job that was through when the request came has new weights, which are served already.
            if not finished:
                job.update(status="canceled", message="canceled; the weights are those before the job")
        except InsituError as error:
            job.update(status="failed", message=str(error))
        except Exception as error:  # whatever a model or the disk raises must end this job, and no more than it
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
        self._record(job)

    def _steps(
        self, learner: Learner, settings: TrainingSettings, rows: Sequence[Row], finished: list[Trained]
    ) -> Generator[Progress, None, None]:
        """Training and publishing as one: no other work gets between the new weights and their being served."""
        trained = yield from learner.run(settings, rows)
        self._publish(trained.module, trained.version, learner.lineage)
        finished.append(trained)

    def _record(self, job: Job) -> None:
        draft = self._folder / f".{job.state.id}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(job.state.model_dump_json(indent=2) + "\n")
            draft.rename(self._folder / f"{job.state.id}.json")
        except OSError as error:  # a full disk: what the job did stands, and its state is still told over HTTP
            logger.warning("the record of job %s was not written: %s", job.state.id, error)


def training_routes(jobs: Jobs) -> list[Route]:
    """The routes under /v1/train/jobs, for an application that turns RequestRefused into an answer."""

    async def submit(request: Request) -> Response:
        key = request.headers.get("idempotency-key")
        if job := jobs.known(key):
            async for _ in request.stream():  # read to its end, or the client could not read the answer
                pass
        else:
            encoding = request.headers.get("content-encoding", "").lower()
            try:
                settings, rows = await read_job(request.stream(), encoding, jobs.limits)
            except ClientDisconnect:
                raise RequestRefused("the client left before its job was complete") from None
            job = jobs.submit(key, settings, rows)
        return _answer(job)

    async def state(request: Request) -> Response:
        return _answer(jobs.get(request.path_params["id"]))

    async def events(request: Request) -> Response:
        job = jobs.get(request.path_params["id"])
        return StreamingResponse(
            _server_sent(job), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def cancel(request: Request) -> Response:
        return _answer(await jobs.cancel(request.path_params["id"]))

    base = "/v1/train/jobs"
    return [
        Route(base, submit, methods=["POST"]),
        Route(f"{base}/{{id}}", state, methods=["GET"]),
        Route(f"{base}/{{id}}/events", events, methods=["GET"]),
        Route(f"{base}/{{id}}/cancel", cancel, methods=["POST"]),
    ]


def _note(job: Job, event: Progress) -> None:
    if event.metrics is None:
        job.update(remember=False, progress=event.percent)
    else:
        job.update(progress=event.percent, metrics=event.metrics)


async def _server_sent(job: Job) -> AsyncIterator[str]:
    async for state in job.events():
        yield ": still here\n\n" if state is None else f"event: {state.status}\ndata: {state.model_dump_json()}\n\n"


def _answer(job: Job) -> Response:
    return Response(job.state.model_dump_json(), media_type="application/json")
