"""A Python function as a workflow, or an agent object that it builds, asked one question for each episode.

workflow: {_type: python, function: my_agent:answer, model: student}

async def answer(question: str, model: insitu.Model) -> str:
    return await model.ask(question)
"""

import ast
import importlib
import inspect
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, Field

from insitu.agents.frameworks import sync_client, with_defaults
from insitu.builder import Builder, name_being_built
from insitu.config import Config
from insitu.config.code import called, input_binder, is_blocking, load_code, parameters, statements_of
from insitu.errors import ConfigError, WorkflowError, a_type
from insitu.registry import FRAMEWORK_GROUP, of_framework
from insitu.schemas.components import WORKFLOW, CodeRef, FunctionBaseConfig, LLMRef
from insitu.schemas.installed import entry_points
from insitu.schemas.kinds import FUNCTION, LLM
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo, register_function, type_hints
from insitu.workflow.llms import ModelClient, as_messages, text_of

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion

_FROM_EPISODE: dict[str, Callable[[Context], Any]] = {
    "row": lambda context: context.row,
    "seed": lambda context: context.seed,
}
_METHODS = ("ainvoke", "arun", "run", "invoke")
"""How an object is asked, if it cannot be called and is of no agent framework that insitu knows."""


class BlockingModel:
    """A `ModelClient` whose methods block, for functions that run in threads."""

    def __init__(self, model: ModelClient) -> None:
        self._model = model
        self.model = model.model
        self.params = model.params

    @cached_property
    def client(self) -> "OpenAI":
        """The official client."""
        return sync_client(self._model)

    def complete(self, messages: str | list[dict[str, Any]], **overrides: Any) -> "ChatCompletion":
        """One chat completion with the configured parameters; `overrides` take precedence. Text is a user's message."""
        request: dict[str, Any] = {"model": self.model, "messages": as_messages(messages), **self.params, **overrides}
        completion: ChatCompletion = self.client.chat.completions.create(**request)
        return completion

    def ask(self, messages: str | list[dict[str, Any]], **overrides: Any) -> str:
        """The text of one completion."""
        return text_of(self.complete(messages, **overrides))


def framework_module(framework: str | None) -> Any:
    """The module that has a framework's `ask_agent` and `with_model`; it may have neither."""
    if framework is None:
        return None
    point = entry_points(FRAMEWORK_GROUP)[framework.lower()]
    return importlib.import_module(point.module)


async def ask(agent: Any, question: Any, framework: str | None) -> Any:
    """The answer of an agent object: of a framework's agent, a callable, or an object with one of the usual methods.

    Raises WorkflowError if it is none of them.
    """
    ask_agent = getattr(framework_module(framework), "ask_agent", None)
    if ask_agent is not None and not inspect.isroutine(agent):
        return await ask_agent(agent, question)
    if callable(agent):
        return await called(agent, question)
    method = next((name for name in _METHODS if callable(getattr(agent, name, None))), None)
    if method is None:
        raise WorkflowError(
            f"the agent is {a_type(agent)}, which insitu cannot ask: return a function of the question, or an "
            f"object that can be called or has a method {', '.join(_METHODS[:-1])} or {_METHODS[-1]}"
        )
    return await called(getattr(agent, method), question)


def binder(agent: Any, framework: str | None, where: str) -> Callable[[Any], Any]:
    """A function that returns a copy of an agent object with another model, for each episode.

    Raises ConfigError if that cannot be done.
    """
    with_model = getattr(framework_module(framework), "with_model", None)
    if with_model is None:
        of = f"an agent of {framework}" if framework else a_type(agent)
        raise ConfigError(
            f"{where}: {of} cannot be given another model once it is built; give a function that builds it, such as "
            "`def build(model): return Agent(model)`, and name its framework"
        )
    return partial(with_model, agent)


class PythonConfig(FunctionBaseConfig, name="python"):
    """A Python function, `def` or `async def`. Parameters called `row` and `seed` get the row and the episode's seed.
    The first that is neither of these, a model nor one of `arguments` gets the row's question, converted to its
    annotated type. A function that is not asynchronous runs in a thread, with a model that has the same methods, which
    wait. A function whose only parameters are models builds the agent that is asked, for each episode."""

    function: CodeRef
    """The function, as MODULE:NAME or FILE.py:NAME. Files are relative to the folder of the YAML file, modules in which
    can be imported."""
    model: LLMRef | None = None
    """The model for the parameter `model`."""
    models: dict[str, LLMRef] = Field(default_factory=dict)
    """Further models, by parameter."""
    framework: str | None = None
    """Pass model objects of this agent framework, such as `langchain`, in place of `insitu.Model`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Values of further parameters."""

    def check_code(self, where: str, folder: Path, llms: Collection[str]) -> None:
        if self.framework is not None:
            of_framework(self.framework.lower(), f"{where}.framework", "requested as a model of")
        CheckedCode.of(self, where, folder, llms)

    def lacks_model(self) -> str | None:
        if self.model is not None or self.models:
            return None
        return f"give {self.function} a parameter `model`, an insitu.Model, and call the model through it"

    def question_column(self, folder: Path) -> str | None:
        try:
            return CheckedCode.of(self, "", folder, ()).first
        except ConfigError:  # reported where the code is checked
            return None


