"""The transport under a framework's own client: the configured parameters are filled in, other dialects translated.

Below it is the recording transport, above it a client that may speak completions, Responses or Anthropic's Messages,
and that may name any model: each request goes to the one model object it was made for.
"""

from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import orjson

from insitu.errors import RequestRefused
from insitu.http_format import parse_events
from insitu.workflow.context import EpisodeScope, current_scope
from insitu.workflow.dialects import DIALECTS, Turn, request_of, shown_of
from insitu.workflow.llms import PlainLLM
from insitu.workflow.transport import Transports, for_library

_STREAM = {"content-type": "text/event-stream"}


@lru_cache
def translating(http: Any) -> Transports:
    """The transports for the module `httpx` or `httpx2`, each made with a PlainLLM."""
    body = type("TranslatedBody", (_AsyncBody, http.AsyncByteStream), {})
    sync_body = type("TranslatedSyncBody", (_SyncBody, http.SyncByteStream), {})
    return Transports(
        type("TranslatingTransport", (_AsyncTransport, http.AsyncBaseTransport), {"http": http, "body": body}),
        type("TranslatingSyncTransport", (_SyncTransport, http.BaseTransport), {"http": http, "body": sync_body}),
    )


class _Asked(NamedTuple):
    """A model call: as the client understands it, and as it is sent."""

    turn: Turn
    request: Any
    streamed: bool


class _Translation:
    http: Any
    body: Any

    def __init__(self, plain: PlainLLM) -> None:
        self._plain = plain
        self._memories: WeakKeyDictionary[EpisodeScope, dict[str, Any]] = WeakKeyDictionary()

    def _asked(self, request: Any, content: bytes) -> Any:
        """The _Asked of a request; the answer, where the request cannot be translated; None if it is no model call."""
        dialect = next((d for route, d in DIALECTS.items() if request.url.path.endswith(f"/{route}")), None)
        if request.method != "POST" or dialect is None:
            return None
        scope = current_scope()
        memory = {} if scope is None else self._memories.setdefault(scope, {})
        try:
            turn = dialect.turn(orjson.loads(content), memory)
        except RequestRefused as error:
            return self._json(dialect.error(str(error), error.status, error.param, error.code), error.status)
        said = request_of(turn, self._plain.params, self._plain.model)
        client = self._plain.client
        sent = self.http.Request(
            "POST",
            f"{str(client.base_url).rstrip('/')}/{turn.route}",
            headers={"content-type": "application/json", "authorization": f"Bearer {client.api_key}"},
            content=orjson.dumps(said),
            extensions=request.extensions,
        )
        return _Asked(turn, sent, bool(said.get("stream")))

    def _json(self, data: dict[str, Any], status: int = 200) -> Any:
        return self.http.Response(status, headers={"content-type": "application/json"}, content=orjson.dumps(data))


class _AsyncTransport(_Translation):
    def __init__(self, plain: PlainLLM) -> None:
        super().__init__(plain)
        self._inner = for_library(self.http).asynchronous(plain.recorder)

    async def handle_async_request(self, request: Any) -> Any:
        asked = self._asked(request, await request.aread())
        if not isinstance(asked, _Asked):
            return asked if asked is not None else await self._inner.handle_async_request(request)
        answer = await self._inner.handle_async_request(asked.request)
        if asked.turn.verbatim or answer.status_code >= 400:
            return answer
        if asked.streamed:
            return self.http.Response(200, headers=_STREAM, stream=self.body(answer.stream, asked.turn))
        return self._json(asked.turn.reply(orjson.loads(await answer.aread())))

    async def aclose(self) -> None:
        await self._inner.aclose()


class _AsyncBody:
    def __init__(self, stream: Any, turn: Turn) -> None:
        self._stream, self._turn = stream, turn

    async def __aiter__(self) -> AsyncIterator[bytes]:
        rest = b""
        failure = None
        async for chunk in self._stream:
            events, rest = parse_events(rest + chunk)
            shown, failure = shown_of(self._turn, events)
            yield shown
            if failure is not None:
                break
        yield b"".join(self._turn.end(failure))

    async def aclose(self) -> None:
        await self._stream.aclose()


class _SyncTransport(_Translation):
    def __init__(self, plain: PlainLLM) -> None:
        super().__init__(plain)
        self._inner = for_library(self.http).synchronous(plain.recorder)

    def handle_request(self, request: Any) -> Any:
        asked = self._asked(request, request.read())
        if not isinstance(asked, _Asked):
            return asked if asked is not None else self._inner.handle_request(request)
        answer = self._inner.handle_request(asked.request)
        if asked.turn.verbatim or answer.status_code >= 400:
            return answer
        if asked.streamed:
            return self.http.Response(200, headers=_STREAM, stream=self.body(answer.stream, asked.turn))
        return self._json(asked.turn.reply(orjson.loads(answer.read())))

    def close(self) -> None:
        self._inner.close()


class _SyncBody:
    def __init__(self, stream: Any, turn: Turn) -> None:
        self._stream, self._turn = stream, turn

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        failure = None
        for chunk in self._stream:
            events, rest = parse_events(rest + chunk)
            shown, failure = shown_of(self._turn, events)
            yield shown
            if failure is not None:
                break
        yield b"".join(self._turn.end(failure))

    def close(self) -> None:
        self._stream.close()
