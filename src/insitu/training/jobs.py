"""Follows training jobs and their backend: submits once, waits by events or polls, submits a lost job again.

A run that was killed finds the job that was accepted from it before. Warns if log-probabilities of sampler and learner
differ too much.

A `JobAdapter` gives `submit`, `find` and `status`, the rest happens here. An adapter with its own
`wait_until_complete` waits itself; only its progress is watched.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from insitu.collect.shared_run import RunState
from insitu.collect.watchdog import Watchdog, seconds_since
from insitu.disk.files import readable_bytes
from insitu.errors import BackendError, BackendUnavailable, InsituError, JobFailed, JobLost, TrajectoryError, UnknownJob
from insitu.schemas.finetuning import (
    PolicyEndpoint,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from insitu.training.interfaces import ResumableAdapter, TrainerAdapter
from insitu.wire.connection import pause
from insitu.wire.endings import end_tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNFINISHED = (TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING)
_EXIT_NOTICE_SECONDS = 1.0
_RECONNECT_DELAY = 0.25
STALE_GAP = 0.2
"""Mean difference in nats per token from which runs with `staleness` have learned less, over 52 runs of the starter."""
AGAINST_STALE_GAP = (
    "leave training.mini_batch_size out, which gives one step a job, lower training.learning_rate, set "
    "training.old_logprobs to rollout, or staleness to 0"
)
_SUBMISSIONS = 3
"""How often one job is submitted, the first time included, if the backend keeps losing it."""


class JobAdapter(ResumableAdapter):
    """Adapter of a backend whose jobs are followed here. `submit` is idempotent by run and epoch."""

    address = "the backend"
    """Where its jobs run, in messages."""
    poll_interval = 10.0
    """Seconds between two requests for a job's status."""
    max_status_failures = 1
    """Number of transient errors in a row after which the run gives up."""
    submits_again_for = 0.0
    """Seconds after its first loss for which a job is submitted again, however often."""

    async def submit_again(self, ref: TrainingJobRef, error: JobLost) -> TrainingJobRef:
        """Submits a job again under its key; raises `error` if that is not possible."""
        raise error

    async def events(self, ref: TrainingJobRef, interval: float) -> AsyncGenerator[TrainingJobStatus, None]:
        """The statuses of a job as they change. May end before the job: it is opened again. Polls by default."""
        while True:
            yield await polled(
                job_label(ref), lambda: self.status(ref), interval, self.max_status_failures, self.address
            )
            await asyncio.sleep(interval)

    async def completed(self, status: TrainingJobStatus) -> TrainingJobStatus:
        """What follows a job that has completed; returns the final status."""
        return status

    async def interrupted(self, ref: TrainingJobRef) -> TrainingJobStatus | None:
        """Called if the run is interrupted, not if it stalls; returns the job's status if that changes.

        The job continues by default.
        """
        return None

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("%s: %s", job_label(ref), metrics)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float | None = None) -> TrainingJobStatus:
        return await follow(self, ref, self.poll_interval if poll_interval is None else poll_interval)


async def submit_once(
    adapter: TrainerAdapter, trajectories: TrajectoryCollection, version: int | None, resumed: bool
) -> TrainingJobRef:
    """Submits an epoch that trains `version`; if `resumed`, returns the job of an earlier process if there is one."""
    if resumed and isinstance(adapter, ResumableAdapter) and trajectories.epoch is not None:
        job = await adapter.find(trajectories.run_id, trajectories.epoch, version)
        if job is not None:
            return job
    return await adapter.submit(trajectories)


async def follow(
    adapter: JobAdapter,
    ref: TrainingJobRef,
    interval: float,
    on_status: Callable[[TrainingJobStatus], None] = lambda _: None,
    watchdog: Watchdog | None = None,
) -> TrainingJobStatus:
    """Waits until a job has ended; one that the backend has lost is submitted again.

    Gives up once it was submitted `_SUBMISSIONS` times and was first lost `submits_again_for` seconds ago.
    """
    delay, submissions, first_loss = _RECONNECT_DELAY, 1, None
    try:
        while True:
            try:
                if (status := await _ended(adapter, ref, interval, on_status)) is not None:
                    break
            except JobLost as error:
                submissions, first_loss = submissions + 1, first_loss or time.monotonic()
                if submissions > _SUBMISSIONS and time.monotonic() - first_loss >= adapter.submits_again_for:
                    raise
                ref = await adapter.submit_again(ref, error)
                logger.warning("submitted %s again: %s", job_label(ref), error)
                continue
            await pause.get()(min(delay, interval))
            delay *= 2
    except asyncio.CancelledError:
        has_stalled = watchdog is not None and watchdog.has_stalled
        if not has_stalled and (status := await adapter.interrupted(ref)) is not None:
            on_status(status)
        raise
    return await adapter.completed(status) if status.status is TrainingStatusEnum.COMPLETED else status


