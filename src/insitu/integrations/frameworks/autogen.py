"""AutoGen AgentChat: an `OpenAIChatCompletionClient` that records, and a workbench that reports tool runs as steps.

client = await builder.get_llm("player", wrapper_type="autogen")
agent = AssistantAgent("looker", client, workbench=ReportingWorkbench([FunctionTool(look, "Looks.")]))
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from autogen_agentchat.base import TaskRunner
from autogen_core.models import ModelFamily
from autogen_core.tools import FunctionTool as AutoGenTool
from autogen_core.tools import StaticStreamWorkbench, ToolResult
from autogen_ext.models.openai import OpenAIChatCompletionClient

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_http
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("autogen")


def make_llm(llm: ModelClient) -> OpenAIChatCompletionClient:
    """For `AssistantAgent(model_client=...)`. Declares all capabilities: the server decides."""
    return OpenAIChatCompletionClient(
        model=llm.model,
        model_info={
            "vision": True,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "multiple_system_messages": True,
            "family": ModelFamily.UNKNOWN,
        },
        base_url=str(llm.client.base_url),
        api_key=llm.client.api_key,
        timeout=llm.client.timeout,
        max_retries=llm.client.max_retries,
        http_client=async_http(llm),
    )


def make_tool(function: Function) -> AutoGenTool:
    """For `AssistantAgent(tools=...)` and workbenches."""
    tool = FunctionTool(function, "autogen")
    return AutoGenTool(tool.run, description=tool.description, name=tool.name)


async def ask_agent(agent: TaskRunner, question: Any) -> Any:
    """The content of the last message."""
    return getattr((await agent.run(task=question)).messages[-1], "content", None)


class ReportingWorkbench(StaticStreamWorkbench):
    """Pushes TOOL_ steps to the current episode for each tool run."""

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> ToolResult:
        with _TOOLS.around(name, arguments) as returned:
            result = await super().call_tool(name, arguments, *args, **kwargs)
            return returned(result, _error_of(result))

    async def call_tool_stream(
        self, name: str, arguments: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any | ToolResult, None]:
        with _TOOLS.around(name, arguments) as returned:
            async for item in super().call_tool_stream(name, arguments, *args, **kwargs):
                yield returned(item, _error_of(item))


def _error_of(result: Any) -> str | None:
    """The text of a result that reports an exception."""
    return result.to_text() if isinstance(result, ToolResult) and result.is_error else None
