"""The registered components of a process: found by `_type` among our own parts, then in installed plugins."""

import difflib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from insitu.errors import PluginError
from insitu.registry.kinds import (
    DATASET,
    EVALUATOR,
    FUNCTION,
    LLM,
    TRAINER,
    TRAINER_ADAPTER,
    TRAJECTORY_BUILDER,
    TTC_STRATEGY,
    Kind,
)
from insitu.schemas.components import TypedBaseModel

logger = logging.getLogger(__name__)

NOT_YET = ("dpo_traj_builder", "nemo_customizer_trainer_adapter", "nemo_customizer_trainer")
"""`_type`s of the documents that are still missing."""
ENTRY_POINT_GROUPS = ("insitu.components", "nat.components", "nat.plugins")


@dataclass(frozen=True)
class _Registration:
    config_type: type[TypedBaseModel]
    factory: Callable[..., Any]
    installed: bool = False
    """Whether it came with an installed plugin, and not from what a file names or a program imports."""


class Registry:
    """All registered components of a process, by kind and `_type`."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Registration] = {}
        self._entry_points_loaded = False
        self._loading = False
        self._broken: list[str] = []
        self._clashes: dict[tuple[str, str], str] = {}

    def add(self, kind: Kind, config_type: type[TypedBaseModel], factory: Callable[..., Any]) -> None:
        name = config_type.static_type()
        if name is None:
            raise PluginError(
                f"{config_type.__name__} has no name: declare class {config_type.__name__}(..., name=...)"
            )
        if not issubclass(config_type, kind.base):
            raise PluginError(f"{config_type.__name__} ({name}) is not a {kind.base.__name__}")
        if name in kind.built_in and not config_type.__module__.startswith("insitu."):
            raise PluginError(f"{name!r} of {kind.section} is a part of insitu; {config_type} needs another name")
        known = self._known.get((kind.section, name))
        if known is not None and _place_of(known.config_type) != _place_of(config_type):
            clash = f"two components of {kind.section} are called {name!r}: {known.config_type} and {config_type}"
            if not self._loading:
                raise PluginError(clash)
            if known.installed:  # else the program's own choice stands
                logger.warning("%s; none of them can be used while both are installed", clash)
                self._clashes[kind.section, name] = clash
            return
        self._known[kind.section, name] = _Registration(config_type, factory, self._loading)

    def find(self, kind: Kind, name: str) -> _Registration | None:
        """The registration of a `_type`; looks among our own parts first, then in installed plugins.

        PluginError if two installed plugins have one of this name.
        """
        if (kind.section, name) not in self._known and name in kind.built_in:
            importlib.import_module(kind.built_in[name])
        if (kind.section, name) not in self._known:
            self._load_entry_points()
        if clash := self._clashes.get((kind.section, name)):
            raise PluginError(f"{clash}; uninstall one of the packages")
        return self._known.get((kind.section, name))

    def names(self, kind: Kind) -> list[str]:
        self._load_entry_points()
        return sorted({n for section, n in self._known if section == kind.section} | set(kind.built_in))

    def _load_entry_points(self) -> None:
        if self._entry_points_loaded:
            return
        self._entry_points_loaded = self._loading = True
        for group in ENTRY_POINT_GROUPS:
            for point in sorted(entry_points(group=group), key=lambda point: point.name):  # the same on every machine
                try:
                    point.load()
                except (Exception, SystemExit) as error:  # a plugin's import may raise anything; said when it is missed
                    logger.warning("plugin %r (%s) could not be imported: %r", point.name, point.value, error)
                    self._broken.append(f"{point.name!r} ({point.value}): {error!r}")
        self._loading = False

    def unknown(self, kind: Kind, what: str, name: str) -> str:
        """The sentence for a `_type` that does not exist."""
        if name in NOT_YET:
            return f"{what} {name!r} is not there yet: preferences and NeMo Customizer come with a later release"
        sentence = not_found(what, name, self.names(kind))
        broken = "; ".join(self._broken)
        return f"{sentence} (installed plugins that could not be imported: {broken})" if broken else sentence


def _place_of(config_type: type) -> tuple[str, str]:
    """Stays the same when a module is loaded again."""
    return config_type.__module__, config_type.__qualname__


registry = Registry()


def _decorator(kind: Kind) -> Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]:
    def register(
        config_type: type[TypedBaseModel], framework_wrappers: Iterable[Any] | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(factory: Callable[..., Any]) -> Callable[..., Any]:
            context = asynccontextmanager(factory) if inspect.isasyncgenfunction(factory) else factory
            registry.add(kind, config_type, context)
            return factory

        return decorate

    register.__doc__ = f"Register the factory of a component of `{kind.section}` for its configuration class."
    return register


register_function = _decorator(FUNCTION)
register_llm_provider = _decorator(LLM)
register_evaluator = _decorator(EVALUATOR)
register_dataset_loader = _decorator(DATASET)
register_ttc_strategy = _decorator(TTC_STRATEGY)
register_trajectory_builder = _decorator(TRAJECTORY_BUILDER)
register_trainer_adapter = _decorator(TRAINER_ADAPTER)
register_trainer = _decorator(TRAINER)


def not_found(what: str, name: str, existing: Iterable[str]) -> str:
    """The sentence for a failed look-up: what was asked for, the nearest name, and all there are."""
    existing = list(existing)
    near = difflib.get_close_matches(name, existing, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{what} {name!r} does not exist{hint}; there is: {', '.join(existing) or 'none'}"
