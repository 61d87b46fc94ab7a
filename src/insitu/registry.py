"""The registry of components, which finds each one by its kind and `_type`.

A factory is an async generator that yields one instance and cleans up after it:

    @register_evaluator(config_type=ExactMatchConfig)
    async def exact_match(config: ExactMatchConfig, builder: Builder):
        yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="1 if the answer is the expected one")

or a class that is made of the configuration and the builder. Its objects are asynchronous contexts, have a coroutine
`close`, or need no clean-up.

Components of insitu are declared as entry points in pyproject.toml, as those of plugins are, and imported on first use.
"""

import importlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, TypeVar

from insitu.errors import ConfigError, PluginError, needing, not_found
from insitu.schemas import kinds
from insitu.schemas.components import TypedBaseModel
from insitu.schemas.installed import entry_points
from insitu.schemas.kinds import Kind

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUPS = ("insitu.components", "nat.components", "nat.plugins")
"""Where plugins declare modules whose import registers components."""
FRAMEWORK_GROUP = "insitu.llm_wrappers"
"""Where packages declare the agent frameworks whose model objects `get_llm(..., wrapper_type=...)` returns."""
ENVIRONMENT_SERVER_GROUP = "insitu.environment_servers"
"""Where packages declare what `insitu serve FILE --as NAME` runs: `serve(config, access, host, port)`, an asynchronous
context that yields the URL."""


Finish = Callable[[str, Any, Any], Any]
"""Turns what a factory yielded into the live object: `finish(name, config, yielded)`."""


@dataclass(frozen=True)
class Registration:
    config_type: type[TypedBaseModel]
    factory: Callable[..., Any]
    finish: Finish | None = None
    frameworks: tuple[str, ...] = ()
    """The agent frameworks that the component declares to use."""
    installed: bool = False
    """Registered by an installed plugin, rather than by a module that the file names or the program imports."""


