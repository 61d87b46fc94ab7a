"""A conversation in which the model calls tools until it answers."""

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from insitu.workflow.llms import ModelClient

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessage

Message = dict[str, Any]


async def run_tools(
    model: ModelClient,
    messages: list[Message],
    tools: list[Message],
    call: Callable[[str, dict[str, Any]], Awaitable[str | list[Message] | None]],
    max_turns: int,
    on_turn: "Callable[[ChatCompletionMessage], Awaitable[None]] | None" = None,
) -> list[Message]:
    """The dialogue after up to `max_turns` answers of the model; it ends with the first one that calls no tool.

    `call(name, arguments)` returns the content of the tool's message; None ends the dialogue. Arguments that are no
    JSON object are reported to the model as the tool's result. `on_turn` gets each answer before its tools are called.
    """
    dialogue = [*messages]
    options: dict[str, Any] = {"tools": tools} if tools else {}
    for _ in range(max_turns):
        message = (await model.complete(dialogue, **options)).choices[0].message
        dialogue.append(message.model_dump(exclude_none=True))
        if on_turn is not None:
            await on_turn(message)
        for each in message.tool_calls or ():
            if each.type != "function":
                continue
            try:
                arguments = json.loads(each.function.arguments or "{}")
            except ValueError as error:
                arguments = error
            if isinstance(arguments, dict):
                content = await call(each.function.name, arguments)
            else:
                content = f"error: the arguments of {each.function.name} are not a JSON object"
            if content is None:
                return dialogue
            dialogue.append({"role": "tool", "tool_call_id": each.id, "content": content})
        if not message.tool_calls:
            break
    return dialogue