async def _ended(
    adapter: JobAdapter, ref: TrainingJobRef, interval: float, on_status: Callable[[TrainingJobStatus], None]
) -> TrainingJobStatus | None:
    """The last status of a job; None if the stream of its events has ended before."""
    async with aclosing(adapter.events(ref, interval)) as statuses:
        async for status in statuses:
            if status.status not in UNFINISHED:
                return status
            on_status(status)
    return None


async def polled(what: str, request: Callable[[], Awaitable[T]], interval: float, most: int, where: str) -> T:
    """The result of a status request, repeated every `interval` seconds after transient errors.

    Raises BackendUnavailable after `most` of them.
    """
    failures = 0
    while True:
        try:
            return await request()
        except BackendUnavailable as error:
            failures += 1
            if most == 1:
                raise
            if failures >= most:
                raise BackendUnavailable(
                    f"{what}: {failures} status requests in a row failed (max_consecutive_status_failures: {most}); "
                    f"it continues at {where}; the last error: {error}"
                ) from error
            logger.warning("%s; asking again", error)
            await asyncio.sleep(max(interval, error.retry_after))


async def status_of(adapter: TrainerAdapter, ref: TrainingJobRef) -> TrainingJobStatus:
    """The status of a job, requested again after transient errors as often as a `JobAdapter` says."""
    if not isinstance(adapter, JobAdapter):
        return await adapter.status(ref)
    limits = adapter.poll_interval, adapter.max_status_failures, adapter.address
    return await polled(job_label(ref), lambda: adapter.status(ref), *limits)


async def wait_for_job(
    adapter: Any,
    ref: TrainingJobRef,
    watchdog: Watchdog,
    on_change: Callable[[TrainingJobStatus], None] = lambda _: None,
) -> TrainingJobStatus:
    """Returns the final status of a job. `on_change` is called with each status that differs from the one before.

    The `watchdog`, that of the run, raises Stalled if the job makes no progress for `eval.general.stall_timeout`.
    """
    progress = _JobProgress(ref, watchdog, on_change)
    with watchdog.waiting(f"training {job_label(ref)}", progress.activity):
        if type(adapter).wait_until_complete is JobAdapter.wait_until_complete:
            interval = adapter.poll_interval
            return await watchdog.watch(lambda: follow(adapter, ref, interval, progress.note, watchdog))
        polling = asyncio.create_task(progress.poll(adapter), name="follow the progress of a job")
        try:
            return await watchdog.watch(lambda: adapter.wait_until_complete(ref))
        finally:
            await end_tasks(polling)


async def succeeds(request: Awaitable[Any]) -> bool:
    """Whether a request to a backend succeeds; its error is logged."""
    try:
        await request
    except BackendError as error:
        logger.warning("%s", error)
        return False
    return True


def check_completed(what: str, status: TrainingJobStatus) -> None:
    """Raises JobFailed unless a job has completed."""
    if status.status is not TrainingStatusEnum.COMPLETED:
        raise JobFailed(f"{what} ended as {status.status.value}: {status.message or 'no reason given'}")


def job_id(ref: TrainingJobRef) -> str:
    """What its adapter calls a job, from its metadata. Raises UnknownJob if these do not say."""
    if (name := (ref.metadata or {}).get("job_id")) is None:
        raise UnknownJob(f"a job of run {ref.run_id!r} without metadata['job_id'] cannot be found")
    return str(name)


def new_version(epoch: int, before: int | None, served: PolicyEndpoint | None) -> int | None:
    """The version served after a job, None if unknown. Raises BackendError if it is still the one `before` it."""
    version = served.version if served is not None else None
    if before is not None and version == before:
        raise BackendError(
            f"epoch {epoch}: the job completed, but the backend still serves policy version {version}, so the next "
            "epoch would sample from the old weights"
        )
    return version


def job_warnings(
    status: TrainingJobStatus, gap: float | None, served: PolicyEndpoint | None, *, is_newest: bool = True
) -> list[str]:
    """What is wrong after a job that has completed, a sentence each.

    `gap` is the job's `logprob_gap`, and `is_newest` says whether its episodes were sampled from the weights before it.
    """
    space = _space_warning((status.metadata or {}).get("checkpoint"))
    return [*filter(None, (gap_warning(gap, served) if is_newest else stale_warning(gap), space))]


