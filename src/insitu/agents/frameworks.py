"""Agent frameworks: one module each, imported on first use.

`builder.get_llm(name, wrapper_type=NAME)` calls `make_llm(llm)` of `integrations/frameworks/NAME`, which returns the
framework's model object over one of these clients:

    async_client(llm), sync_client(llm)      the official OpenAI client, with the parameters of the llms block
    async_http(llm, sdk), sync_http(...)     an `httpx` or `httpx2` client, depending on the SDK

All of them record calls, override the model name of a request, add the configured sampling parameters that a request
does not set, and are closed with the builder.

A module reports tool runs as TOOL_START and TOOL_END steps with its `ToolSteps`. It registers global hooks on import if
the framework has them, and otherwise provides an object for the agent's constructor.

    tools = ToolSteps("langchain")
    tools.start(run_id, name, arguments)                 from a pair of callbacks
    tools.end(run_id, output)                            or error=...
    with tools.around(name, arguments) as returned:      from a hook that wraps the run
        returned(await proceed())                        or with error=..., if the framework caught one

`builder.get_tools(names, wrapper_type=NAME)` calls `make_tool(function)`, which returns the framework's tool over a
`FunctionTool`.

A module may also have two functions for plain agents (`insitu.agents`): `ask_agent(agent, question)` returns the answer
of the framework's agent object, and `with_model(agent, model)` a copy of it with another model.

Model calls are recorded as LLM_ steps automatically. `push` is for frameworks that report more about them.
"""

import asyncio
import inspect
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from pydantic import BaseModel

from insitu.agents.translation import translating_transport
from insitu.capture.ledger import current_call_site
from insitu.schemas.steps import IntermediateStepCategory as Category
from insitu.schemas.steps import IntermediateStepPayload, IntermediateStepType, StreamEventData, TraceMetadata
from insitu.workflow.context import EpisodeScope, current_scope
from insitu.workflow.functions import Arguments, Function
from insitu.workflow.llms import ModelClient, http_library, lasting

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

T = TypeVar("T")


def async_http(llm: ModelClient, sdk: ModuleType | None = None) -> Any:
    """An `AsyncClient` of the HTTP library that `sdk` (default: `openai`) uses."""
    http = http_library(sdk)
    return lasting(http.AsyncClient, translating_transport(http)(llm), llm.closers)


def sync_http(llm: ModelClient, sdk: ModuleType | None = None) -> Any:
    """A `Client` of the HTTP library that `sdk` (default: `openai`) uses."""
    http = http_library(sdk)
    return lasting(http.Client, translating_transport(http)(llm), llm.closers)


def async_client(llm: ModelClient) -> "AsyncOpenAI":
    return llm.client.with_options(http_client=async_http(llm))


def with_defaults(llm: ModelClient) -> ModelClient:
    """The model with a client that also adds the parameters of its block to requests."""
    return replace(llm, client=async_client(llm))


def sync_client(llm: ModelClient) -> "OpenAI":
    from openai import OpenAI

    client = llm.client
    return OpenAI(
        base_url=client.base_url,
        api_key=client.api_key,
        timeout=client.timeout,
        max_retries=client.max_retries,
        http_client=sync_http(llm),
    )


def push(
    framework: str,
    event_type: IntermediateStepType,
    run_id: object,
    name: str | None,
    data: StreamEventData,
    scope: EpisodeScope | None = None,
    **others: Any,
) -> None:
    """Pushes a step to `scope` or the current episode. Does nothing outside an episode."""
    scope = scope or current_scope()
    if scope is not None:
        payload = IntermediateStepPayload(
            event_type=event_type, UUID=str(run_id), framework=framework, name=name, data=data, **others
        )
        scope.step_manager.push_intermediate_step(payload)


class _Run(NamedTuple):
    name: str | None
    input: Any


