"""The recorder under an HTTP client: transports for `httpx` and `httpx2`, with aiohttp below asynchronous clients.

The two libraries have the same interface and different classes, so `recording_transport` derives a transport from the
base classes of the one that it serves. aiohttp takes about a tenth of the CPU time of their connection pools.
"""

import asyncio
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import aiohttp
import orjson
from multidict import CIMultiDict
from yarl import URL

from insitu.capture.recorder import Exchange, Recorder
from insitu.errors import BackendUnavailable
from insitu.wire.http_format import COMPACT, JSON, error_body, format_event, retry_header

_KEEP_ALIVE_SECONDS = 4.0  # less than uvicorn's 5: the client must be the one to close an idle connection
_REWRITTEN = frozenset((b"content-length", b"content-encoding", b"transfer-encoding"))


@lru_cache
def recording_transport(http: Any) -> Any:
    """The transport class for `httpx` or `httpx2` (the module); its instances serve a Client or an AsyncClient."""
    stream = type("RecordedStream", (_RecordedStream, http.AsyncByteStream, http.SyncByteStream), {"http": http})
    bases = (_RecordingTransport, http.AsyncBaseTransport, http.BaseTransport)
    return type("RecordingTransport", bases, {"http": http, "stream": stream})


class _RecordingTransport:
    """Asynchronous requests share an aiohttp session, which belongs to the event loop that the transport is made in.

    (Or is first used in.) A request in another loop has its own session and closes it: frameworks that offer a
    synchronous method run a loop for each call, in a thread, and nothing else could close that loop's session.
    Synchronous requests go to the library's own transport.
    """

    http: Any
    stream: Any

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._session: aiohttp.ClientSession | None = None
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._sync_transport: Any = None
        self._lock = threading.Lock()

    async def handle_async_request(self, request: Any) -> Any:
        content = await request.aread()
        exchange = self._recorder.begin(request.method, request.url.path, content)
        async with AsyncExitStack() as cleanup:
            try:
                session = self._session_of_this_loop(cleanup)
                while True:
                    answer = await session.request(**_arguments(request, content, exchange))
                    streams = exchange is None or (exchange.streamed and answer.status < 400)
                    received = b"" if streams else await answer.read()
                    if exchange is None or answer.status < 400 or not exchange.must_resend(answer.status, received):
                        break
            except BaseException as error:  # also a cancellation is a failed attempt; always re-raised
                self._fail(exchange, request, error)
            left_out = _left_out(request, answer.status, answer.headers)
            headers = [pair for pair in answer.raw_headers if pair[0].lower() not in left_out]
            extensions = {"http_version": b"HTTP/1.1", "reason_phrase": (answer.reason or "").encode()}
            if streams:
                headers += self._retry(answer.status) if answer.status >= 400 else []
                stream = self.stream(answer, answer.headers, exchange, request, cleanup.pop_all())
                return self.http.Response(answer.status, headers=headers, stream=stream, extensions=extensions)
            assert exchange is not None
            body = exchange.complete(answer.status, answer.headers, received)
            return self._completed(exchange, answer.status, headers, body, extensions)

    def handle_request(self, request: Any) -> Any:
        with self._lock:  # agents may call from several threads
            if self._sync_transport is None:
                limits = self.http.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS)  # and any number of connections
                self._sync_transport = self.http.HTTPTransport(limits=limits)
        exchange = self._recorder.begin(request.method, request.url.path, request.read())
        if exchange is None:
            answer = self._sync_transport.handle_request(request)
            answer.headers.update(self._retry(answer.status_code))
            answer.stream = self.stream(answer.stream, answer.headers, None)
            return answer
        headers = [pair for pair in request.headers.raw if pair[0].lower() not in (*_REWRITTEN, b"accept-encoding")]
        if accept := exchange.headers.get("Accept"):
            headers = [*(pair for pair in headers if pair[0].lower() != b"accept"), (b"Accept", accept.encode())]
        to, extensions = (request.method, request.url), request.extensions
        try:
            while True:
                request = self.http.Request(*to, headers=headers, content=exchange.content, extensions=extensions)
                answer = self._sync_transport.handle_request(request)
                if answer.status_code < 400 or not exchange.must_resend(answer.status_code, answer.read()):
                    break
            left_out = _left_out(request, answer.status_code, answer.headers)
            if exchange.streamed and answer.status_code < 400:
                for name in left_out & {b"location"}:
                    del answer.headers[name.decode()]
                answer.stream = self.stream(answer.stream, answer.headers, exchange)
                return answer
            received = answer.read()
        except BaseException as error:  # always re-raised
            self._fail(exchange, request, error)
        headers = [pair for pair in answer.headers.raw if pair[0].lower() not in left_out]
        body = exchange.complete(answer.status_code, answer.headers, received)
        return self._completed(exchange, answer.status_code, headers, body, answer.extensions)

    def _completed(
        self, exchange: Exchange, status: int, headers: list[tuple[bytes, bytes]], body: bytes, extensions: Any
    ) -> Any:
        """The response for the client. One that is not a completion becomes a 502, which clients retry."""
        if exchange.parse_error is not None:
            problem = f"the response of {self._recorder.server} is not a completion: {exchange.parse_error}"
            status, body = 502, orjson.dumps(error_body(problem, 502))
            headers = [(b"Content-Type", JSON.encode())]
        elif exchange.headers:
            compact = COMPACT.encode()
            headers = [(name, JSON.encode() if value.lower().startswith(compact) else value) for name, value in headers]
        if status >= 400:
            headers = [*headers, *self._retry(status)]
        return self.http.Response(status, headers=headers, content=body, extensions=extensions)

    def _retry(self, status: int) -> list[tuple[bytes, bytes]]:
        named = retry_header(status, self._recorder.retried_statuses)
        return [(name.encode(), value.encode()) for name, value in named.items()]

    def _fail(self, exchange: Exchange | None, request: Any, error: BaseException) -> NoReturn:
        """Fails the exchange, and raises the error, one of the connection as that of the client's library."""
        translated = _translated(self.http, request, error)
        if exchange is not None:
            exchange.fail(type(translated or error).__name__, by_server=translated is not None)
        if translated is None:
            raise error
        raise translated from error

    def _session_of_this_loop(self, cleanup: AsyncExitStack) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            session = new_session(through_proxies=True)
            cleanup.push_async_callback(session.close)
            return session
        if self._session is None:
            self._session = new_session(through_proxies=True)
        return self._session

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def close(self) -> None:
        if self._sync_transport is not None:
            self._sync_transport.close()


