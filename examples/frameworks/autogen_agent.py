"""An AutoGen agent that looks at things."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool

from insitu.integrations.frameworks.autogen import ReportingWorkbench
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="autogen_agent"):
    llm: LLMRef
    stream: bool = False


def look(at: str) -> str:
    return {"sky": "blue", "grass": "green"}[at]


LOOK = FunctionTool(look, description="Tells the colour of a thing.")


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    client = await builder.get_llm(config.llm, wrapper_type="autogen")

    async def answer(question: str) -> str:
        looker = AssistantAgent(
            "looker",
            client,
            workbench=ReportingWorkbench([LOOK]),
            model_client_stream=config.stream,
            max_tool_iterations=5,
        )
        return (await looker.run(task=question)).messages[-1].content

    yield answer
