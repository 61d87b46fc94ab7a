"""The recorder under an HTTP client: transports for `httpx` and `httpx2`, with aiohttp below the asynchronous one.

The two libraries have the same interface and different class identities, so each class here is completed with the
bases of the library it is to serve (`for_library`). aiohttp takes about a tenth of the CPU time of their own pools.
"""

import asyncio
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from insitu.workflow.capture import Exchange, Recorder

_KEEP_ALIVE_SECONDS = 4.0  # shorter than uvicorn's 5: the side that sends must be the one to give a connection up
_REWRITTEN = frozenset((b"content-length", b"content-encoding", b"transfer-encoding"))
_CHUNK_BYTES = 65536


class Transports(NamedTuple):
    """The transport classes for one HTTP library; each is made with a Recorder."""

    asynchronous: Any
    synchronous: Any


@lru_cache
def for_library(http: Any) -> Transports:
    """The transports for the module `httpx` or `httpx2`."""
    body = type("RecordedBody", (_AsyncBody, http.AsyncByteStream), {"http": http})
    sync_body = type("RecordedSyncBody", (_SyncBody, http.SyncByteStream), {})
    return Transports(
        type("RecordingTransport", (_AsyncTransport, http.AsyncBaseTransport), {"http": http, "body": body}),
        type("RecordingSyncTransport", (_SyncTransport, http.BaseTransport), {"http": http, "body": sync_body}),
    )


class _AsyncTransport:
    """Sends over one aiohttp session, of the event loop it is made in (or else first used in).

    A call from another loop has a session of its own, which ends with it: frameworks that offer a synchronous method
    run a loop for each call, in a thread, and nobody could close what is kept for such a loop.
    """

    http: Any
    body: Any

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._session: aiohttp.ClientSession | None = None
        self._loop = _running_loop()

    async def handle_async_request(self, request: Any) -> Any:
        content = await request.aread()
        exchange = self._recorder.begin(request.method, request.url.path, content)
        async with AsyncExitStack() as until_answered:
            with _translated(self.http, request, exchange):
                session = self._session_here(until_answered)
                answer = await _send(session, request, content if exchange is None else exchange.content)
                whole = exchange is not None and not (exchange.streamed and answer.status < 400)
                received = await answer.read() if whole else b""
            headers = [pair for pair in answer.raw_headers if pair[0].lower() not in _REWRITTEN]
            extensions = {"http_version": b"HTTP/1.1", "reason_phrase": (answer.reason or "").encode()}
            if whole:
                assert exchange is not None
                shown = exchange.answer(answer.status, answer.headers, received)
                return self.http.Response(answer.status, headers=headers, content=shown, extensions=extensions)
            body = self.body(answer, request, exchange, until_answered.pop_all())
            return self.http.Response(answer.status, headers=headers, stream=body, extensions=extensions)

    def _session_here(self, until_answered: AsyncExitStack) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            session = _new_session()
            until_answered.push_async_callback(session.close)
            return session
        if self._session is None:
            self._session = _new_session()
        return self._session

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        trust_env=bool(urllib.request.getproxies()),  # looked up per request, which costs where there is none
    )


async def _send(session: aiohttp.ClientSession, request: Any, content: bytes) -> aiohttp.ClientResponse:
    headers: CIMultiDict[str] = CIMultiDict(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in request.headers.raw
        if name.lower() not in _REWRITTEN
    )
    headers["Accept-Encoding"] = "gzip, deflate"  # what aiohttp always can undo
    limits = request.extensions.get("timeout") or {}
    return await session.request(
        request.method,
        URL(str(request.url), encoded=True),
        headers=headers,
        data=content or None,
        allow_redirects=False,
        timeout=_timeout(limits.get("connect"), limits.get("read")),
    )


