"""A LlamaIndex agent that looks at things."""

from llama_index.core.agent.workflow import FunctionAgent

from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="llama_index_agent"):
    llm: LLMRef
    stream: bool = False


def look(at: str) -> str:
    """Tells the colour of a thing."""
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    llm = await builder.get_llm(config.llm, wrapper_type="llama_index")
    looker = FunctionAgent(tools=[look], llm=llm, streaming=config.stream)

    async def answer(question: str) -> str:
        return str(await looker.run(question))

    yield answer
