"""Converts LangChain's messages and generations, as objects or JSON, to OpenAI messages.

LLM_START: `metadata.chat_inputs`, or else `data.input`, is the list of messages or the prompt as text. LLM_END:
`metadata.chat_responses` is the list of generations, one per completion. TOOL_END: `metadata.tool_outputs`, or else
`data.output`, is the ToolMessage or the tool's result.
"""

from collections.abc import Sequence
from typing import Any

from insitu.errors import TrajectoryError
from insitu.integrations.nat import parser_common as common
from insitu.integrations.nat.parser_common import Completion, JsonObject, Message, StepFormat

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "function", "chat": ""}
_GENERATIONS = ("ChatGeneration", "ChatGenerationChunk", "Generation", "GenerationChunk")
_CALL_BLOCKS = ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "input_json_delta")
_OPENAI_BLOCKS = ("text", "image_url", "input_audio", "refusal")


def _messages(item: Any, before: Sequence[Message]) -> list[Message] | None:
    message = _normalize(item)
    if message is None:
        return None
    extras = message.get("additional_kwargs") or {}
    kind = message["type"]
    role = extras.get("__openai_role__") or _ROLES[kind] or _chat_role(message)
    content = message["content"]
    parts, reasoning = _parts(content)
    parsed = [*(message.get("tool_calls") or ()), *(message.get("invalid_tool_calls") or ())]
    calls = [common.tool_call(call["name"], call["args"], call.get("id")) for call in parsed]
    calls = calls or common.openai_tool_calls(extras)
    text = content if isinstance(content, str) else parts or ""
    others = {key: extras.get(key) for key in ("function_call", "refusal", "audio")}
    others |= {"name": message.get("name") or None, "tool_call_id": message["tool_call_id"] if kind == "tool" else None}
    reasoning = reasoning or extras.get("reasoning_content") or ""
    return [common.make_message(role, text or None if calls else text, len(before), calls, reasoning, **others)]


def _completions(item: JsonObject, before: Sequence[Message]) -> list[Completion] | None:
    if isinstance(prompts := item.get("generations"), list):  # an LLMResult
        if len(prompts) != 1:
            raise TrajectoryError(f"an LLMResult of {len(prompts)} prompts; allowed: one")
        return common.parse_completions(prompts[0], before, (LANGCHAIN,))
    info: dict[str, Any] = {}
    message = item
    if item.get("type") in _GENERATIONS:
        info = item.get("generation_info") or {}
        message = item.get("message") or {"type": "ai", "content": item.get("text")}
    messages, fields = _messages(message, before), _normalize(message)
    if not messages or not fields or messages[0]["role"] != "assistant":
        return None
    info = {**info, **(fields.get("response_metadata") or {})}
    reason = next((info[k] for k in ("finish_reason", "stop_reason", "done_reason") if info.get(k)), None)
    return [common.make_completion(messages[0], reason, info.get("logprobs"))]


def _is_tool_message(output: JsonObject) -> bool:
    message = _normalize(output)
    return message is not None and message["type"] == "tool" and "tool_call_id" in message


def _normalize(item: Any) -> dict[str, Any] | None:
    """A message in either of LangChain's two JSON forms, with `type` one of _ROLES; None for anything else."""
    if not isinstance(item, dict):
        return None
    kind, fields = item.get("type"), item
    if kind == "constructor" and item.get("id"):
        kind, fields = item["id"][-1], item.get("kwargs") or {}
    kind = str(kind).removesuffix("Chunk").removesuffix("Message").lower()  # the name of a class, or a type
    return {**fields, "type": kind} if kind in _ROLES and "content" in fields else None


def _chat_role(message: dict[str, Any]) -> str:
    if message.get("role") not in ("system", "developer", "user", "assistant"):
        raise TrajectoryError(f"a ChatMessage of role {message.get('role')!r}, which OpenAI does not have")
    return str(message["role"])


def _parts(content: Any) -> tuple[list[JsonObject], str]:
    """The parts of a message's content without its reasoning, and the reasoning."""
    parts, reasoning = [], []
    for item in [content] if isinstance(content, str) else content or ():
        block: JsonObject = {"type": "text", "text": item} if isinstance(item, str) else item
        kind = block.get("type")
        if kind in _OPENAI_BLOCKS:
            parts.append({key: value for key, value in block.items() if value is not None})
        elif kind in ("thinking", "reasoning", "reasoning_content", "redacted_thinking"):
            keys = ("thinking", "reasoning", "reasoning_content", "text")
            text = next((block[key] for key in keys if block.get(key)), None)
            if not isinstance(text, str):
                text = "".join(str(part.get("text", "")) for part in block.get("summary") or ())
            reasoning.append(text)
        elif kind in ("image", "audio", "video", "file"):
            parts.append(_media(block))
        elif kind not in _CALL_BLOCKS:  # the calls are in `tool_calls` too
            raise TrajectoryError(f"content of type {kind!r} has no equivalent in OpenAI messages")
    return parts, "".join(reasoning)


def _media(block: JsonObject) -> JsonObject:
    kind = block["type"]
    if isinstance(block.get(kind), dict):
        return block  # OpenAI's format already
    source = block["source"] if isinstance(block.get("source"), dict) else block
    mime = source.get("mime_type") or source.get("media_type") or f"{kind}/*"
    data, url = source.get("base64") or source.get("data"), source.get("url") or source.get("file_id")
    if not isinstance(data or url, str):
        raise TrajectoryError(f"content of type {kind!r} with neither data nor url nor file_id")
    holders = (block, block.get("extras") or {}, block.get("metadata") or {})
    name = next((holder["filename"] for holder in holders if "filename" in holder), None) if kind == "file" else None
    return common.media_part(mime, data, url, **({"filename": name} if name else {}))


LANGCHAIN = StepFormat(_messages, _completions, _is_tool_message)
parse_to_openai_message = common.step_parser(LANGCHAIN, common.OPENAI)
