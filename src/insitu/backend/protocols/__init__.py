"""The HTTP interfaces of the backend, one package each.

A protocol is a module with a function `routes(services) -> list[ApiRoute]`, declared by an entry point of the group
`insitu.backend.protocols`. The server serves the routes of all of them.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from insitu.backend import BackendOptions
from insitu.backend.compute import ComputeThread
from insitu.backend.http import ApiRoute
from insitu.backend.inference.sampler import LATEST, Sampler, WeightVersion
from insitu.backend.learner.jobs import TrainingQueue
from insitu.backend.learner.learner import Learner, Learners
from insitu.backend.learner.policy import fingerprint
from insitu.backend.model import LoadedModel
from insitu.errors import RequestRefused
from insitu.schemas.installed import entry_points
from insitu.wire.http_format import parse_count

GROUP = "insitu.backend.protocols"


class ServedModel(NamedTuple):
    """Weights behind a model name, and their current version.

    `returns_token_ids`: the client sends completions back for training, so each choice carries logprobs, sampled token
    ids (as `token_id:N`) and prompt token ids even if the request does not ask for them.
    """

    weights: WeightVersion
    version: int
    returns_token_ids: bool = False


class ModelProvider(Protocol):
    """A source of further model names, such as a protocol's trained models."""

    def find(self, name: str) -> ServedModel | None: ...

    def names(self) -> list[str]: ...


@dataclass
class ServedModels:
    """All served model names: `NAME` for the latest weights of the backend's own policy, `NAME@K` for version K.

    The latest that the sampler serves: a version that was just trained may not be. Protocols add theirs with `add`.
    """

    name: str
    learner: Learner
    sampler: Sampler
    providers: list[ModelProvider] = field(default_factory=list)

    def add(self, provider: ModelProvider) -> None:
        if provider not in self.providers:
            self.providers.append(provider)

    def find(self, name: str) -> ServedModel:
        """Raises RequestRefused (404) with the existing names."""
        for find in (self._own, *(provider.find for provider in self.providers)):
            if model := find(name):
                return model
        problem = f"no such model: {name!r}; known models: {', '.join(self.names())}"
        raise RequestRefused(problem, status=404, param="model", code="model_not_found")

    def _own(self, name: str) -> ServedModel | None:
        if name == self.name:
            return ServedModel(LATEST, self.sampler.version)
        policy, _, version = name.rpartition("@")
        if policy == self.name and (number := parse_count(version)) in self.learner.versions:
            return ServedModel(WeightVersion(number), number)
        return None

    def names(self) -> list[str]:
        own = [self.name, *(f"{self.name}@{version}" for version in self.learner.versions)]
        return own + [name for provider in self.providers for name in provider.names()]


@dataclass(frozen=True)
class Services:
    """The parts of a backend, as protocols use them. `models` takes further model names."""

    options: BackendOptions
    loaded: LoadedModel
    compute: ComputeThread
    sampler: Sampler
    learners: Learners
    jobs: TrainingQueue
    models: ServedModels
    output_dir: Path
    digests: dict[int, str | None] = field(default_factory=dict)

    def weights_digest(self, weights: WeightVersion) -> str | None:
        """The digest of a version of the own policy, equal in every process that serves it; None if it is unknown."""
        version = weights.version or 0
        if weights.policy:
            return None
        if version not in self.digests:
            try:
                digest = self.learners.digest(weights)
            except RequestRefused:  # deleted meanwhile
                return None
            self.digests[version] = fingerprint(self.loaded.module) if digest is None and not version else digest
        return self.digests[version]


def protocol_routes(services: Services) -> list[ApiRoute]:
    """The routes of all protocols, in the order of their names; one whose module is not installed is left out."""
    points = sorted(entry_points(GROUP), key=lambda point: point.name)
    return [route for point in points if is_installed(point.module) for route in point.load()(services)]


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is its package
        return False
