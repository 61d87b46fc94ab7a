"""The models that ART clients train: each is a policy with its own names, checkpoints and logged metrics."""

import asyncio
import contextlib
import hashlib
import json
import math
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import pstdev
from typing import Any
from urllib.parse import quote

from insitu.backend.inference.sampler import WeightVersion
from insitu.backend.learner.learner import Learner
from insitu.backend.protocols import ServedModel, Services
from insitu.disk.json_files import LineFile, read_line, whole_lines
from insitu.errors import InsituError, RequestRefused
from insitu.integrations.art.remote_backend import mean_metrics
from insitu.integrations.art.server.settings import parse_plan
from insitu.integrations.art.server.trajectories import ArtGroup, ArtModel
from insitu.schemas.config import MAX_NAME_BYTES
from insitu.wire.http_format import parse_count

ARTIFACT = "wandb-artifact:///"
"""Prefix of `entity/project/name` in the serverless protocol."""

MAX_MODELS = 1000
MAX_BASE_NAMES = 64
"""Names of the loaded model that are served; the latest ones."""


class MetricsLog:
    """`history.jsonl` in the model's folder: a line per log request, with metrics named `SPLIT/METRIC`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "history.jsonl"
        self._records: list[dict[str, Any]] = []
        self._writing = asyncio.Lock()
        for number, line in whole_lines(self._path):
            record = read_line(self._path, number, line)
            if not isinstance(record.get("step"), int):
                raise InsituError(f"{self._path}, line {number} has no step")
            self._records.append(record)

    async def log(self, step: int, split: str, groups: Sequence[ArtGroup]) -> None:
        """Logs the means over all trajectories of `groups`; they are on disk when it returns."""
        record = {"step": step, **{f"{split}/{name}": value for name, value in _group_metrics(groups).items()}}
        async with self._writing:
            await asyncio.to_thread(self._append, json.dumps(record).encode() + b"\n")
            self._records.append(record)

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(LineFile(self._path)) as file:  # which syncs it
            file.append(line)

    def metrics(self, step: int) -> dict[str, float]:
        """Means of the metrics logged at this step."""
        means = mean_metrics(record for record in self._records if record["step"] == step)
        return {name: mean for name, mean in means.items() if name != "step"}

    def best(self, metric: str, smoothing: float, steps: Iterable[int]) -> int | None:
        """Returns the step with the highest metric, the later one of equals; None if the metric was never logged.

        `smoothing` is the weight of each step relative to the average of earlier steps; 1 disables smoothing.
        """
        weighted = total = 0.0
        best: tuple[float, int] | None = None
        for step in sorted(steps):
            value = self.metrics(step).get(metric)
            if value is None:
                continue
            weighted, total = weighted * (1 - smoothing) + value, total * (1 - smoothing) + 1
            best = max(best or (-math.inf, step), (weighted / total, step))
        return best[1] if best else None


def _group_metrics(groups: Sequence[ArtGroup]) -> dict[str, float]:
    """ART's metrics: reward, exception_rate, the trajectories' own metrics, reward_std_dev within groups."""
    rewards = [[trajectory.reward for trajectory in group.trajectories] for group in groups]
    records = [{"reward": reward, "exception_rate": 0.0} for each in rewards for reward in each]
    records += [{"exception_rate": 1.0} for group in groups for _ in group.exceptions]
    records += [trajectory.metrics for group in groups for trajectory in group.trajectories]
    records += [{"reward_std_dev": pstdev(each)} for each in rewards if len(each) > 1]
    return mean_metrics(records)


@dataclass
class RegisteredModel:
    """A model in training, its weights and logged metrics."""

    model: ArtModel
    learner: Learner
    metrics_log: MetricsLog
    ignored_settings: set[str] = field(default_factory=set)
    """Settings without effect that have been logged already."""

    @property
    def id(self) -> str:
        """Fits a path, and is the same in every process."""
        return hashlib.blake2b(self.model.key.encode(), digest_size=12).hexdigest()

    @property
    def step(self) -> int:
        return self.learner.version

    def find(self, name: str) -> ServedModel | None:
        """`NAME` is the latest step, `NAME@K` step K; also in the serverless protocol's artifact form."""
        policy = self.learner.policy_name
        for base, separator in self._name_forms():
            if name == base:
                return ServedModel(WeightVersion(None, policy), self.step, returns_token_ids=True)
            step = name.removeprefix(base + separator)
            if step != name and (number := parse_count(step)) in self.learner.versions:
                return ServedModel(WeightVersion(number, policy), number, returns_token_ids=True)
        return None

    def names(self) -> list[str]:
        names: list[str] = []
        for base, separator in self._name_forms():
            names += [base, *(f"{base}{separator}{step}" for step in self.learner.versions)]
        return names

    def _name_forms(self) -> tuple[tuple[str, str], ...]:
        return (self.model.name, "@"), (ARTIFACT + self.model.key, ":step")


