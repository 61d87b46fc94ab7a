"""The adapter for ART servers, over the official client library."""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from insitu.errors import BackendError, BackendUnavailable, InsituError, JobFailed, JobLost, UnknownJob
from insitu.integrations.art.config import ARTTrainerAdapterConfig, load_art, model_configs, train_config
from insitu.integrations.art.conversion import art_object, check_order, mean_reward, sampled_tokens
from insitu.integrations.art.remote_backend import known_metrics, mean_metrics, remote_backend, serialize_group
from insitu.schemas.finetuning import (
    FinetuneConfig,
    PolicyEndpoint,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from insitu.training.interfaces import RewardAdapter
from insitu.training.jobs import UNFINISHED, JobAdapter, check_completed, job_id, succeeds
from insitu.wire.addresses import http_url
from insitu.wire.endings import end_tasks
from insitu.wire.json_values import gc_paused

if TYPE_CHECKING:
    import art

logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    if name != "art":  # the client library, whose import takes seconds
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load_art()


BACKEND = "openpipe-art"
_POLL_INTERVAL = 3.0
"""Seconds between polls of the model's step after a lost reply."""
_WATCH_SECONDS = 5.0
"""Interval of the health checks while the server is in use."""


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
    """A training job, from model step `step` to `final_step`, as far as this process knows it."""

    step: int
    run_id: str
    key: str
    groups: list[orjson.Fragment] = field(default_factory=list)
    sampled_tokens: int = 0
    resumed: bool = False
    """Whether an earlier process of the run may have submitted it."""
    task: asyncio.Task[None] | None = None
    step_metrics: list[dict[str, float]] = field(default_factory=list)
    final_step: int | None = None
    loss: Loss | None = None
    failure: BaseException | None = None

    @property
    def idempotency_key(self) -> str:
        """Includes the step, to distinguish an earlier run with the same id."""
        return f"{self.key}/{self.step}"

    @property
    def can_start(self) -> bool:
        """Whether a submission trains: nothing has, and nothing may."""
        return self.final_step is None and self.loss is None and (self.task is None or self.task.done())

    @property
    def ref(self) -> TrainingJobRef:
        return TrainingJobRef(run_id=self.run_id, backend=BACKEND, metadata={"job_id": self.key, "step": self.step})

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


class ARTTrainerAdapter(RewardAdapter, JobAdapter):
    """Submits trajectories to an ART server, which trains and serves the model.

    Needs the package `openpipe-art` (the extra `art`). Raises ConfigError for configuration keys that the
    installed release does not support.
    """

    def __init__(self, adapter_config: ARTTrainerAdapterConfig) -> None:
        super().__init__(adapter_config)
        self.config = adapter_config
        self._art = sys.modules[__name__].art
        backend = adapter_config.backend
        self._model_internal_config, self._server_config = model_configs(self._art, backend)
        self._train_config, self._dev_config = train_config(self._art, adapter_config.training)
        url = http_url(backend.ip, backend.port)
        self._remote = remote_backend(self._art, url, backend.api_key, backend.read_timeout, backend.retry_timeout)
        self.remote_backend: art.Backend = self._remote
        model = self._art.TrainableModel
        run_name = {"run_name": backend.name} if "run_name" in model.model_fields else {}  # from 0.5.20 on
        self.model: art.TrainableModel = model(
            name=backend.name,
            **run_name,
            project=backend.project,
            base_model=backend.base_model,
            _internal_config=self._model_internal_config or None,
        )
        self.training_jobs: dict[str, asyncio.Task[None]] = {}
        """The last submitted training task of each run."""
        self._jobs: dict[str, Job] = {}
        self._mean_rewards: dict[int, float] = {}  # by the model step that sampled the episodes
        self._submit_lock = asyncio.Lock()
        self.submits_again_for = backend.retry_timeout

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Registers the model with the server. Raises BackendUnavailable if the server is not healthy."""
        await super().initialize(run_config)
        try:
            await self._remote.check_health()
        except BackendError as error:
            raise BackendUnavailable(f"the ART server cannot be used: {error}") from error
        await self.model.register(self.remote_backend, _openai_client_config=self._server_config)

    async def check_settings(self) -> None:
        """The client has been asked about them, and `initialize` has reached the server."""

    def training_settings(self) -> dict[str, Any]:
        return self.config.training.model_dump(mode="json", exclude_none=True)

    async def is_healthy(self) -> bool:
        return await succeeds(self._remote.check_health(retried=False))

    async def wait_until_reachable(self, since: float) -> bool:
        return bool(await self._remote.was_away(since))

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(min(_WATCH_SECONDS, self.config.backend.read_timeout))
            await self._remote.check_health()

    async def close(self) -> None:
        """Stops waiting for running jobs, which the server continues, and closes the connections."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        await end_tasks(*tasks)  # also retrieves the exceptions of failed tasks
        await self._remote.close()

    async def policy_endpoint(self) -> PolicyEndpoint:
        remote, backend = self._remote, self.config.backend
        step = await remote._get_step(self.model)
        await remote.refresh_served_names()
        current_name = partial(remote._model_inference_name, self.model)
        key = self.model.inference_api_key or backend.api_key
        return PolicyEndpoint(remote.inference_url, current_name(), key, step, current_name, backend.base_model)

    async def _validate_episode_order(self, traj: Trajectory) -> None:
        """Raises ValueError if ART cannot train this order of roles, see `check_order`."""
        check_order(traj.episode, traj.id)

    async def _construct_trajectory_groups(
        self, trajectory_lists: list[list[Trajectory]]
    ) -> "list[art.TrajectoryGroup]":
        """One ART group per list. Raises ValueError for a trajectory that ART cannot train."""
        for trajectory in (t for group in trajectory_lists for t in group):
            await self._validate_episode_order(trajectory)

        def convert() -> "list[art.TrajectoryGroup]":
            with gc_paused():
                return [self._art.TrajectoryGroup([art_object(self._art, t) for t in own]) for own in trajectory_lists]

        return await asyncio.to_thread(convert)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts training on all groups. A run's epoch is trained once, even if submitted twice.

        Without an epoch, which plugins may leave unset, each submission is a job.
        """
        run_id, epoch = trajectories.run_id, trajectories.epoch
        if not any(trajectories.trajectories):
            raise JobFailed(f"run {run_id}: there are no trajectories to train on")
        key = f"{run_id}/{f'submission {len(self._jobs) + 1}' if epoch is None else epoch}"
        async with self._submit_lock:
            job = self._jobs.get(key)
            if job is None or job.can_start:
                groups = await self._serialized_groups(trajectories.trajectories)
                step = job.step if job is not None else await self._remote._get_step(self.model)
                resumed = job is not None and job.resumed
                self._mean_rewards[step] = mean_reward(trajectories)
                if self.config.backend.delete_old_checkpoints and not resumed:
                    await self._delete_old_checkpoints(step)
                job = self._jobs[key] = Job(step, run_id, key, groups, sampled_tokens(trajectories), resumed)
                self._start(job)
            elif job.resumed and job.task is None:
                job.sampled_tokens = sampled_tokens(trajectories)
        return job.ref

    async def find(self, run_id: str, epoch: int, version: int | None) -> TrainingJobRef | None:
        """Always None, once it is known whether the server has trained the job: then `submit` returns that job.

        A server that lists the job returns its metrics to a second submission. One that lists no jobs may be training
        it: waits for the model's next step.
        """
        if version is None:
            return None
        key, now = f"{run_id}/{epoch}", time.monotonic()
        job = self._jobs[key] = Job(version, run_id, key, resumed=True)
        try:
            if await self._remote.find_job(job.idempotency_key) is not None:
                return None
        except BackendError:  # asked again
            pass
        problem = "an earlier process of the run submitted the job: its metrics are unknown"
        job.loss = Loss(problem, now, self._remote.connection.refused)
        try:
            async for status in self.events(job.ref, _POLL_INTERVAL):
                if status.status not in UNFINISHED:
                    check_completed(f"job {key}", status)
                    break
        except JobLost as error:
            logger.info("%s", error)
        return None

    async def submit_again(self, ref: TrainingJobRef, error: JobLost) -> TrainingJobRef:
        job = self._job(ref)
        if not job.groups:
            raise error
        self._start(job)
        return ref

    def _start(self, job: Job) -> None:
        job.step_metrics, job.loss, job.failure = [], None, None
        job.task = asyncio.create_task(self._train(job), name=f"train {job.key}")
        self.training_jobs[job.run_id] = job.task

    async def _serialized_groups(self, trajectory_lists: list[list[Trajectory]]) -> list[orjson.Fragment]:
        """Converts one group at a time: ART's objects take many times the memory of their JSON."""
        return [
            await asyncio.to_thread(serialize_group, group)
            for trajectories in trajectory_lists
            for group in await self._construct_trajectory_groups([trajectories])
        ]

    async def _train(self, job: Job) -> None:
        """One training request, and the check that it has trained."""
        try:
            async for metrics in self._remote._train_model(
                self.model, job.groups, self._train_config, self._dev_config, idempotency_key=job.idempotency_key
            ):
                job.step_metrics.append(metrics)
        except BackendUnavailable as error:
            timeout = self.config.backend.lost_reply_timeout
            logger.warning("%s; waiting for up to %g s for the model's next step", error, timeout)
            pause = max(_POLL_INTERVAL, error.retry_after)
            job.loss = Loss(str(error), time.monotonic(), self._remote.connection.refused, pause)
            return
        step = await self._current_step(job)
        if step == job.step:
            raise JobFailed(f"the ART server finished the job, but the model is still at step {job.step}")
        if not any(known_metrics(metrics).get("steps", 1) for metrics in job.step_metrics):
            reasons = _drop_reasons(job.step_metrics)
            raise JobFailed(f"the model is at step {step}, but without any gradient step: {reasons}")
        job.end(step)

    async def _current_step(self, job: Job) -> int:
        """The model's step. Raises JobFailed if it is earlier than the job's first."""
        step = int(await self._remote._get_step(self.model))
        if step < job.step:
            problem = "the ART server has lost its checkpoints (was it restarted with another folder?)"
            raise JobFailed(f"the model was at step {job.step} before the job and is at step {step} now: {problem}")
        return step

    async def _resolve(self, job: Job, loss: Loss) -> None:
        """Sets the job's `final_step` if the server has trained it although its reply was lost.

        Raises JobLost if it is known not to train: it lists its jobs without this one, or it refused connections and
        has therefore restarted; or if the step has not changed within `lost_reply_timeout`.
        """
        waited = time.monotonic() - loss.since
        if waited < loss.pause:
            return
        step = await self._current_step(job)
        if step != job.step:
            job.end(step)
            logger.warning("%s; but the model is at step %d: job %s was trained", loss.problem, step, job.key)
            return
        restarted = self._remote.connection.refused > loss.refused
        if restarted or waited >= self.config.backend.lost_reply_timeout or not await self._may_be_training(job):
            raise JobLost(f"{loss.problem}; the model is still at step {step}")

    async def _may_be_training(self, job: Job) -> bool:
        """Whether the server has the job, or cannot say. Raises JobFailed if the job has failed."""
        try:
            match = await self._remote.find_job(job.idempotency_key)
        except BackendError:
            return True
        if match is not None and match.status in ("failed", "canceled"):
            raise JobFailed(match.message)
        return match is not None

    async def _delete_old_checkpoints(self, step: int) -> None:
        """Keeps the latest checkpoint and the one with the highest mean reward. Errors are only logged.

        Servers that record rewards also delete checkpoints of earlier runs; on other servers those are kept.
        """
        try:
            if hasattr(self._art.Backend, "_delete_checkpoints"):  # releases whose server records rewards
                record = self._art.Trajectory(messages_and_choices=[], reward=self._mean_rewards[step])
                await self._remote._log(self.model, [self._art.TrajectoryGroup([record])], "collected")
                await self._remote._delete_checkpoints(self.model, "collected/reward", 1.0)
            else:
                best = max(self._mean_rewards, key=lambda s: (self._mean_rewards[s], s))
                earlier = range(min(self._mean_rewards))
                await self._remote._delete_checkpoint_files(self.model, [*earlier, *sorted({best, step})])
        except InsituError as error:
            logger.warning("old checkpoints were not deleted: %s", error)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Raises JobLost if the job was submitted, and the server is known not to train it."""
        job = self._job(ref)
        if job.loss is not None and job.final_step is None:
            try:
                await self._resolve(job, job.loss)
            except JobFailed as error:
                job.loss, job.failure = None, error
                if isinstance(error, JobLost):
                    raise
        status, message = job.status()
        progress = 100.0 if status is TrainingStatusEnum.COMPLETED else None
        metrics: dict[str, Any] = {"tokens": job.sampled_tokens, **known_metrics(mean_metrics(job.step_metrics))}
        if job.final_step is not None:
            metrics["step"] = job.final_step
        elif total := mean_metrics(job.step_metrics[-1:]).get("num_gradient_steps"):
            progress = 100.0 * len(job.step_metrics) / total
        return TrainingJobStatus(
            run_id=ref.run_id, backend=BACKEND, status=status, progress=progress, message=message, metadata=metrics
        )

    async def events(self, ref: TrainingJobRef, interval: float) -> AsyncGenerator[TrainingJobStatus, None]:
        """Polls, and notices at once when the server's reply is complete."""
        while True:
            yield await self.status(ref)
            if (task := self._job(ref).task) is not None and not task.done():
                await asyncio.wait([task], timeout=interval)
            else:
                await asyncio.sleep(min(interval, _POLL_INTERVAL))

    def _job(self, ref: TrainingJobRef) -> Job:
        of_run = [job for job in self._jobs.values() if job.run_id == ref.run_id]
        key = of_run[-1].key if of_run and "job_id" not in (ref.metadata or {}) else job_id(ref)
        if key not in self._jobs:
            raise UnknownJob(f"no job {key!r} was submitted; submitted jobs: {', '.join(self._jobs) or 'none'}")
        return self._jobs[key]


def _drop_reasons(step_metrics: list[dict[str, float]]) -> str:
    """Why the server trained nothing: `insitu backend` reports counts by reason."""
    counts = {k.partition("dropped_")[2]: v for line in step_metrics for k, v in line.items() if "dropped_" in k}
    return ", ".join(f"{v:g} x {k}" for k, v in counts.items()) or "the server found nothing to train on"
