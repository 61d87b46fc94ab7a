"""Puts a streamed completion together while its server-sent events pass through."""

import codecs
from typing import Any, Protocol

import orjson

from insitu.http_format import DONE, error_message
from insitu.workflow.spelling import delta_of


class Filter(Protocol):
    """What the client is not to see of an answer."""

    hide_token_ids: bool

    def strip(self, choice: dict[str, Any]) -> bool: ...


class StreamAssembly:
    """The answer so far, in the shape of one that was not streamed.

    Events pass on as soon as they are complete, without what `shown` takes out of them.
    """

    def __init__(self, shown: Filter) -> None:
        self._shown = shown
        self._rest = b""
        self._event: list[bytes] = []
        """The lines with data of the event that is coming in."""
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.error: str | None = None
        self.done = False
        """The server has said `[DONE]`."""

    def feed(self, chunk: bytes) -> bytes:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return b"".join(self._line(line + b"\n") for line in lines)

    def _line(self, line: bytes) -> bytes:
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.startswith(b"data:"):
            self._event.append(line)
            return b""
        return self._ended() + line if line in (b"\n", b"\r\n") else line

    def _ended(self) -> bytes:
        """The event whose last line has come: in one line, and as it was where nothing had to be changed."""
        lines, self._event = self._event, []
        data = b"".join(line[5:] for line in lines)
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:  # what only the client can make sense of, or its end
            self.done = self.done or data.strip() == DONE
            return b"".join(lines)
        if (isinstance(event, dict) and self._take(event)) or len(lines) > 1:
            return b"data: " + orjson.dumps(event) + b"\n"
        return b"".join(lines)

    def _take(self, event: dict[str, Any]) -> bool:
        """Add an event to the answer; whether it was changed."""
        self.error = self.error or error_message(event)
        for name in ("prompt_token_ids", "policy_version", "usage"):
            if event.get(name) is not None:
                self._head[name] = event[name]
        found = self._shown.hide_token_ids and event.pop("prompt_token_ids", None) is not None
        for choice in event.get("choices") or ():
            found |= self._add(choice)
            found |= self._shown.strip(choice)
        return found

    def _add(self, piece: dict[str, Any]) -> bool:
        """Whether it was changed: tool calls get the `index` that some servers leave out, and clients need."""
        index = piece.get("index", 0)
        choice = self._choices.setdefault(index, {"index": index, "message": {"role": "assistant", "content": None}})
        delta = delta_of(piece)
        found = any(part.get("index") is None for part in delta.get("tool_calls") or ())
        merge_delta(choice["message"], delta)
        for name in ("finish_reason", "prompt_token_ids"):
            if piece.get(name) is not None:
                choice[name] = piece[name]
        if piece.get("token_ids") is not None:
            choice.setdefault("token_ids", []).extend(piece["token_ids"])
        for name, told in (piece.get("logprobs") or {}).items():
            if isinstance(told, list):
                choice.setdefault("logprobs", {}).setdefault(name, []).extend(told)
        return found

    def is_complete(self, choices: int) -> bool:
        """Whether all `choices` have come to their end."""
        return len(self._choices) >= choices and all("finish_reason" in c for c in self._choices.values())

    def reply(self) -> dict[str, Any]:
        """Its tool calls stand close together, though some servers count them from 1."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            if calls := choice["message"].get("tool_calls"):
                choice["message"]["tool_calls"] = [call for call in calls if call]
        return {**self._head, "choices": choices}


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message: text grows, parts with an `index` (tool calls) are merged by it, the rest is set."""
    for name, value in delta.items():
        known = message.get(name)
        if value is None:
            message.setdefault(name)
        elif isinstance(value, list) and (name == "tool_calls" or all("index" in part for part in value)):
            parts = message[name] = known or []
            for part in value:
                _merge_part(parts, part)
        elif isinstance(known, str) and isinstance(value, str) and name != "role":
            message[name] = known + value
        elif isinstance(known, dict) and isinstance(value, dict):
            merge_delta(known, value)
        else:
            message[name] = value


def _index_of(piece: dict[str, Any], calls: list[dict[str, Any]]) -> int:
    """The call that a piece without `index` belongs to: one that names a function begins a call, or repeats its id."""
    if not (piece.get("function") or {}).get("name"):
        return max(len(calls) - 1, 0)
    ids = [call.get("id") for call in calls]
    return ids.index(piece["id"]) if piece.get("id") and piece["id"] in ids else len(calls)


def _merge_part(parts: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    index = piece.get("index")
    if index is None:
        index = piece["index"] = _index_of(piece, parts)
    while len(parts) <= index:
        parts.append({})
    rest = {name: value for name, value in piece.items() if name != "index"}
    for name in ("id", "type"):  # these come whole, and some servers repeat them in every piece
        if rest.get(name) is not None:
            parts[index][name] = rest.pop(name)
    merge_delta(parts[index], rest)
