"""Tool calls in sampled text, spelt `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen)."""

import re
import secrets
from typing import Any

import orjson

OPENING = "<tool_call>"
_CALL = re.compile(rf"{OPENING}(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def split_tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The content before the first call, and the calls as OpenAI spells them.

    A call that is not readable makes the whole text content: what the model said is never dropped.
    """
    calls = []
    for match in _CALL.finditer(text):
        call = _tool_call(match.group(1))
        if call is None:
            return text, []
        calls.append(call)
    if not calls:
        return text, []
    return text[: text.index(OPENING)].rstrip() or None, calls


def _tool_call(text: str) -> dict[str, Any] | None:
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    spelt = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call["name"], "arguments": spelt},
    }
