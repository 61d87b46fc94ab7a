"""Semantic Kernel: an `OpenAIChatCompletion` on a recording client, and a filter that reports tool runs as steps.

service = await builder.get_llm("player", wrapper_type="semantic_kernel")
kernel = Kernel(services=service)
kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, tool_filter)
"""

from collections.abc import Awaitable, Callable
from typing import Any

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.filters import FunctionInvocationContext
from semantic_kernel.functions import KernelFunction, KernelFunctionFromMethod, kernel_function

from insitu.agents.frameworks import FunctionTool, ToolSteps, async_client
from insitu.workflow.functions import Function
from insitu.workflow.llms import ModelClient

_TOOLS = ToolSteps("semantic_kernel")


def make_llm(llm: ModelClient) -> OpenAIChatCompletion:
    """For `Kernel(services=...)` and `ChatCompletionAgent(service=...)`; its service_id is the key under `llms`."""
    return OpenAIChatCompletion(ai_model_id=llm.model, service_id=llm.name, async_client=async_client(llm))


def make_tool(function: Function) -> KernelFunction:
    """For `ChatCompletionAgent(plugins=...)` and `Kernel.add_function`."""
    tool = FunctionTool(function, "semantic_kernel")
    method = kernel_function(name=tool.name, description=tool.description)(tool.run)
    return KernelFunctionFromMethod(method, plugin_name="functions")


async def ask_agent(agent: ChatCompletionAgent, question: Any) -> str:
    """The content of the response."""
    return str((await agent.get_response(messages=question)).content)


def with_model(agent: ChatCompletionAgent, model: OpenAIChatCompletion) -> ChatCompletionAgent:
    return agent.model_copy(update={"service": model})


async def tool_filter(
    context: FunctionInvocationContext, next: Callable[[FunctionInvocationContext], Awaitable[None]]
) -> None:
    """Pushes TOOL_ steps to the current episode, except for prompt functions."""
    if context.function.is_prompt:
        await next(context)
        return
    with _TOOLS.around(context.function.name, dict(context.arguments)) as returned:
        await next(context)
        returned(context.result)
