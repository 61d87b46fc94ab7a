"""The official Anthropic SDK: its client in front of any model of `llms`, and steps for the agent's tool runs.

client = await builder.get_llm("player", wrapper_type="anthropic")
with tool_step("look", block.input) as returned:
    returned(look(**block.input))

Blocking agents use `sync_client(await builder.get_llm("player"))`.
"""

from typing import Any

import anthropic

from insitu.agents.frameworks import ToolSteps, async_http, sync_http
from insitu.workflow.llms import ModelClient

tool_step = ToolSteps("anthropic").around


def make_llm(llm: ModelClient) -> anthropic.AsyncAnthropic:
    """A client that always calls this model, regardless of the model a request names."""
    return anthropic.AsyncAnthropic(http_client=async_http(llm, anthropic), **_options(llm))


def sync_client(llm: ModelClient) -> anthropic.Anthropic:
    return anthropic.Anthropic(http_client=sync_http(llm, anthropic), **_options(llm))


def _options(llm: ModelClient) -> dict[str, Any]:
    return {
        "base_url": str(llm.client.base_url).rstrip("/").removesuffix("/v1"),
        "api_key": llm.client.api_key,
        "timeout": llm.config.timeout or anthropic.DEFAULT_TIMEOUT,  # openai's may belong to another HTTP library
        "max_retries": llm.client.max_retries,
    }
