"""A Strands agent that looks at things."""

from strands import Agent, tool

from insitu.integrations.frameworks.strands import ToolReports
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="strands_agent"):
    llm: LLMRef
    stream: bool = False


@tool
def look(at: str) -> str:
    """Tells the colour of a thing."""
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    model = await builder.get_llm(config.llm, wrapper_type="strands")
    model.update_config(stream=config.stream)

    async def answer(question: str) -> str:
        looker = Agent(model, tools=[look], hooks=[ToolReports()], callback_handler=None)
        return str(await looker.invoke_async(question)).strip()

    yield answer
