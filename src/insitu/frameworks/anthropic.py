"""The official Anthropic SDK: its client before any model of `llms`, and steps for the tools that an agent runs.

client = await builder.get_llm("player", wrapper_type="anthropic")
with tool_step("look", block.input) as returned:
    returned(look(**block.input))
"""

import anthropic

from insitu.frameworks import ToolSteps, async_http
from insitu.workflow.llms import PlainLLM

tool_step = ToolSteps("anthropic").around


def make_llm(plain: PlainLLM) -> anthropic.AsyncAnthropic:
    """A client that asks the model under this key of `llms`, whatever the name in a request."""
    return anthropic.AsyncAnthropic(
        base_url=str(plain.client.base_url).rstrip("/").removesuffix("/v1"),
        api_key=plain.client.api_key,
        timeout=plain.config.timeout or anthropic.DEFAULT_TIMEOUT,  # openai may stand on the other HTTP library
        max_retries=plain.client.max_retries,
        http_client=async_http(plain, anthropic),
    )
