"""Google ADK's requests, contents and responses, live or as JSON, as OpenAI messages.

LLM_START: `metadata.chat_inputs` is the LlmRequest of before_model_callback, copied, for the flow goes on using it (or
its list of Contents). LLM_END: `metadata.chat_responses` is `[response]`, the LlmResponse of after_model_callback (or
the Event) that is not partial. TOOL_END: `data.output` is what the tool returned.

Gemini numbers no function calls, and the ids that ADK makes up ("adk-...") are taken out before a request is sent. Such
calls are named by their place in the dialogue (`call_2_0`: message 2, first call), and a response answers the first
open call of its function.
"""

from collections.abc import Sequence
from typing import Any

from insitu.errors import TrajectoryError
from insitu.toolkit.parsers.common import (
    OPENAI,
    Answer,
    Dialect,
    Message,
    content_of,
    finish_reason,
    json_text,
    media_part,
    message_of_step,
    numbered,
    tool_call,
)

_ROLES = {"model": "assistant", "user": "user", "system": "system", None: "user"}


def parse_to_openai_message(step: Any, previous_message: Message | None = None, **others: Any) -> Message:
    """The message that one step of ADK adds: the prompt's last, the answer, or the tool's.

    An answer has `logprobs` (a number for each token, empty if unknown), `finish_reason` and `token_ids` where they
    are known. TrajectoryError names the step that holds no message or one that cannot be read.
    """
    return message_of_step(step, previous_message, (ADK, OPENAI))


def _messages(item: Any, before: Sequence[Message]) -> list[Message] | None:
    if not isinstance(item, dict):
        return None
    if isinstance(contents := item.get("contents"), list):  # a whole LlmRequest
        made = _instruction(_get(item.get("config") or {}, "systemInstruction"))
        for content in contents:
            made += _turn(content, [*before, *made])
        return made
    return _turn(item, before) if "parts" in item else None


def _answers(item: Any, before: Sequence[Message]) -> list[Answer] | None:
    if not isinstance(item, dict):
        return None
    content = item if "parts" in item else item.get("content")
    if content is None and _get(item, "errorCode") is not None:
        return []
    if not isinstance(content, dict) or "parts" not in content:
        return None
    if item.get("partial"):
        raise TrajectoryError("it holds a piece of a streamed answer; allowed: the whole, which is not partial")
    messages = _turn({**content, "role": "model"}, before) or [{"role": "assistant", "content": ""}]
    chosen = _get(_get(item, "logprobsResult") or {}, "chosenCandidates")
    logprobs = None if chosen is None else [float(_get(token, "logProbability")) for token in chosen]
    ids = None if chosen is None else [_get(token, "tokenId") for token in chosen]
    reason = finish_reason(_get(item, "finishReason"))
    if reason == "stop" and messages[0].get("tool_calls"):
        reason = "tool_calls"  # ADK has no word for it
    return [Answer(messages[0], reason, logprobs, ids if ids and None not in ids else None)]


def _get(fields: dict[str, Any], name: str) -> Any:
    """A field by its name in JSON (`finishReason`), or else in Python (`finish_reason`)."""
    python = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return fields[name] if fields.get(name) is not None else fields.get(python)


def _instruction(given: Any) -> list[Message]:
    """The system instruction: text, a Content, a part, or a list of parts or texts."""
    if given is None or given == []:
        return []
    content = given["parts"] if isinstance(given, dict) and "parts" in given else given
    parts = content if isinstance(content, list) else [content]
    read = [{"type": "text", "text": part} if isinstance(part, str) else _part(part) for part in parts]
    return [{"role": "system", "content": content_of(read)}]


def _turn(content: dict[str, Any], before: Sequence[Message]) -> list[Message]:
    """The messages of one Content: one for each function response, and one for all else."""
    if content.get("role") not in _ROLES:
        raise TrajectoryError(f"a Content of role {content.get('role')!r}; allowed: user, model")
    made: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for part in content["parts"] or ():
        if (called := _get(part, "functionCall")) is not None:
            calls.append(tool_call(called["name"], called.get("args"), _own_id(called)))
        elif (response := _get(part, "functionResponse")) is not None:
            made.append(_tool(response, [*before, *made]))
            parts.extend(_part(media) for media in response.get("parts") or ())
        elif part.get("thought"):
            thoughts.append(part.get("text") or "")
        else:
            parts.append(_part(part))
    if parts or calls or thoughts:
        message: Message = {"role": _ROLES[content.get("role")], "content": content_of(parts)}
        if calls:
            message["tool_calls"] = numbered(calls, len(before) + len(made))
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        made.append(message)
    return made


def _own_id(function: dict[str, Any]) -> str | None:
    given = function.get("id")
    return None if given is None or given.startswith("adk-") else given


def _tool(response: dict[str, Any], before: Sequence[Message]) -> Message:
    name, call_id, given = response["name"], _own_id(response), response.get("response")
    if call_id is None:
        calls = [call for message in before for call in message.get("tool_calls") or ()]
        answered = {message.get("tool_call_id") for message in before}
        waiting = [c["id"] for c in calls if c["function"]["name"] == name and c["id"] not in answered]
        if not waiting:
            raise TrajectoryError(f"a response of the function {name!r} answers no call that stands before it")
        call_id = waiting[0]
    content = given if isinstance(given, str) else json_text(given)
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def _part(part: dict[str, Any]) -> Message:
    if part.get("text") is not None:
        return {"type": "text", "text": part["text"]}
    if (blob := _get(part, "inlineData")) is not None:
        return media_part(_get(blob, "mimeType"), blob["data"])
    if (file := _get(part, "fileData")) is not None:
        return media_part(_get(file, "mimeType"), None, _get(file, "fileUri"))
    holds = [key for key, value in part.items() if value is not None]
    raise TrajectoryError(f"a part with {', '.join(holds) or 'nothing'} has no form among OpenAI's messages")


ADK = Dialect(_messages, _answers)