class _AsyncBody:
    """A body that passes through as it comes; `until_answered` is closed with it."""

    http: Any

    def __init__(
        self, answer: aiohttp.ClientResponse, request: Any, exchange: Exchange | None, until_answered: AsyncExitStack
    ) -> None:
        self._answer = answer
        self._request = request
        self._exchange = exchange
        self._until_answered = until_answered

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            with _translated(self.http, self._request, None):
                async for chunk in self._answer.content.iter_any():
                    shown = chunk if self._exchange is None else self._exchange.feed(chunk)
                    if self._exchange is not None and self._exchange.is_done:
                        self._end()
                    if shown:
                        yield shown
        except self.http.TransportError as error:
            self._end(f"the stream broke off: {error!r}")
            raise
        self._end()

    async def aclose(self) -> None:
        if self._answer.content.at_eof():
            self._answer.release()
        else:
            self._answer.close()  # the rest is not wanted: the connection cannot be used again
        self._end()
        await self._until_answered.aclose()

    def _end(self, error: str | None = None) -> None:
        if self._exchange is not None:
            self._exchange.end(self._answer.headers, error)


class _SyncTransport:
    """Sends over the library's own transport, made at the first request."""

    http: Any
    body: Any

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._inner: Any = None
        self._lock = threading.Lock()

    def handle_request(self, request: Any) -> Any:
        with self._lock:  # agents run in threads of their own call at once
            if self._inner is None:
                limits = self.http.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS)  # and any number of connections
                self._inner = self.http.HTTPTransport(limits=limits)
        exchange = self._recorder.begin(request.method, request.url.path, request.read())
        if exchange is None:
            return self._inner.handle_request(request)
        kept = [pair for pair in request.headers.raw if pair[0].lower() not in (*_REWRITTEN, b"accept-encoding")]
        request = self.http.Request(
            request.method, request.url, headers=kept, content=exchange.content, extensions=request.extensions
        )
        with _translated(self.http, request, exchange):
            answer = self._inner.handle_request(request)
            if exchange.streamed and answer.status_code < 400:
                answer.stream = self.body(answer.stream, answer.headers, exchange)
                return answer
            received = answer.read()
        headers = [pair for pair in answer.headers.raw if pair[0].lower() not in _REWRITTEN]
        shown = exchange.answer(answer.status_code, answer.headers, received)
        return self.http.Response(answer.status_code, headers=headers, content=shown, extensions=answer.extensions)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


class _SyncBody:
    def __init__(self, stream: Any, headers: Mapping[str, str], exchange: Exchange) -> None:
        self._stream, self._headers, self._exchange = stream, headers, exchange

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            shown = self._exchange.feed(chunk)
            if self._exchange.is_done:
                self._exchange.end(self._headers)
            yield shown
        self._exchange.end(self._headers)

    def close(self) -> None:
        self._stream.close()
        self._exchange.end(self._headers)


@lru_cache
def _timeout(connect: float | None, read: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=read)


@contextmanager
def _translated(http: Any, request: Any, exchange: Exchange | None) -> Iterator[None]:
    """Tell the exchange of a failure, and raise aiohttp's errors as those of the client's library."""
    try:
        yield
    except BaseException as error:  # counted as a failed attempt; raised again or translated
        name = _error_name(error)
        if exchange is not None:
            exchange.fail(name or type(error).__name__)
        if name is None:
            raise
        raise getattr(http, name)(f"{type(error).__name__}: {error}", request=request) from error


_ERRORS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (aiohttp.ConnectionTimeoutError, "ConnectTimeout"),
    (TimeoutError, "ReadTimeout"),
    ((aiohttp.ClientConnectorError, aiohttp.ClientConnectorDNSError), "ConnectError"),
    (aiohttp.ClientProxyConnectionError, "ProxyError"),
    ((aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError), "RemoteProtocolError"),
    ((aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError), "UnsupportedProtocol"),
    ((aiohttp.ClientError, ConnectionError), "ReadError"),
)


def _error_name(error: BaseException) -> str | None:
    """The name that `httpx` and `httpx2` have for an error of aiohttp; None if it is none."""
    return next((name for kinds, name in _ERRORS if isinstance(error, kinds)), None)
