"""The adapter that trains on an ART server through the official client library."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from openai.types.chat.chat_completion import Choice
from pydantic import ValidationError

from insitu.adapters.art.config import ARTTrainerAdapterConfig
from insitu.adapters.art.conversion import art_trajectory, check_order, named
from insitu.adapters.art.library import internal_config, load_art, server_config, train_config
from insitu.adapters.art.remote_backend import averages, remote_backend, spelt
from insitu.errors import BackendUnavailable, InsituError, JobFailed, TrajectoryError
from insitu.http_format import gc_paused
from insitu.interfaces import TrainerAdapter
from insitu.registry import PolicyEndpoint
from insitu.schemas.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)

if TYPE_CHECKING:
    import art

logger = logging.getLogger(__name__)

BACKEND = "openpipe-art"
_POLL = 3.0
"""Seconds between two questions for the step of a server whose answer was lost."""
_ABSENCE = 30.0
"""Seconds it may be gone."""
_METRICS = {
    "loss": ("loss/train", "loss", "policy_loss"),
    "kl": ("loss/kl_policy_ref", "kl_policy_ref", "kl_div"),
    "entropy": ("loss/entropy", "entropy"),
    "grad_norm": ("loss/grad_norm", "grad_norm"),
    "learning_rate": ("loss/learning_rate", "learning_rate"),
    "tokens": ("data/step_trainer_tokens",),
    "steps": ("data/step_num_gradient_steps", "num_gradient_steps"),
}
"""Our name of a metric, and what the releases of ART call it."""


@dataclass
class _Job:
    """One training: the step it began at, the sampled tokens it was given, what its steps told, and how it ended.

    `lost` is why its answer was not heard.
    """

    step: int
    key: str
    tokens: int
    lines: list[dict[str, float]] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None
    trained_to: int | None = None
    lost: str | None = None

    @property
    def name(self) -> str:
        """What the server knows it by; a run of the same id that was trained before has begun at another step."""
        return f"{self.key}/{self.step}"


class ARTTrainerAdapter(TrainerAdapter):
    """Submits trajectories to an ART server, and says where the model it trains is served.

    It needs the package `openpipe-art` (`pip install 'insitu[art]'`): releases up to 0.5.7 with their own client, later
    ones with a backend class of ours. Raises ConfigError for a key that the installed release cannot pass on.
    """

    weighs_itself = True

    def __init__(self, adapter_config: ARTTrainerAdapterConfig) -> None:
        super().__init__(adapter_config)
        self.adapter_config: ARTTrainerAdapterConfig = adapter_config
        self.config = adapter_config
        self._art = load_art()
        backend = adapter_config.backend
        self._model_internal_config = internal_config(self._art, backend)
        self._server_config = server_config(self._art, backend)
        self._train_config, self._dev_config = train_config(self._art, adapter_config.training)
        host = f"[{backend.ip}]" if ":" in backend.ip else backend.ip
        self.remote_backend: art.Backend = remote_backend(self._art, f"http://{host}:{backend.port}", backend.api_key)
        self.model: art.TrainableModel = self._art.TrainableModel(
            name=backend.name,
            project=backend.project,
            base_model=backend.base_model,
            _internal_config=self._model_internal_config or None,
        )
        self._training_jobs: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, _Job] = {}
        self._rewards: dict[int, float] = {}  # the mean reward of what each step's weights did
        self._submitting = asyncio.Lock()

    @property
    def training_jobs(self) -> dict[str, asyncio.Task[None]]:
        """The training of each run that was submitted last."""
        return self._training_jobs

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Register the model with the server. Raises BackendUnavailable where there is no such server."""
        await super().initialize(run_config)
        if problem := await self._remote.health():
            raise BackendUnavailable(f"the ART server cannot be used: {problem}")
        await self.model.register(self.remote_backend, _openai_client_config=self._server_config)

    @property
    def _remote(self) -> Any:
        return self.remote_backend

    async def is_healthy(self) -> bool:
        problem = await self._remote.health()
        if problem:
            logger.warning("%s", problem)
        return problem is None

    async def close(self) -> None:
        """Let go of what still trains (the server goes on with it), and close the connections."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # also of those that failed and that nobody asked about
        await self._remote.close()

    async def policy_endpoint(self) -> PolicyEndpoint:
        step = await self._remote._get_step(self.model)
        await self._remote.list_names()
        name = self._remote._model_inference_name(self.model)
        key = self.model.inference_api_key or self.config.backend.api_key
        return PolicyEndpoint(self._remote.inference_url, name, key, step, self._name_now)

    def _name_now(self) -> str:
        return str(self._remote._model_inference_name(self.model))

    async def _validate_episode_order(self, traj: Trajectory) -> None:
        """Raises ValueError unless the dialogue is one that ART can train: see `check_order`."""
        check_order(traj.episode, traj.id)

    async def _construct_trajectory_groups(
        self, trajectory_lists: list[list[Trajectory]]
    ) -> "list[art.TrajectoryGroup]":
        """A group of ART for each list. Raises ValueError for a trajectory that ART cannot train."""
        for trajectory in (t for group in trajectory_lists for t in group):
            await self._validate_episode_order(trajectory)
        return await asyncio.to_thread(self._groups, trajectory_lists)

    def _groups(self, trajectory_lists: list[list[Trajectory]]) -> "list[art.TrajectoryGroup]":
        with gc_paused():
            return [self._art.TrajectoryGroup([self._made(t) for t in group]) for group in trajectory_lists]

    def _made(self, given: Trajectory) -> "art.Trajectory":
        made = art_trajectory(given)
        histories = (made, *made["additional_histories"])
        try:
            for history in histories:
                turns = history["messages_and_choices"]
                # ART takes any mapping for a message: a choice has to be an object when it comes
                history["messages_and_choices"] = [Choice.model_validate(t) if "message" in t else t for t in turns]
            trajectory = self._art.Trajectory.model_validate(made)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise TrajectoryError(f"{named(given.id)}: {place} is {first['input']!r}: {first['msg']}") from None
        for history, told in zip((trajectory, *trajectory.additional_histories), histories, strict=True):
            history.tools = told["tools"]  # ART sorts their keys anew, in which order templates print them
        return trajectory

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Begin to train on all groups. What a run submits twice for one epoch is trained once.

        Builders of plugins may not say which epoch their trajectories are of: then each submission is a job.
        """
        if not any(trajectories.trajectories):
            raise JobFailed(f"run {trajectories.run_id}: there are no trajectories to train on")
        number = trajectories.epoch if trajectories.epoch is not None else f"submission {len(self._jobs) + 1}"
        key = f"{trajectories.run_id}/{number}"
        async with self._submitting:
            job = self._jobs.get(key)
            if job is None or (job.task is not None and job.task.done() and job.trained_to is None):
                groups = await self._spelt(trajectories.trajectories)
                step = job.step if job is not None else await self._remote._get_step(self.model)
                self._rewards[step] = _mean_reward(trajectories)
                job = self._jobs[key] = _Job(step, key, _sampled_tokens(trajectories))
                job.task = asyncio.create_task(self._train(job, groups), name=f"train {key}")
                self._training_jobs[trajectories.run_id] = job.task
        return TrainingJobRef(run_id=trajectories.run_id, backend=BACKEND, metadata={"job": key, "step": job.step})

    async def _spelt(self, trajectory_lists: list[list[Trajectory]]) -> list[orjson.Fragment]:
        """The groups as they are sent, made one by one: ART's objects take many times the room, and the time."""
        return [
            await asyncio.to_thread(spelt, group)
            for trajectories in trajectory_lists
            for group in await self._construct_trajectory_groups([trajectories])
        ]

    async def _train(self, job: _Job, groups: list[orjson.Fragment]) -> None:
        if self.config.backend.delete_old_checkpoints:
            await self._delete_old(job.step)
        for attempt in (1, 2):
            job.lines = []
            try:
                async for line in self._remote._train_model(
                    self.model, groups, self._train_config, self._dev_config, key=job.name
                ):
                    job.lines.append(line)
            except BackendUnavailable as error:
                reached = await self._step_after(job, error)
                if reached == job.step and attempt == 1:
                    logger.warning("%s; the model is still at step %d: training again", error, reached)
                    continue
                if reached == job.step:
                    raise
                job.lost = str(error)
                logger.warning("%s; but the model is at step %d now: it has trained", error, reached)
            break
        reached = await self._reached(job)
        if reached == job.step:
            raise JobFailed(f"the ART server has ended the training, but the model is still at step {job.step}")
        if job.lost is None and not any(known_metrics(line).get("steps", 1) for line in job.lines):
            raise JobFailed(f"the ART server took no gradient step, though its step is {reached} now: {_left_out(job)}")
        job.trained_to = reached

    async def _reached(self, job: _Job) -> int:
        """The model's step; raises JobFailed where the server has an earlier one than the job began at."""
        step = int(await self._remote._get_step(self.model))
        if step < job.step:
            raise JobFailed(
                f"the model was at step {job.step} before the training, and is at step {step} now: the ART server has "
                "lost its checkpoints (was it started again with another folder?)"
            )
        return step

    async def _step_after(self, job: _Job, lost: BackendUnavailable) -> int:
        """The model's step once the server can be asked again; raises `lost` where it cannot for half a minute.

        A server that is there all the time may still be training what it was given: it is asked until its step has
        moved, for `lost_reply_patience` at most. One that was gone and has come back is not.
        """
        asked, gone = time.monotonic(), 0
        while time.monotonic() - asked < self.config.backend.lost_reply_patience:
            await asyncio.sleep(_POLL)
            try:
                step = await self._reached(job)
            except BackendUnavailable:
                gone += 1
                if gone * _POLL >= _ABSENCE:
                    raise lost from None
                continue
            if step != job.step or gone:
                return step
            if why := await self._remote.failure_of(job.name):
                raise JobFailed(why)
        return await self._reached(job)

    async def _delete_old(self, step: int) -> None:
        """Keep the latest checkpoint and that of the highest mean reward; training does not depend on it.

        Of the steps before this run some servers know the rewards, and delete them too; for the others they stay.
        """
        try:
            if hasattr(self._art.Backend, "_delete_checkpoints"):  # releases whose server keeps the record of rewards
                told = self._art.Trajectory(messages_and_choices=[], reward=self._rewards[step])
                await self._remote._log(self.model, [self._art.TrajectoryGroup([told])], "collected")
                await self._remote._delete_checkpoints(self.model, "collected/reward", 1.0)
            else:
                best = max(self._rewards, key=lambda known: (self._rewards[known], known))
                earlier = range(min(self._rewards))
                await self._remote._delete_checkpoint_files(self.model, [*earlier, *sorted({best, step})])
        except InsituError as error:
            logger.warning("old checkpoints were not deleted: %s", error)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        job = self._job(ref)
        task = job.task
        assert task is not None
        if not task.done():
            return self._told(ref, TrainingStatusEnum.RUNNING, self._progress(job), None)
        if task.cancelled():
            return self._told(ref, TrainingStatusEnum.CANCELED, None, "canceled")
        if (error := task.exception()) is not None:
            return self._told(ref, TrainingStatusEnum.FAILED, None, f"{type(error).__name__}: {error}")
        return self._told(ref, TrainingStatusEnum.COMPLETED, 100.0, job.lost and f"trained, but {job.lost}")

    def _told(
        self, ref: TrainingJobRef, status: TrainingStatusEnum, progress: float | None, message: str | None
    ) -> TrainingJobStatus:
        job = self._job(ref)
        metrics: dict[str, Any] = {"tokens": job.tokens, **known_metrics(averages(job.lines))}
        if job.trained_to is not None:
            metrics["step"] = job.trained_to
        return TrainingJobStatus(
            run_id=ref.run_id, backend=BACKEND, status=status, progress=progress, message=message, metadata=metrics
        )

    @staticmethod
    def _progress(job: _Job) -> float | None:
        total = averages(job.lines[-1:]).get("num_gradient_steps") if job.lines else None
        return 100.0 * len(job.lines) / total if total else None

    def _job(self, ref: TrainingJobRef) -> _Job:
        of_run = [key for key in self._jobs if key.rpartition("/")[0] == ref.run_id]
        key = (ref.metadata or {}).get("job", of_run[-1] if of_run else ref.run_id)
        if key not in self._jobs:
            known = ", ".join(self._jobs) or "none yet"
            raise JobFailed(f"this adapter has submitted no job {key!r}; it has: {known}")
        return self._jobs[key]

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The training's final status. It is waited for; `poll_interval` (seconds) bounds how long at a time."""
        task = self._job(ref).task
        assert task is not None
        while not task.done():
            await asyncio.wait([task], timeout=poll_interval)
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("job %s: %s", (ref.metadata or {}).get("job"), metrics)


