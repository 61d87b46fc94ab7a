"""smolagents: an `OpenAIModel` whose calls are recorded, and a tool wrapper that records tool runs as steps.

model = await builder.get_llm("player", wrapper_type="smolagents")
agent = ToolCallingAgent([ReportingTool(look)], model)
answer = await asyncio.to_thread(agent.run, question)

smolagents agents are synchronous: run them with `asyncio.to_thread`, which carries over the current episode.
"""

import asyncio
from typing import Any

from smolagents import MultiStepAgent, OpenAIModel, Tool

from insitu.agents.frameworks import FunctionTool, ToolSteps, sync_http
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("smolagents")


def make_llm(llm: ModelClient) -> OpenAIModel:
    """Returns a model for `ToolCallingAgent` or `CodeAgent`."""
    client = llm.client
    client_kwargs = {"timeout": client.timeout, "max_retries": client.max_retries, "http_client": sync_http(llm)}
    return _AutoToolChoiceModel(
        llm.model, api_base=str(client.base_url), api_key=client.api_key, client_kwargs=client_kwargs
    )


def make_tool(function: Function) -> Tool:
    """For `ToolCallingAgent(tools=...)`; its calls are steps without `ReportingTool`."""
    return _FunctionTool(FunctionTool(function, "smolagents"))


class _FunctionTool(Tool):
    skip_forward_signature_validation = True

    def __init__(self, tool: FunctionTool) -> None:
        super().__init__()
        self.name, self.description, self.output_type = tool.name, tool.description, "any"
        properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
        self.inputs = {
            name: {
                "type": each.get("type", "any"),
                "description": each.get("description", name),
                **({} if name in required else {"nullable": True}),
            }
            for name, each in properties.items()
        }
        self.forward = tool.blocking
        self.is_initialized = True


async def ask_agent(agent: MultiStepAgent, question: Any) -> Any:
    """The final answer of a run, in a thread."""
    return await asyncio.to_thread(agent.run, question)


class _AutoToolChoiceModel(OpenAIModel):
    """Defaults `tool_choice` to `auto` instead of smolagents' `required`.

    Many servers cannot force calls, or train them as if they had not been forced.
    """

    def generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        return super().generate(messages, *args, **_with_auto_tool_choice(kwargs))

    def generate_stream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        return super().generate_stream(messages, *args, **_with_auto_tool_choice(kwargs))


def _with_auto_tool_choice(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"tool_choice": "auto", **kwargs} if kwargs.get("tools_to_call_from") else kwargs


class ReportingTool(Tool):
    """Wraps a tool so that each call pushes TOOL_ steps, whether made by the agent or by code it generated."""

    skip_forward_signature_validation = True  # forward(*args, **kwargs) does not match `inputs`

    def __init__(self, tool: Tool) -> None:
        super().__init__()
        self.tool = tool
        self.name, self.description = tool.name, tool.description
        self.inputs, self.output_type = tool.inputs, tool.output_type
        self.output_schema = getattr(tool, "output_schema", None)
        self.is_initialized = True  # the wrapped tool does its own setup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.inputs, args, strict=False)), **kwargs}
        with _TOOLS.around(self.name, arguments) as returned:
            return returned(self.tool(*args, **kwargs))
