"""A LangGraph agent that looks at things."""

from langchain.agents import create_agent

from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="langgraph_agent"):
    llm: LLMRef
    stream: bool = False


def look(at: str) -> str:
    """Tells the colour of a thing."""
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    graph = create_agent(await builder.get_llm(config.llm, wrapper_type="langgraph"), [look])

    async def answer(question: str) -> str:
        asked = {"messages": [{"role": "user", "content": question}]}
        if not config.stream:
            return (await graph.ainvoke(asked))["messages"][-1].text
        state = asked
        async for mode, part in graph.astream(asked, stream_mode=["messages", "values"]):
            if mode == "values":
                state = part
        return state["messages"][-1].text

    yield answer
