"""One module for each agent framework, imported when a model object of that framework is asked for.

`builder.get_llm(name, wrapper_type=NAME)` imports `insitu.frameworks.NAME` and calls its `make_llm(plain)`, which gives
the framework's own model object over the clients made here:

    async_client(plain), sync_client(plain)     the official OpenAI client
    async_http(plain, sdk), sync_http(...)      an `httpx` or `httpx2` client, whichever that SDK's module stands on

All of them record, send each call to the model of `plain` whatever its name in the request, fill in the parameters of
the configuration that a request does not name, and are closed with the builder.

Tool runs become TOOL_START and TOOL_END steps by a module's one `ToolSteps`: where the framework has hooks for all of
its runs the module registers with them when it is imported, else `make_llm` gives them to the model object.

    tools = ToolSteps("langchain")
    tools.start(run_id, name, arguments)        from a pair of callbacks
    tools.end(run_id, output)                   or error=...
    with tools.around(name, arguments) as returned:      from a hook that stands around the run
        returned(await proceed())                        also with error=..., where the framework has caught one

Model calls become LLM_ steps by themselves; `push` is for a framework that tells more about them (LangChain).
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from insitu.gateway.translation import translating_transport
from insitu.schemas.steps import IntermediateStepPayload, IntermediateStepType, StreamEventData, TraceMetadata
from insitu.workflow.context import EpisodeScope, current_scope
from insitu.workflow.llms import ModelClient, http_library

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


def async_http(plain: ModelClient, sdk: ModuleType | None = None) -> Any:
    """An `AsyncClient` of the HTTP library that `sdk` (none: `openai`) stands on."""
    http = http_library(sdk)
    client = http.AsyncClient(transport=translating_transport(http)(plain), follow_redirects=True)
    plain.closers.append(client.aclose)
    return client


def sync_http(plain: ModelClient, sdk: ModuleType | None = None) -> Any:
    """A `Client` of the HTTP library that `sdk` (none: `openai`) stands on."""
    http = http_library(sdk)
    client = http.Client(transport=translating_transport(http)(plain), follow_redirects=True)
    plain.closers.append(client.close)
    return client


def async_client(plain: ModelClient) -> "AsyncOpenAI":
    return plain.client.with_options(http_client=async_http(plain))


def sync_client(plain: ModelClient) -> "OpenAI":
    from openai import OpenAI

    client = plain.client
    return OpenAI(
        base_url=client.base_url,
        api_key=client.api_key,
        timeout=client.timeout,
        max_retries=client.max_retries,
        http_client=sync_http(plain),
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
    """Push a step to `scope`, or to the episode that is going on; outside an episode it goes nowhere."""
    scope = scope or current_scope()
    if scope is not None:
        payload = IntermediateStepPayload(
            event_type=event_type, UUID=str(run_id), framework=framework, name=name, data=data, **others
        )
        scope.step_manager.push_intermediate_step(payload)


class _Run(NamedTuple):
    scope: EpisodeScope
    name: str | None
    arguments: Any


class ToolSteps:
    """The tool runs of one framework as steps of the episode they began in; a run's id is its own in all episodes."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._open: dict[str, _Run] = {}

    def start(self, run_id: object, name: str | None, arguments: Any, info: Any = None) -> None:
        scope = current_scope()
        if scope is None:
            return
        self._open[str(run_id)] = _Run(scope, name, arguments)
        metadata = TraceMetadata.model_construct(tool_inputs=arguments, tool_info=info)
        data = StreamEventData(input=arguments)
        push(self._framework, IntermediateStepType.TOOL_START, run_id, name, data, scope, metadata=metadata)

    def end(self, run_id: object, output: Any = None, error: object = None, arguments: Any = None) -> None:
        """The END tells name and arguments again, as that of a model call does. A run that did not start has none.

        `arguments` are for a framework that tells them only now.
        """
        run = self._open.pop(str(run_id), None)
        if run is None:
            return
        metadata: Any = {"error": repr(error)}
        if error is None:
            metadata = TraceMetadata.model_construct(tool_outputs=output)
        data = StreamEventData(input=run.arguments if arguments is None else arguments, output=output)
        push(self._framework, IntermediateStepType.TOOL_END, run_id, run.name, data, run.scope, metadata=metadata)

    @contextmanager
    def around(self, name: str, arguments: Any) -> Iterator["Returned"]:
        """A tool run; what it yields is to be called with the result."""
        run_id = uuid.uuid4()
        told: list[tuple[Any, object]] = [(None, None)]

        def returned(output: Any, error: object = None) -> None:
            told.append((output, error))

        self.start(run_id, name, arguments)
        try:
            yield returned
        except BaseException as error:  # whatever ends the run is told, and raised again
            self.end(run_id, error=error)
            raise
        self.end(run_id, *told[-1])


class Returned(Protocol):
    """Takes what a tool has returned, and the error that the framework has made it of, if any."""

    def __call__(self, output: Any, error: object = None) -> None: ...
