"""The APIs that agents use, each translated to the completions that model servers offer.

OpenAI's completions are here; other dialects are entry points of `insitu.dialects`, named by their route below `/v1`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, ClassVar

import orjson

from insitu.errors import PluginError, RequestRefused
from insitu.schemas.parts import load_named, names
from insitu.wire.connection import parse_events
from insitu.wire.http_format import CHAT, MALFORMED, TEXT, error_body, error_message, format_event


class Translation(ABC):
    """Translates one request of an agent to a completion request, and the response back. Subclasses are dialects.

    The constructor raises RequestRefused for a request that cannot be translated. `memory` is the dialect's state for
    one episode.
    """

    route = CHAT
    """Route of `request` below `/v1`."""
    verbatim = False
    """Whether responses pass through unchanged: the agent and the server use the same API."""
    header: ClassVar[str | None] = None
    """A header that clients of the dialect send with every request, also to routes without a dialect."""

    def __init__(self, request: dict[str, Any], memory: dict[str, Any]) -> None:
        self.request = request
        self.memory = memory

    @abstractmethod
    def response(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The response to the agent."""

    @abstractmethod
    def events(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        """The agent's events for one chunk of a streamed completion."""

    @abstractmethod
    def end(self, failure: str | None = None) -> Iterator[bytes]:
        """The final events of a stream; `failure` is why it ended early."""

    @staticmethod
    def error(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
        """An error body."""
        return error_body(message, status, param, code)

    def completion_request(self, params: dict[str, Any], model: str) -> dict[str, Any]:
        """The request for the server: the agent's, plus the configured `params` that it does not set, or to null."""
        params = dict(params)
        further = params.pop("extra_body", {})
        if self.route == CHAT:
            params |= further
        if self.route == TEXT and params.pop("logprobs", False):  # the number of alternatives in this API
            params["logprobs"] = params.pop("top_logprobs", 0)
        request = {name: value for name, value in self.request.items() if value is not None or name not in params}
        if request.get("max_completion_tokens") is not None and "max_tokens" not in request:
            params.pop("max_tokens", None)  # the agent has set the same limit by its newer name
        return {**params, **request, "model": model}


class ChatTranslation(Translation):
    """OpenAI's chat completions, which need no translation."""

    verbatim = True

    def response(self, completion: dict[str, Any]) -> dict[str, Any]:
        return completion

    def events(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        raise NotImplementedError("chunks pass through unchanged")

    def end(self, failure: str | None = None) -> Iterator[bytes]:
        if failure is not None:
            yield b"\n\n" + format_event(orjson.dumps(error_body(failure, 502, code="upstream")))


class TextTranslation(ChatTranslation):
    """OpenAI's text completions."""

    route = TEXT


Dialect = type[Translation]


def translate(dialect: Dialect, request: dict[str, Any], memory: dict[str, Any]) -> Translation:
    """Raises RequestRefused for a request that cannot be translated."""
    try:
        return dialect(request, memory)
    except MALFORMED as error:
        raise RequestRefused(f"the request is malformed: {type(error).__name__} {error}") from error


@cache
def dialects() -> dict[str, Dialect]:
    """By route below `/v1`; a dialect that cannot be imported refuses its requests."""
    installed = {route: _load(route) for route in names("dialects")}
    return {CHAT: ChatTranslation, TEXT: TextTranslation, **installed}


def _load(route: str) -> Dialect:
    try:
        dialect: Any = load_named("dialects", route)
    except PluginError as error:
        problem = f"this installation of insitu cannot translate requests to {route}: {error}"
        allowed = f"{problem}; available: {CHAT}, {TEXT}"

        class NotInstalled(ChatTranslation):
            verbatim = False

            def __init__(self, request: dict[str, Any], memory: dict[str, Any]) -> None:
                raise RequestRefused(allowed, status=501, code="unsupported")

        return NotInstalled
    return dialect  # type: ignore[no-any-return]


class StreamTranslator:
    """Translates a streamed completion chunk by chunk, until the server reports an error in an event."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._rest = b""
        self.failure: str | None = None

    def feed(self, chunk: bytes) -> bytes:
        if self._translation.verbatim:
            return chunk
        events, self._rest = parse_events(self._rest + chunk)
        translated = bytearray()
        for event in events:
            self.failure = error_message(event)
            if self.failure is not None:
                break
            for part in self._translation.events(event):
                translated += part
        return bytes(translated)

    def end(self, failure: str | None = None) -> bytes:
        return b"".join(self._translation.end(failure or self.failure))


def as_chunk(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion as the only chunk of its stream."""
    choice = completion["choices"][0]
    calls = [{**call, "index": index} for index, call in enumerate(choice["message"].get("tool_calls") or ())]
    return {**completion, "choices": [{**choice, "delta": {**choice["message"], "tool_calls": calls}}]}


def present(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The values of these names that are not null."""
    return {name: values[name] for name in names if values.get(name) is not None}


def refuse_unsupported(request: dict[str, Any], fields: frozenset[str], neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raises RequestRefused for a parameter without counterpart, unless its value is `neutral` (has no effect)."""
    for name, value in request.items():
        if name not in fields and value is not None and value not in neutral.get(name, ()):
            raise RequestRefused(f"{name} cannot be passed on to a chat completion", param=name, code="unsupported")


def unsupported_type(where: str, kind: Any, allowed: str, param: str) -> RequestRefused:
    reason = ", which the server would have to run" if param == "tools" else ""
    return RequestRefused(f"{where} is of type {kind!r}{reason}; allowed: {allowed}", param=param, code="unsupported")


def join_text(content: Any, kinds: tuple[str, ...], where: str) -> str:
    """The text of a message's content; raises RequestRefused for parts of other kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise unsupported_type(f"{where}.{number}", kind, ", ".join(kinds), where)
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)
