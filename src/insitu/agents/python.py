"""A Python function as a workflow, or an agent object that it builds, asked one question for each episode.

workflow: {_type: python, function: my_agent:answer, model: student}

async def answer(question: str, model: insitu.Model) -> str:
    return await model.ask(question)
"""

import asyncio
import importlib
import inspect
import re
from collections.abc import AsyncIterator, Callable, Collection
from functools import cached_property, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from insitu.agents.frameworks import sync_client
from insitu.builder import Builder, name_being_built
from insitu.config import Config
from insitu.config.code import load_code
from insitu.errors import ConfigError, WorkflowError, a_type
from insitu.registry import FRAMEWORK_GROUP, FUNCTION, LLM, not_found
from insitu.schemas.components import WORKFLOW, CodeRef, FunctionBaseConfig, LLMRef
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
    (point,) = entry_points(group=FRAMEWORK_GROUP, name=framework.lower())
    return importlib.import_module(point.module)


def is_blocking(function: Any) -> bool:
    """Whether calling it waits for its result: it is neither a coroutine function nor an asynchronous generator."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    asynchronous = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return not any(check(each) for check in asynchronous for each in (function, called))


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function, which runs in a thread unless it is asynchronous."""
    result = await asyncio.to_thread(function, *args, **kwargs) if is_blocking(function) else function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


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
    """A Python function, `def` or `async def`. Its first parameter gets the row's question, converted to its annotated
    type. Parameters called `row` and `seed` get the row and the episode's seed. A function that is not asynchronous
    runs in a thread, with a model that has the same methods, which wait. A function whose only parameters are models
    builds the agent that is asked, for each episode."""

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


def parameters(
    function: Callable[..., Any], where: str, names: Collection[str], offered: Collection[str], hint: str = ""
) -> tuple[str | None, list[str]]:
    """The parameter for the input, and those of `offered` that the function has.

    Raises ConfigError, which ends with `hint`, if it has none for one of `names`, or needs one that nobody fills.
    """
    signature = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.values())
    for name in names:
        if name not in signature and not takes_any:
            raise ConfigError(not_found(f"{where}: the parameter", name, signature) + hint)
    positional = [n for n, each in signature.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    first = next((name for name in positional if name not in names and name not in offered), None)
    filled = {first, *names, *offered}
    for name, each in signature.items():
        is_variable = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if each.default is each.empty and not is_variable and name not in filled:
            raise ConfigError(f"{where}: nothing is given for the parameter {name}; set arguments.{name}{hint}")
    return first, [name for name in offered if name in signature]


class CheckedCode(NamedTuple):
    """A function or an agent object, its parameter for the input, those for parts of the episode, and its models."""

    code: Any
    first: str | None
    from_episode: list[str]
    models: dict[str, LLMRef]
    build: Callable[..., Any] | None = None
    """Binds an agent object to a model; None for functions."""

    @classmethod
    def of(cls, config: PythonConfig, name: str, file: Config) -> "CheckedCode":
        """Raises ConfigError for what cannot be a workflow."""
        where = "workflow" if name == WORKFLOW else f"functions.{name}"
        code = load_code(config.function, f"{where}.function", file.folder)
        models = {**({"model": config.model} if config.model is not None else {}), **config.models}
        if not callable(code):
            build = binder(code, config.framework, f"{where}.function")
            if config.model is None:
                raise ConfigError(_no_model(where, "the agent object", file))
            return cls(code, None, [], models, build)
        if any(map(inspect.isgeneratorfunction, (code, getattr(code, "__call__", code)))):  # noqa: B004
            raise ConfigError(
                f"{where}: {config.function} is a generator; return the answer, or declare it `async def`, and what it "
                "yields is the answer in pieces"
            )
        has_model = "model" in inspect.signature(code).parameters
        if "model" not in {*models, *config.arguments} and has_model:
            raise ConfigError(_no_model(where, config.function, file))
        hint = "" if has_model else "; the model is given to the parameter `model`, or to those that `models` names"
        settings = {**config.arguments, **models}
        return cls(code, *parameters(code, f"{where} ({config.function})", settings, _FROM_EPISODE, hint), models)


def check_functions(config: Config) -> None:
    """Raises ConfigError if a function of the file cannot be what its block says."""
    for name in config.names(FUNCTION):
        if isinstance(block := config.block(FUNCTION, name), PythonConfig):
            CheckedCode.of(block, name, config)


@register_function(config_type=PythonConfig)
async def python_function(config: PythonConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    name = name_being_built()
    code, first, from_episode, models, build = CheckedCode.of(config, name, builder.config)
    if build is not None:  # an agent object
        model = await _model(builder, models["model"], config, blocking=False)
        yield FunctionInfo.from_fn(_asking(build, [model], {}, config.framework))
        return
    builds = bool(models) and first is None and not from_episode
    blocking = is_blocking(code) and not builds
    arguments = config.arguments | {key: await _model(builder, ref, config, blocking) for key, ref in models.items()}
    if builds:
        run = _asking(code, [], arguments, config.framework)
    else:
        run = _calling(code, first is not None, from_episode, arguments)
        run.__annotations__ = {"value": type_hints(code).get(first or "", Any)}
    yield FunctionInfo.from_fn(run, description=inspect.getdoc(code))


def _no_model(where: str, what: str, config: Config) -> str:
    names = ", ".join(config.names(LLM)) or "none"
    return f"{where}.model is missing: {what} takes a model; available under llms: {names}"


def _asking(build: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], framework: str | None) -> Any:
    """A workflow that asks an agent that `build` makes for each episode: most agents remember what they were asked."""

    async def call(value: Any) -> Any:
        return await ask(await called(build, *args, **kwargs), value, framework)

    return call


def _calling(code: Callable[..., Any], takes_input: bool, from_episode: list[str], arguments: dict[str, Any]) -> Any:
    """A workflow that calls a function."""

    def bound(value: Any) -> tuple[list[Any], dict[str, Any]]:
        context = Context.get()
        others = {key: _FROM_EPISODE[key](context) for key in from_episode}
        return ([value] if takes_input else []), arguments | others

    if not inspect.isasyncgenfunction(code):

        async def call(value: Any) -> Any:
            args, kwargs = bound(value)
            return await called(code, *args, **kwargs)

        return call

    async def stream(value: Any) -> AsyncIterator[Any]:
        args, kwargs = bound(value)
        async for piece in code(*args, **kwargs):
            yield piece

    return stream


async def _model(builder: Builder, ref: str, config: PythonConfig, blocking: bool) -> Any:
    if config.framework is not None:
        return await builder.get_llm(ref, wrapper_type=config.framework)
    model = await builder.get_llm(ref)
    return BlockingModel(model) if blocking else model


def mentions_tools(config: Config) -> bool:
    """Whether a file with a function of `config` has the word `tools`, if it lies in or below its folder."""
    blocks = [config.block(FUNCTION, name) for name in config.names(FUNCTION)]
    modules = [block.function.partition(":")[0] for block in blocks if isinstance(block, PythonConfig)]
    files = [name if name.endswith(".py") else f"{name.replace('.', '/')}.py" for name in modules]
    texts = [path.read_text("utf-8", "replace") for file in files if (path := config.folder / file).is_file()]
    return any(re.search(r"\btools\b", text) for text in texts)
