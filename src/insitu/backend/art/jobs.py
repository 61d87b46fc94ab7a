"""Training as ART clients ask for it: groups in, a metrics line for each gradient step out, and no reply paid twice."""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.backend.art.messages import ArtModel, Group, read_groups
from insitu.backend.art.models import ArtModels, Registered
from insitu.backend.art.rows import Batch, RowOptions, make_batch
from insitu.backend.art.settings import Plan, read_plan
from insitu.backend.inference.tokens import ChatTokenizer
from insitu.backend.training.batches import optimiser_steps
from insitu.backend.training.jobs import Job, Jobs
from insitu.errors import JobFailed, RequestRefused
from insitu.schemas.training_jobs import JobState, TrainingSettings

logger = logging.getLogger(__name__)

REMEMBERED = 100
"""Requests whose outcome can be looked up."""


@dataclass(frozen=True)
class Ask:
    """A request to train on `groups`, not yet read; `key` is the client's name for it, `digest` that of its body."""

    model: ArtModel
    groups: Any
    config: Mapping[str, Any]
    dev_config: Mapping[str, Any]
    key: str | None
    digest: bytes


@dataclass
class Run:
    """A job that an ART client started; `delivered` once its whole reply has been sent to a client that was there.

    `counts` are what its metrics say of the groups, `dropped` what was left out of them by reason.
    """

    job: Job
    model: ArtModel
    counts: dict[str, int]
    dropped: Mapping[str, int]
    digest: bytes
    delivered: bool = False

    @property
    def steps(self) -> int:
        return self.counts["num_gradient_steps"]

    def state(self) -> dict[str, Any]:
        """What there is to know of it over HTTP."""
        more = {"model": self.model.key, "dropped": dict(self.dropped), "gradient_steps": self.steps}
        return self.job.state.model_dump() | more

    async def lines(self) -> AsyncIterator[dict[str, float]]:
        """The metrics of each gradient step, from the first; of a batch without any, why. Raises JobFailed."""
        async for state in self.job.events():
            if state is not None:
                if state.status in ("failed", "canceled"):
                    raise JobFailed(f"job {state.id}: {state.message}")
                for line in self._told(state):
                    yield line

    def lines_so_far(self) -> list[dict[str, float]]:
        return [line for state in self.job.history for line in self._told(state)]

    def _told(self, state: JobState) -> list[dict[str, float]]:
        if state.status == "running" and "loss" in state.metrics:
            return [self._line(state.metrics)]
        return [self._line({})] if state.status == "completed" and not self.steps else []

    def _line(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Under the names of every generation of clients that may ask."""
        known = {name: metrics.get(name) or 0.0 for name in ("loss", "grad_norm", "entropy", "learning_rate")}
        dropped = {f"dropped_{reason}": float(count) for reason, count in self.dropped.items()}
        old = {
            **{name: value for name, value in known.items() if name != "learning_rate"},
            **({"kl_div": metrics["kl"]} if metrics.get("kl") is not None else {}),
            "num_gradient_steps": self.steps,
        }
        if self.model.generation == "A":
            return old | dropped
        new = {
            **{f"loss/{'train' if name == 'loss' else name}": value for name, value in known.items()},
            **({"loss/kl_policy_ref": metrics["kl"]} if metrics.get("kl") is not None else {}),
            **{f"data/step_{name}": float(value) for name, value in self.counts.items()},
            **{f"data/step_{name}": value for name, value in dropped.items()},
        }
        return old | new


class ArtJobs:
    """Starts runs, remembers the latest, and knows a request that came again because its reply was lost."""

    def __init__(self, models: ArtModels, jobs: Jobs, tokens: ChatTokenizer) -> None:
        self._models = models
        self._jobs = jobs
        self._tokens = tokens
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._latest: dict[str, Run] = {}  # by the model's key
        self._refused: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self._turns: dict[str, asyncio.Lock] = {}

    async def start(self, ask: Ask) -> Run:
        """The run of this request: a new one, or the one it has already. Raises RequestRefused where it cannot be."""
        try:
            return await self._start(ask)
        except RequestRefused as error:  # whose answer not every client shows
            self._refused.appendleft({"model": ask.model.key, "message": str(error), "param": error.param})
            raise

    async def _start(self, ask: Ask) -> Run:
        async with self._turns.setdefault(ask.model.key, asyncio.Lock()):
            if run := self._known(ask):
                return run
            registered = await self._models.open(ask.model)
            plan = read_plan(ask.model, ask.config, ask.dev_config)
            self._tell(registered, plan)
            groups, batch = await asyncio.to_thread(self._batch, ask, plan)
            settings = plan.settings.model_copy(
                update={
                    "steps_per_iteration": batch.sequences or None,
                    "lora": plan.settings.lora or registered.learner.lora,
                }
            )
            step = registered.step
            job = self._jobs.submit(_key(ask), settings, batch.rows, registered.learner)
            run = Run(job, ask.model, _counts(groups, batch, settings), batch.dropped, ask.digest)
            self._runs[job.state.id] = self._latest[ask.model.key] = run
            registered.history.log(step, "train", groups)
            if len(self._runs) > REMEMBERED:
                self._runs.popitem(last=False)
            return run

    def _known(self, ask: Ask) -> Run | None:
        """The same request again: by its key, or by its body while nobody has had the whole reply to it.

        A client that had the reply and sends the same body means to train on it once more.
        """
        if ask.key:
            job = self._jobs.known(_key(ask))
            return self._runs.get(job.state.id) if job else None
        run = self._latest.get(ask.model.key)
        if run is None or run.delivered or run.digest != ask.digest or run.job.state.status in ("failed", "canceled"):
            return None
        logger.info("model %s: the request of %s came again; it is not trained twice", run.model.key, run.job.state.id)
        return run

    def _batch(self, ask: Ask, plan: Plan) -> tuple[list[Group], Batch]:
        groups = read_groups(ask.groups)
        limits = self._jobs.limits
        longest = min(plan.max_length or limits.max_length, limits.max_length)
        options = RowOptions(plan.scale_rewards, plan.advantage_balance, longest, plan.packed_length, plan.max_length)

        def render(messages: list[dict[str, Any]], tools: list[Any] | None) -> list[int]:
            return self._tokens.prompt(messages, tools, plan.template)

        return groups, make_batch(groups, options, render, limits)

    def _tell(self, registered: Registered, plan: Plan) -> None:
        if new := sorted(set(plan.without_effect) - registered.told):
            registered.told.update(new)
            logger.warning("model %s: without effect here: %s", registered.model.key, ", ".join(new))

    def get(self, id: str) -> Run:
        if id not in self._runs:
            known = ", ".join(self._runs) or "none yet"
            raise RequestRefused(f"there is no job {id!r}; there are: {known}", status=404, code="job_not_found")
        return self._runs[id]

    def state(self) -> dict[str, Any]:
        """The latest first."""
        return {"jobs": [run.state() for run in reversed(self._runs.values())], "refused": list(self._refused)}

    def busy(self, model: ArtModel) -> bool:
        run = self._latest.get(model.key)
        return run is not None and not run.job.ended


def _counts(groups: Sequence[Group], batch: Batch, settings: TrainingSettings) -> dict[str, int]:
    """By ART's names."""
    return {
        "num_scenarios": len(groups),
        "num_trajectories": sum(len(group.trajectories) + group.exceptions for group in groups),
        "num_groups_submitted": len(groups),
        "num_groups_trainable": batch.trainable_groups,
        "trainer_tokens": sum(len(row.positions) for row in batch.rows),
        "num_gradient_steps": len(optimiser_steps(batch.rows, settings)) if batch.rows else 0,
    }


def _key(ask: Ask) -> str | None:
    return f"art/{ask.model.key}/{ask.key}" if ask.key else None
