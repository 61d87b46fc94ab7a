"""The names of models in requests, and the weights that each selects."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from insitu.backend.inference.sampler import LATEST, WeightVersion
from insitu.errors import RequestRefused


class ServedModel(NamedTuple):
    """Weights behind a model name, and their current version.

    `returns_token_ids`: the client sends completions back for training, so each choice carries logprobs, sampled token
    ids (as `token_id:N`) and prompt token ids even if the request does not ask for them.
    """

    weights: WeightVersion
    version: int
    returns_token_ids: bool = False


class ModelProvider(Protocol):
    """A source of model names, such as a protocol's trained models."""

    def find(self, name: str) -> ServedModel | None: ...

    def names(self) -> list[str]: ...


class PolicyModels:
    """`NAME` for the latest weights of the backend's own policy, `NAME@K` for version K.

    The latest that is `served`: a version that was just trained may not be.
    """

    def __init__(self, name: str, versions: Callable[[], Sequence[int]], served: Callable[[], int]) -> None:
        self._name = name
        self._versions = versions
        self._served = served

    def find(self, name: str) -> ServedModel | None:
        if name == self._name:
            return ServedModel(LATEST, self._served())
        policy, _, version = name.rpartition("@")
        if policy == self._name and version.isdecimal() and int(version) in self._versions():
            return ServedModel(WeightVersion(int(version)), int(version))
        return None

    def names(self) -> list[str]:
        return [self._name, *(f"{self._name}@{version}" for version in self._versions())]


class ModelRegistry:
    """All served model names; protocols add theirs with `add`."""

    def __init__(self, *providers: ModelProvider) -> None:
        self._providers = list(providers)

    def add(self, provider: ModelProvider) -> None:
        self._providers.append(provider)

    def find(self, name: str) -> ServedModel:
        """Raises RequestRefused (404) with the existing names."""
        for provider in self._providers:
            if model := provider.find(name):
                return model
        raise RequestRefused(
            f"no such model: {name!r}; known models: {', '.join(self.names())}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def names(self) -> list[str]:
        return [name for provider in self._providers for name in provider.names()]