class ArtModels:
    """The registered models; a provider of model names."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._source, self._name = services.options.model, services.options.name
        self._folder = services.output_dir / "art"
        self._models: dict[str, RegisteredModel] = {}
        self._base_names: deque[str] = deque(maxlen=MAX_BASE_NAMES)  # the clients' names of the loaded model

    def check(self, model: ArtModel) -> None:
        """Raises RequestRefused if this backend cannot train the model."""
        for key in ("entity", "project", "name"):
            value, problem = getattr(model, key), ""
            if value in ("", ".", "..") or not value.isprintable():  # it is also a line of logs
                problem = f"{value!r:.80}, which is not a folder name"
            elif len(_folder_name(value)) > MAX_NAME_BYTES:
                problem = f"{value!r:.40}..., too long for a folder name; allowed: {MAX_NAME_BYTES} bytes"
            if problem:
                raise RequestRefused(f"the model's {key} is {problem}", status=422, param=key)
        base = model.base
        if base is None or not self._is_loaded_model(base):
            problem = f"this backend has loaded {self._source!r}, also served as {self._name!r}"
            raise _conflict(f"base_model is {base!r}, but {problem}", "base_model", "other_base_model")
        parse_plan(model, {}, {})  # refuses unsupported configuration now instead of after the first episodes
        for other in self._models.values():
            if other.model.name == model.name and other.model.key != model.key:
                raise _name_taken(model, f"{other.model.key} is served under it")
            if other.model.key == model.key and other.model.identity != model.identity:
                raise _name_taken(model, f"entity, project and name of another model are {other.model.identity}")
            if other.model.name == base:
                problem = f"{other.model.key} is served under that name; {self._name!r} is the same model"
                raise _conflict(f"base_model is {base!r}, but {problem}", "base_model", "name_taken")
        if model.name == self._name:
            raise _name_taken(model, "this backend serves its own model under it (option --name)")
        if model.name == base or model.name in self._base_names:
            raise _name_taken(model, "the base model is served under it")
        self._services.models.add(self)
        if base != self._name and base not in self._base_names:
            self._base_names.append(base)

    async def open(self, model: ArtModel) -> RegisteredModel:
        """Registers the model, or returns it; resumes from its checkpoints. Raises RequestRefused like `check`."""
        self.check(model)
        if model.key not in self._models:
            if len(self._models) >= MAX_MODELS:
                problem = f"this backend trains {MAX_MODELS} models already; delete some"
                raise _conflict(problem, None, "too_many_models")
            folder = self.folder(model)
            learner = await self._services.compute.call(self._open_learner, model, folder)
            if learner.version:
                await self._services.sampler.publish(WeightVersion(learner.version, model.key))
            if model.key not in self._models:  # another request may have registered it meanwhile
                self._services.jobs.adopt(learner)
                self._models[model.key] = RegisteredModel(model, learner, MetricsLog(folder))
        return self._models[model.key]

    def _open_learner(self, model: ArtModel, folder: Path) -> Learner:
        learner = self._services.learners.open(model.key, folder)
        settings = parse_plan(model, {}, {}).settings
        learner.verify(settings.model_copy(update={"lora": settings.lora or learner.lora}))
        return learner

    def get(self, model_id: str) -> RegisteredModel:
        for registered in self._models.values():
            if registered.id == model_id:
                return registered
        names = ", ".join(registered.id for registered in self._models.values()) or "none"
        raise RequestRefused(f"no such model: {model_id!r}; known models: {names}", status=404, code="model_not_found")

    async def delete_steps(self, registered: RegisteredModel, steps: Iterable[int]) -> list[int]:
        """Deletes checkpoints except the latest and the loaded model (step 0); returns the deleted steps."""
        return await self._services.jobs.delete_versions(registered.learner, steps)

    async def delete(self, registered: RegisteredModel) -> None:
        """Deletes the model with all its checkpoints and logs; it may be registered again meanwhile."""
        policy_name = registered.learner.policy_name

        def delete() -> None:
            self._services.learners.close(policy_name)
            shutil.rmtree(self.folder(registered.model), ignore_errors=True)

        del self._models[registered.model.key]
        await self._services.compute.call(delete)
        await self._services.sampler.retire(WeightVersion(None, policy_name))

    def folder(self, model: ArtModel) -> Path:
        return self._folder.joinpath(*map(_folder_name, model.identity))

    def find(self, name: str) -> ServedModel | None:
        if name in self._base_names:
            return ServedModel(WeightVersion(0), 0, returns_token_ids=True)
        return next(filter(None, (registered.find(name) for registered in self._models.values())), None)

    def names(self) -> list[str]:
        return [*self._base_names, *(name for registered in self._models.values() for name in registered.names())]

    def _is_loaded_model(self, name: str) -> bool:
        """Accepts the path, the hub name, the last component of either, and the name it is served under."""
        return name in (self._source, self._name) or Path(name).name == Path(self._source).resolve().name


def _folder_name(name: str) -> str:
    return quote(name, safe="")


def _name_taken(model: ArtModel, reason: str) -> RequestRefused:
    message = f"the name {model.name!r} of {model.key} is taken: {reason}; rename one of them"
    return _conflict(message, "name", "name_taken")


def _conflict(message: str, param: str | None, code: str) -> RequestRefused:
    return RequestRefused(message, status=409, param=param, code=code)
