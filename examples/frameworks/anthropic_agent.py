"""An agent on the plain Anthropic SDK that looks at things."""

from insitu.integrations.frameworks.anthropic import tool_step
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="anthropic_agent"):
    llm: LLMRef
    stream: bool = False


def look(at: str) -> str:
    return {"sky": "blue", "grass": "green"}[at]


LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    client = await builder.get_llm(config.llm, wrapper_type="anthropic")

    async def ask(messages: list):
        asked = {"model": "claude", "messages": messages, "tools": [LOOK], "max_tokens": 100}
        if not config.stream:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    async def answer(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        while (said := await ask(messages)).stop_reason == "tool_use":
            results = []
            for block in said.content:
                if block.type == "tool_use":
                    with tool_step("look", block.input) as returned:
                        returned(seen := look(**block.input))
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": seen})
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
        return said.content[0].text

    yield answer
