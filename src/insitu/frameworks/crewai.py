"""CrewAI: its OpenAI model on recording clients, and hooks that report tool runs as steps.

Importing this module registers the hooks; outside an episode they do nothing. CrewAI's events are not used, because its
event bus dispatches them on a thread pool, where the end of a run can arrive before its start.
"""

import uuid

from crewai.hooks import ToolCallHookContext, register_after_tool_call_hook, register_before_tool_call_hook
from crewai.llms.providers.openai.completion import OpenAICompletion

from insitu.frameworks import ToolSteps, async_client, sync_client
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("crewai")
_running: dict[int, uuid.UUID] = {}
"""By the identity of a run's arguments, which is all that its two hooks have in common; `_TOOLS` keeps them alive."""

_FAILED = ("Error executing tool: ", "I encountered an error while trying to use the tool.")
"""How the result begins that CrewAI makes of an exception; hooks are told nothing else of it."""


def make_llm(plain: ModelClient) -> OpenAICompletion:
    """For `Agent(llm=...)`."""
    llm = OpenAICompletion(
        model=plain.model,
        base_url=str(plain.client.base_url),
        api_key=plain.client.api_key,
        custom_openai=True,  # else it may come to prefer the Responses API
    )
    # It has fields for the clients' parameters, but one http_client for the two of them.
    llm._client, llm._async_client = sync_client(plain), async_client(plain)
    return llm


def _before(context: ToolCallHookContext) -> None:
    run_id = _running[id(context.tool_input)] = uuid.uuid4()
    _TOOLS.start(run_id, context.tool_name, context.tool_input)


def _after(context: ToolCallHookContext) -> None:
    result = context.tool_result
    error = result if result is not None and result.startswith(_FAILED) else None
    _TOOLS.end(_running.pop(id(context.tool_input), None), result, error)


register_before_tool_call_hook(_before)
register_after_tool_call_hook(_after)
