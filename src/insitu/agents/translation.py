"""The transport under a framework's own client: fills in configured parameters and translates other dialects.

Below it is the recording transport. The client above may use chat completions, Responses or Anthropic's Messages, and
may name any model: each request goes to the model that the transport is made for.
"""

from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import orjson

from insitu.capture.ledger import CallLedger, current_call_site
from insitu.capture.transport import recording_transport
from insitu.errors import RequestRefused
from insitu.formats.dialects import StreamTranslator, Translation, dialects, translate
from insitu.wire.addresses import authorized
from insitu.workflow.llms import ModelClient

_STREAM = {"content-type": "text/event-stream"}
_OWN_HEADERS = ("host", "content-length", "transfer-encoding", "connection")
"""Headers of a request that another one has its own of."""


@lru_cache
def translating_transport(http: Any) -> Any:
    """The transport class for `httpx` or `httpx2` (the module); its instances serve a Client or an AsyncClient."""
    stream = type("TranslatedStream", (_TranslatedStream, http.AsyncByteStream, http.SyncByteStream), {})
    bases = (_TranslatingTransport, http.AsyncBaseTransport, http.BaseTransport)
    return type("TranslatingTransport", bases, {"http": http, "stream": stream})


class _Call(NamedTuple):
    """A request to send, or its refusal, and how to translate the response; without `translation` it is unchanged."""

    request: Any
    translation: Translation | None = None
    streamed: bool = False
    refusal: Any = None


class _TranslatingTransport:
    http: Any
    stream: Any

    def __init__(self, llm: ModelClient) -> None:
        self._llm = llm
        self._inner = recording_transport(self.http)(llm.recorder)
        self._memories: WeakKeyDictionary[CallLedger, dict[str, Any]] = WeakKeyDictionary()

    async def handle_async_request(self, request: Any) -> Any:
        call = self._translate(request, await request.aread())
        response = call.refusal or await self._inner.handle_async_request(call.request)
        if call.translation is None or response.status_code >= 400:
            return response
        return self._translated(call.translation, response, None if call.streamed else await response.aread())

    def handle_request(self, request: Any) -> Any:
        call = self._translate(request, request.read())
        response = call.refusal or self._inner.handle_request(call.request)
        if call.translation is None or response.status_code >= 400:
            return response
        return self._translated(call.translation, response, None if call.streamed else response.read())

    def _translate(self, request: Any, content: bytes) -> _Call:
        dialect = next((d for route, d in dialects().items() if request.url.path.endswith(f"/{route}")), None)
        if request.method != "POST" or dialect is None:
            return _Call(request)
        ledger = current_call_site.get().ledger
        memory = {} if ledger is None else self._memories.setdefault(ledger, {})
        try:
            translation = translate(dialect, orjson.loads(content), memory)
        except RequestRefused as error:
            body = dialect.error(str(error), error.status, error.param, error.code)
            return _Call(request, refusal=self._json(body, error.status))
        body = translation.completion_request(self._llm.params, self._llm.model)
        base_url, credentials = authorized(str(self._llm.client.base_url), self._llm.client.api_key)
        headers, query = {"content-type": "application/json"}, None
        if translation.verbatim:
            headers = {name: value for name, value in request.headers.items() if name not in _OWN_HEADERS}
            query = request.url.params or None
        translated = self.http.Request(
            "POST",
            f"{base_url}/{translation.route}",
            params=query,
            headers={**headers, "authorization": credentials},
            content=orjson.dumps(body),
            extensions=request.extensions,
        )
        return _Call(translated, None if translation.verbatim else translation, bool(body.get("stream")))

    def _translated(self, translation: Translation, response: Any, content: bytes | None) -> Any:
        """The response to the agent; that of a stream has no `content`."""
        if content is None:
            return self.http.Response(200, headers=_STREAM, stream=self.stream(response.stream, translation))
        return self._json(translation.response(orjson.loads(content)))

    def _json(self, body: dict[str, Any], status: int = 200) -> Any:
        return self.http.Response(status, headers={"content-type": "application/json"}, content=orjson.dumps(body))

    async def aclose(self) -> None:
        await self._inner.aclose()

    def close(self) -> None:
        self._inner.close()


class _TranslatedStream:
    def __init__(self, stream: Any, translation: Translation) -> None:
        self._stream = stream
        self._translator = StreamTranslator(translation)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield self._translator.feed(chunk)
            if self._translator.failure is not None:
                break
        yield self._translator.end(self._stream.failure)

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            yield self._translator.feed(chunk)
            if self._translator.failure is not None:
                break
        yield self._translator.end(self._stream.failure)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def close(self) -> None:
        self._stream.close()
