"""An Agno agent that looks at things."""

from agno.agent import Agent

from insitu.integrations.frameworks.agno import tool_hook
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="agno_agent"):
    llm: LLMRef
    stream: bool = False


def look(at: str) -> str:
    """Tells the colour of a thing."""
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    model = await builder.get_llm(config.llm, wrapper_type="agno")

    async def answer(question: str) -> str:
        looker = Agent(model=model, tools=[look], tool_hooks=[tool_hook], telemetry=False)
        if not config.stream:
            return (await looker.arun(question)).content
        events = [event async for event in looker.arun(question, stream=True, yield_run_output=True)]
        return events[-1].content

    yield answer
