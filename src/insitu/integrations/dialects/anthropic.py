"""Anthropic's Messages (`POST /v1/messages`) as chat completions.

Source: https://docs.anthropic.com/en/api/messages and its page on streaming.
"""

import uuid
from collections import deque
from collections.abc import Iterator
from typing import Any

import orjson

from insitu.formats.dialects import Translation, as_chunk, join_text, present, refuse_unsupported, unsupported_type
from insitu.wire.http_format import format_event

_SAME = ("model", "max_tokens", "temperature", "top_p", "stream")
_IGNORED = ("metadata", "service_tier", "cache_control")  # no effect on the completion
_KNOWN = frozenset((*_SAME, *_IGNORED, "thinking", "messages", "system", "tools", "tool_choice", "stop_sequences"))
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({},),
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _chat_request(request: dict[str, Any], memory: dict[str, str]) -> dict[str, Any]:
    chat = present(request, _SAME)
    messages: list[dict[str, Any]] = []
    if system := join_text(request.get("system"), ("text",), "system"):
        messages.append({"role": "system", "content": system})
    given = request.get("messages") or []
    for index, message in enumerate(given):
        messages.extend(_messages(message, f"messages.{index}", memory))
    if given and given[-1] == {"role": "assistant", "content": []}:  # begins the answer, with nothing
        messages.pop()
    chat["messages"] = messages
    if stops := request.get("stop_sequences"):
        chat["stop"] = stops
    if tools := request.get("tools"):
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(tools)]
    if choice := request.get("tool_choice"):
        kind = choice.get("type")
        if kind not in ("tool", *_TOOL_CHOICES):
            raise unsupported_type("tool_choice", kind, "auto, any, tool, none", "tool_choice")
        by_name = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = by_name if kind == "tool" else _TOOL_CHOICES[kind]
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    thinking = (request.get("thinking") or {}).get("type", "adaptive")
    if thinking not in ("disabled", "enabled", "adaptive"):
        raise unsupported_type("thinking", thinking, "disabled, enabled, adaptive", "thinking")
    if thinking != "adaptive":
        chat["chat_template_kwargs"] = {"enable_thinking": thinking == "enabled"}
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise unsupported_type(f"tools.{index}", tool["type"], "custom", "tools")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": present(function, function)}


