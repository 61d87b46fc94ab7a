"""A Python function as a workflow.

workflow: {_type: python, function: my_agent:answer, model: student}

async def answer(question: str, model: insitu.Model) -> str:
    return await model.ask(question)
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from pydantic import Field

from insitu.builder import Builder, name_being_built
from insitu.config.code import load_code
from insitu.errors import ConfigError
from insitu.plain.models import BlockingModel
from insitu.registry import LLM, not_found
from insitu.schemas.components import WORKFLOW, CodeRef, FunctionBaseConfig, LLMRef
from insitu.workflow.context import Context
from insitu.workflow.conversion import type_hints
from insitu.workflow.functions import FunctionInfo, register_function

_FROM_EPISODE: dict[str, Callable[[Context], Any]] = {
    "row": lambda context: context.row,
    "seed": lambda context: context.seed,
}


class PythonConfig(FunctionBaseConfig, name="python"):
    """A Python function, `def` or `async def`. Its first parameter gets the row's question, converted to its annotated
    type. Parameters called `row` and `seed` get the row and the episode's seed. A function that is not asynchronous
    runs in a thread."""

    function: CodeRef
    """The function, as MODULE:NAME; modules in the folder of the YAML file can be imported."""
    model: LLMRef | None = None
    """The model for the parameter `model`."""
    models: dict[str, LLMRef] = Field(default_factory=dict)
    """Further models, by parameter."""
    framework: str | None = None
    """Pass model objects of this agent framework, such as `langchain`, in place of `insitu.Model`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Values of further parameters."""


def parameters(
    function: Callable[..., Any], where: str, given: Collection[str], offered: Collection[str]
) -> tuple[str | None, list[str]]:
    """The parameter for the input, and those of `offered` that the function has.

    Raises ConfigError if it has none for one of `given`, or needs one that nobody fills.
    """
    known = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    for name in given:
        if name not in known and not takes_any:
            raise ConfigError(not_found(f"{where}: the parameter", name, known))
    positional = [n for n, each in known.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    first = next((name for name in positional if name not in given and name not in offered), None)
    filled = {first, *given, *offered}
    for name, each in known.items():
        is_variable = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if each.default is each.empty and not is_variable and name not in filled:
            raise ConfigError(f"{where}: nothing is given for the parameter {name}; set arguments.{name}")
    return first, [name for name in offered if name in known]


def is_blocking(function: Any) -> bool:
    """Whether calling it waits for its result: it is neither a coroutine function nor an asynchronous generator."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    asynchronous = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return not any(check(each) for check in asynchronous for each in (function, called))


@register_function(config_type=PythonConfig)
async def python_function(config: PythonConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    name = name_being_built()
    where = "workflow" if name == WORKFLOW else f"functions.{name}"
    function = load_code(config.function, f"{where}.function", builder.config.folder)
    models = {**({"model": config.model} if config.model is not None else {}), **config.models}
    blocking = is_blocking(function)
    arguments = config.arguments | {key: await _model(builder, ref, config, blocking) for key, ref in models.items()}
    if "model" not in arguments and "model" in inspect.signature(function).parameters:
        known = ", ".join(builder.config.names(LLM)) or "none"
        raise ConfigError(f"{where}.model is missing: {config.function} takes a model; available under llms: {known}")
    first, from_episode = parameters(function, f"{where} ({config.function})", arguments, _FROM_EPISODE)

    def bound(value: Any) -> tuple[list[Any], dict[str, Any]]:
        context = Context.get()
        others = {key: _FROM_EPISODE[key](context) for key in from_episode}
        return ([value] if first is not None else []), arguments | others

    if inspect.isasyncgenfunction(function):

        async def stream(value: Any) -> AsyncIterator[Any]:
            args, kwargs = bound(value)
            async for piece in function(*args, **kwargs):
                yield piece

        run: Any = stream
    else:

        async def call(value: Any) -> Any:
            args, kwargs = bound(value)
            if blocking:
                return await asyncio.to_thread(function, *args, **kwargs)
            return await function(*args, **kwargs)

        run = call
    run.__annotations__ = {"value": type_hints(function).get(first or "", Any)}
    yield FunctionInfo.from_fn(run, description=inspect.getdoc(function))


async def _model(builder: Builder, ref: str, config: PythonConfig, blocking: bool) -> Any:
    if config.framework is not None:
        return await builder.get_llm(ref, wrapper_type=config.framework)
    model = await builder.get_llm(ref)
    return BlockingModel(model) if blocking else model
