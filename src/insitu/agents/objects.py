"""Agents that a function builds, and agent objects: asked one question each."""

import asyncio
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from insitu.errors import ConfigError, WorkflowError
from insitu.registry import FRAMEWORK_GROUP

_METHODS = ("ainvoke", "arun", "run", "invoke")
"""How an object is asked, if it cannot be called and is of no agent framework that insitu knows."""


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
            f"the agent is a {type(agent).__name__}, which insitu cannot ask: return a function of the question, or an "
            f"object that can be called or has a method {', '.join(_METHODS[:-1])} or {_METHODS[-1]}"
        )
    return await called(getattr(agent, method), question)


def binder(agent: Any, framework: str | None, where: str) -> Callable[[Any], Any]:
    """A function that returns a copy of an agent object with another model, for each episode.

    Raises ConfigError if that cannot be done.
    """
    with_model = getattr(framework_module(framework), "with_model", None)
    if with_model is None:
        of = f"an agent of {framework}" if framework else f"a {type(agent).__name__}"
        raise ConfigError(
            f"{where}: {of} cannot be given another model once it is built; give a function that builds it, such as "
            "`def build(model): return Agent(model)`, and name its framework"
        )
    return partial(with_model, agent)
