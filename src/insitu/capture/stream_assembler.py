"""Assembles a streamed completion while its server-sent events pass through."""

import codecs
from typing import Any

import orjson

from insitu.capture.completion_format import ResponseFilter, choice_delta
from insitu.http_format import DONE, error_message


class StreamAssembler:
    """Builds the response that the server would have sent without streaming.

    Each event passes on as soon as it is complete: its bytes are unchanged unless the filter removes something.
    """

    def __init__(self, response_filter: ResponseFilter) -> None:
        self._filter = response_filter
        self._rest = b""
        self._data_lines: list[bytes] = []  # of the event that is coming in
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.error: str | None = None
        """The first error that the server reported in an event."""
        self.done = False
        """Whether the server has sent `[DONE]`."""

    def feed(self, chunk: bytes) -> bytes:
        """Takes a chunk of the stream; returns the bytes to pass on."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        passed = bytearray()
        for line in lines:
            line = line.removeprefix(codecs.BOM_UTF8) + b"\n"
            if line.startswith(b"data:"):
                self._data_lines.append(line)
                continue
            if line in (b"\n", b"\r\n"):
                passed += self._event()
            passed += line
        return bytes(passed)

    def _event(self) -> bytes:
        """Completes an event; returns its data lines unchanged if possible, else joined to one."""
        lines, self._data_lines = self._data_lines, []
        data = b"".join(line[5:] for line in lines)
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:  # `[DONE]`, or something that only the client understands
            self.done = self.done or data.strip() == DONE
            return b"".join(lines)
        if (isinstance(event, dict) and self._add_event(event)) or len(lines) > 1:
            return b"data: " + orjson.dumps(event) + b"\n"
        return b"".join(lines)

    def _add_event(self, event: dict[str, Any]) -> bool:
        """Adds an event to the response; returns whether the event was changed."""
        self.error = self.error or error_message(event)
        for name in ("prompt_token_ids", "policy_version", "usage"):
            if event.get(name) is not None:
                self._head[name] = event[name]
        changed = False
        for choice in event.get("choices") or ():
            changed |= self._add_choice(choice)
        return self._filter.apply(event) or changed

    def _add_choice(self, piece: dict[str, Any]) -> bool:
        """Returns whether `piece` was changed: tool calls get the `index` that some servers omit and clients need."""
        index = piece.get("index", 0)
        choice = self._choices.setdefault(index, {"index": index, "message": {"role": "assistant", "content": None}})
        delta = choice_delta(piece)
        changed = any(part.get("index") is None for part in delta.get("tool_calls") or ())
        merge_delta(choice["message"], delta)
        for name in ("finish_reason", "prompt_token_ids"):
            if piece.get(name) is not None:
                choice[name] = piece[name]
        if piece.get("token_ids") is not None:
            choice.setdefault("token_ids", []).extend(piece["token_ids"])
        for name, values in (piece.get("logprobs") or {}).items():
            if isinstance(values, list):
                choice.setdefault("logprobs", {}).setdefault(name, []).extend(values)
        return changed

    def is_complete(self, num_choices: int) -> bool:
        """Whether all choices have finished."""
        return len(self._choices) >= num_choices and all("finish_reason" in c for c in self._choices.values())

    def response(self) -> dict[str, Any]:
        """The response so far; gaps in the numbers of tool calls, which some servers count from 1, are closed."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            if calls := choice["message"].get("tool_calls"):
                choice["message"]["tool_calls"] = [call for call in calls if call]
        return {**self._head, "choices": choices}


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Adds a delta to a message: texts are joined, lists of parts (tool calls) merged by `index`, other values set."""
    for name, value in delta.items():
        current = message.get(name)
        if value is None:
            message.setdefault(name)
        elif isinstance(value, list) and (name == "tool_calls" or all("index" in part for part in value)):
            parts = message[name] = current or []
            for part in value:
                _merge_part(parts, part)
        elif isinstance(current, str) and isinstance(value, str) and name != "role":
            message[name] = current + value
        elif isinstance(current, dict) and isinstance(value, dict):
            merge_delta(current, value)
        else:
            message[name] = value


def _merge_part(parts: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    index = piece.get("index")
    if index is None:  # a piece that names a function starts a call, or repeats the id of one
        index = max(len(parts) - 1, 0)
        if (piece.get("function") or {}).get("name"):
            ids = [part.get("id") for part in parts]
            index = ids.index(piece["id"]) if piece.get("id") and piece["id"] in ids else len(parts)
        piece["index"] = index
    while len(parts) <= index:
        parts.append({})
    rest = {name: value for name, value in piece.items() if name != "index"}
    for name in ("id", "type"):  # never split, and some servers repeat them in every piece
        if rest.get(name) is not None:
            parts[index][name] = rest.pop(name)
    merge_delta(parts[index], rest)
