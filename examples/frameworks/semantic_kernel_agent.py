"""A Semantic Kernel agent that looks at things."""

from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import kernel_function

from insitu.integrations.frameworks.semantic_kernel import tool_filter
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="semantic_kernel_agent"):
    llm: LLMRef
    stream: bool = False


class Eyes:
    @kernel_function(description="Tells the colour of a thing.")
    def look(self, at: str) -> str:
        return {"sky": "blue", "grass": "green"}[at]


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    kernel = Kernel()
    kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, tool_filter)
    service = await builder.get_llm(config.llm, wrapper_type="semantic_kernel")
    looker = ChatCompletionAgent(name="looker", service=service, kernel=kernel, plugins=[Eyes()])

    async def answer(question: str) -> str:
        if not config.stream:
            return str((await looker.get_response(messages=question)).content)
        return "".join([str(piece.content) async for piece in looker.invoke_stream(messages=question)])

    yield answer
