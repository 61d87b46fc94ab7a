"""Agno: an `OpenAILike` on recording clients, and hooks that report tool runs as steps.

model = await builder.get_llm("player", wrapper_type="agno")
agent = Agent(model=model, tools=[look], tool_hooks=[tool_hook])
"""

from collections.abc import Awaitable, Callable
from typing import Any

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from agno.tools.function import Function as AgnoTool

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_client, sync_client
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("agno")


def make_llm(llm: ModelClient) -> OpenAILike:
    """For `Agent(model=...)`."""
    return OpenAILike(id=llm.model, client=sync_client(llm), async_client=async_client(llm))


def make_tool(function: Function) -> AgnoTool:
    """For `Agent(tools=...)`."""
    tool = FunctionTool(function, "agno")
    return AgnoTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        entrypoint=tool.run,
        skip_entrypoint_processing=True,
    )


async def ask_agent(agent: Agent, question: Any) -> Any:
    """The content of a run."""
    return (await agent.arun(question)).content


def with_model(agent: Agent, model: OpenAILike) -> Agent:
    return agent.deep_copy(update={"model": model})


async def tool_hook(function_name: str, function_call: Callable[..., Awaitable[Any]], arguments: dict[str, Any]) -> Any:
    """Pushes TOOL_ steps to the current episode, for agents run with `arun`."""
    with _TOOLS.around(function_name, arguments) as returned:
        return returned(await function_call(**arguments))


def sync_tool_hook(function_name: str, function_call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Pushes TOOL_ steps to the current episode, for agents run with `run`."""
    with _TOOLS.around(function_name, arguments) as returned:
        return returned(function_call(**arguments))
