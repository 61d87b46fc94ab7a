"""The official Anthropic SDK: its client in front of any model of `llms`, and steps for the agent's tool runs.

client = await builder.get_llm("player", wrapper_type="anthropic")
with tool_step("look", block.input) as returned:
    returned(look(**block.input))

Blocking agents use `sync_client(await builder.get_llm("player"))`.
"""

from typing import Any

import anthropic

from insitu.frameworks import ToolSteps, async_http, sync_http
from insitu.workflow.llms import ModelClient

tool_step = ToolSteps("anthropic").around


def make_llm(plain: ModelClient) -> anthropic.AsyncAnthropic:
    """A client that always calls this model, whatever model a request names."""
    return anthropic.AsyncAnthropic(http_client=async_http(plain, anthropic), **_options(plain))


def sync_client(plain: ModelClient) -> anthropic.Anthropic:
    return anthropic.Anthropic(http_client=sync_http(plain, anthropic), **_options(plain))


def _options(plain: ModelClient) -> dict[str, Any]:
    return {
        "base_url": str(plain.client.base_url).rstrip("/").removesuffix("/v1"),
        "api_key": plain.client.api_key,
        "timeout": plain.config.timeout or anthropic.DEFAULT_TIMEOUT,  # openai's may belong to another HTTP library
        "max_retries": plain.client.max_retries,
    }
