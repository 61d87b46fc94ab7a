"""CrewAI: its OpenAI model on recording clients, and hooks that report tool runs as steps.

Importing this module registers the hooks; outside an episode they do nothing. CrewAI's events are not used, because its
event bus dispatches them on a thread pool, where the end of a run can arrive before its start.
"""

import uuid
from typing import Any

from crewai import Agent
from crewai.hooks import ToolCallHookContext, register_after_tool_call_hook, register_before_tool_call_hook
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.tools.base_tool import BaseTool, Tool

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_client, sync_client
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("crewai")
_running: dict[int, uuid.UUID] = {}
"""Keyed by the id of the arguments object, the only thing the two hooks share. `_TOOLS` keeps the object alive."""

_FAILED = ("Error executing tool: ", "I encountered an error while trying to use the tool.")
"""Prefixes of results that report an exception; hooks get no other sign of it."""


def make_llm(llm: ModelClient) -> OpenAICompletion:
    """For `Agent(llm=...)`."""
    model = OpenAICompletion(
        model=llm.model,
        base_url=str(llm.client.base_url),
        api_key=llm.client.api_key,
        custom_openai=True,  # stays with Chat Completions
    )
    # Its http_client parameter cannot serve both the sync and the async client.
    model._client, model._async_client = sync_client(llm), async_client(llm)
    return model


def make_tool(function: Function) -> BaseTool:
    """For `Agent(tools=...)`. CrewAI runs tools in threads."""
    tool = FunctionTool(function, "crewai")
    return Tool(name=tool.name, description=tool.description, args_schema=tool.schema, func=tool.blocking)


async def ask_agent(agent: Any, question: Any) -> Any:
    """What an agent answers, or a crew, which gets a mapping as the inputs of its tasks."""
    inputs = question if isinstance(question, dict) or isinstance(agent, Agent) else {"question": question}
    return (await agent.kickoff_async(inputs)).raw


def _before(context: ToolCallHookContext) -> None:
    run_id = _running[id(context.tool_input)] = uuid.uuid4()
    _TOOLS.start(run_id, context.tool_name, context.tool_input)


def _after(context: ToolCallHookContext) -> None:
    result = context.tool_result
    error = result if result is not None and result.startswith(_FAILED) else None
    _TOOLS.end(_running.pop(id(context.tool_input), None), result, error)


register_before_tool_call_hook(_before)
register_after_tool_call_hook(_after)
