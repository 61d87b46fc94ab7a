"""Puts a streamed completion together while its server-sent events pass through."""

from typing import Any, Protocol

import orjson

from insitu.workflow.spelling import delta_of


class Filter(Protocol):
    """What the client is not to see of an answer."""

    hide_token_ids: bool

    def strip(self, choice: dict[str, Any]) -> bool: ...


class StreamAssembly:
    """The answer so far, in the shape of one that was not streamed.

    Lines pass on as soon as they are complete, without what `shown` takes out of them.
    """

    def __init__(self, shown: Filter) -> None:
        self._shown = shown
        self._rest = b""
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.error: str | None = None

    def feed(self, chunk: bytes) -> bytes:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return b"".join(self._line(line) + b"\n" for line in lines)

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return line
        try:
            event = orjson.loads(line[5:])
        except orjson.JSONDecodeError:
            return line  # [DONE], or what only the client can make sense of
        if not isinstance(event, dict):
            return line
        return b"data: " + orjson.dumps(event) if self._take(event) else line

    def _take(self, event: dict[str, Any]) -> bool:
        """Add an event to the answer; whether something was taken out of it."""
        if "error" in event:
            self.error = str(event["error"])
        for name in ("prompt_token_ids", "policy_version", "usage"):
            if event.get(name) is not None:
                self._head[name] = event[name]
        found = self._shown.hide_token_ids and event.pop("prompt_token_ids", None) is not None
        for choice in event.get("choices") or ():
            self._add(choice)
            found |= self._shown.strip(choice)
        return found

    def _add(self, piece: dict[str, Any]) -> None:
        index = piece.get("index", 0)
        choice = self._choices.setdefault(index, {"index": index, "message": {"role": "assistant", "content": None}})
        merge_delta(choice["message"], delta_of(piece))
        for name in ("finish_reason", "prompt_token_ids"):
            if piece.get(name) is not None:
                choice[name] = piece[name]
        if piece.get("token_ids") is not None:
            choice.setdefault("token_ids", []).extend(piece["token_ids"])
        for name, told in (piece.get("logprobs") or {}).items():
            if isinstance(told, list):
                choice.setdefault("logprobs", {}).setdefault(name, []).extend(told)

    def is_complete(self, choices: int) -> bool:
        """Whether all `choices` have come to their end."""
        return len(self._choices) >= choices and all("finish_reason" in c for c in self._choices.values())

    def reply(self) -> dict[str, Any]:
        return {**self._head, "choices": [self._choices[index] for index in sorted(self._choices)]}


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message: text grows, parts with an `index` (tool calls) are merged by it, the rest is set."""
    for name, value in delta.items():
        known = message.get(name)
        if value is None and name in message:
            continue
        if isinstance(value, list) and all(isinstance(part, dict) and "index" in part for part in value):
            parts = message.setdefault(name, [])
            for part in value:
                _merge_part(parts, part)
        elif isinstance(known, str) and isinstance(value, str) and name != "role":
            message[name] = known + value
        elif isinstance(known, dict) and isinstance(value, dict):
            merge_delta(known, value)
        else:
            message[name] = value


def _merge_part(parts: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    index = piece["index"]
    while len(parts) <= index:
        parts.append({})
    rest = {name: value for name, value in piece.items() if name != "index"}
    for name in ("id", "type"):  # these come whole, and some servers repeat them in every piece
        if rest.get(name) is not None:
            parts[index][name] = rest.pop(name)
    merge_delta(parts[index], rest)