class RunSteps:
    """Reports runs of a framework as steps of the episode they started in. Run ids are globally unique."""

    types: tuple[IntermediateStepType, IntermediateStepType]
    """The types of the first and of the last step of a run."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        # Runs that are not ended, as those of cancelled calls may be, do not keep their episode in memory.
        self._scopes: WeakValueDictionary[str, EpisodeScope] = WeakValueDictionary()
        self._open: WeakKeyDictionary[EpisodeScope, dict[str, _Run]] = WeakKeyDictionary()

    def _start(self, run_id: object, name: str | None, value: Any, metadata: TraceMetadata | None) -> None:
        if (scope := current_scope()) is not None:
            self._scopes[str(run_id)] = scope
            self._open.setdefault(scope, {})[str(run_id)] = _Run(name, value)
            push(self._framework, self.types[0], run_id, name, StreamEventData(input=value), scope, metadata=metadata)

    def _end(self, run_id: object, error: str | None, metadata: dict[str, Any], data: Any, **others: Any) -> None:
        """Pushes name and input as in the start, with the error or `metadata`. Ignores runs without a start."""
        if (scope := self._scopes.pop(str(run_id), None)) is not None:
            run = self._open[scope].pop(str(run_id))
            data = StreamEventData(**{"input": run.input, **data})
            fields: Any = {"error": error} if error is not None else TraceMetadata.model_construct(**metadata)
            push(self._framework, self.types[1], run_id, run.name, data, scope, metadata=fields, **others)


class ToolSteps(RunSteps):
    """Reports the tool runs of a framework."""

    types = IntermediateStepType.TOOL_START, IntermediateStepType.TOOL_END

    def start(self, run_id: object, name: str | None, arguments: Any, info: Any = None) -> None:
        metadata = TraceMetadata.model_construct(tool_inputs=arguments, tool_info=info)
        self._start(run_id, name, arguments, metadata)

    def end(self, run_id: object, output: Any = None, error: object = None, arguments: Any = None) -> None:
        """Ignores runs without a start. `arguments` replaces those of the start, where only the end knows them."""
        data = {"output": output} if arguments is None else {"output": output, "input": arguments}
        self._end(run_id, None if error is None else repr(error), {"tool_outputs": output}, data)

    @contextmanager
    def around(self, name: str, arguments: Any) -> Iterator["Returned"]:
        """Reports a tool run. Yields a function that takes the result, and returns it; the last call counts."""
        run_id = uuid.uuid4()
        results: list[tuple[Any, object]] = [(None, None)]

        def returned(output: T, error: object = None) -> T:
            results.append((output, error))
            return output

        self.start(run_id, name, arguments)
        try:
            yield returned
        except BaseException as error:  # reported, then re-raised
            self.end(run_id, error=error)
            raise
        self.end(run_id, *results[-1])


_PLAIN = (str, int, float, dict, list)
"""Answers that every framework takes as they are; others become text, by the function's converters or as JSON."""


class FunctionTool:
    """A function of the file as a model calls it: with the fields of `schema`, one at a time.

    `run` is an asynchronous function, `blocking` one for threads; both have the tool's name, description and signature,
    from which some frameworks make the tool. A call is a TOOL_ step, pushed here unless the framework has pushed one.
    """

    def __init__(self, function: Function, framework: str) -> None:
        steps, loop, thread = ToolSteps(framework), asyncio.get_running_loop(), threading.get_ident()
        self.name = function.name.replace(".", "__")
        self.description = function.description or function.name
        self.schema: type[BaseModel] = function.input_schema

        async def run(*args: Any, **kwargs: Any) -> Any:
            arguments = Arguments(signature.bind(*args, **kwargs).arguments)
            scope = current_scope()
            around = scope.step_manager.innermost(current_call_site.get()) if scope is not None else None
            if around is not None and around.category is Category.TOOL:
                return plain(await function.ainvoke(arguments))
            with steps.around(self.name, arguments) as returned:
                return returned(plain(await function.ainvoke(arguments)))

        def plain(answer: Any) -> Any:
            return answer if answer is None or isinstance(answer, _PLAIN) else function.text(answer)

        def blocking(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:  # it would wait for itself
                raise RuntimeError(f"the tool {self.name} blocks the event loop: run the agent by asyncio.to_thread")
            return asyncio.run_coroutine_threadsafe(run(*args, **kwargs), loop).result()

        signature = self._signature()
        for made in (run, blocking):
            made.__name__ = made.__qualname__ = self.name
            made.__doc__ = self.description
            made.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
            made.__signature__ = signature  # type: ignore[union-attr]
        self.run, self.blocking = run, blocking

    def _signature(self) -> inspect.Signature:
        parameters = []
        for name, field in self.schema.model_fields.items():
            default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=field.annotation))
        return inspect.Signature(sorted(parameters, key=lambda each: each.default is not inspect.Parameter.empty))

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        return self.schema.model_json_schema()


class Returned(Protocol):
    """Takes the output of a tool, which it returns, and the error if the framework caught one."""

    def __call__(self, output: T, error: object = None) -> T: ...
