"""Pydantic AI: a chat model, and a capability that reports the agent's tool runs as steps.

model = await builder.get_llm("player", wrapper_type="pydantic_ai")
agent = Agent(model, capabilities=[ToolReports()])
"""

from copy import copy
from typing import Any

from pydantic_ai import Agent, RunContext, Tool, ToolDefinition
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_client
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("pydantic_ai")


def make_llm(llm: ModelClient) -> OpenAIChatModel:
    """For `Agent(model, ...)`."""
    return OpenAIChatModel(llm.model, provider=OpenAIProvider(openai_client=async_client(llm)))


def make_tool(function: Function) -> Tool[None]:
    """For `Agent(tools=...)`."""
    tool = FunctionTool(function, "pydantic_ai")
    return Tool.from_schema(tool.run, tool.name, tool.description, tool.parameters)


async def ask_agent(agent: Agent[None, Any], question: Any) -> Any:
    """The output of a run."""
    return (await agent.run(question)).output


def with_model(agent: Agent[None, Any], model: OpenAIChatModel) -> Agent[None, Any]:
    agent = copy(agent)
    agent.model = model
    return agent


class ToolReports(AbstractCapability[Any]):
    """Pushes TOOL_ steps to the current episode."""

    async def wrap_tool_execute(
        self, ctx: RunContext[Any], *, call: ToolCallPart, tool_def: ToolDefinition, args: dict[str, Any], handler: Any
    ) -> Any:
        with _TOOLS.around(call.tool_name, args) as returned:
            return returned(await handler(args))
