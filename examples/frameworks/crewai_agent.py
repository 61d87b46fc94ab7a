"""A CrewAI agent that looks at things."""

from crewai import Agent
from crewai.tools import tool

from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="crewai_agent"):
    llm: LLMRef
    stream: bool = False


@tool
def look(at: str) -> str:
    """Tells the colour of a thing."""
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    llm = await builder.get_llm(config.llm, wrapper_type="crewai")
    llm.stream = config.stream

    async def answer(question: str) -> str:
        looker = Agent(role="looker", goal="look", backstory="It has eyes.", tools=[look], llm=llm)
        return (await looker.kickoff_async(question)).raw

    yield answer
