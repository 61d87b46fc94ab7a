"""Names -> factories -> live objects: one mechanism for every kind of component, and the Builder that runs it.

A factory is an async generator that yields one instance and cleans up behind it:

    @register_evaluator(config_type=ExactMatchConfig)
    async def exact_match(config: ExactMatchConfig, builder: Builder):
        yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="1 where the answer is the expected one")

Parts of insitu further to the right are named here as text and imported when first asked for.
"""

import asyncio
import difflib
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Any, Protocol

from insitu.errors import ConfigError, InsituError, PluginError, told
from insitu.schemas.components import (
    DatasetBaseConfig,
    EvaluatorBaseConfig,
    FunctionBaseConfig,
    LLMBaseConfig,
    TTCStrategyBaseConfig,
    TypedBaseModel,
)
from insitu.schemas.evaluation import EvalInput, EvalOutput
from insitu.schemas.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUPS = ("insitu.components", "nat.components", "nat.plugins")


@dataclass(frozen=True)
class Kind:
    """A kind of component: the section of the file its blocks stand in, and the base of their configuration.

    `built_in` maps each `_type` of our own to the module that registers it. `finish` ("module:function") makes what
    the factory yielded into the live object: `finish(name, config, yielded)`.
    """

    section: str
    base: type[TypedBaseModel]
    built_in: dict[str, str] = field(default_factory=dict, hash=False)
    finish: str | None = None


LLM = Kind("llms", LLMBaseConfig, dict.fromkeys(("openai", "nim", "policy"), "insitu.workflow.llms"))
FUNCTION = Kind("functions", FunctionBaseConfig, finish="insitu.workflow.functions:as_function")
EVALUATOR = Kind("eval.evaluators", EvaluatorBaseConfig)
DATASET = Kind(
    "eval.general.dataset",
    DatasetBaseConfig,
    dict.fromkeys(("json", "jsonl", "csv", "parquet", "xls"), "insitu.evaluation.datasets"),
)
TTC_STRATEGY = Kind("ttc_strategies", TTCStrategyBaseConfig)
TRAJECTORY_BUILDER = Kind(
    "trajectory_builders", TrajectoryBuilderConfig, {"insitu_traj_builder": "insitu.trajectories.builder"}
)
TRAINER_ADAPTER = Kind(
    "trainer_adapters", TrainerAdapterConfig, {"insitu_trainer_adapter": "insitu.adapters.insitu_backend"}
)
TRAINER = Kind("trainers", TrainerConfig, {"insitu_trainer": "insitu.training.loop"})

KINDS = (LLM, FUNCTION, EVALUATOR, DATASET, TTC_STRATEGY, TRAJECTORY_BUILDER, TRAINER_ADAPTER, TRAINER)


class LLMFrameworkEnum(StrEnum):
    """Agent frameworks whose own model object `get_llm(name, wrapper_type=...)` can give."""

    LANGCHAIN = "langchain"
    LLAMA_INDEX = "llama_index"
    CREWAI = "crewai"
    SEMANTIC_KERNEL = "semantic_kernel"
    AGNO = "agno"
    ADK = "adk"
    STRANDS = "strands"
    AUTOGEN = "autogen"


@dataclass(frozen=True)
class EvaluatorInfo:
    """What an evaluator's factory yields: `evaluate_fn` scores all the items it is given."""

    config: EvaluatorBaseConfig
    evaluate_fn: Callable[[EvalInput], Awaitable[EvalOutput]]
    description: str = ""


@dataclass(frozen=True)
class PolicyEndpoint:
    """Where the model under training is served. `model` names the newest weights; `version` is theirs now."""

    base_url: str
    model: str
    api_key: str = "none"
    version: int | None = None


@dataclass(frozen=True)
class _Registration:
    config_type: type[TypedBaseModel]
    factory: Callable[..., Any]


