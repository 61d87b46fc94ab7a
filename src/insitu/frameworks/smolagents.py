"""smolagents: an `OpenAIModel` on a recording client, and a tool wrapper that reports tool runs as steps.

model = await builder.get_llm("player", wrapper_type="smolagents")
agent = ToolCallingAgent([ReportingTool(look)], model)
answer = await asyncio.to_thread(agent.run, question)

Its agents block: run them with `asyncio.to_thread`, which keeps the episode.
"""

from typing import Any

from smolagents import OpenAIModel, Tool

from insitu.frameworks import ToolSteps, sync_http
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("smolagents")


def make_llm(llm: ModelClient) -> OpenAIModel:
    """For `ToolCallingAgent(model=...)` and `CodeAgent(model=...)`."""
    client = llm.client
    settings = {"timeout": client.timeout, "max_retries": client.max_retries, "http_client": sync_http(llm)}
    return _Model(llm.model, api_base=str(client.base_url), api_key=client.api_key, client_kwargs=settings)


class _Model(OpenAIModel):
    """Sends `tool_choice: auto` instead of smolagents' `required`.

    Forced tool calls change the sampling distribution, and many servers do not support them.
    """

    def generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        return super().generate(messages, *args, **_auto(kwargs))

    def generate_stream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        return super().generate_stream(messages, *args, **_auto(kwargs))


def _auto(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"tool_choice": "auto", **kwargs} if kwargs.get("tools_to_call_from") else kwargs


class ReportingTool(Tool):
    """Wraps a tool to push TOOL_ steps, for calls by the agent and by code it has written."""

    skip_forward_signature_validation = True

    def __init__(self, tool: Tool) -> None:
        super().__init__()
        self.tool = tool
        self.name, self.description = tool.name, tool.description
        self.inputs, self.output_type = tool.inputs, tool.output_type
        self.output_schema = getattr(tool, "output_schema", None)
        self.is_initialized = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.inputs, args, strict=False)), **kwargs}
        with _TOOLS.around(self.name, arguments) as returned:
            result = self.tool(*args, **kwargs)
            returned(result)
            return result
