"""An agent on the plain OpenAI SDK that looks at things."""

import json

from insitu.integrations.frameworks.openai import tool_step
from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function


class AgentConfig(FunctionBaseConfig, name="openai_agent"):
    llm: LLMRef
    stream: bool = False


def look(at: str) -> str:
    return {"sky": "blue", "grass": "green"}[at]


PROPERTIES = {"at": {"type": "string"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["at"], "additionalProperties": False}
LOOK = {"type": "function", "function": {"name": "look", "strict": True, "parameters": PARAMETERS}}


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder):
    client = await builder.get_llm(config.llm, wrapper_type="openai")

    async def ask(messages: list):
        asked = {"model": "gpt-5", "messages": messages, "tools": [LOOK]}
        if not config.stream:
            return (await client.chat.completions.create(**asked)).choices[0].message
        async with client.chat.completions.stream(**asked) as stream:
            return (await stream.get_final_completion()).choices[0].message

    async def answer(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        while (said := await ask(messages)).tool_calls:
            messages.append(said.model_dump(include={"role", "content", "tool_calls"}))
            for call in said.tool_calls:
                arguments = json.loads(call.function.arguments)
                with tool_step("look", arguments) as returned:
                    returned(seen := look(**arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
        return said.content

    yield answer
