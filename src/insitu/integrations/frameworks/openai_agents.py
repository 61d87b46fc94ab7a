"""OpenAI Agents SDK: a Chat Completions model, and a trace processor that reports tool runs as steps.

Importing this module adds a trace processor. If tracing is disabled there are no steps; if it is configured to omit
inputs and outputs, the steps lack them. A TOOL_START has no arguments; the TOOL_END has arguments and result. A tool's
exception is reported in full only if the tool has a custom `failure_error_function`: the SDK's default hides it from
model and traces.
"""

import json
from typing import Any

from agents import Agent, FunctionSpanData, OpenAIChatCompletionsModel, Runner, TracingProcessor, add_trace_processor
from agents import FunctionTool as AgentsTool

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_client
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("openai_agents")


def make_llm(llm: ModelClient) -> OpenAIChatCompletionsModel:
    """For `Agent(model=...)`."""
    return OpenAIChatCompletionsModel(model=llm.model, openai_client=async_client(llm))


def make_tool(function: Function) -> AgentsTool:
    """For `Agent(tools=...)`."""
    tool = FunctionTool(function, "openai_agents")

    async def invoke(_context: Any, arguments: str) -> Any:
        return await tool.run(**json.loads(arguments or "{}"))

    return AgentsTool(tool.name, tool.description, tool.parameters, invoke, strict_json_schema=False)


async def ask_agent(agent: Agent[Any], question: Any) -> Any:
    """The final output of a run."""
    return (await Runner.run(agent, question)).final_output


def with_model(agent: Agent[Any], model: OpenAIChatCompletionsModel) -> Agent[Any]:
    """Agents that it hands over to keep their model."""
    return agent.clone(model=model)


class _ToolReports(TracingProcessor):
    """Spans begin and end in the task that runs the tool."""

    def on_span_start(self, span: Any) -> None:
        if isinstance(span.span_data, FunctionSpanData):
            _TOOLS.start(span.span_id, span.span_data.name, span.span_data.input)

    def on_span_end(self, span: Any) -> None:
        if isinstance(span.span_data, FunctionSpanData):
            _TOOLS.end(span.span_id, span.span_data.output, span.error, arguments=span.span_data.input)

    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


add_trace_processor(_ToolReports())
