"""Assembles a streamed completion while its server-sent events pass through."""

import codecs
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from insitu.wire.connection import MAX_LINE
from insitu.wire.http_format import DONE, error_message, load_json

_SENT_ONCE = (
    *("finish_reason", "stop_reason", "prompt_token_ids", "logprobs_temperature", "logprobs_processed"),
    *("structured_outputs", "tool_call_malformed"),
)
"""Fields of a choice that are whole in one of its chunks."""


class StreamAssembler:
    """Builds the response that the server would have sent without streaming.

    Events are forwarded as soon as they are complete, byte for byte unless `strip` removes a field (it returns whether
    it has), a tool call lacks its `index`, or the data has several lines.
    """

    def __init__(self, strip: Callable[[dict[str, Any]], bool]) -> None:
        self._strip = strip
        self._partial_line = b""
        self._data_lines: list[bytes] = []  # of the event being received
        self._top_level_fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._other_lines = bytearray()  # before the first choice: a body that is no stream of events
        self.event_error: str | None = None
        """The first error that the server reported in an event, which its client got."""
        self.malformed_event: str | None = None
        """The start of the last event that was not JSON."""
        self.done_received = False
        """Whether the server has sent `[DONE]`."""

    def feed(self, chunk: bytes) -> bytes:
        """Takes a chunk of the stream; returns the bytes to forward."""
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        if len(self._partial_line) > MAX_LINE:
            raise aiohttp.ClientPayloadError(f"a line of the stream has more than {MAX_LINE} bytes")
        output = bytearray()
        for line in lines:
            line = line.removeprefix(codecs.BOM_UTF8) + b"\n"
            if line.startswith(b"data:"):
                self._data_lines.append(line)
                continue
            if line in (b"\n", b"\r\n"):
                output += self._finish_event()
            elif not self._choices and len(self._other_lines) < MAX_LINE:
                self._other_lines += line
            output += line
        return bytes(output)

    def _finish_event(self) -> bytes:
        """Finishes the current event; returns its data lines, unchanged if possible, else as one line."""
        lines, self._data_lines = self._data_lines, []
        data = b"".join(line[5:] for line in lines)
        try:
            event = load_json(data)
        except ValueError:  # `[DONE]` or a non-JSON payload: forward unchanged
            if data.strip() == DONE:
                self.done_received = True
            elif data.strip():
                self.malformed_event = f"the stream has an event that is not JSON: {data[:80]!r}"
            return b"".join(lines)
        changed = isinstance(event, dict) and self._add_event(event)
        if changed or len(lines) > 1:  # the gateway, and many clients, parse each data line separately
            return b"data: " + orjson.dumps(event) + b"\n"
        return b"".join(lines)

    def _add_event(self, event: dict[str, Any]) -> bool:
        """Adds an event to the response; returns whether the event was changed."""
        self.event_error = self.event_error or error_message(event)
        for field in ("prompt_token_ids", "policy_version", "weights", "usage"):
            if event.get(field) is not None:
                self._top_level_fields[field] = event[field]
        changed = False
        for choice in event.get("choices") or ():
            changed |= self._add_choice(choice)
        return self._strip(event) or changed

    def _add_choice(self, chunk_choice: dict[str, Any]) -> bool:
        """Adds a choice delta; returns whether it was changed: `merge_delta` fills in missing tool-call indices."""
        index = chunk_choice.get("index", 0)
        choice = self._choices.setdefault(index, {"index": index, "message": {"role": "assistant", "content": None}})
        text = chunk_choice.get("text")
        delta: dict[str, Any] = {"content": text} if isinstance(text, str) else chunk_choice.get("delta") or {}
        changed = any(part.get("index") is None for part in delta.get("tool_calls") or ())
        merge_delta(choice["message"], delta)
        for field in _SENT_ONCE:
            if chunk_choice.get(field) is not None:
                choice[field] = chunk_choice[field]
        if chunk_choice.get("token_ids") is not None:
            choice.setdefault("token_ids", []).extend(chunk_choice["token_ids"])
        for field, values in (chunk_choice.get("logprobs") or {}).items():
            if isinstance(values, list):
                choice.setdefault("logprobs", {}).setdefault(field, []).extend(values)
        return changed

    @property
    def error(self) -> str | None:
        """The first error that the server reported in an event, or else in a body that is no stream of events."""
        if self.event_error is not None or self._choices:
            return self.event_error
        try:
            return error_message(load_json(bytes(self._other_lines + self._partial_line)))
        except ValueError:
            return None

    def all_choices_finished(self, num_choices: int) -> bool:
        return len(self._choices) >= num_choices and all("finish_reason" in c for c in self._choices.values())

    def response(self) -> dict[str, Any]:
        """The response so far. Empty tool-call slots are removed (some servers number tool calls from 1)."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            if calls := choice["message"].get("tool_calls"):
                choice["message"]["tool_calls"] = [call for call in calls if call]
        return {**self._top_level_fields, "choices": choices}


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Merges a delta: concatenates strings, merges lists of indexed parts (tool calls), overwrites other values."""
    for field, value in delta.items():
        current = message.get(field)
        if value is None:
            message.setdefault(field)
        elif isinstance(value, list) and (field == "tool_calls" or all("index" in part for part in value)):
            parts = message[field] = current or []
            for part in value:
                _merge_part(parts, part)
        elif isinstance(current, str) and isinstance(value, str) and field != "role":
            message[field] = current + value
        elif isinstance(current, dict) and isinstance(value, dict):
            merge_delta(current, value)
        else:
            message[field] = value


def _merge_part(parts: list[dict[str, Any]], part_delta: dict[str, Any]) -> None:
    index = part_delta.get("index")
    if index is None:  # a part with a function name starts a new call unless its id is known; others continue the last
        index = max(len(parts) - 1, 0)
        if (part_delta.get("function") or {}).get("name"):
            ids = [part.get("id") for part in parts]
            index = ids.index(part_delta["id"]) if part_delta.get("id") and part_delta["id"] in ids else len(parts)
        part_delta["index"] = index
    while len(parts) <= index:
        parts.append({})
    fields = {field: value for field, value in part_delta.items() if field != "index"}
    for field in ("id", "type"):  # sent whole, sometimes in every chunk: overwrite instead of concatenating
        if fields.get(field) is not None:
            parts[index][field] = fields.pop(field)
    merge_delta(parts[index], fields)
