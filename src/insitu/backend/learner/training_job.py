"""A training job: its state, the rows that it trains, and the events that say how far it is."""

import asyncio
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from typing import Any

from insitu.backend.learner.learner import Learner, TrainedVersion
from insitu.backend.learner.parts import PartedRows
from insitu.schemas.training_jobs import JobState, Retention

HEARTBEAT_SECONDS = 15.0
"""`TrainingJob.events` yields None after this long without an event, so that the caller can send a keep-alive."""


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
    expiry: asyncio.Task[None] | None = None
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
