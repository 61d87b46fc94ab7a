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
from insitu.gateway.dialects import StreamTranslator, Translation, dialects
from insitu.wire.http_format import authorized
from insitu.workflow.llms import ModelClient

_STREAM = {"content-type": "text/event-stream"}


@lru_cache
def translating_transport(http: Any) -> Any:
    """The transport class for `httpx` or `httpx2` (the module); its instances serve a Client or an AsyncClient."""
    stream = type("TranslatedStream", (_TranslatedStream, http.AsyncByteStream, http.SyncByteStream), {})
    bases = (_TranslatingTransport, http.AsyncBaseTransport, http.BaseTransport)
    return type("TranslatingTransport", bases, {"http": http, "stream": stream})


class _Call(NamedTuple):
    """A request to send, and how to translate its response; without `translation` the response passes unchanged."""

    request: Any
    translation: Translation | None = None
    streamed: bool = False

    def passes(self, response: Any) -> bool:
        return self.translation is None or self.translation.verbatim or response.status_code >= 400


class _TranslatingTransport:
    http: Any
    stream: Any

    def __init__(self, llm: ModelClient) -> None:
        self._llm = llm
        self._inner = recording_transport(self.http)(llm.recorder)
        self._memories: WeakKeyDictionary[CallLedger, dict[str, Any]] = WeakKeyDictionary()

    async def handle_async_request(self, request: Any) -> Any:
        call = self._translate(request, await request.aread())
        if not isinstance(call, _Call):
            return call
        response = await self._inner.handle_async_request(call.request)
        if call.passes(response):
            return response
        return self._translated(call, response, b"" if call.streamed else await response.aread())

    def handle_request(self, request: Any) -> Any:
        call = self._translate(request, request.read())
        if not isinstance(call, _Call):
            return call
        response = self._inner.handle_request(call.request)
        if call.passes(response):
            return response
        return self._translated(call, response, b"" if call.streamed else response.read())

    def _translate(self, request: Any, content: bytes) -> Any:
        """The _Call of a request, or an error response if the request cannot be translated."""
        dialect = next((d for route, d in dialects().items() if request.url.path.endswith(f"/{route}")), None)
        if request.method != "POST" or dialect is None:
            return _Call(request)
        ledger = current_call_site.get().ledger
        memory = {} if ledger is None else self._memories.setdefault(ledger, {})
        try:
            translation = dialect(orjson.loads(content), memory)
        except RequestRefused as error:
            return self._json(dialect.error(str(error), error.status, error.param, error.code), error.status)
        body = translation.completion_request(self._llm.params, self._llm.model)
        base_url, credentials = authorized(str(self._llm.client.base_url), self._llm.client.api_key)
        translated = self.http.Request(
            "POST",
            f"{base_url}/{translation.route}",
            headers={"content-type": "application/json", "authorization": credentials},
            content=orjson.dumps(body),
            extensions=request.extensions,
        )
        return _Call(translated, translation, bool(body.get("stream")))

    def _translated(self, call: _Call, response: Any, content: bytes) -> Any:
        assert call.translation is not None
        if call.streamed:
            return self.http.Response(200, headers=_STREAM, stream=self.stream(response.stream, call.translation))
        return self._json(call.translation.response(orjson.loads(content)))

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
        yield self._translator.end()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            yield self._translator.feed(chunk)
            if self._translator.failure is not None:
                break
        yield self._translator.end()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def close(self) -> None:
        self._stream.close()