class Registry:
    """All registered components of a process, by kind and `_type`."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Registration] = {}
        self._entry_points_loaded = False
        self._loading = False
        self._broken: list[str] = []
        self._clashes: dict[tuple[str, str], str] = {}

    def add(
        self,
        kind: Kind,
        config_type: type[TypedBaseModel],
        factory: Callable[..., Any],
        finish: Finish | None = None,
        frameworks: Iterable[Any] = (),
    ) -> None:
        """Raises PluginError for a class without a name, of another kind, or with a name that is taken."""
        class_name, name = config_type.__name__, config_type.static_type()
        if name is None:
            raise PluginError(f"{class_name} has no name: declare class {class_name}(..., name=...)")
        if not issubclass(config_type, kind.base):
            raise PluginError(f"{class_name} ({name}) is not a {kind.base.__name__}")
        registration = self._known.get((kind.section, name))
        if name in kind.built_in:
            if not kind.replaceable and not _is_own(config_type):
                raise PluginError(f"{name!r} of {kind.section} is built into insitu; {config_type} needs another name")
            if registration is not None and _is_own(config_type) and not _is_own(registration.config_type):
                return
            if registration is not None and _is_own(registration.config_type):
                registration = None
        if registration is not None and _qualified_name(registration.config_type) != _qualified_name(config_type):
            clash = (
                f"two components of {kind.section} are called {name!r}: {registration.config_type} and {config_type}"
            )
            if not self._loading:
                raise PluginError(clash)
            if registration.installed:  # otherwise the program's own registration wins
                logger.warning("%s; neither can be used while both are installed", clash)
                self._clashes[kind.section, name] = clash
            return
        names = tuple(str(framework).lower() for framework in frameworks)
        self._known[kind.section, name] = Registration(config_type, factory, finish, names, self._loading)

    def find(self, kind: Kind, name: str) -> Registration | None:
        """The registration of a `_type`, looked up among the built-in components first, then in installed plugins.

        Raises PluginError if two installed plugins register the same name.
        """
        if (kind.section, name) not in self._known and name in kind.built_in:
            importlib.import_module(kind.built_in[name])
        if (kind.section, name) not in self._known:
            self._load_entry_points()
        if clash := self._clashes.get((kind.section, name)):
            raise PluginError(f"{clash}; uninstall one of the packages")
        return self._known.get((kind.section, name))

    def parse(self, kind: Kind, block: dict[str, Any]) -> TypedBaseModel:
        """The configuration of a block that the program makes, rather than the file."""
        name = str(block["_type"])
        registration = self.find(kind, name)
        if registration is None:
            raise PluginError(self.unknown(kind, f"{kind.section}: _type", name))
        return registration.config_type(**{key: value for key, value in block.items() if key != "_type"})

    def names(self, kind: Kind) -> list[str]:
        self._load_entry_points()
        return sorted({n for section, n in self._known if section == kind.section} | set(kind.built_in))

    def _load_entry_points(self) -> None:
        if self._entry_points_loaded:
            return
        self._entry_points_loaded = self._loading = True
        for group in ENTRY_POINT_GROUPS:
            for point in sorted(entry_points(group), key=lambda point: point.name):  # the same on every machine
                try:
                    point.load()
                except (Exception, SystemExit) as error:  # reported when one of its components is missing
                    logger.warning("plugin %r (%s) could not be imported: %r", point.name, point.value, error)
                    self._broken.append(f"{point.name!r} ({point.value}): {error!r}")
        self._loading = False

    def unknown(self, kind: Kind, what: str, name: str) -> str:
        """The error message for a `_type` that does not exist."""
        sentence = not_found(what, name, self.names(kind))
        broken = "; ".join(self._broken)
        return f"{sentence} (installed plugins that could not be imported: {broken})" if broken else sentence


def _is_own(config_type: type) -> bool:
    return config_type.__module__.startswith("insitu.")


def _qualified_name(config_type: type) -> tuple[str, str]:
    """Unchanged when a module is reloaded."""
    return config_type.__module__, config_type.__qualname__


registry = Registry()

Factory = TypeVar("Factory", bound=Callable[..., Any])


def decorator(kind: Kind, finish: Finish | None = None) -> Callable[..., Callable[[Factory], Factory]]:
    """The `register_...` decorator of a kind of component."""

    def register(
        config_type: type[TypedBaseModel], framework_wrappers: Iterable[Any] | None = None
    ) -> Callable[[Factory], Factory]:
        def decorate(factory: Factory) -> Factory:
            context: Callable[..., Any] = factory
            if inspect.isasyncgenfunction(factory):
                context = asynccontextmanager(factory)
            elif isinstance(factory, type):
                context = partial(_made, factory)
            registry.add(kind, config_type, context, finish, framework_wrappers or ())
            return factory

        return decorate

    register.__doc__ = f"Register the factory of a component of `{kind.section}` for its configuration class."
    return register


@asynccontextmanager
async def _made(component_type: Callable[..., Any], config: TypedBaseModel, builder: Any) -> AsyncIterator[Any]:
    component = component_type(config, builder)
    async with AsyncExitStack() as stack:
        if hasattr(component, "__aenter__"):
            component = await stack.enter_async_context(component)
        elif hasattr(component, "close"):
            stack.push_async_callback(component.close)
        yield component


register_llm_provider = decorator(kinds.LLM)
register_evaluator = decorator(kinds.EVALUATOR)
register_dataset_loader = decorator(kinds.DATASET)
register_executor = decorator(kinds.EXECUTOR)
register_ttc_strategy = decorator(kinds.TTC_STRATEGY)
register_trajectory_builder = decorator(kinds.TRAJECTORY_BUILDER)
register_trainer_adapter = decorator(kinds.TRAINER_ADAPTER)
register_trainer = decorator(kinds.TRAINER)


def frameworks() -> list[str]:
    """The names of `wrapper_type`: insitu's agent frameworks and those of installed packages."""
    return sorted(entry_points(FRAMEWORK_GROUP).names)


def of_framework(framework: str, where: str, how: str) -> EntryPoint:
    """The entry point of a framework, whose module can be imported. `how` says what `where` needs it for."""
    if framework not in frameworks():
        raise ConfigError(not_found(f"{where}: the framework", framework, frameworks()))
    point = entry_points(FRAMEWORK_GROUP)[framework]
    with needing(framework.replace("_", "-"), f"{where}, {how} {framework},"):
        point.load()
    return point