def _sampled_tokens(trajectories: TrajectoryCollection) -> int:
    """How many tokens there are to train on, where the builder knows the calls behind its trajectories."""
    given = (t for group in trajectories.trajectories for t in group)
    return sum(len(t.calls[place].token_ids or ()) for t in given for place in t.trained_calls)


def _mean_reward(trajectories: TrajectoryCollection) -> float:
    """Of all that was collected, where its builder tells: what is left out for having no variance may be the best."""
    rewards = [t.reward for group in trajectories.trajectories for t in group]
    return sum(rewards) / len(rewards) if trajectories.mean_reward is None else trajectories.mean_reward


def _left_out(job: _Job) -> str:
    """Why, as far as the server says so: `insitu backend` counts what it leaves out by reason."""
    reasons = {k.partition("dropped_")[2]: v for line in job.lines for k, v in line.items() if "dropped_" in k}
    return ", ".join(f"{v:g} x {k}" for k, v in reasons.items()) or "it found nothing to train on in what it was given"


def known_metrics(told: Mapping[str, float]) -> dict[str, Any]:
    """What the server told, with our names for what we know beside its own."""
    found = {
        ours: next(told[name] for name in theirs if name in told)
        for ours, theirs in _METRICS.items()
        if any(name in told for name in theirs)
    }
    return {**told, **found}
