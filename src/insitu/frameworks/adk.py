"""Google ADK: a `LiteLlm` that records its calls, and a plugin that reports tool runs as steps.

model = await builder.get_llm("player", wrapper_type="adk")
runner = InMemoryRunner(LlmAgent(name="looker", model=model, tools=[look]), plugins=[ToolReports()])
"""

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from google.adk.models.lite_llm import LiteLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin

from insitu.frameworks import ToolSteps, async_client, push
from insitu.schemas.steps import IntermediateStepType, StreamEventData, TraceMetadata
from insitu.workflow.context import current_scope
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("adk")


def make_llm(plain: ModelClient) -> LiteLlm:
    """For `LlmAgent(model=...)`."""
    timeout = {} if plain.config.timeout is None else {"timeout": plain.config.timeout}
    return _ReportingLlm(model=f"openai/{plain.model}", client=async_client(plain), **timeout)


class _ReportingLlm(LiteLlm):
    """Pushes an LLM_START with the request and an LLM_END with the answer, whole ones only."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        if current_scope() is None:
            async for response in super().generate_content_async(llm_request, stream):
                yield response
            return
        run_id, name = uuid.uuid4(), self.model.removeprefix("openai/")
        asked = llm_request.model_copy(update={"contents": list(llm_request.contents)})  # the flow goes on using it
        metadata = TraceMetadata.model_construct(chat_inputs=asked)
        data = StreamEventData(input=asked)
        push("adk", IntermediateStepType.LLM_START, run_id, name, data, metadata=metadata)
        held: list[LlmResponse] = []
        try:
            async for response in super().generate_content_async(llm_request, stream):
                if response.partial and not held:
                    yield response
                else:
                    held.append(response)
        except BaseException as error:  # whatever ends the call is told, and raised again
            push("adk", IntermediateStepType.LLM_END, run_id, name, data, metadata={"error": repr(error)})
            raise
        answers = [response for response in held if not response.partial]
        metadata = TraceMetadata.model_construct(chat_responses=answers)
        data = StreamEventData(input=asked, output=_text(answers))
        push("adk", IntermediateStepType.LLM_END, run_id, name, data, metadata=metadata)
        for response in held:  # not before: ADK runs the tools of an answer while this waits to go on
            yield response


def _text(answers: list[LlmResponse]) -> str:
    parts = [part for answer in answers if answer.content for part in answer.content.parts or ()]
    return "".join(part.text for part in parts if part.text and not part.thought)


class ToolReports(BasePlugin):
    """Pushes TOOL_ steps to the episode that is going on; one serves any number of runners."""

    def __init__(self) -> None:
        super().__init__("insitu")

    async def before_tool_callback(self, *, tool: Any, tool_args: dict[str, Any], tool_context: Any) -> None:
        _TOOLS.start(_run_id(tool_context), tool.name, dict(tool_args))

    async def after_tool_callback(
        self, *, tool: Any, tool_args: dict[str, Any], tool_context: Any, result: dict[str, Any]
    ) -> None:
        _TOOLS.end(_run_id(tool_context), result)

    async def on_tool_error_callback(
        self, *, tool: Any, tool_args: dict[str, Any], tool_context: Any, error: Exception
    ) -> None:
        _TOOLS.end(_run_id(tool_context), error=error)


def _run_id(tool_context: Any) -> str:
    """A call's id may come from the server, and be unique in its dialogue only."""
    return f"{tool_context.invocation_id}/{tool_context.function_call_id}"
