"""The Builder: turns each block of the file into a live object once, and closes them in reverse order."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from insitu.errors import ConfigError, PluginError, foreign_errors
from insitu.registry import of_framework, registry
from insitu.schemas.components import (
    WORKFLOW,
    FunctionBaseConfig,
    LLMFrameworkEnum,
    TTCStrategyBaseConfig,
    TypedBaseModel,
    for_component,
)
from insitu.schemas.config import Config
from insitu.schemas.evaluation import EvaluatorInfo
from insitu.schemas.finetuning import FinetuneRunConfig, PolicyEndpoint
from insitu.schemas.kinds import (
    EVALUATOR,
    EXECUTOR,
    FUNCTION,
    FUNCTION_GROUP,
    LLM,
    TRAINER,
    TRAINER_ADAPTER,
    TRAJECTORY_BUILDER,
    TTC_STRATEGY,
    Kind,
)


def _adder(kind: Kind) -> Callable[["Builder", str, TypedBaseModel], Awaitable[Any]]:
    async def add(self: "Builder", name: str, config: TypedBaseModel) -> Any:
        """Adds a block that the file does not have and returns its live object."""
        with self._adding(kind, name, config):
            return await self.get(kind, name)

    return add


def _config_getter(kind: Kind) -> Callable[["Builder", str], TypedBaseModel]:
    def get_config(self: "Builder", name: str) -> TypedBaseModel:
        """A block as configured. The result may also be awaited."""
        return for_component(self.block(kind, name))

    return get_config


_Key = tuple[str, str]
"""A component: its section, and its name there."""
_building: ContextVar[tuple["Builder | None", tuple[_Key, ...]]] = ContextVar("insitu_building", default=(None, ()))
"""The builder at work, and the components being built, each needed by the one before it."""


def name_being_built() -> str:
    """The key of the block being built, for factories."""
    return _building.get()[1][-1][1]


def builder_at_work() -> "Builder | None":
    """The builder whose factory is running, for components that are constructed without one."""
    return _building.get()[0]


class Builder:
    """Builds each block on first use and keeps it alive until `aclose`.

    Without a `config` only blocks that are added exist. One builder serves a whole run: its epochs, evaluations and
    validations share it. A builder with a `parent` serves another file inside the parent's run: it uses the parent's
    live trainer adapters, so that an llm of `_type: policy` is the model under training.
    """

    def __init__(
        self,
        config: Config | None = None,
        parent: "Builder | None" = None,
        console: Console | None = None,
        request: FinetuneRunConfig | None = None,
    ) -> None:
        self.config = config or Config()
        self.parent = parent
        self.request = request
        """What the command line, or the call from Python, asks of the run; None outside a run."""
        self.moved: dict[Path, Path] = parent.moved if parent is not None else {}
        """Folders that the run has moved aside, and where they are now."""
        self.lost: BaseException | None = None
        """Why the run is being cancelled: its backend is lost."""
        self.console = console or Console(highlight=False)
        """Where a run prints its progress; standard output by default."""
        self._live: dict[_Key, asyncio.Future[Any]] = {}
        self._waits: list[tuple[_Key | None, _Key]] = []
        """Who waits for which component; None outside the components."""
        self._added: dict[_Key, TypedBaseModel] = {}
        self._stack = AsyncExitStack()
        self.trained_policy: PolicyEndpoint | None = parent.trained_policy if parent is not None else None
        """Where the model under training is served; None if nothing is trained, or if the adapter does not say."""

    @cached_property
    def trained_llms(self) -> frozenset[str]:
        """The keys of the llms that are trained."""
        return self.config.trained_llms()

    async def __aenter__(self) -> "Builder":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the components in the reverse order of their construction."""
        self._live.clear()
        await self._stack.aclose()

    def __getattr__(self, name: str) -> Any:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.startswith(("get_", "add_")):
            there = ", ".join(sorted(each for each in dir(type(self)) if each.startswith(name[:4])))
            message = (
                f"the builder has no {name}: that part of the toolkit does not exist in insitu; available: {there}"
            )
        raise AttributeError(message)

    def block(self, kind: Kind, name: str) -> TypedBaseModel:
        added = self._added.get((kind.section, name))
        return added if added is not None else self.config.block(kind, name)

    @contextmanager
    def _adding(self, kind: Kind, name: str, config: TypedBaseModel) -> Iterator[None]:
        """Keeps the block unless the body fails."""
        if name in self.names(kind):
            raise ConfigError(f"{kind.section}.{name} exists already; add a block under a new name")
        self._added[kind.section, name] = config
        try:
            yield
        except BaseException:  # re-raised
            del self._added[kind.section, name]
            raise

    async def get(self, kind: Kind, name: str) -> Any:
        """The live object of a block; concurrent callers share one."""
        if self.parent is not None and kind is TRAINER_ADAPTER and name in self.parent.config.names(kind):
            return await self.parent.get(kind, name)
        return await self._once((kind.section, name), lambda: self._build(kind, name))

    def built(self, kind: Kind) -> list[Any]:
        """The live objects of a kind that have been built so far."""
        futures = [future for (section, _), future in self._live.items() if section == kind.section]
        return [future.result() for future in futures if future.done()]

    async def _once(self, key: _Key, build: Callable[[], Awaitable[Any]]) -> Any:
        chain = *_building.get()[1], key
        asker = chain[-2] if len(chain) > 1 else None
        is_building = key in self._live and not self._live[key].done()
        if asker is not None and is_building and (path := self._path(key, asker)):
            raise ConfigError(f"{' -> '.join('.'.join(k) for k in (*path, key))}: each needs the next")
        self._waits.append((asker, key))
        try:
            return await self._shared(key, chain, build)
        finally:
            self._waits.remove((asker, key))

    def _path(self, start: _Key, end: _Key) -> tuple[_Key, ...]:
        """From a component to one that it waits for; empty if it does not wait for it."""
        paths: dict[_Key, tuple[_Key, ...]] = {start: (start,)}
        for asker in (asked := [start]):  # more are added
            for needed in (needed for each, needed in self._waits if each == asker and needed not in paths):
                paths[needed] = (*paths[asker], needed)
                asked.append(needed)
        return paths.get(end, ())

    async def _shared(self, key: _Key, chain: tuple[_Key, ...], build: Callable[[], Awaitable[Any]]) -> Any:
        while (future := self._live.get(key)) is not None:
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if not future.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise  # otherwise the task that was building was cancelled: build it here
        future = self._live[key] = asyncio.get_running_loop().create_future()
        token = _building.set((self, chain))
        try:
            made = await build()
        except BaseException as error:  # passed on to all waiters, then re-raised
            self._live.pop(key, None)
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
                future.exception()  # marks it as retrieved: without waiters asyncio would log a warning
            raise
        finally:
            _building.reset(token)
        future.set_result(made)
        return made

    async def _build(self, kind: Kind, name: str) -> Any:
        where = "workflow" if name == WORKFLOW else f"{kind.section}.{name}"
        block = for_component(self.block(kind, name))
        return await self._make(kind, name, where, block)

    async def _make(self, kind: Kind, name: str, where: str, config: TypedBaseModel) -> Any:
        registration = registry.find(kind, config.type)
        if registration is None:
            raise ConfigError(registry.unknown(kind, f"{where}: _type", config.type))
        with foreign_errors(PluginError, f"{where} (_type: {config.type}) could not be built"):
            made = registration.factory(config, self)
            if hasattr(made, "__aenter__"):
                made = await self._stack.enter_async_context(made)
            elif inspect.isawaitable(made):
                made = await made
        return made if registration.finish is None else registration.finish(name, config, made)

    async def get_executor(self, block: dict[str, Any] | None = None) -> Any:
        """What runs the episodes, for a run and the other files that it evaluates; None: this process.

        `block` replaces the file's `general.executor`.
        """
        if self.parent is not None:
            return await self.parent.get_executor(block)
        config = self.config.general.executor if block is None else registry.parse(EXECUTOR, block)
        if config is None:
            return None
        key = (EXECUTOR.section, "" if block is None else config.model_dump_json())
        return await self._once(key, lambda: self._make(EXECUTOR, "", EXECUTOR.section, config))

    async def get_function(self, name: str) -> Any:
        """The function of a block, or of a group as GROUP.NAME or GROUP__NAME; `<workflow>` is the block `workflow`."""
        if name != WORKFLOW and name not in self.names(FUNCTION):
            for separator in (".", "__"):
                group, _, own = name.partition(separator)
                if own and group in self.names(FUNCTION_GROUP):
                    return (await self.get_function_group(group)).function(own)
        return await self.get(FUNCTION, name)

    async def get_functions(self, names: Iterable[str]) -> list[Any]:
        return [await self.get_function(name) for name in names]

    async def get_function_group(self, name: str) -> Any:
        return await self.get(FUNCTION_GROUP, name)

    def get_workflow_config(self) -> FunctionBaseConfig:
        """The block `workflow`."""
        return self.config.workflow

    def get_output_dir(self) -> Path:
        """The folder of the run, or of the evaluation."""
        return self.config.run_dir if self.config.finetuning.enabled else self.config.eval.folder

    def names(self, kind: Kind) -> list[str]:
        """The blocks of the file and those that were added."""
        return [*self.config.names(kind), *(name for section, name in self._added if section == kind.section)]

    async def get_workflow(self) -> Any:
        return await self.get(FUNCTION, WORKFLOW)

    async def get_llm(self, name: str, wrapper_type: LLMFrameworkEnum | str | None = None) -> Any:
        """Our own model object, or with `wrapper_type` that framework's (see `insitu.integrations.frameworks`)."""
        llm = await self.get(LLM, name)
        if wrapper_type is None:
            return llm
        framework = str(wrapper_type).lower()

        async def wrap() -> Any:
            return of_framework(framework, f"llms.{name}", "requested as a model of").load()(llm)

        return await self._once((f"llms as {framework}", name), wrap)

    async def get_llms(self, names: Iterable[str], wrapper_type: LLMFrameworkEnum | str | None = None) -> list[Any]:
        return [await self.get_llm(name, wrapper_type) for name in names]

    async def get_tool(self, name: str, wrapper_type: LLMFrameworkEnum | str) -> Any:
        """A function as that framework's tool, whose calls are steps TOOL_START and TOOL_END."""
        return await self._tool(await self.get_function(name), wrapper_type)

    async def get_tools(self, tool_names: Iterable[str], wrapper_type: LLMFrameworkEnum | str) -> list[Any]:
        """The tools of functions and of all functions of groups, in this order, each once."""
        functions: list[Any] = []
        for name in tool_names:
            if name in self.names(FUNCTION_GROUP):
                functions += (await self.get_function_group(name)).functions.values()
            else:
                functions.append(await self.get_function(name))
        once = {function.name: function for function in functions}
        return [await self._tool(function, wrapper_type) for function in once.values()]

    async def _tool(self, function: Any, wrapper_type: LLMFrameworkEnum | str) -> Any:
        framework, where = str(wrapper_type).lower(), f"functions.{function.name}"

        async def wrap() -> Any:
            module = import_module(of_framework(framework, where, "requested as a tool of").module)
            if not hasattr(module, "make_tool"):
                raise ConfigError(f"{where} is requested as a tool of {framework}, for which insitu makes no tools")
            return module.make_tool(function)

        return await self._once((f"tools of {framework}", function.name), wrap)

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
        """Adds a block that the file does not have; it is built when it is first requested."""
        with self._adding(TTC_STRATEGY, name, config):
            pass

    async def get_ttc_strategy(self, strategy_name: str, pipeline_type: str, stage_type: str) -> Any:
        """The strategy with its components, one object per pipeline type.

        Raises ConfigError if its stage differs or it does not support the pipeline type.
        """
        where = f"ttc_strategies.{strategy_name}"

        async def build() -> Any:
            strategy = await self._build(TTC_STRATEGY, strategy_name)
            kind = self.block(TTC_STRATEGY, strategy_name).type
            with foreign_errors(PluginError, f"{where} (_type: {kind}) could not be built"):
                stage, supported = strategy.stage_type(), strategy.supported_pipeline_types()
                if stage != stage_type:
                    raise ConfigError(f"{where} is a strategy of stage {stage}, not {stage_type}")
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
        """Where the configured trainer adapter serves the model under training."""
        name = self.config.finetuning.trainer_adapter
        if not name:
            raise ConfigError(
                "an llm of _type policy is the model under training, but finetuning.trainer_adapter names no adapter "
                "that serves it; name one, or use _type openai with the address of a model"
            )
        adapter = await self.get_trainer_adapter(name)
        endpoint: PolicyEndpoint | None = await adapter.policy_endpoint()
        if endpoint is None:
            raise ConfigError(
                f"trainer_adapters.{name} ({type(adapter).__name__}) does not say where its model is served (its "
                "policy_endpoint() returns None): configure the llm as _type openai with base_url and model_name"
            )
        return endpoint

    add_llm, get_llm_config = _adder(LLM), _config_getter(LLM)
    add_function, get_function_config = _adder(FUNCTION), _config_getter(FUNCTION)
    add_function_group, get_function_group_config = _adder(FUNCTION_GROUP), _config_getter(FUNCTION_GROUP)
    add_evaluator, get_evaluator_config = _adder(EVALUATOR), _config_getter(EVALUATOR)
    get_ttc_strategy_config = _config_getter(TTC_STRATEGY)
    add_trajectory_builder = _adder(TRAJECTORY_BUILDER)
    get_trajectory_builder_config = _config_getter(TRAJECTORY_BUILDER)
    add_trainer_adapter, get_trainer_adapter_config = _adder(TRAINER_ADAPTER), _config_getter(TRAINER_ADAPTER)
    add_trainer, get_trainer_config = _adder(TRAINER), _config_getter(TRAINER)


EvalBuilder = WorkflowBuilder = Builder
"""Documented aliases, for evaluators and for code that builds a workflow itself."""
