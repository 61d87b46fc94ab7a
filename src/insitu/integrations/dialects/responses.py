"""OpenAI's Responses (`POST /v1/responses`) as chat completions.

Source: https://platform.openai.com/docs/api-reference/responses and its page on streaming. Responses are kept for
`previous_response_id` until the episode ends.
"""

import time
import uuid
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import orjson

from insitu.errors import RequestRefused
from insitu.formats.dialects import Translation, as_chunk, join_text, present, refuse_unsupported, unsupported_type
from insitu.wire.http_format import format_event

_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_logprobs", "seed", "user")
_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "text", "truncation")
_IGNORED = ("store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
_KNOWN = frozenset((*_SAME, *_ECHOED, *_IGNORED, "input", "tools", "tool_choice", "include", "stream_options"))
_NEUTRAL: dict[str, tuple[Any, ...]] = {"background": (False,), "max_tool_calls": (), "conversation": (), "prompt": ()}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_REASONING = ("reasoning_text", "summary_text")
_TEXT = ("input_text", "output_text", "text", "summary_text", "refusal")


def _chat_request(request: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
    chat = present(request, _SAME)
    if request.get("max_output_tokens") is not None:
        chat["max_tokens"] = request["max_output_tokens"]
    if "message.output_text.logprobs" in (request.get("include") or ()):
        chat["logprobs"] = True
    else:
        chat.pop("top_logprobs", None)
    items = request.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    chat["messages"] = [*history, *_messages(items or [])]
    if request.get("instructions"):
        chat["messages"] = [{"role": "system", "content": request["instructions"]}, *chat["messages"]]
    if tools := request.get("tools"):
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(tools)]
    choice = _tool_choice(request.get("tool_choice"))
    if choice is not None and (tools or choice not in ("auto", "none")):
        chat["tool_choice"] = choice
    if effort := (request.get("reasoning") or {}).get("effort"):
        chat["reasoning_effort"] = effort
    form = (request.get("text") or {}).get("format") or {}
    if form.get("type", "text") != "text":
        schema = {name: value for name, value in form.items() if name != "type"}
        chat["response_format"] = {"type": form["type"], **({"json_schema": schema} if schema else {})}
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        tools = [_tool_choice(tool) for tool in choice.get("tools") or ()]
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": tools}}
    if kind != "function":
        raise unsupported_type("tool_choice", kind, "function, allowed_tools", "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported_type(f"tools.{index}", tool.get("type"), "function", "tools")
    return {"type": "function", "function": present(tool, ("name", "description", "parameters", "strict"))}


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts items to chat messages; those of one response (reasoning, text, calls) become one assistant message."""
    messages: list[dict[str, Any]] = []
    answering = False  # whether the previous item is the assistant's
    for index, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input.{index}"
        if kind == "reasoning":
            if not answering:
                messages.append({"role": "assistant", "content": None})
            if text := join_text(item.get("content") or item.get("summary"), _REASONING, where):
                messages[-1].setdefault("reasoning_content", []).append(text)
        elif kind == "message":
            content = join_text(item.get("content"), _TEXT, where)
            if answering and item.get("role") == "assistant" and messages[-1]["content"] is None:
                messages[-1]["content"] = content  # text after the calls
            else:
                messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            if not (answering and messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif kind == "function_call_output":
            output = join_text(item.get("output"), _TEXT, where)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        else:
            raise unsupported_type(where, kind, "message, function_call, function_call_output, reasoning", "input")
        answering = messages[-1]["role"] == "assistant"
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return [message for message in messages if message != {"role": "assistant", "content": None}]


class ResponsesTranslation(Translation):
    """`memory` maps the id of each response to the messages of its conversation."""

    def __init__(self, request: dict[str, Any], memory: dict[str, Any]) -> None:
        refuse_unsupported(request, _KNOWN, _NEUTRAL)
        before = request.get("previous_response_id")
        if before is not None and before not in memory:
            problem = f"there is no response {before!r} in this episode; available: {', '.join(memory) or 'none'}"
            raise RequestRefused(problem, status=404, param="previous_response_id")
        super().__init__(_chat_request(request, memory[before] if before is not None else []), memory)
        self._original = request
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = request.get("model")
        self._sequence_number = -1
        self._output: list[dict[str, Any]] = []
        self._text: dict[str, Any] | None = None
        self._reasoning: dict[str, Any] | None = None
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}

    def response(self, completion: dict[str, Any]) -> dict[str, Any]:
        deque(self.events(as_chunk(completion)), maxlen=0)
        return self._finished()

    def _finished(self) -> dict[str, Any]:
        """The final response; its conversation is kept for `previous_response_id`."""
        for item in self._output:
            item["status"] = "completed"
        answer = (_messages(self._output) or [{"role": "assistant", "content": ""}])[-1]
        sent = self.request["messages"][1 if self._original.get("instructions") else 0 :]
        self.memory[self._id] = [*sent, answer]
        return self._response("incomplete" if self._finish in _INCOMPLETE else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        request = self._original
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": _INCOMPLETE[str(self._finish)]} if status == "incomplete" else None,
            "model": self._model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": request.get("parallel_tool_calls", True),
            "temperature": request.get("temperature"),
            "top_p": request.get("top_p"),
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            **{name: request.get(name) for name in _ECHOED},
            "usage": _usage(self._usage) if self._usage else None,
        }

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sequence_number += 1
        return format_event(orjson.dumps({"type": kind, "sequence_number": self._sequence_number, **data}), kind)

    def events(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        self._model = chunk.get("model", self._model)
        if self._sequence_number < 0:  # nothing was sent
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("reasoning_content"):
                yield from self._add_reasoning(delta["reasoning_content"])
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            if delta.get("content"):
                yield from self._add_text(delta["content"], logprobs)
            for part in delta.get("tool_calls") or ():
                yield from self._call(part)
            self._finish = choice.get("finish_reason") or self._finish
            if self._finish and not self._output:  # the model said nothing, which the agent is to send back
                yield from self._add_text("", logprobs)

    def _open(self, prefix: str, kind: str, **fields: Any) -> Generator[bytes, None, dict[str, Any]]:
        """Adds an item to the output, incomplete so far, and returns it."""
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        self._output.append(item)
        return item

    def _add_reasoning(self, text: str) -> Iterator[bytes]:
        if self._reasoning is None:
            part = {"type": "reasoning_text", "text": ""}
            self._reasoning = yield from self._open("rs", "reasoning", summary=[], content=[part])
        self._reasoning["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", **self._position(self._reasoning), delta=text)

    def _add_text(self, text: str, logprobs: list[Any]) -> Iterator[bytes]:
        if self._text is None:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._text = yield from self._open("msg", "message", role="assistant", content=[part])
            yield self._event("response.content_part.added", **self._position(self._text), part=part)
        part = self._text["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._event("response.output_text.delta", **self._position(self._text), delta=text, logprobs=logprobs)

    def _position(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._output.index(item), "content_index": 0}

    def _call(self, part: dict[str, Any]) -> Iterator[bytes]:
        function, index = part.get("function") or {}, part.get("index", 0)
        if index not in self._calls:
            fields = {"call_id": part.get("id") or f"call_{uuid.uuid4().hex}", "name": function.get("name")}
            self._calls[index] = yield from self._open("fc", "function_call", **fields, arguments="")
        item = self._calls[index]
        if piece := function.get("arguments"):
            item["arguments"] += piece
            where = {"item_id": item["id"], "output_index": self._output.index(item)}
            yield self._event("response.function_call_arguments.delta", **where, delta=piece)

    def end(self, failure: str | None = None) -> Iterator[bytes]:
        if failure is not None:
            yield self._event("error", code="server_error", message=failure, param=None)
            return
        if self._reasoning is not None:
            text = self._reasoning["content"][0]["text"]
            yield self._event("response.reasoning_text.done", **self._position(self._reasoning), text=text)
        if self._text is not None:
            part = self._text["content"][0]
            final = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **self._position(self._text), **final)
            yield self._event("response.content_part.done", **self._position(self._text), part=part)
        for index, item in enumerate(self._output):
            item["status"] = "completed"
            if item["type"] == "function_call":
                done = {"name": item["name"], "arguments": item["arguments"]}
                kind = "response.function_call_arguments.done"
                yield self._event(kind, item_id=item["id"], output_index=index, **done)
            yield self._event("response.output_item.done", output_index=index, item=item)
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    input_tokens, output_tokens = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }
