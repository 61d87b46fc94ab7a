"""What a dialect is, and what dialects share: events, parts of text, errors, and refusing by name."""

from collections.abc import Iterator
from typing import Any, Protocol

from insitu.errors import RequestRefused
from insitu.http_format import error_message


class Turn(Protocol):
    """One request of an agent, in its own dialect.

    `request` is the same as the server's `route` takes it. Of a streamed answer every chunk is told to `event`, and
    `end` closes it, `failure` saying what has broken it off; both give the events for the agent.
    """

    route: str
    request: dict[str, Any]
    verbatim: bool
    """The agent speaks the server's dialect: answers need no translation."""

    def reply(self, completion: dict[str, Any]) -> dict[str, Any]: ...

    def event(self, chunk: dict[str, Any]) -> Iterator[bytes]: ...

    def end(self, failure: str | None = None) -> Iterator[bytes]: ...

    def error(self, message: str, status: int) -> dict[str, Any]: ...


class Dialect(Protocol):
    """How one kind of client spells requests, answers and errors. `memory` is kept for an agent's further requests."""

    def turn(self, request: dict[str, Any], memory: dict[str, Any]) -> Turn: ...

    def error(self, message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]: ...


def refuse_others(request: dict[str, Any], known: frozenset[str], neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raise RequestRefused for what cannot be carried over, by name; `neutral` values ask for nothing."""
    for name, value in request.items():
        if name not in known and value is not None and value not in neutral.get(name, ()):
            raise RequestRefused(f"{name} cannot be passed on to a chat completion", param=name, code="unsupported")


def text_parts(content: Any, kinds: tuple[str, ...], where: str) -> str | list[dict[str, Any]]:
    """Content in parts as chat completions have it: one text where all is text, else parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise RequestRefused(
                f"{where}.{number} is of type {kind!r}; allowed: {', '.join(kinds)}", param=where, code="unsupported"
            )
        parts.append({"type": "text", "text": part.get("text", "")})
    return "".join(part["text"] for part in parts)


def shown_of(turn: Turn, events: list[dict[str, Any]]) -> tuple[bytes, str | None]:
    """What the agent is shown of these chunks, up to the one in which the server tells of a failure, and that."""
    shown = bytearray()
    for event in events:
        if (failure := error_message(event)) is not None:
            return bytes(shown), failure
        for part in turn.event(event):
            shown += part
    return bytes(shown), None
