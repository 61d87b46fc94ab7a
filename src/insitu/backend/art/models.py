"""The ART models of this backend, each a line of weights of its own, and the names they are served under."""

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from insitu.backend.art.history import History
from insitu.backend.art.messages import ArtModel, optional
from insitu.backend.art.settings import read_plan
from insitu.backend.compute import Compute
from insitu.backend.inference.completions import Served
from insitu.backend.inference.engine import Engine, Weights
from insitu.backend.training.learner import Learner
from insitu.backend.training.lineages import Lineages
from insitu.errors import RequestRefused

ARTIFACT = "wandb-artifact:///"
"""What the serverless protocol puts before `entity/project/name`."""


@dataclass
class Registered:
    """A model that somebody trains, its weights and what was logged of it."""

    model: ArtModel
    learner: Learner
    history: History
    told: set[str] = field(default_factory=set)
    """Settings without effect that have been named in the log."""

    @property
    def id(self) -> str:
        return id_of(self.model)

    @property
    def step(self) -> int:
        return self.learner.version

    def find(self, name: str) -> Served | None:
        """`NAME` is the latest step and `NAME@K` another, or as artifacts of the serverless protocol."""
        lineage = self.learner.lineage
        for own, mark in self._forms():
            if name == own:
                return Served(Weights(None, lineage), self.step, takes_back=True)
            step = name.removeprefix(own + mark)
            if step != name and step.isdecimal() and int(step) in self.learner.versions:
                return Served(Weights(int(step), lineage), int(step), takes_back=True)
        return None

    def names(self) -> list[str]:
        steps = self.learner.versions
        return [name for own, mark in self._forms() for name in (own, *(f"{own}{mark}{step}" for step in steps))]

    def _forms(self) -> tuple[tuple[str, str], ...]:
        return (self.model.name, "@"), (ARTIFACT + self.model.key, ":step")


class ArtModels:
    """All of them; `base` is what the backend was started with: a folder or hub name, and the name it is served by."""

    def __init__(
        self, lineages: Lineages, engine: Engine, compute: Compute, base: tuple[str, str], folder: Path
    ) -> None:
        self._lineages = lineages
        self._engine = engine
        self._compute = compute
        self._source, self._name = base
        self._folder = folder
        self._models: dict[str, Registered] = {}
        self._aliases: dict[str, None] = {}  # what clients call the loaded model, in the order they came

    def check(self, model: ArtModel) -> None:
        """Raises RequestRefused where the model cannot be one of this backend's."""
        for what, text in (("entity", model.entity), ("project", model.project), ("name", model.name)):
            if text in ("", ".", ".."):
                raise RequestRefused(f"the model's {what} is {text!r}, which names no folder", status=422, param=what)
        asked = optional(optional(model.config, "init_args", dict) or {}, "model_name", str) or model.base_model
        if asked is None or not self._is_base(asked):
            raise RequestRefused(
                f"base_model is {asked!r}, but this backend has loaded {self._source!r}, which is also known as "
                f"{self._name!r}",
                status=409,
                param="base_model",
                code="other_base_model",
            )
        read_plan(model, {}, {})  # what its configuration asks for beyond us is told now, not after the first episodes
        for other in self._models.values():
            if other.model.name == model.name and other.model.key != model.key:
                raise _taken(model, f"{other.model.key} is served under it")
        if model.name == self._name:
            raise _taken(model, "this backend serves its own model under it (its option --name)")
        if asked != self._name:
            self._aliases[asked] = None

    async def open(self, model: ArtModel) -> Registered:
        """The model, which goes on from the checkpoints it has. Raises RequestRefused as `check`."""
        self.check(model)
        if model.key not in self._models:
            folder = self.folder(model)
            learner = await self._compute.call(self._open, model.key, folder)
            if model.key not in self._models:  # somebody else may have been quicker
                self._models[model.key] = Registered(model, learner, History(folder))
        return self._models[model.key]

    def _open(self, name: str, folder: Path) -> Learner:
        learner = self._lineages.open(name, folder)
        if learner.version:
            weights = Weights(learner.version, name)
            self._engine.publish(self._lineages.module_at(weights), learner.version, name)
        return learner

    def get(self, id: str) -> Registered:
        for registered in self._models.values():
            if registered.id == id:
                return registered
        known = ", ".join(registered.id for registered in self._models.values()) or "none yet"
        raise RequestRefused(f"there is no model {id!r}; there are: {known}", status=404, code="model_not_found")

    async def delete_steps(self, registered: Registered, steps: Iterable[int]) -> list[int]:
        """Deletes checkpoints, but never the latest nor the loaded model (step 0); gives those deleted."""
        learner = registered.learner
        chosen = sorted(set(steps) & set(learner.versions) - {0, learner.version})

        def delete() -> None:
            for step in chosen:
                learner.forget(step)
                self._engine.withdraw(Weights(step, learner.lineage))

        await self._compute.call(delete)
        return chosen

    async def delete(self, registered: Registered) -> None:
        """The model with all its checkpoints and logs."""
        lineage = registered.learner.lineage
        del self._models[registered.model.key]

        def delete() -> None:
            self._lineages.close(lineage)
            self._engine.withdraw(Weights(None, lineage))

        await self._compute.call(delete)
        shutil.rmtree(self.folder(registered.model), ignore_errors=True)

    def folder(self, model: ArtModel) -> Path:
        return self._folder.joinpath(*(quote(part, safe="") for part in (model.entity, model.project, model.name)))

    def find(self, model: str) -> Served | None:
        if model in self._aliases:
            return Served(Weights(0), 0, takes_back=True)
        return next(filter(None, (registered.find(model) for registered in self._models.values())), None)

    def all(self) -> list[str]:
        return [*self._aliases, *(name for registered in self._models.values() for name in registered.names())]

    def _is_base(self, asked: str) -> bool:
        """By its path, the hub name, the last part of either, or the name it is served under."""
        return asked in (self._source, self._name) or Path(asked).name == Path(self._source).resolve().name


def id_of(model: ArtModel) -> str:
    """The same in every process; fits a path."""
    return hashlib.blake2b(model.key.encode(), digest_size=12).hexdigest()


def _taken(model: ArtModel, why: str) -> RequestRefused:
    return RequestRefused(
        f"the name {model.name!r} of {model.key} is taken: {why}; give one of them another name",
        status=409,
        param="name",
        code="name_taken",
    )
