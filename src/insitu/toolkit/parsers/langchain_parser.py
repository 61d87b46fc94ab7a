"""LangChain's messages and generations, live or as JSON, as OpenAI messages.

LLM_START: `metadata.chat_inputs`, or else `data.input`, is the list of messages (or the prompt as text). LLM_END:
`metadata.chat_responses` is the list of generations, of which each is a candidate. TOOL_END: `metadata.tool_outputs`,
or else `data.output`, is the ToolMessage or what the tool returned.
"""

from collections.abc import Sequence
from typing import Any

from insitu.errors import TrajectoryError
from insitu.toolkit.parsers.common import (
    OPENAI,
    Answer,
    Dialect,
    Message,
    finish_reason,
    logprob_values,
    media_part,
    message_of_step,
    numbered,
    read_answers,
    token_ids_of,
    tool_call,
)

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "function", "chat": ""}
_CLASSES = {
    "HumanMessage": "human",
    "AIMessage": "ai",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "FunctionMessage": "function",
    "ChatMessage": "chat",
}
_GENERATIONS = ("ChatGeneration", "ChatGenerationChunk", "Generation", "GenerationChunk")
_TOLD_BY_TOOL_CALLS = (
    "tool_use",
    "tool_call",
    "tool_call_chunk",
    "invalid_tool_call",
    "function_call",
    "input_json_delta",
)
_AS_OPENAI = ("text", "image_url", "input_audio", "refusal")


def parse_to_openai_message(step: Any, previous_message: Message | None = None, **others: Any) -> Message:
    """The message that one step of LangChain adds: the prompt's last, the answer, or the tool's.

    An answer has `logprobs` (a number for each token, empty if unknown), `finish_reason` and `token_ids` where they
    are known. TrajectoryError names the step that holds no message or one that cannot be read.
    """
    return message_of_step(step, previous_message, (LANGCHAIN, OPENAI))


def _messages(item: Any, before: Sequence[Message]) -> list[Message] | None:
    message = _unpacked(item)
    if message is None:
        return None
    extras = message.get("additional_kwargs") or {}
    kind = message["type"]
    role = extras.get("__openai_role__") or _ROLES[kind] or _chat_role(message)
    content = message["content"]
    parts, reasoning = _parts(content)
    made: Message = {"role": role, "content": content if isinstance(content, str) else parts or ""}
    if message.get("name"):
        made["name"] = message["name"]
    if kind == "tool":
        made["tool_call_id"] = message["tool_call_id"]
    for key in ("function_call", "refusal", "audio", "reasoning_content"):
        if extras.get(key) is not None:
            made[key] = extras[key]
    if reasoning:
        made["reasoning_content"] = reasoning
    if calls := _tool_calls(message, extras):
        made["tool_calls"] = numbered(calls, len(before))
        made["content"] = made["content"] or None
    return [made]


def _answers(item: Any, before: Sequence[Message]) -> list[Answer] | None:
    if not isinstance(item, dict):
        return None
    if isinstance(prompts := item.get("generations"), list):  # a whole LLMResult
        if len(prompts) != 1:
            raise TrajectoryError(f"an LLMResult of {len(prompts)} prompts; allowed: of one, as callbacks give it")
        return read_answers(prompts[0], before, (LANGCHAIN,))
    info: dict[str, Any] = {}
    message = item
    if item.get("type") in _GENERATIONS:
        info = item.get("generation_info") or {}
        message = item.get("message") or {"type": "ai", "content": item.get("text")}
    messages, fields = _messages(message, before), _unpacked(message)
    if not messages or not fields or messages[0]["role"] != "assistant":
        return None
    info = {**info, **(fields.get("response_metadata") or {})}
    reason = next((info[k] for k in ("finish_reason", "stop_reason", "done_reason") if info.get(k)), None)
    logprobs = info.get("logprobs")
    return [Answer(messages[0], finish_reason(reason), logprob_values(logprobs), token_ids_of(logprobs))]


def _unpacked(item: Any) -> dict[str, Any] | None:
    """A message with its plain type, whichever of LangChain's two JSON forms it has; None for anything else."""
    if not isinstance(item, dict):
        return None
    kind, fields = item.get("type"), item
    if kind == "constructor" and item.get("id"):
        kind, fields = item["id"][-1], item.get("kwargs") or {}
    kind = str(kind).removesuffix("Chunk")
    kind = _CLASSES.get(kind, kind)
    return {**fields, "type": kind} if kind in _ROLES and "content" in fields else None


def _chat_role(message: dict[str, Any]) -> str:
    if message.get("role") not in ("system", "developer", "user", "assistant"):
        raise TrajectoryError(f"a ChatMessage of role {message.get('role')!r}, which OpenAI does not know")
    return str(message["role"])


def _tool_calls(message: dict[str, Any], extras: dict[str, Any]) -> list[Message]:
    parsed = [*(message.get("tool_calls") or ()), *(message.get("invalid_tool_calls") or ())]
    if parsed:
        return [tool_call(call["name"], call["args"], call.get("id")) for call in parsed]
    raw = extras.get("tool_calls") or ()
    return [tool_call(call["function"]["name"], call["function"]["arguments"], call.get("id")) for call in raw]


def _parts(content: Any) -> tuple[list[Message], str]:
    """The parts of a message's content, and the reasoning that stood among them."""
    parts, reasoning = [], []
    for block in [content] if isinstance(content, str) else content or ():
        kind = "text" if isinstance(block, str) else block.get("type")
        if isinstance(block, str):
            parts.append({"type": "text", "text": block})
        elif kind in _AS_OPENAI:
            parts.append({key: value for key, value in block.items() if value is not None})
        elif kind in ("thinking", "reasoning", "reasoning_content", "redacted_thinking"):
            reasoning.append(_thought(block))
        elif kind in ("image", "audio", "video", "file"):
            parts.append(_media(block))
        elif kind not in _TOLD_BY_TOOL_CALLS:
            raise TrajectoryError(f"content of type {kind!r} has no form among OpenAI's messages")
    return parts, "".join(reasoning)


def _thought(block: dict[str, Any]) -> str:
    said = block.get("thinking") or block.get("reasoning") or block.get("reasoning_content") or block.get("text") or ""
    summary = block.get("summary") or ()
    return said if isinstance(said, str) and said else "".join(str(part.get("text", "")) for part in summary)


def _media(block: dict[str, Any]) -> Message:
    kind = block["type"]
    if isinstance(block.get(kind), dict):
        return block  # as OpenAI spells it
    source = block["source"] if isinstance(block.get("source"), dict) else block
    mime = source.get("mime_type") or source.get("media_type") or f"{kind}/*"
    data, url = source.get("base64") or source.get("data"), source.get("url") or source.get("file_id")
    if not isinstance(data or url, str):
        raise TrajectoryError(f"content of type {kind!r} with neither data nor url nor file_id")
    places = (block, block.get("extras") or {}, block.get("metadata") or {})
    name = next((place["filename"] for place in places if "filename" in place), None) if kind == "file" else None
    return media_part(mime, data, url, **({"filename": name} if name else {}))


LANGCHAIN = Dialect(_messages, _answers)