class CheckedCode(NamedTuple):
    """A function, its parameter for the input, those for parts of the episode, and its models.

    That of an agent object binds it to its model.
    """

    code: Callable[..., Any]
    first: str | None
    from_episode: list[str]
    models: dict[str, LLMRef]

    @classmethod
    def of(cls, config: PythonConfig, where: str, folder: Path, llms: Collection[str]) -> "CheckedCode":
        """Raises ConfigError, naming the block's key `where`, for what cannot be a workflow."""
        code = load_code(config.function, f"{where}.function", folder)
        models = {**({"model": config.model} if config.model is not None else {}), **config.models}
        if not callable(code):
            build = binder(code, config.framework, f"{where}.function")
            if config.model is None:
                raise ConfigError(_no_model(where, "the agent object", llms))
            return cls(lambda model, **_: build(model), None, [], {"model": config.model})
        if any(map(inspect.isgeneratorfunction, (code, getattr(code, "__call__", code)))):  # noqa: B004
            raise ConfigError(
                f"{where}: {config.function} is a generator; return the answer, or declare it `async def`, and what it "
                "yields is the answer in pieces"
            )
        has_model = "model" in inspect.signature(code).parameters
        if "model" not in {*models, *config.arguments} and has_model:
            raise ConfigError(_no_model(where, config.function, llms))
        hint = "" if has_model else "; the model is given to the parameter `model`, or to those that `models` names"
        settings = {**config.arguments, **models}
        return cls(code, *parameters(code, f"{where} ({config.function})", settings, _FROM_EPISODE, hint), models)


@register_function(config_type=PythonConfig)
async def python_function(config: PythonConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    name, file = name_being_built(), builder.config
    where = "workflow" if name == WORKFLOW else f"functions.{name}"
    code, first, from_episode, models = CheckedCode.of(config, where, file.folder, file.names(LLM))
    builds = bool(models) and first is None and not from_episode
    blocking = is_blocking(code) and not builds
    arguments = config.arguments | {key: await _model(builder, ref, config, blocking) for key, ref in models.items()}
    if builds:
        run = _asking(code, arguments, config.framework)
    else:
        run = _calling(code, first, from_episode, arguments)
        run.__signature__, run.__annotations__ = inspect.Signature(), {}
        if first is not None:
            is_field = not (first.startswith("_") or hasattr(BaseModel, first))
            own = inspect.signature(code).parameters[first].replace(name=first if is_field else "value")
            run.__signature__ = inspect.Signature([own])
            run.__annotations__ = {own.name: type_hints(code).get(first, Any)}
    yield FunctionInfo.from_fn(run, description=inspect.getdoc(code))


def _no_model(where: str, what: str, llms: Collection[str]) -> str:
    names = ", ".join(llms) or "none"
    return f"{where}.model is missing: {what} takes a model; available under llms: {names}"


def _asking(build: Callable[..., Any], arguments: dict[str, Any], framework: str | None) -> Any:
    """A workflow that asks an agent that `build` makes for each episode: most agents remember what they were asked."""

    args, kwargs = input_binder(build, None)((), arguments)

    async def call(value: Any) -> Any:
        return await ask(await called(build, *args, **kwargs), value, framework)

    return call


def _calling(code: Callable[..., Any], first: str | None, from_episode: list[str], arguments: dict[str, Any]) -> Any:
    """A workflow that calls a function. It takes the input, or nothing if the function needs none."""

    bind = input_binder(code, first)

    def bound(given: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        context = Context.get()
        others = {key: _FROM_EPISODE[key](context) for key in from_episode}
        return bind(given, arguments | others)

    if not inspect.isasyncgenfunction(code):

        async def call(*given: Any) -> Any:
            args, kwargs = bound(given)
            return await called(code, *args, **kwargs)

        return call

    async def stream(*given: Any) -> AsyncIterator[Any]:
        args, kwargs = bound(given)
        async for piece in code(*args, **kwargs):
            yield piece

    return stream


async def _model(builder: Builder, ref: str, config: PythonConfig, blocking: bool) -> Any:
    if config.framework is not None:
        return await builder.get_llm(ref, wrapper_type=config.framework)
    model = await builder.get_llm(ref)
    return BlockingModel(model) if blocking else with_defaults(model)


def mentions_tools(config: Config) -> bool:
    """Whether a function of `config` that has a trained model, or what it uses of its file, has the word `tools`."""
    blocks = [config.block(FUNCTION, name) for name in config.names(FUNCTION)]
    trained = config.trained_llms()
    functions = [
        block.function
        for block in blocks
        if isinstance(block, PythonConfig) and not trained.isdisjoint((block.model, *block.models.values()))
    ]
    statements = [each for function in functions for each in statements_of(function, config.folder) or ()]
    return any(re.search(r"\btools\b", ast.unparse(each)) for each in statements)
