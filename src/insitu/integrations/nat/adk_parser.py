"""Converts Google ADK's LlmRequest, Content and LlmResponse, as objects or JSON, to OpenAI messages.

LLM_START: `metadata.chat_inputs` is a copy of the LlmRequest of before_model_callback (the flow modifies the original),
or its list of Contents. LLM_END: `metadata.chat_responses` is `[response]`: the final (non-partial) LlmResponse passed
to after_model_callback, or the Event. TOOL_END: `metadata.tool_outputs`, or else `data.output`, is the tool's result.

Gemini's function calls have no ids, and ADK removes its generated ids ("adk-...") before it sends a request. These
calls get ids from their position (`call_2_0`: message 2, first call), and a function response is matched to the first
call of its function without a response.
"""

from collections.abc import Sequence
from typing import Any

from insitu.errors import TrajectoryError
from insitu.integrations.nat import parser_common as common
from insitu.integrations.nat.parser_common import Completion, JsonObject, Message, StepFormat

_ROLES = {"model": "assistant", "user": "user", "system": "system", None: "user"}


def _messages(item: JsonObject, before: Sequence[Message]) -> list[Message] | None:
    if isinstance(contents := item.get("contents"), list):  # an LlmRequest
        messages = _system_messages(_get(item.get("config") or {}, "systemInstruction"))
        for content in contents:
            messages += _content_messages(content, [*before, *messages])
        return messages
    return _content_messages(item, before) if _is_content(item) else None


def _completions(item: JsonObject, before: Sequence[Message]) -> list[Completion] | None:
    content = item if _is_content(item) else item.get("content")
    if content is None and _get(item, "errorCode") is not None:
        return []
    if not isinstance(content, dict) or not _is_content(content):
        return None
    if item.get("partial"):
        raise TrajectoryError("partial response of a stream; report the final one only")
    messages = _content_messages({**content, "role": "model"}, before) or [{"role": "assistant", "content": ""}]
    chosen = _get(_get(item, "logprobsResult") or {}, "chosenCandidates")
    reason = common.openai_finish_reason(_get(item, "finishReason"))
    if reason == "stop" and messages[0].get("tool_calls"):
        reason = "tool_calls"  # Gemini reports STOP for tool calls
    completion = Completion(message=messages[0], finish_reason=reason)
    if chosen is not None:
        ids = [_get(token, "tokenId") for token in chosen]
        completion.token_ids = ids if ids and None not in ids else None
        completion.logprobs = [float(_get(token, "logProbability")) for token in chosen]
        completion.tokens = [str(token.get("token") or "") for token in chosen]
    return [completion]


def _is_tool_message(output: JsonObject) -> bool:
    parts = output.get("parts")
    return isinstance(parts, list) and any(isinstance(p, dict) and _get(p, "functionResponse") for p in parts)


def _is_content(item: JsonObject) -> bool:
    """Whether this is a Content; JSON without None has no `parts` if the model returned nothing."""
    return "parts" in item or item == {"role": "model"}


def _get(fields: JsonObject, name: str) -> Any:
    """A field by its JSON name (`finishReason`) or its Python name (`finish_reason`)."""
    snake_case = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return fields[name] if fields.get(name) is not None else fields.get(snake_case)


def _system_messages(instruction: Any) -> list[Message]:
    """The system message for a system instruction: text, a Content, a Part, or a list of Parts or texts."""
    if isinstance(instruction, dict) and not {"parts", "role"}.isdisjoint(instruction):
        instruction = instruction.get("parts")
    if instruction is None or instruction == []:
        return []
    items = instruction if isinstance(instruction, list) else [instruction]
    parts = [{"type": "text", "text": item} if isinstance(item, str) else _part(item) for item in items]
    return [{"role": "system", "content": common.message_content(parts)}]


def _content_messages(content: JsonObject, before: Sequence[Message]) -> list[Message]:
    """One message per function response in a Content, and one for all other parts."""
    role = content.get("role")
    if role not in _ROLES:
        raise TrajectoryError(f"Content has role {role!r}; allowed: user, model, system")
    messages: list[Message] = []
    parts: list[JsonObject] = []
    tool_calls: list[JsonObject] = []
    thoughts: list[str] = []
    for part in content.get("parts") or ():
        if (function_call := _get(part, "functionCall")) is not None:
            call_id = _original_call_id(function_call)
            tool_calls.append(common.tool_call(function_call["name"], function_call.get("args"), call_id))
        elif (response := _get(part, "functionResponse")) is not None:
            messages.append(_tool_message(response, [*before, *messages]))
            parts.extend(_part(media) for media in response.get("parts") or ())
        elif part.get("thought"):
            thoughts.append(part.get("text") or "")
        else:
            parts.append(_part(part))
    if parts or tool_calls or thoughts:
        content_parts, position = common.message_content(parts), len(before) + len(messages)
        messages.append(common.make_message(_ROLES[role], content_parts, position, tool_calls, "".join(thoughts)))
    return messages


def _original_call_id(call_or_response: JsonObject) -> str | None:
    """The model's own id; None if it has none or ADK generated it."""
    call_id = call_or_response.get("id")
    return None if call_id is None or call_id.startswith("adk-") else call_id


def _tool_message(response: JsonObject, before: Sequence[Message]) -> Message:
    name, call_id, result = response["name"], _original_call_id(response), response.get("response")
    if call_id is None:
        calls = [call for message in before for call in message.get("tool_calls") or ()]
        answered = {message.get("tool_call_id") for message in before}
        pending = [c["id"] for c in calls if c["function"]["name"] == name and c["id"] not in answered]
        if not pending:
            raise TrajectoryError(f"function response for {name!r} has no preceding call")
        call_id = pending[0]
    content = result if isinstance(result, str) else common.to_json(result)
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def _part(part: JsonObject) -> JsonObject:
    if part.get("text") is not None:
        return {"type": "text", "text": part["text"]}
    if (blob := _get(part, "inlineData")) is not None:
        return common.media_part(_get(blob, "mimeType"), blob["data"])
    if (file := _get(part, "fileData")) is not None:
        return common.media_part(_get(file, "mimeType"), None, _get(file, "fileUri"))
    keys = [key for key, value in part.items() if value is not None]
    raise TrajectoryError(f"Part with {', '.join(keys) or 'nothing'} has no OpenAI equivalent")


ADK = StepFormat(_messages, _completions, _is_tool_message)
parse_to_openai_message = common.step_parser(ADK, common.OPENAI)