class Registry:
    """All registered components of a process, by kind and `_type`."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Registration] = {}
        self._entry_points_loaded = False
        self._broken: list[str] = []

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
            raise PluginError(
                f"two components of {kind.section} are called {name!r}: {known.config_type} and {config_type}"
            )
        self._known[kind.section, name] = _Registration(config_type, factory)

    def find(self, kind: Kind, name: str) -> _Registration | None:
        """The registration of a `_type`; looks among our own parts first, then in installed plugins."""
        if (kind.section, name) not in self._known and name in kind.built_in:
            importlib.import_module(kind.built_in[name])
        if (kind.section, name) not in self._known:
            self._load_entry_points()
        return self._known.get((kind.section, name))

    def names(self, kind: Kind) -> list[str]:
        self._load_entry_points()
        return sorted({n for section, n in self._known if section == kind.section} | set(kind.built_in))

    def _load_entry_points(self) -> None:
        if self._entry_points_loaded:
            return
        self._entry_points_loaded = True
        for group in ENTRY_POINT_GROUPS:
            for point in entry_points(group=group):
                try:
                    point.load()
                except Exception as error:  # a plugin's import may raise anything; said when something is missing
                    logger.warning("plugin %r (%s) could not be imported: %r", point.name, point.value, error)
                    self._broken.append(f"{point.name!r} ({point.value}): {error!r}")

    def unknown(self, kind: Kind, what: str, name: str) -> str:
        """The sentence for a `_type` that does not exist."""
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


class ComponentBlocks(Protocol):
    """What the Builder needs of a configuration: its validated blocks by section."""

    def block(self, kind: Kind, name: str) -> TypedBaseModel: ...


def _adder(kind: Kind) -> Callable[["Builder", str, TypedBaseModel], Awaitable[Any]]:
    async def add(self: "Builder", name: str, config: TypedBaseModel) -> Any:
        self._added[kind.section, name] = config
        return await self.get(kind, name)

    return add


def _config_getter(kind: Kind) -> Callable[["Builder", str], TypedBaseModel]:
    def get_config(self: "Builder", name: str) -> TypedBaseModel:
        return self.block(kind, name)

    return get_config


_building: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("insitu_building", default=())
"""The components being built here, each for the one before it."""


class Builder:
    """Builds each block of the file once, when it is first asked for, and keeps it alive until `aclose`.

    `config` gives the blocks. One builder serves a whole run: every evaluation, epoch and validation share it.
    """

    def __init__(self, config: ComponentBlocks) -> None:
        self.config = config
        self._live: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self._added: dict[tuple[str, str], TypedBaseModel] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Builder":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take the components down in reverse order of their building."""
        self._live.clear()
        await self._stack.aclose()

    def adopt(self, kind: Kind, name: str, live: Any) -> None:
        """Use an object that another builder keeps alive."""
        future = self._live[kind.section, name] = asyncio.get_running_loop().create_future()
        future.set_result(live)

    def block(self, kind: Kind, name: str) -> TypedBaseModel:
        added = self._added.get((kind.section, name))
        return added if added is not None else self.config.block(kind, name)

    async def get(self, kind: Kind, name: str) -> Any:
        """The live object of a block; concurrent callers wait for the same one."""
        return await self._once((kind.section, name), lambda: self._build(kind, name))

    async def _once(self, key: tuple[str, str], build: Callable[[], Awaitable[Any]]) -> Any:
        while (future := self._live.get(key)) is not None:
            if key in _building.get() and not future.done():
                raise ConfigError(f"{' -> '.join('.'.join(k) for k in (*_building.get(), key))}: each needs the next")
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if not future.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise  # else it was the one who built that was cancelled: build it here
        future = self._live[key] = asyncio.get_running_loop().create_future()
        token = _building.set((*_building.get(), key))
        try:
            made = await build()
        except BaseException as error:  # given to everyone who waits, then raised again
            self._live.pop(key, None)
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
                future.exception()  # whoever waits gets it; nobody waiting is no reason for a warning
            raise
        finally:
            _building.reset(token)
        future.set_result(made)
        return made

    async def _build(self, kind: Kind, name: str) -> Any:
        config = self.block(kind, name)
        registration = registry.find(kind, config.type)
        if registration is None:
            raise ConfigError(registry.unknown(kind, f"{kind.section}.{name}: _type", config.type))
        where = "workflow" if name == "<workflow>" else f"{kind.section}.{name}"
        try:
            made = registration.factory(config, self)
            if hasattr(made, "__aenter__"):
                made = await self._stack.enter_async_context(made)
            elif inspect.isawaitable(made):
                made = await made
        except InsituError:
            raise
        except Exception as error:  # a plugin's factory may raise anything; say which one it was, and where
            logger.debug("%s could not be built", where, exc_info=error)
            raise PluginError(f"{where} (_type: {config.type}) could not be built: {told(error)}") from error
        if kind.finish is not None:
            module, _, function = kind.finish.partition(":")
            made = getattr(importlib.import_module(module), function)(name, config, made)
        return made

    async def get_function(self, name: str) -> Any:
        """The function of a block under `functions`; `<workflow>` is the block `workflow`."""
        return await self.get(FUNCTION, name)

    async def get_workflow(self) -> Any:
        return await self.get(FUNCTION, "<workflow>")

    async def get_llm(self, name: str, wrapper_type: LLMFrameworkEnum | str | None = None) -> Any:
        """The plain model object, or with `wrapper_type` that framework's own (see `insitu.frameworks`)."""
        plain = await self.get(LLM, name)
        if wrapper_type is None:
            return plain
        framework = str(wrapper_type).lower()

        async def wrap() -> Any:
            try:
                module = importlib.import_module(f"insitu.frameworks.{framework}")
            except ModuleNotFoundError as error:
                if error.name != f"insitu.frameworks.{framework}":
                    raise ConfigError(
                        f"llms.{name} is asked for as a model of {framework}, which needs the package {error.name!r}: "
                        f"pip install 'insitu[{framework}]'"
                    ) from error
                raise ConfigError(f"llms.{name}: there is no support for the framework {framework!r}") from error
            return module.make_llm(plain)

        return await self._once((f"llms as {framework}", name), wrap)

    async def get_evaluator(self, name: str) -> EvaluatorInfo:
        return await self.get(EVALUATOR, name)

    async def get_trajectory_builder(self, name: str) -> Any:
        return await self.get(TRAJECTORY_BUILDER, name)

    async def get_trainer_adapter(self, name: str) -> Any:
        return await self.get(TRAINER_ADAPTER, name)

    async def get_trainer(self, name: str, trajectory_builder: Any, trainer_adapter: Any) -> Any:
        """The trainer, bound to the two components it drives."""
        trainer = await self.get(TRAINER, name)
        await trainer.bind_components(trajectory_builder, trainer_adapter)
        return trainer

    def get_max_concurrency(self) -> int:
        """`eval.general.max_concurrency`, for evaluators that limit themselves."""
        return self.config.max_concurrency  # type: ignore[attr-defined]

    async def policy_endpoint(self) -> PolicyEndpoint:
        """Where the model under training is served now, as the configured trainer adapter says."""
        name = self.config.finetuning.trainer_adapter  # type: ignore[attr-defined]
        if not name:
            raise ConfigError(
                "an llm of _type policy is the model under training, but finetuning.trainer_adapter names no adapter "
                "that serves it; name one, or use _type openai with the address of a model"
            )
        adapter = await self.get_trainer_adapter(name)
        endpoint = getattr(adapter, "policy_endpoint", None)
        if endpoint is None:
            raise ConfigError(
                f"trainer_adapters.{name} ({type(adapter).__name__}) does not say where its model is served (it has no "
                "policy_endpoint()): give the llm as _type openai with base_url and model_name"
            )
        return await endpoint()

    add_llm, get_llm_config = _adder(LLM), _config_getter(LLM)
    add_function, get_function_config = _adder(FUNCTION), _config_getter(FUNCTION)
    add_evaluator, get_evaluator_config = _adder(EVALUATOR), _config_getter(EVALUATOR)
    add_ttc_strategy, get_ttc_strategy_config = _adder(TTC_STRATEGY), _config_getter(TTC_STRATEGY)
    add_trajectory_builder = _adder(TRAJECTORY_BUILDER)
    get_trajectory_builder_config = _config_getter(TRAJECTORY_BUILDER)
    add_trainer_adapter, get_trainer_adapter_config = _adder(TRAINER_ADAPTER), _config_getter(TRAINER_ADAPTER)
    add_trainer, get_trainer_config = _adder(TRAINER), _config_getter(TRAINER)
