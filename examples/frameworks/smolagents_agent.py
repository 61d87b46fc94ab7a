"""A smolagents agent that looks at things."""

import asyncio

from smolagents import ToolCallingAgent, tool

from insitu.integrations.frameworks.smolagents import ReportingTool
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="smolagents_agent"):
    llm: LLMRef
    stream: bool = False


@tool
def look(at: str) -> str:
    """Tells the colour of a thing.

    Args:
        at: The thing.
    """
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    model = await builder.get_llm(config.llm, wrapper_type="smolagents")

    async def answer(question: str) -> str:
        looker = ToolCallingAgent([ReportingTool(look)], model, stream_outputs=config.stream, verbosity_level=0)
        return await asyncio.to_thread(looker.run, question)

    yield answer
