"""Google ADK: a `LiteLlm` that records its calls, and a plugin that reports tool runs as steps.

model = await builder.get_llm("player", wrapper_type="adk")
runner = InMemoryRunner(LlmAgent(name="looker", model=model, tools=[look]), plugins=[ToolReports()])
"""

import uuid
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from google.adk.agents import BaseAgent, LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner
from google.adk.tools.function_tool import FunctionTool as ADKTool
from google.genai.types import Content, Part

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_client
from insitu.integrations.frameworks import ModelSteps
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_MODELS, _TOOLS = ModelSteps("adk"), ToolSteps("adk")


def make_llm(llm: ModelClient) -> LiteLlm:
    """For `LlmAgent(model=...)`."""
    timeout = {} if llm.config.timeout is None else {"timeout": llm.config.timeout}
    return _ReportingLlm(model=f"openai/{llm.model}", client=async_client(llm), **timeout)


def make_tool(function: Function) -> ADKTool:
    """For `LlmAgent(tools=...)`."""
    return ADKTool(FunctionTool(function, "adk").run)


async def ask_agent(agent: BaseAgent, question: Any) -> str:
    """Asks the agent in a new session; returns the text of the last final response."""
    runner = InMemoryRunner(agent, plugins=[ToolReports()])
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
    message = Content(role="user", parts=[Part(text=str(question))])
    events = runner.run_async(user_id="user", session_id=session.id, new_message=message)
    final = [event async for event in events if event.is_final_response()]
    return _text((final[-1].content.parts if final and final[-1].content else None) or ())


def _text(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if part.text and not part.thought)


def with_model(agent: LlmAgent, model: LiteLlm) -> LlmAgent:
    """Sub-agents with a model keep theirs."""
    return agent.clone(update={"model": model})


class _ReportingLlm(LiteLlm):
    """Pushes LLM_START with the request and LLM_END with the final responses."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        run_id, name = uuid.uuid4(), self.model.removeprefix("openai/")
        request = llm_request.model_copy(update={"contents": list(llm_request.contents)})  # ADK appends to the original
        _MODELS.start(run_id, name, request, chat_inputs=request)
        held: list[LlmResponse] = []
        try:
            async for response in super().generate_content_async(llm_request, stream):
                if response.partial and not held:
                    yield response
                else:
                    held.append(response)
        except BaseException as error:  # reported, then re-raised
            _MODELS.end(run_id, error=repr(error))
            raise
        final = [response for response in held if not response.partial]
        parts = [part for response in final if response.content for part in response.content.parts or ()]
        _MODELS.end(run_id, _text(parts), final)
        for response in held:  # after LLM_END: ADK runs the tools of a response before it resumes this generator
            yield response


class ToolReports(BasePlugin):
    """Pushes TOOL_ steps to the current episode. Can be shared by runners."""

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
    """A call id from the server may only be unique within its conversation."""
    return f"{tool_context.invocation_id}/{tool_context.function_call_id}"
