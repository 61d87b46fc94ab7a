"""Strands Agents: an `OpenAIModel` on a recording client, and a hook provider that reports tool runs as steps.

model = await builder.get_llm("player", wrapper_type="strands")
agent = Agent(model, tools=[look], hooks=[ToolReports()])
"""

from typing import Any

from strands import Agent
from strands import tool as strands_tool
from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent, HookProvider, HookRegistry
from strands.models.openai import OpenAIModel

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_client
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("strands")


def make_llm(llm: ModelClient) -> OpenAIModel:
    """For `Agent(model=...)`. Strands streams unless configured with `update_config(stream=False)`."""
    return OpenAIModel(client=async_client(llm), model_id=llm.model)


def make_tool(function: Function) -> Any:
    """For `Agent(tools=...)`."""
    tool = FunctionTool(function, "strands")
    return strands_tool(name=tool.name, description=tool.description, inputSchema={"json": tool.parameters})(tool.run)


async def ask_agent(agent: Agent, question: Any) -> str:
    """The text of the result."""
    return str(await agent.invoke_async(question)).strip()


class ToolReports(HookProvider):
    """Pushes TOOL_ steps to the current episode. Can be shared by agents."""

    def register_hooks(self, registry: HookRegistry, **others: Any) -> None:
        registry.add_callback(BeforeToolCallEvent, self._before)
        registry.add_callback(AfterToolCallEvent, self._after)

    def _before(self, event: BeforeToolCallEvent) -> None:
        _TOOLS.start(_run_id(event), event.tool_use["name"], event.tool_use["input"])

    def _after(self, event: AfterToolCallEvent) -> None:
        _TOOLS.end(_run_id(event), event.result, event.exception)


def _run_id(event: BeforeToolCallEvent | AfterToolCallEvent) -> str:
    """A call id from the server may only be unique within its conversation."""
    return f"{id(event.agent):x}/{event.tool_use['toolUseId']}"
