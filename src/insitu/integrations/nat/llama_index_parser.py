"""Converts LlamaIndex's chat messages and responses, as objects or JSON, to OpenAI messages.

LLM_START: `metadata.chat_inputs` is the list of ChatMessages of LLMChatStartEvent (or EventPayload.MESSAGES), or
`data.input` the prompt of a completion. LLM_END: `metadata.chat_responses` is `[response]`, the ChatResponse of
LLMChatEndEvent (or EventPayload.RESPONSE), or a CompletionResponse. TOOL_END: `metadata.tool_outputs`, or else
`data.output`, is the tool's result. Logprobs come from the server's response in `raw`, which streamed responses lack.
"""

from collections.abc import Sequence
from typing import Any

from insitu.errors import TrajectoryError
from insitu.integrations.nat import parser_common as common
from insitu.integrations.nat.parser_common import Completion, JsonObject, Message, StepFormat

_ROLES = {"chatbot": "assistant", "model": "assistant"}
_MESSAGE_FIELDS = {"blocks", "additional_kwargs"}


def _messages(item: Any, before: Sequence[Message]) -> list[Message] | None:
    if not isinstance(item, dict) or _MESSAGE_FIELDS.isdisjoint(item):
        return None
    if "tool_name" in item:  # a ToolOutput
        parts, _, _ = _parse_blocks(item["blocks"])
        text = common.message_content(parts, join_text=True) or ""
        return [{"role": "tool", "name": item["tool_name"], "content": text}]
    if "role" not in item:
        return None
    extras = item.get("additional_kwargs") or {}
    blocks = item["blocks"] if "blocks" in item else [{"block_type": "text", "text": item.get("content") or ""}]
    parts, calls, thoughts = _parse_blocks(blocks)
    calls = common.openai_tool_calls(extras) or calls  # the same calls, as the server sent them
    content = common.message_content(parts, join_text=True) or (None if calls else "")
    others = {key: extras.get(key) for key in ("tool_call_id", "name", "function_call", "refusal")}
    if extras.get("reference_audio_id"):
        others["audio"] = {"id": extras["reference_audio_id"]}
    role = _ROLES[item["role"]] if item["role"] in _ROLES else item["role"]
    return [common.make_message(role, content, len(before), calls, "".join(thoughts), **others)]


def _completions(item: JsonObject, before: Sequence[Message]) -> list[Completion] | None:
    if "message" not in item and "text" in item and "raw" in item:
        messages: list[Message] | None = [{"role": "assistant", "content": item["text"]}]
    else:
        messages = _messages(item.get("message", item), before)
    if not messages or messages[0]["role"] != "assistant":
        return None
    raw = item.get("raw")
    raw = raw if isinstance(raw, dict) else {}
    choice = (raw.get("choices") or [{}])[0]
    reason = choice.get("finish_reason") or raw.get("done_reason") or raw.get("stop_reason")
    logprobs = choice.get("logprobs") if "delta" not in choice else None  # a chunk has only those of the tokens in it
    return [common.make_completion(messages[0], reason, logprobs)]


def _is_tool_message(output: JsonObject) -> bool:
    is_output = {"tool_name", "blocks"} <= output.keys()  # a ToolOutput
    return is_output or (output.get("role") == "tool" and not _MESSAGE_FIELDS.isdisjoint(output))


def _parse_blocks(blocks: list[JsonObject]) -> tuple[list[JsonObject], list[JsonObject], list[str]]:
    """Content parts, tool calls, and reasoning."""
    parts: list[JsonObject] = []
    calls: list[JsonObject] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block["block_type"]
        if kind == "text":
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "tool_call":
            calls.append(common.tool_call(block["tool_name"], block["tool_kwargs"], block.get("tool_call_id")))
        elif kind == "thinking":
            thoughts.append(block.get("content") or "")
        elif kind in ("image", "audio", "video", "document"):
            parts.append(_media(block))
        elif kind in ("citable", "citation"):
            nested = block.get("content") or block.get("cited_content") or []
            parts.extend(_parse_blocks(nested if isinstance(nested, list) else [nested])[0])
        elif kind != "cache":  # a cache marker, not content
            raise TrajectoryError(f"a block of type {kind!r} has no equivalent in OpenAI messages")
    return parts, calls, thoughts


def _media(block: JsonObject) -> JsonObject:
    kind = block["block_type"]
    data = block.get("data") if kind == "document" else block.get(kind)
    url = block.get("url")
    if data is None and url is None:
        raise TrajectoryError(f"a block of type {kind!r} with neither data nor url; a local path may be gone later")
    extra = {"detail": block["detail"]} if block.get("detail") else {}
    if kind == "document":
        extra = {"filename": block["title"]} if block.get("title") else {}
        mime = block.get("document_mimetype") or ""
    else:
        mime = block.get(f"{kind}_mimetype") or f"{kind}/{block.get('format') or '*'}"
    return common.media_part(mime, data, url, **extra)


LLAMA_INDEX = StepFormat(_messages, _completions, _is_tool_message)
parse_to_openai_message = common.step_parser(LLAMA_INDEX, common.OPENAI)
