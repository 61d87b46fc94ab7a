"""A Python function as a workflow.

workflow: {_type: python, function: my_agent:answer, model: student}

async def answer(question: str, model: insitu.Model) -> str:
    return await model.ask(question)
"""

import inspect
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from pydantic import Field

from insitu.agents.blocking_model import BlockingModel
from insitu.agents.objects import ask, binder, called, is_blocking
from insitu.builder import Builder, name_being_built
from insitu.config.code import load_code
from insitu.errors import ConfigError
from insitu.registry import LLM, not_found
from insitu.schemas.components import WORKFLOW, CodeRef, FunctionBaseConfig, LLMRef
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo, register_function, type_hints

_FROM_EPISODE: dict[str, Callable[[Context], Any]] = {
    "row": lambda context: context.row,
    "seed": lambda context: context.seed,
}


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


@register_function(config_type=PythonConfig)
async def python_function(config: PythonConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    name = name_being_built()
    where = "workflow" if name == WORKFLOW else f"functions.{name}"
    code = load_code(config.function, f"{where}.function", builder.config.folder)
    models = {**({"model": config.model} if config.model is not None else {}), **config.models}
    if not callable(code):  # an agent object
        build = binder(code, config.framework, f"{where}.function")
        if config.model is None:
            raise ConfigError(_no_model(where, "the agent object", builder))
        model = await _model(builder, config.model, config, blocking=False)
        yield FunctionInfo.from_fn(_asking(build, [model], {}, config.framework))
        return
    if "model" not in {*models, *config.arguments} and "model" in inspect.signature(code).parameters:
        raise ConfigError(_no_model(where, config.function, builder))
    given = {**config.arguments, **models}
    first, from_episode = parameters(code, f"{where} ({config.function})", given, _FROM_EPISODE)
    builds = bool(models) and first is None and not from_episode
    blocking = is_blocking(code) and not builds
    arguments = config.arguments | {key: await _model(builder, ref, config, blocking) for key, ref in models.items()}
    if builds:
        run = _asking(code, [], arguments, config.framework)
    else:
        run = _calling(code, first is not None, from_episode, arguments)
        run.__annotations__ = {"value": type_hints(code).get(first or "", Any)}
    yield FunctionInfo.from_fn(run, description=inspect.getdoc(code))


def _no_model(where: str, what: str, builder: Builder) -> str:
    known = ", ".join(builder.config.names(LLM)) or "none"
    return f"{where}.model is missing: {what} takes a model; available under llms: {known}"


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
