"""Asks an agent of a framework whose tools are functions of the file; prints its answer and steps as JSON.

python function_tools.py FRAMEWORK BASE_URL
"""

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

from insitu.builder import Builder
from insitu.schemas.components import FunctionBaseConfig
from insitu.workflow.context import EpisodeScope
from insitu.workflow.functions import FunctionInfo, register_function
from insitu.workflow.llms import OpenAIConfig


class LookConfig(FunctionBaseConfig, name="look"):
    colour: str


@register_function(config_type=LookConfig)
async def look_function(config: LookConfig, builder: Builder):
    async def look(at: str, times: int = 1) -> str:
        assert asyncio.get_running_loop() is loop, "it may use what the builder has opened"
        return f"{config.colour} {at}" * times

    loop = asyncio.get_running_loop()

    yield FunctionInfo.from_fn(look, description="Looks at a place.")


def agent_of(framework: str, model: Any, tools: list[Any]) -> Any:
    instructions = "Look before you answer."
    match framework:
        case "langgraph":
            from langchain.agents import create_agent

            return create_agent(model, tools)
        case "llama_index":
            from llama_index.core.agent.workflow import FunctionAgent

            return FunctionAgent(tools=tools, llm=model, streaming=False)
        case "adk":
            from google.adk.agents import LlmAgent

            return LlmAgent(name="looker", model=model, tools=tools)
        case "crewai":
            from crewai import Agent

            return Agent(role="looker", goal="look", backstory=instructions, llm=model, tools=tools)
        case "semantic_kernel":
            from semantic_kernel import Kernel
            from semantic_kernel.agents import ChatCompletionAgent

            kernel = Kernel()
            for tool in tools:
                kernel.add_function("functions", tool)
            return ChatCompletionAgent(service=model, kernel=kernel, name="looker")
        case "agno":
            from agno.agent import Agent

            return Agent(model=model, tools=tools, telemetry=False)
        case "autogen":
            from autogen_agentchat.agents import AssistantAgent

            return AssistantAgent("looker", model, tools=tools, reflect_on_tool_use=True)
        case "strands":
            from strands import Agent

            model.update_config(stream=False)
            return Agent(model, tools=tools, callback_handler=None)
        case "openai_agents":
            from agents import Agent

            return Agent(name="looker", model=model, tools=tools)
        case "pydantic_ai":
            from pydantic_ai import Agent

            return Agent(model, tools=tools)
        case "smolagents":
            from smolagents import ToolCallingAgent

            return ToolCallingAgent(tools, model, max_steps=2)
    raise ValueError(framework)


async def ask(framework: str, base_url: str) -> dict[str, Any]:
    async with Builder() as builder:
        await builder.add_llm("player", OpenAIConfig(model_name="fake", base_url=base_url, max_retries=0))
        await builder.add_function("look", LookConfig(colour="blue"))
        model = await builder.get_llm("player", wrapper_type=framework)
        tools = await builder.get_tools(["look"], wrapper_type=framework)
        agent = agent_of(framework, model, tools)
        with EpisodeScope() as scope:
            answer = await import_module(f"insitu.integrations.frameworks.{framework}").ask_agent(
                agent, "What is there?"
            )
    steps = [step for step in scope.steps if step.event_type.startswith(("TOOL_", "FUNCTION_"))]
    return {
        "answer": str(answer),
        "steps": [(step.event_type, step.name) for step in steps],
        "outputs": [str(step.data.output) for step in steps if step.event_type == "TOOL_END" and step.data],
    }


if __name__ == "__main__":
    print("\n" + json.dumps(asyncio.run(ask(sys.argv[1], sys.argv[2]))))
