"""The token bridge: the prompt of a conversation's next turn, from the tokens that were sampled in it.

Some chat templates drop or rewrite what earlier turns were, such as reasoning, so that the next prompt does not begin
with them and a conversation is trained as a row for each turn. The bridge appends to the tokens so far what the
template adds for the new messages: its text after the end of the last sampled message.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.tokenizer import ChatTokenizer

_MARK = "\ue000\ue001"
"""Characters for private use, which no message has."""


class Continuation(BaseModel):
    """The tokens of a prompt and its completion, which make up the first `num_messages` of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], StopAtFirstError()] = Field(min_length=1)
    """Token ids of the prompt and the completion."""
    num_messages: int = Field(ge=2)
    """How many of the messages they are; the last one is the completion."""


def bridged_prompt(
    continuation: Continuation,
    messages: Sequence[dict[str, Any]],
    render: Callable[[Sequence[dict[str, Any]]], str],
    tokenizer: ChatTokenizer,
) -> list[int] | None:
    """The token ids of the next prompt; None if the template does not say where the last sampled message ends.

    `messages` are those of the whole request, as templates get them, and `render` renders them with the template.
    """
    last = continuation.num_messages - 1
    if last >= len(messages) or messages[last].get("role") != "assistant":
        return None
    marked = [*messages[:last], _marked(messages[last]), *messages[last + 1 :]]
    first, second = render(messages), render(marked)
    if first == second:  # the template leaves the message out
        return None
    text = _common_end(first, second)
    sampled = continuation.token_ids
    if sampled[-1] in tokenizer.eos_token_ids:
        _, found, text = text.partition(tokenizer.decode(sampled[-1:], skip_special_tokens=False))
        if not found:
            return None
    elif messages[last].get("tool_calls"):  # cut off: what is missing of them is unknown
        return None
    return sampled + tokenizer.encode(text, add_special_tokens=False)


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with another end: of its content, or of its last tool call."""
    calls = message.get("tool_calls")
    if not calls:
        return message | {"content": f"{message.get('content') or ''}{_MARK}"}
    function = calls[-1].get("function") or {}
    mark = f'{{"{_MARK}": "{_MARK}"}}' if isinstance(function.get("arguments"), str) else {_MARK: _MARK}
    return message | {"tool_calls": [*calls[:-1], calls[-1] | {"function": function | {"arguments": mark}}]}


def _common_end(first: str, second: str) -> str:
    size = 0
    while size < min(len(first), len(second)) and first[-1 - size] == second[-1 - size]:
        size += 1
    return first[len(first) - size :]
