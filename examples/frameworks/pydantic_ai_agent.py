"""A Pydantic AI agent that looks at things."""

from pydantic_ai import Agent

from insitu.integrations.frameworks.pydantic_ai import ToolReports
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="pydantic_ai_agent"):
    llm: LLMRef
    stream: bool = False


def look(at: str) -> str:
    """Tells the colour of a thing."""
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    model = await builder.get_llm(config.llm, wrapper_type="pydantic_ai")
    looker = Agent(model, tools=[look], capabilities=[ToolReports()])

    async def answer(question: str) -> str:
        if not config.stream:
            return (await looker.run(question)).output
        async with looker.run_stream(question) as result:
            return await result.get_output()

    yield answer
