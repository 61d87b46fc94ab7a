"""The Builder: blocks of the file made into live objects, each once, and taken down in reverse order."""

import asyncio
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from insitu.errors import ConfigError, InsituError, PluginError, describe_error
from insitu.registry.components import registry
from insitu.registry.kinds import (
    EVALUATOR,
    FUNCTION,
    LLM,
    TRAINER,
    TRAINER_ADAPTER,
    TRAJECTORY_BUILDER,
    TTC_STRATEGY,
    EvaluatorInfo,
    Kind,
    LLMFrameworkEnum,
    PolicyEndpoint,
)
from insitu.schemas.components import TTCStrategyBaseConfig, TypedBaseModel
from insitu.schemas.finetuning import FinetuneConfig

logger = logging.getLogger(__name__)


class ComponentBlocks(Protocol):
    """What the Builder needs of a configuration: its validated blocks by section."""

    finetuning: FinetuneConfig

    @property
    def max_concurrency(self) -> int: ...

    def names(self, kind: Kind) -> list[str]: ...

    def block(self, kind: Kind, name: str) -> TypedBaseModel: ...


def _adder(kind: Kind) -> Callable[["Builder", str, TypedBaseModel], Awaitable[Any]]:
    async def add(self: "Builder", name: str, config: TypedBaseModel) -> Any:
        """Add a block that the file does not have, build it, and give its live object."""
        with self._adding(kind, name, config):
            return await self.get(kind, name)

    return add


def _config_getter(kind: Kind) -> Callable[["Builder", str], TypedBaseModel]:
    def get_config(self: "Builder", name: str) -> TypedBaseModel:
        return self.block(kind, name)

    return get_config


_building: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("insitu_building", default=())
"""The components being built here, each for the one before it."""


def name_being_built() -> str:
    """For factories: the key of the block that is being built."""
    return _building.get()[-1][1]


@contextmanager
def _says_where(where: str, config: TypedBaseModel) -> Iterator[None]:
    try:
        yield
    except InsituError:
        raise
    except Exception as error:  # a plugin's code may raise anything; say which part it was, and where
        logger.debug("%s could not be built", where, exc_info=error)
        raise PluginError(f"{where} (_type: {config.type}) could not be built: {describe_error(error)}") from error


class Builder:
    """Builds each block of the file once, when it is first asked for, and keeps it alive until `aclose`.

    `config` gives the blocks; without one, there are those that are added. One builder serves a whole run: every
    evaluation, epoch and validation share it.
    """

    def __init__(self, config: ComponentBlocks | None = None) -> None:
        self.config: ComponentBlocks = importlib.import_module("insitu.config").Config() if config is None else config
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

    @contextmanager
    def _adding(self, kind: Kind, name: str, config: TypedBaseModel) -> Iterator[None]:
        """Keep the block, unless what is done with it here fails."""
        if (kind.section, name) in self._added or name in self.config.names(kind):
            raise ConfigError(f"{kind.section}.{name} exists already; a block is added under a name of its own")
        self._added[kind.section, name] = config
        try:
            yield
        except BaseException:  # whatever it was is raised again
            del self._added[kind.section, name]
            raise

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
        with _says_where("workflow" if name == "<workflow>" else f"{kind.section}.{name}", config):
            made = registration.factory(config, self)
            if hasattr(made, "__aenter__"):
                made = await self._stack.enter_async_context(made)
            elif inspect.isawaitable(made):
                made = await made
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
                        f"pip install 'insitu[{framework.replace('_', '-')}]'"
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

    async def add_ttc_strategy(self, name: str, config: TTCStrategyBaseConfig) -> None:
        """Add a block that the file does not have; what it is for is said when it is asked for."""
        with self._adding(TTC_STRATEGY, name, config):
            pass

    async def get_ttc_strategy(self, strategy_name: str, pipeline_type: str, stage_type: str) -> Any:
        """The strategy with its components, one object for each pipeline type.

        ConfigError if it is of another stage, or does not support the pipeline type.
        """

        where = f"ttc_strategies.{strategy_name}"

        async def build() -> Any:
            strategy = await self._build(TTC_STRATEGY, strategy_name)
            with _says_where(where, self.block(TTC_STRATEGY, strategy_name)):
                stage, supported = strategy.stage_type(), strategy.supported_pipeline_types()
                if stage != stage_type:
                    raise ConfigError(f"{where} is a strategy of stage {stage}; it was asked for as {stage_type}")
                if pipeline_type not in supported:
                    raise ConfigError(
                        f"{where} supports the pipeline types {', '.join(supported)}, not {pipeline_type}"
                    )
                strategy.set_pipeline_type(pipeline_type)
                await strategy.build_components(self)
            return strategy

        return await self._once((f"ttc_strategies as {pipeline_type} {stage_type}", strategy_name), build)

    def get_max_concurrency(self) -> int:
        """`eval.general.max_concurrency`, for evaluators that limit themselves."""
        return self.config.max_concurrency

    async def policy_endpoint(self) -> PolicyEndpoint:
        """Where the model under training is served now, as the configured trainer adapter says."""
        name = self.config.finetuning.trainer_adapter
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
    get_ttc_strategy_config = _config_getter(TTC_STRATEGY)
    add_trajectory_builder = _adder(TRAJECTORY_BUILDER)
    get_trajectory_builder_config = _config_getter(TRAJECTORY_BUILDER)
    add_trainer_adapter, get_trainer_adapter_config = _adder(TRAINER_ADAPTER), _config_getter(TRAINER_ADAPTER)
    add_trainer, get_trainer_config = _adder(TRAINER), _config_getter(TRAINER)


EvalBuilder = WorkflowBuilder = Builder
"""The documented names of the one builder, for evaluators and for code that builds a workflow by itself."""
