"""Training requests of ART clients: groups in, a line of metrics per optimizer step out, and no retry trained twice."""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from insitu.backend.learner.batches import optimizer_steps
from insitu.backend.learner.jobs import TrainingJob
from insitu.backend.protocols import Services
from insitu.errors import JobFailed, RequestRefused
from insitu.integrations.art.server.models import ArtModels
from insitu.integrations.art.server.rows import ArtBatch, build_batch
from insitu.integrations.art.server.settings import parse_plan
from insitu.integrations.art.server.trajectories import ArtGroup, ArtModel, TrainingBody, parse
from insitu.schemas.training_jobs import JobState, TrainingSettings

logger = logging.getLogger(__name__)

KEPT_JOBS = 100
"""Jobs and refused requests that can be looked up."""
_LOSS_NAMES = {"loss": "train", "kl": "kl_policy_ref"}
"""Our metrics -> their names after `loss/` in releases from 0.5.17 on, where they differ."""


class TrainRequest(NamedTuple):
    """A client's training request; its body is still to be parsed."""

    model: ArtModel
    kind: type[TrainingBody]
    body: Any
    digest: str
    idempotency_key: str | None

    @property
    def job_key(self) -> str | None:
        return f"art/{self.model.key}/{self.idempotency_key}" if self.idempotency_key else None


