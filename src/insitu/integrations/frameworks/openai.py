"""The official OpenAI SDK, Chat Completions and Responses: its client, and steps for the agent's tool runs.

client = await builder.get_llm("player", wrapper_type="openai")
with tool_step("look", arguments) as returned:
    returned(look(**arguments))

Blocking agents use `sync_client(await builder.get_llm("player"))`.
"""

from openai import AsyncOpenAI

from insitu.agents.frameworks import ToolSteps, async_client, sync_client
from insitu.workflow.llms import ModelClient

__all__ = ["make_llm", "sync_client", "tool_step"]

tool_step = ToolSteps("openai").around


def make_llm(llm: ModelClient) -> AsyncOpenAI:
    """A client that always calls this model, regardless of the model a request names."""
    return async_client(llm)
