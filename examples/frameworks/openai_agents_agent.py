"""An agent of the OpenAI Agents SDK that looks at things."""

from agents import Agent, Runner, function_tool

from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="openai_agents_agent"):
    llm: LLMRef
    stream: bool = False


@function_tool
def look(at: str) -> str:
    """Tells the colour of a thing."""
    return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    model = await builder.get_llm(config.llm, wrapper_type="openai_agents")
    looker = Agent(name="looker", model=model, tools=[look])

    async def answer(question: str) -> str:
        if not config.stream:
            return (await Runner.run(looker, question)).final_output
        result = Runner.run_streamed(looker, question)
        async for _ in result.stream_events():
            pass
        return result.final_output

    yield answer
