"""Conversations of a model with an environment, or with tools until it answers."""

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from insitu.workflow.llms import ModelClient

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessage

Message = dict[str, Any]
Reply = Callable[["ChatCompletionMessage"], Awaitable[list[Message]]]
"""The messages for the model after its answer."""


async def converse(model: ModelClient, messages: list[Message], reply: Reply, max_turns: int, **options: Any) -> None:
    """Asks the model for up to `max_turns` answers, until one has no reply."""
    dialogue = [*messages]
    for _ in range(max_turns):
        message = (await model.complete(dialogue, **options)).choices[0].message
        dialogue.append(message.model_dump(exclude_none=True))
        replies = await reply(message)
        dialogue += replies
        if not replies:
            break


async def run_tools(
    model: ModelClient,
    messages: list[Message],
    tools: list[Message],
    call: Callable[[str, dict[str, Any]], Awaitable[str | list[Message] | None]],
    max_turns: int,
    on_turn: "Callable[[ChatCompletionMessage], Awaitable[None]] | None" = None,
) -> None:
    """Asks the model for up to `max_turns` answers, until one calls no tool.

    `call(name, arguments)` returns the content of the tool's message; None ends the conversation. Arguments that are no
    JSON object are reported to the model as the tool's result. `on_turn` gets each answer before its tools are called.
    """

    async def reply(message: "ChatCompletionMessage") -> list[Message]:
        if on_turn is not None:
            await on_turn(message)
        results: list[Message] = []
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
                return []
            results.append({"role": "tool", "tool_call_id": each.id, "content": content})
        return results

    await converse(model, messages, reply, max_turns, **({"tools": tools} if tools else {}))
