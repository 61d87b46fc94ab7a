"""Dialogues as messages for other tools: what a trained model was shown, and what followed."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from insitu.collect.conversations import conversations
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import text_content

Messages = list[dict[str, Any]]
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_OPENAI_KEYS = (*_KEYS, "refusal", "function_call")


class Dialogue(NamedTuple):
    """A conversation with trained calls: `prompt` is that of the first, `completion` the rest of the conversation.

    `trained` are the positions, in both together, of messages that trained calls have sampled.
    """

    prompt: Messages
    completion: Messages
    trained: list[int]
    calls: list[ModelCall]

    @property
    def messages(self) -> Messages:
        return self.prompt + self.completion

    @property
    def tools(self) -> Messages | None:
        """The tools of the last call."""
        return self.calls[-1].tools


def dialogues(calls: Sequence[ModelCall], trained: Collection[int]) -> list[Dialogue]:
    """The conversations of an episode in which a call at one of the positions `trained` sampled a message."""
    targets = {id(calls[position]) for position in trained}
    found = []
    for turns in conversations(calls):
        sampled = [k for k, turn in enumerate(turns) if turn.call is not None and id(turn.call) in targets]
        if sampled:
            messages = [turn.message for turn in turns]
            own = [turn.call for turn in turns if turn.call is not None]
            found.append(Dialogue(messages[: sampled[0]], messages[sampled[0] :], sampled, own))
    return found


def is_text(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether no message has images or other parts that are not text."""
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def template_messages(messages: Iterable[Mapping[str, Any]]) -> Messages:
    """Messages for a chat template, as TRL expects them: contents as text, arguments of tools as objects."""
    return [_template_message(message) for message in messages]


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: message[key] for key in _KEYS if message.get(key) is not None}
    kept["content"] = text_content(message.get("content"))
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        kept["reasoning_content"] = reasoning
    if "tool_calls" in kept:
        kept["tool_calls"] = [_template_call(call) for call in kept["tool_calls"]]
    return kept


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    with suppress(json.JSONDecodeError, TypeError):  # a model may write anything
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def openai_messages(dialogue: Dialogue) -> Messages:
    """Messages for OpenAI's finetuning API, which trains assistant messages unless their weight is 0."""
    messages = []
    for position, message in enumerate(dialogue.messages):
        kept = {key: message[key] for key in _OPENAI_KEYS if message.get(key) is not None}
        if message.get("role") == "assistant" and position not in dialogue.trained:
            kept["weight"] = 0
        messages.append(kept)
    return messages