def stale_warning(gap: float | None) -> str | None:
    """A sentence if the learner has moved so far from the earlier weights that have sampled that it learns less."""
    if gap is None or gap <= STALE_GAP:
        return None
    return (
        f"WARNING: logprob_gap is {gap:.2g}, above {STALE_GAP:g}: the learner is far from the earlier weights that "
        f"sampled these episodes, and learns less from them: {AGAINST_STALE_GAP}"
    )


def gap_warning(gap: float | None, served: PolicyEndpoint | None) -> str | None:
    """A sentence if sampler and learner differ by more than rounding."""
    limit = served.logprob_tolerance if served is not None else None
    if gap is None or limit is None or gap <= limit:
        return None
    return (
        f"WARNING: logprob_gap is {gap:.2g}, above {limit:g}: the log-probabilities of the sampler differ from the "
        "learner's, so other weights or another distribution were sampled than are trained"
    )


def _space_warning(checkpoint: str | None) -> str | None:
    """A sentence if the disk has less space left than two checkpoints like this one, which is on this machine."""
    if checkpoint is None or not (folder := Path(checkpoint)).is_dir():
        return None
    size, free = sum(path.stat().st_size for path in folder.iterdir()), shutil.disk_usage(folder).free
    if free >= 2 * size:
        return None
    left = f"the disk of {folder} has {readable_bytes(free)} left, and a checkpoint takes {readable_bytes(size)}"
    return f"{left}: free space (`insitu runs prune`), or keep fewer checkpoints (`keep` of the trainer adapter)"


def job_label(of: TrainingJobRef | TrainingJobStatus) -> str:
    return f"job {(of.metadata or {}).get('job_id', of.run_id)}"


class _JobProgress:
    """How far a job is, by the statuses that its adapter reports."""

    def __init__(self, ref: TrainingJobRef, watchdog: Watchdog, on_change: Callable[[TrainingJobStatus], None]) -> None:
        self._ref = ref
        self._watchdog = watchdog
        self._on_change = on_change
        self._seen: tuple[TrainingStatusEnum, float | None, str | None] | None = None
        self._changed_at = time.monotonic()

    def activity(self) -> str:
        if self._seen is None:
            return f"its status is unknown since {seconds_since(self._changed_at)}"
        status, progress, _ = self._seen
        percent = "" if progress is None else f" at {progress:.0f} %"
        return f"{status.value}{percent} for {seconds_since(self._changed_at)}"

    def note(self, status: TrainingJobStatus) -> None:
        state = (status.status, status.progress, status.message)
        if state == self._seen:
            return
        self._seen, self._changed_at = state, time.monotonic()
        self._watchdog.note_progress()
        self._on_change(status)

    async def poll(self, adapter: Any) -> None:
        """Notes the job's status until it is cancelled."""
        while (interval := self._watchdog.interval) is not None:
            await asyncio.sleep(interval)
            try:
                self.note(await adapter.status(self._ref))
            except InsituError as error:  # `wait_until_complete` reports and retries
                logger.debug("the progress of a job is unknown: %s", error)


@asynccontextmanager
async def watched(adapter: Any, run: RunState | None = None) -> AsyncIterator[None]:
    """Cancels the body and raises the adapter's error once its backend is lost, which `run` gets to know first."""
    if not isinstance(adapter, TrainerAdapter):  # a plugin's, which implements only the documented methods
        yield
        return
    watcher = asyncio.create_task(adapter.watch(), name="watch the backend")

    def lost() -> BaseException | None:
        return watcher.exception() if watcher.done() and not watcher.cancelled() else None

    def expire(_: asyncio.Task[None]) -> None:
        if (error := lost()) is not None:
            if run is not None:
                run.builder.lost = error
            limit.reschedule(0.0)

    try:
        async with asyncio.timeout(None) as limit:
            watcher.add_done_callback(expire)
            try:
                yield
            except (BackendError, TrajectoryError):  # requests can fail before the end of the process is known
                await asyncio.wait([watcher], timeout=_EXIT_NOTICE_SECONDS)
                raise
            finally:
                watcher.remove_done_callback(expire)
    except Exception:  # re-raised, unless it follows from the loss of the backend
        if (error := lost()) is not None:
            raise error from None
        raise
    finally:
        await end_tasks(watcher)
