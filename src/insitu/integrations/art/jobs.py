"""A training job on an ART server, as far as this process knows it."""

import asyncio
from dataclasses import dataclass, field

import orjson

from insitu.schemas.finetuning import TrainingStatusEnum, TrajectoryCollection


@dataclass
class Loss:
    """A lost reply: the model's step tells whether the server has trained the job."""

    problem: str
    since: float
    """By `time.monotonic()`."""
    refused: int
    """The number of refused connections then. More: the server has restarted, so it trains nothing."""
    pause: float = 0.0
    """Seconds after it before the step is requested."""


@dataclass
class Job:
    """A training job, from model step `step` to `final_step`."""

    step: int
    key: str
    groups: list[orjson.Fragment] = field(default_factory=list)
    sampled_tokens: int = 0
    resumed: bool = False
    """Whether an earlier process of the run may have submitted it."""
    task: "asyncio.Task[None] | None" = None
    step_metrics: list[dict[str, float]] = field(default_factory=list)
    final_step: int | None = None
    loss: Loss | None = None
    failure: BaseException | None = None

    @property
    def idempotency_key(self) -> str:
        """Includes the step, to distinguish an earlier run with the same id."""
        return f"{self.key}/{self.step}"

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def can_start(self) -> bool:
        """Whether a submission trains: nothing has, and nothing may."""
        return self.final_step is None and self.loss is None and not self.is_running

    def end(self, step: int) -> None:
        """The job has trained the model up to this step."""
        self.final_step, self.groups = step, []

    def status(self) -> tuple[TrainingStatusEnum, str | None]:
        """The status with its message, as far as it is known here."""
        task, failure = self.task, self.failure
        if failure is None and task is not None and task.done() and not task.cancelled():
            failure = task.exception()
        if self.final_step is not None:
            return TrainingStatusEnum.COMPLETED, f"trained, but {self.loss.problem}" if self.loss is not None else None
        if failure is not None:
            return TrainingStatusEnum.FAILED, f"{type(failure).__name__}: {failure}"
        if task is not None and task.cancelled():
            return TrainingStatusEnum.CANCELED, "canceled"
        return TrainingStatusEnum.RUNNING, None


def sampled_tokens(collection: TrajectoryCollection) -> int:
    trajectories = (t for group in collection.trajectories for t in group)
    return sum(len(t.calls[index].token_ids or ()) for t in trajectories for index in t.trained_calls)


def mean_reward(collection: TrajectoryCollection) -> float:
    """The mean reward of all collected episodes if known: groups without variance may be the best ones."""
    rewards = [t.reward for group in collection.trajectories for t in group]
    return sum(rewards) / len(rewards) if collection.mean_reward is None else collection.mean_reward


def drop_reasons(job: Job) -> str:
    """Why the server trained nothing: `insitu backend` reports counts by reason."""
    counts = {k.partition("dropped_")[2]: v for line in job.step_metrics for k, v in line.items() if "dropped_" in k}
    return ", ".join(f"{v:g} x {k}" for k, v in counts.items()) or "the server found nothing to train on"