@dataclass
class ArtJob:
    """A job started by an ART client; `end_was_delivered` once the client has received the complete response.

    `counts` are the batch statistics among its metrics, `dropped` counts trajectories left out by reason.
    """

    job: TrainingJob
    model: ArtModel
    counts: dict[str, int]
    dropped: Mapping[str, int]
    digest: str
    end_was_delivered: bool = False

    @property
    def steps(self) -> int:
        return self.counts["num_gradient_steps"]

    def state(self) -> dict[str, Any]:
        extra = {"model": self.model.key, "dropped": dict(self.dropped), "gradient_steps": self.steps}
        return self.job.state.model_dump() | extra

    async def metric_lines(self) -> AsyncIterator[dict[str, float]]:
        """Yields the metrics of each optimizer step; one line for a job without steps.

        Raises JobFailed, or RequestRefused (422) if the rows or settings made the loss or a weight infinite.
        """
        async for state in self.job.events():
            if state is not None:
                if state.status in ("failed", "canceled"):
                    message = f"job {state.id}: {state.message}"
                    raise RequestRefused(message, status=422) if self.job.diverged else JobFailed(message)
                for line in self._lines_of(state):
                    yield line

    def gradient_step_metrics(self) -> list[dict[str, float]]:
        return [line for state in self.job.history for line in self._lines_of(state)]

    def _lines_of(self, state: JobState) -> list[dict[str, float]]:
        if state.status == "running" and "loss" in state.metrics:
            return [self._format(state.metrics)]
        has_no_other = not self.steps or len(self.job.history) == 1  # which is of an earlier process
        return [self._format(state.metrics)] if state.status == "completed" and has_no_other else []

    def _format(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """The metrics under the names that the client's release expects."""
        values = dict.fromkeys(("loss", "grad_norm", "entropy", "learning_rate"), 0.0)
        values |= {name: metrics[name] for name in (*values, "kl") if metrics.get(name) is not None}
        dropped = {f"dropped_{reason}": float(count) for reason, count in self.dropped.items()}
        old = {"kl_div" if name == "kl" else name: value for name, value in values.items() if name != "learning_rate"}
        old["num_gradient_steps"] = self.steps
        if self.model.legacy:
            return old | dropped
        losses = {f"loss/{_LOSS_NAMES.get(name, name)}": value for name, value in values.items()}
        return old | losses | {f"data/step_{name}": float(value) for name, value in (self.counts | dropped).items()}


class ArtJobs:
    """Starts jobs, keeps the latest, and recognizes a request repeated because its response was lost."""

    def __init__(self, models: ArtModels, services: Services) -> None:
        self._models = models
        self._services = services
        self._jobs: OrderedDict[str, ArtJob] = OrderedDict()
        self._latest: dict[str, ArtJob] = {}  # by model key
        self._refused: deque[dict[str, Any]] = deque(maxlen=KEPT_JOBS)
        self._locks: dict[str, asyncio.Lock] = {}  # by model key

    async def start(self, request: TrainRequest) -> ArtJob:
        """Returns a new job, or the existing job of a repeated request. Raises RequestRefused."""
        try:
            async with self._locks.setdefault(request.model.key, asyncio.Lock()):
                return self._find(request) or await self._start(request)
        except RequestRefused as error:  # kept because not every client shows the response
            self._refused.appendleft({"model": request.model.key, "message": str(error), "param": error.param})
            raise

    async def _start(self, request: TrainRequest) -> ArtJob:
        registered = await self._models.open(request.model)
        body = await asyncio.to_thread(parse, request.kind, request.body)
        plan = parse_plan(request.model, body.config, body.dev_config)
        if ignored := sorted(set(plan.ignored) - registered.ignored_settings):
            registered.ignored_settings.update(ignored)
            logger.warning("model %s: settings without effect here: %s", registered.model.key, ", ".join(ignored))
        groups = body.trajectory_groups
        render = partial(self._services.sampler.tokenizer.render_prompt, template_kwargs=plan.options.template_kwargs)
        limits = self._services.loaded.max_length, self._services.loaded.vocab_size
        batch = await asyncio.to_thread(build_batch, groups, plan.options, render, *limits)
        lora = plan.settings.lora or registered.learner.lora
        settings = plan.settings.model_copy(update={"steps_per_iteration": batch.sequences or None, "lora": lora})
        step = registered.step
        latest = self._latest.get(request.model.key)
        repeats = latest.job if latest is not None and latest.digest == request.digest else None
        job = self._services.jobs.submit(
            request.job_key, settings, batch.rows, registered.learner, None, repeats, request.digest
        )
        art_job = ArtJob(job, request.model, _counts(groups, batch, settings), batch.dropped, request.digest)
        self._jobs[job.state.id] = self._latest[request.model.key] = art_job
        if not job.ended:
            await registered.metrics_log.log(step, "train", groups)
        if len(self._jobs) > KEPT_JOBS:
            self._jobs.popitem(last=False)
        return art_job

    def _find(self, request: TrainRequest) -> ArtJob | None:
        """The job of the same idempotency key, or of the same body while its response has not been delivered.

        A client that received the response and sends the same body again wants to train on it once more.
        """
        if request.idempotency_key:
            job = self._services.jobs.find_by_idempotency_key(request.job_key)
            return self._jobs.get(job.state.id) if job else None
        latest = self._latest.get(request.model.key)
        if latest is None or latest.end_was_delivered or latest.digest != request.digest:
            return None
        state = latest.job.state
        if state.status in ("failed", "canceled"):
            return None
        logger.info("model %s: the request of %s was repeated; it is not trained twice", latest.model.key, state.id)
        return latest

    def get(self, job_id: str) -> ArtJob:
        if job_id not in self._jobs:
            existing = ", ".join(self._jobs) or "none"
            raise RequestRefused(f"no such job: {job_id!r}; known jobs: {existing}", status=404, code="job_not_found")
        return self._jobs[job_id]

    def state(self) -> dict[str, Any]:
        """Jobs and refused requests, the latest first."""
        return {"jobs": [job.state() for job in reversed(self._jobs.values())], "refused": list(self._refused)}

    async def delete_model(self, model_id: str) -> None:
        """Deletes a model; a request for one of the same name is a new job. Raises RequestRefused while it trains."""
        key = self._models.get(model_id).model.key
        async with self._locks.setdefault(key, asyncio.Lock()):
            registered = self._models.get(model_id)
            if self._services.jobs.trains(registered.learner):
                problem = f"{key} cannot be deleted while a training job is pending or running"
                raise RequestRefused(problem, status=409, code="model_busy")
            self._latest.pop(key, None)
            self._services.jobs.forget_keys(registered.learner)
            await self._models.delete(registered)


def _counts(groups: Sequence[ArtGroup], batch: ArtBatch, settings: TrainingSettings) -> dict[str, int]:
    """Batch statistics by ART's names."""
    return {
        "num_scenarios": len(groups),
        "num_trajectories": sum(len(group.trajectories) + len(group.exceptions) for group in groups),
        "num_groups_submitted": len(groups),
        "num_groups_trainable": batch.trainable_groups,
        "trainer_tokens": sum(len(row.positions) for row in batch.rows),
        "num_gradient_steps": len(optimizer_steps(batch.rows, settings)) if batch.rows else 0,
    }
