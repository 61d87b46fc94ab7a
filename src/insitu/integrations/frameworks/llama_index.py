"""LlamaIndex: an `OpenAILike` on recording clients, and instrumentation that reports calls and tool runs as steps.

Importing this module adds handlers to LlamaIndex's root dispatcher; outside an episode they do nothing.
"""

from typing import Any

from llama_index.core.agent.workflow import BaseWorkflowAgent
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.exception import ExceptionEvent
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.instrumentation.events.span import SpanDropEvent
from llama_index.core.instrumentation.span_handlers import NullSpanHandler
from llama_index.core.tools import BaseTool
from llama_index.core.tools import FunctionTool as LlamaIndexTool
from llama_index.core.tools.types import BaseToolAsyncAdapter
from llama_index.llms.openai_like import OpenAILike
from pydantic import PrivateAttr

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_http, sync_http
from insitu.integrations.frameworks import ModelSteps
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_MODELS, _TOOLS = ModelSteps("llama_index"), ToolSteps("llama_index")
_CONTEXT_WINDOW = 2**17
"""LlamaIndex truncates histories to this many tokens; the server enforces the real limit."""


def make_llm(llm: ModelClient) -> OpenAILike:
    """Does not send LlamaIndex's default temperature."""
    params = {"temperature": None, **llm.params}
    max_tokens = params.pop("max_tokens", None)
    return OpenAILike(
        model=llm.model,
        api_base=str(llm.client.base_url),
        api_key=llm.client.api_key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=_CONTEXT_WINDOW,
        max_tokens=max_tokens,
        additional_kwargs=params,
        timeout=llm.config.timeout or 600.0,
        max_retries=llm.client.max_retries,
        http_client=sync_http(llm),
        async_http_client=async_http(llm),
    )


def make_tool(function: Function) -> LlamaIndexTool:
    """For `FunctionAgent(tools=...)`."""
    tool = FunctionTool(function, "llama_index")
    return LlamaIndexTool.from_defaults(
        async_fn=tool.run, name=tool.name, description=tool.description, fn_schema=tool.schema
    )


async def ask_agent(agent: Any, question: Any) -> str:
    """The text of what an agent workflow returns."""
    return str(await agent.run(question))


def with_model(agent: BaseWorkflowAgent, model: OpenAILike) -> BaseWorkflowAgent:
    return agent.model_copy(update={"llm": model})


class _ModelReports(BaseEventHandler):
    """A model call's span opens with its start event and closes with an end event, an error, or an abandoned stream."""

    def handle(self, event: Any, **others: Any) -> None:
        match event:
            case LLMChatStartEvent():
                messages = list(event.messages)
                self._start(event, messages, chat_inputs=messages)
            case LLMCompletionStartEvent():
                self._start(event, event.prompt)
            case LLMChatEndEvent() | LLMCompletionEndEvent():
                response = event.response
                is_text = isinstance(response, CompletionResponse)
                text = response.text if is_text else response and response.message.content
                _MODELS.end(event.span_id, text, [] if response is None else [response])
            case ExceptionEvent():
                _MODELS.end(event.span_id, error=repr(event.exception))
            case SpanDropEvent():
                _MODELS.end(event.span_id, error=event.err_str)

    def _start(self, event: Any, prompt: Any, **metadata: Any) -> None:
        name, tools = event.model_dict.get("model_name"), event.additional_kwargs.get("tools")
        _MODELS.start(event.span_id, name, prompt, tools_schema=tools, **metadata)


class _ToolReports(NullSpanHandler):
    """Each tool run is a span. If a tool's methods call one another, only the outermost is reported."""

    _running: dict[str, BaseTool] = PrivateAttr(default_factory=dict)

    def span_enter(
        self, id_: str, bound_args: Any, instance: Any = None, parent_id: str | None = None, **others: Any
    ) -> None:
        if not isinstance(instance, BaseTool) or isinstance(instance, BaseToolAsyncAdapter):
            return
        if self._running.get(parent_id or "") is not instance:
            bound = dict(bound_args.arguments)
            arguments = {**bound.pop("kwargs", {}), **bound}
            arguments.pop(getattr(instance, "ctx_param_name", None), None)  # the workflow's context, not the model's
            _TOOLS.start(id_, instance.metadata.get_name(), arguments)
        self._running[id_] = instance

    def span_exit(self, id_: str, bound_args: Any, instance: Any = None, result: Any = None, **others: Any) -> None:
        self._running.pop(id_, None)
        _TOOLS.end(id_, result)

    def span_drop(self, id_: str, bound_args: Any, instance: Any = None, err: Any = None, **others: Any) -> None:
        self._running.pop(id_, None)
        _TOOLS.end(id_, error=err)


get_dispatcher().add_event_handler(_ModelReports())
get_dispatcher().add_span_handler(_ToolReports())
