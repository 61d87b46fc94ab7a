"""Waits for training jobs, and says which make no progress."""

import asyncio
import logging
import time
from typing import Any

from insitu.collect.shared_run import watchdog_of
from insitu.collect.watchdog import Watchdog, seconds_since
from insitu.config import Config
from insitu.errors import InsituError
from insitu.schemas.finetuning import TrainingJobRef, TrainingJobStatus, TrajectoryCollection
from insitu.training.interfaces import ResumableAdapter, TrainerAdapter

logger = logging.getLogger(__name__)


async def submit_once(
    adapter: TrainerAdapter, trajectories: TrajectoryCollection, version: int | None, resumed: bool
) -> TrainingJobRef:
    """Submits an epoch that trains `version`; if `resumed`, returns the job of an earlier process if there is one."""
    if resumed and isinstance(adapter, ResumableAdapter) and trajectories.epoch is not None:
        job = await adapter.find(trajectories.run_id, trajectories.epoch, version)
        if job is not None:
            return job
    return await adapter.submit(trajectories)


async def wait_for_job(adapter: Any, ref: TrainingJobRef, config: Config) -> TrainingJobStatus:
    """`adapter.wait_until_complete`. Raises Stalled if the job makes no progress for `eval.general.stall_timeout`."""
    watchdog = watchdog_of(config)
    progress = _JobProgress(adapter, ref, watchdog)
    following = asyncio.create_task(progress.follow(), name="follow the progress of a job")
    try:
        job_id = (ref.metadata or {}).get("job_id", ref.run_id)
        with watchdog.waiting(f"training job {job_id}", progress.activity):
            return await watchdog.watch(lambda: adapter.wait_until_complete(ref))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


class _JobProgress:
    """How far a job is, by the statuses that its adapter reports."""

    def __init__(self, adapter: Any, ref: TrainingJobRef, watchdog: Watchdog) -> None:
        self._adapter = adapter
        self._ref = ref
        self._watchdog = watchdog
        self._seen: TrainingJobStatus | None = None
        self._changed_at = time.monotonic()

    def activity(self) -> str:
        if self._seen is None:
            return f"its status is unknown since {seconds_since(self._changed_at)}"
        percent = "" if self._seen.progress is None else f" at {self._seen.progress:.0f} %"
        return f"{self._seen.status.value}{percent} for {seconds_since(self._changed_at)}"

    async def follow(self) -> None:
        """Notes each change of the job's status; ends when it is cancelled."""
        while (interval := self._watchdog.interval) is not None:
            await asyncio.sleep(interval)
            try:
                status = await self._adapter.status(self._ref)
            except InsituError as error:  # `wait_until_complete` reports and retries
                logger.debug("the progress of a job is unknown: %s", error)
            else:
                if self._seen is None or _progress(status) != _progress(self._seen):
                    self._seen, self._changed_at = status, time.monotonic()
                    self._watchdog.note_progress()


def _progress(status: TrainingJobStatus) -> tuple[Any, ...]:
    return status.status, status.progress, status.message