def _messages(message: dict[str, Any], where: str, memory: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Converts one message; tool results become separate messages before the text."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content or ()):
        kind = block.get("type")
        if kind == "text":
            texts.append(block["text"])
        elif kind == "tool_use" and role == "assistant":
            arguments, value = memory.get(block["id"]), block.get("input") or {}
            if arguments is None or _arguments(arguments) != value:  # not sampled in this episode, or changed
                arguments = orjson.dumps(value).decode()
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = join_text(block.get("content"), ("text",), f"{where}.content.{index}.content")
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}
        elif kind == "thinking":
            thoughts.append(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            raise unsupported_type(f"{where}.content.{index}", kind, "text, tool_use, tool_result", where)
    reasoning = {"reasoning_content": text} if (text := "".join(thoughts)) else {}
    if calls:
        yield {"role": role, "content": "".join(texts) or None, **reasoning, "tool_calls": calls}
    elif texts or reasoning or role == "assistant":  # which may have said nothing
        yield {"role": role, "content": "".join(texts), **reasoning}


class MessagesTranslation(Translation):
    """`memory` maps the id of each tool call to its arguments exactly as the model wrote them."""

    header = "anthropic-version"

    def __init__(self, request: dict[str, Any], memory: dict[str, Any]) -> None:
        refuse_unsupported(request, _KNOWN, _NEUTRAL)
        super().__init__(_chat_request(request, memory), memory)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._begun = False
        self._content: list[dict[str, Any]] = []  # blocks, of which only the latest is open
        self._calls: dict[int, tuple[str, int]] = {}  # id and block index of each tool call
        self._stop = _stop({})
        self._usage: dict[str, Any] = {}

    def completion_request(self, params: dict[str, Any], model: str) -> dict[str, Any]:
        request = super().completion_request(params, model)
        if own := self.request.get("chat_template_kwargs"):
            request["chat_template_kwargs"] = params.get("extra_body", {}).get("chat_template_kwargs", {}) | own
        return request

    def response(self, completion: dict[str, Any]) -> dict[str, Any]:
        deque(self.events(as_chunk(completion)), maxlen=0)
        for block in self._content:
            if block["type"] == "tool_use":
                block["input"] = _arguments(self.memory[block["id"]])
        return self._message(completion, self._content, self._stop)

    def _message(self, completion: dict[str, Any], content: list[Any], stop: dict[str, Any]) -> dict[str, Any]:
        message = {"id": self._id, "type": "message", "role": "assistant", "model": completion.get("model")}
        return {**message, "content": content, **stop, "usage": _usage(completion.get("usage") or {})}

    def events(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        yield from self._begin(chunk)
        if chunk.get("usage"):
            self._usage = _usage(chunk["usage"])
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("reasoning_content"):
                yield from self._add("thinking", delta["reasoning_content"], signature="")
            if delta.get("content"):
                yield from self._add("text", delta["content"])
            for part in delta.get("tool_calls") or ():
                yield from self._call(part)
            if choice.get("finish_reason"):
                self._stop = _stop(choice)

    def _begin(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield _event({"type": "message_start", "message": self._message(chunk, [], dict.fromkeys(self._stop))})

    def _add(self, kind: str, text: str, **more: str) -> Iterator[bytes]:
        """Adds to the open block of a kind, or opens one."""
        if not self._content or self._content[-1]["type"] != kind:
            yield from self._open({"type": kind, kind: "", **more})
        self._content[-1][kind] += text
        yield self._delta(len(self._content) - 1, {"type": f"{kind}_delta", kind: text})

    def _call(self, part: dict[str, Any]) -> Iterator[bytes]:
        function, index = part.get("function") or {}, part.get("index", 0)
        if index not in self._calls:
            called = part.get("id") or f"toolu_{uuid.uuid4().hex}"
            self._calls[index] = called, len(self._content)
            self.memory[called] = ""
            yield from self._open({"type": "tool_use", "id": called, "name": function.get("name"), "input": {}})
        if function.get("arguments"):
            called, block = self._calls[index]
            self.memory[called] += function["arguments"]
            yield self._delta(block, {"type": "input_json_delta", "partial_json": function["arguments"]})

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        yield _event({"type": "content_block_start", "index": len(self._content), "content_block": block})
        self._content.append(block)

    def _close(self) -> Iterator[bytes]:
        if self._content:
            yield _event({"type": "content_block_stop", "index": len(self._content) - 1})

    def _delta(self, block: int, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": block, "delta": delta})

    def end(self, failure: str | None = None) -> Iterator[bytes]:
        if failure is not None:
            yield _event(self.error(failure, 502))
            return
        yield from self._begin({})
        yield from self._close()
        yield _event({"type": "message_delta", "delta": self._stop, "usage": self._usage or _usage({})})
        yield _event({"type": "message_stop"})

    @staticmethod
    def error(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
        kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


def _event(data: dict[str, Any]) -> bytes:
    return format_event(orjson.dumps(data), data["type"])


def _arguments(text: str | None) -> Any:
    """A tool call's arguments as an object; text that is not a JSON object is wrapped as `{"arguments": text}`.

    So is one that is nested too deeply for a response: orjson reads 1,024 levels and writes 254.
    """
    try:
        value = orjson.loads(text or "{}")
        orjson.dumps([[[[value]]]])
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    """The stop reason, and the stop sequence if the server reports it."""
    if choice.get("finish_reason") == "stop" and isinstance(sequence := choice.get("stop_reason"), str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": _STOPS.get(str(choice.get("finish_reason")), "end_turn"), "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {"input_tokens": usage.get("prompt_tokens") or 0, "output_tokens": usage.get("completion_tokens") or 0}
