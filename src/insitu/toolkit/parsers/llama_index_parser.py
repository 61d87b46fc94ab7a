"""LlamaIndex's chat messages and responses, live or as JSON, as OpenAI messages.

LLM_START: `metadata.chat_inputs` is the list of ChatMessages of LLMChatStartEvent (or EventPayload.MESSAGES), or
`data.input` the prompt of a completion. LLM_END: `metadata.chat_responses` is `[response]`, the ChatResponse of
LLMChatEndEvent (or EventPayload.RESPONSE), or a CompletionResponse. TOOL_END: `data.output` is what the tool returned.
Logprobs are read from the server's answer in `raw`; the end of a stream does not hold them.
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
    logprob_values,
    media_part,
    message_of_step,
    numbered,
    token_ids_of,
    tool_call,
)

_ROLES = {"chatbot": "assistant", "model": "assistant"}
_SHAPE = {"blocks", "additional_kwargs"}


def parse_to_openai_message(step: Any, previous_message: Message | None = None, **others: Any) -> Message:
    """The message that one step of LlamaIndex adds: the prompt's last, the answer, or the tool's.

    An answer has `logprobs` (a number for each token, empty if unknown), `finish_reason` and `token_ids` where they
    are known. TrajectoryError names the step that holds no message or one that cannot be read.
    """
    return message_of_step(step, previous_message, (LLAMA_INDEX, OPENAI))


def _messages(item: Any, before: Sequence[Message]) -> list[Message] | None:
    if not isinstance(item, dict) or _SHAPE.isdisjoint(item):
        return None
    if "tool_name" in item:  # a ToolOutput
        parts, _, _ = _read(item["blocks"])
        return [{"role": "tool", "name": item["tool_name"], "content": content_of(parts, as_text=True) or ""}]
    if "role" not in item:
        return None
    extras = item.get("additional_kwargs") or {}
    blocks = item["blocks"] if "blocks" in item else [{"block_type": "text", "text": item.get("content") or ""}]
    parts, calls, thoughts = _read(blocks)
    if raw := extras.get("tool_calls"):  # told twice: here as the server spelt them
        calls = [tool_call(c["function"]["name"], c["function"]["arguments"], c.get("id")) for c in raw]
    content = content_of(parts, as_text=True) or (None if calls else "")
    made: Message = {"role": _ROLES.get(item["role"], item["role"]), "content": content}
    if calls:
        made["tool_calls"] = numbered(calls, len(before))
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    for key in ("tool_call_id", "name", "function_call", "refusal"):
        if extras.get(key) is not None:
            made[key] = extras[key]
    if extras.get("reference_audio_id"):
        made["audio"] = {"id": extras["reference_audio_id"]}
    return [made]


def _answers(item: Any, before: Sequence[Message]) -> list[Answer] | None:
    if not isinstance(item, dict):
        return None
    if "message" in item:
        messages = _messages(item["message"], before)
    elif "text" in item and "raw" in item:
        messages = [{"role": "assistant", "content": item["text"]}]
    else:
        messages = _messages(item, before)
    if not messages or messages[0]["role"] != "assistant":
        return None
    raw = item.get("raw")
    raw = raw if isinstance(raw, dict) else {}
    choice = (raw.get("choices") or [{}])[0]
    reason = choice.get("finish_reason") or raw.get("done_reason") or raw.get("stop_reason")
    logprobs = choice.get("logprobs") if "delta" not in choice else None  # a chunk: those of the last piece only
    return [Answer(messages[0], finish_reason(reason), logprob_values(logprobs), token_ids_of(logprobs))]


def _read(blocks: list[dict[str, Any]]) -> tuple[list[Message], list[Message], list[str]]:
    """Parts of the content, tool calls, and thoughts."""
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block["block_type"]
        if kind == "text":
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "tool_call":
            calls.append(tool_call(block["tool_name"], block["tool_kwargs"], block.get("tool_call_id")))
        elif kind == "thinking":
            thoughts.append(block.get("content") or "")
        elif kind in ("image", "audio", "video", "document"):
            parts.append(_media(block))
        elif kind in ("citable", "citation"):
            nested = block.get("content") or block.get("cited_content") or []
            inner = _read(nested if isinstance(nested, list) else [nested])
            parts.extend(inner[0])
        elif kind != "cache":  # a mark for the server, not content
            raise TrajectoryError(f"a block of type {kind!r} has no form among OpenAI's messages")
    return parts, calls, thoughts


def _media(block: dict[str, Any]) -> Message:
    kind = block["block_type"]
    data = block.get("data") if kind == "document" else block.get(kind)
    url = block.get("url")
    if data is None and url is None:
        raise TrajectoryError(f"a block of type {kind!r} with neither data nor url: a file's path says nothing later")
    others = {"detail": block["detail"]} if block.get("detail") else {}
    if kind == "document":
        others = {"filename": block["title"]} if block.get("title") else {}
        mime = block.get("document_mimetype") or ""
    else:
        mime = block.get(f"{kind}_mimetype") or f"{kind}/{block.get('format') or '*'}"
    return media_part(mime, data, url, **others)


LLAMA_INDEX = Dialect(_messages, _answers)