@dataclass(eq=False)
class _RecordedStream:
    """The body of a response as it comes in: of aiohttp with its `request`, or the stream of the library's transport.

    `cleanup` is closed with it.
    """

    http: ClassVar[Any]
    body: Any
    headers: Mapping[str, str]
    exchange: Exchange | None
    request: Any = None
    cleanup: AsyncExitStack = field(default_factory=AsyncExitStack)
    failure: str | None = None
    """Why the response is incomplete, if it is."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.exchange is not None:
            self.exchange.read_by(asyncio.current_task(), self.close)
        try:
            async for chunk in self.body.content.iter_any():
                if passed := self._pass(chunk):
                    yield passed
        except Exception as error:  # of aiohttp, which has many; re-raised
            translated = _translated(self.http, self.request, error)
            if translated is None:
                raise
            self._end(f"the stream was cut off: {translated!r}")
            raise translated from error
        if last := self._last():
            yield last

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from map(self._pass, self.body)
        except Exception as error:  # depends on the library; re-raised
            self._end(f"the stream was interrupted: {error!r}")
            raise
        if last := self._last():
            yield last

    def _pass(self, chunk: bytes) -> bytes:
        """The bytes for the client. The exchange ends before the client sees the end."""
        if self.exchange is None:
            return chunk
        passed = self.exchange.feed(chunk)
        if self.exchange.done_received:
            self._end()
        return passed

    def _last(self) -> bytes:
        """Ends the exchange; returns the event of an error that the server has reported in another form."""
        self._end()
        problem = self.exchange.parse_error if self.exchange is not None else None
        return b"" if problem is None else b"\n\n" + format_event(orjson.dumps(error_body(problem, 502)))

    async def aclose(self) -> None:
        if self.body.content.at_eof():
            self.body.release()
        else:
            self.body.close()  # with its unread rest the connection cannot be reused
        self._end(by_server=False)
        await self.cleanup.aclose()

    def close(self) -> None:
        self.body.close()
        self._end(by_server=False)

    def _end(self, error: str | None = None, *, by_server: bool = True) -> None:
        if self.exchange is not None:
            self.failure = self.exchange.end(self.headers, error, by_server=by_server) or self.failure


def _left_out(request: Any, status: int, headers: Mapping[str, str]) -> frozenset[bytes]:
    """Headers that the client does not get; for a redirect to another server, `Location`: it would send the prompt."""
    target, where = URL(str(request.url)), headers.get("Location") if 300 <= status < 400 else None
    leads_elsewhere = where and target.join(URL(where)).origin() != target.origin()
    return _REWRITTEN | {b"location"} if leads_elsewhere else _REWRITTEN


def new_session(*, through_proxies: bool) -> aiohttp.ClientSession:
    """A session for model servers, with any number of connections; it adds nothing to requests.

    `through_proxies`: those of the environment; aiohttp would look for them per request, which costs time.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        trust_env=through_proxies and bool(urllib.request.getproxies()),
    )


def _arguments(request: Any, content: bytes, exchange: Exchange | None) -> dict[str, Any]:
    """A request of the client's library for aiohttp."""
    raw = request.headers.raw
    headers: CIMultiDict[str] = CIMultiDict(
        [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw if name.lower() not in _REWRITTEN]
    )
    headers["Accept-Encoding"] = "gzip, deflate"  # what aiohttp can always decompress
    if exchange is not None:
        content = exchange.content
        headers.update(exchange.headers)
    limits = request.extensions.get("timeout") or {}
    return {
        "method": request.method,
        "url": URL(str(request.url), encoded=True).with_user(None),  # the client's library has made a header of it
        "headers": headers,
        "data": content or None,
        "allow_redirects": False,
        "timeout": client_timeout(limits.get("connect"), limits.get("read")),
    }


@lru_cache
def client_timeout(connect: float | None, read: float | None) -> aiohttp.ClientTimeout:
    """Limits the silence of a server in seconds, not the length of its answer."""
    return aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=read)


def _translated(http: Any, request: Any, error: BaseException) -> Exception | None:
    """An error of the connection as one of the client's library; None for other errors."""
    is_own = isinstance(error, http.TransportError)  # of the synchronous transport
    kind: Any = type(error) if is_own else getattr(http, _error_name(error) or "", None)
    if kind is None:
        return None
    message = str(error) if is_own else f"{type(error).__name__}: {error}"
    return _unavailable(kind)(message, request=request)  # type: ignore[no-any-return]


@lru_cache
def _unavailable(kind: type[Exception]) -> Any:
    """An error of the client's library that is also a BackendUnavailable, to recognise it among an SDK's errors."""
    return type(kind.__name__, (kind, BackendUnavailable), {})


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
    """The name in `httpx` and `httpx2` of an error of aiohttp; None for other errors."""
    return next((name for kinds, name in _ERRORS if isinstance(error, kinds)), None)
