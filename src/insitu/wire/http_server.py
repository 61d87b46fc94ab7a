"""What our HTTP servers share, on aiohttp: listening, access, limits, request bodies, error responses, shutdown.

async with listening(web.Application(middlewares=[guard(access)]), ("127.0.0.1", 0)) as (host, port):
    ...

A request's handler is cancelled when its client disconnects; `uncancelled` is for those that must not stop halfway.

Python objects need up to twenty times the memory of their JSON (`[],[],[]`), so a body is measured before it is parsed.
The C library keeps most of that memory when the objects are freed: glibc up to 64 MiB for each thread that has parsed a
body. So a server has one heap for all threads (`prepare_process`), and returns its free pages after large requests.
"""

import asyncio
import ctypes
import gc
import logging
import os
import re
import socket
import threading
import traceback
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ValidationError

from insitu.errors import BackendUnavailable, ConfigError, InsituError, RequestRefused, key_of
from insitu.wire.heap import return_free_pages, use_one_arena
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_format import IDEMPOTENCY_KEY, JSON, Sample, error_body, metrics_text
from insitu.wire.json_values import gc_paused
from insitu.wire.open_files import raise_file_limit
from insitu.wire.paced_connections import BURST, SHARE, Pace, PacedConnection
from insitu.wire.redaction import redact

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_KEY = re.compile(r"/e/[^/\s'\"]+")
MAX_VALUES = 2**20
"""Commas and brackets in a request to a model, which count the values: more than the tokens of any prompt."""
MAX_DEPTH = 128
"""Levels of nesting. Parsers read deeper ones that writers and templates then fail on."""
LARGE_BODY = 2**16
"""Bodies from this size on are parsed in a thread, so that they do not hold up other responses."""
PARSE_SECONDS = 10.0
"""How long a request may be parsed by what may loop."""
IDLE_SECONDS = 75.0
"""A connection without a request is closed after this long."""
BODY_SECONDS = 60.0
"""A request is refused if no more of its body arrives for this long."""
MIN_OPEN_FILES = 256
"""A server with fewer runs out of them with a few dozen clients."""
_HUGE_BODY = 2**20
"""Bodies from this size on have their memory returned when their requests have ended."""
_TRIM_SECONDS = 0.5
"""Memory is returned this long after a large request, once for all that end in the meantime."""
_BACKLOG = 4096
"""Connections waiting to be accepted: hundreds of agents may start at the same time."""
_WINDOW_BITS = {"": 0, "identity": 0, "gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's parameter for each Content-Encoding; 0: the body is not compressed."""
_PART_BYTES = 2**18
"""Bytes decompressed before other tasks of the event loop run."""
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}
"""Headers of refusals, by status."""


@asynccontextmanager
async def listening(
    app: web.Application,
    address: tuple[str, int] | socket.socket,
    *,
    grace: float = 0.5,
    key: str = "--port",
    connections: Callable[[], int] | None = None,
) -> AsyncIterator[tuple[str, int]]:
    """Serves at an address (port 0: a free one) or a bound socket while the context is open; yields host and port.

    Idle connections are closed, and those to a socket that has as many as `connections` allows; in the end, requests
    get `grace` seconds. Raises ConfigError if the process may open too few files, or if the address cannot be bound:
    then it names the `key` that sets it.
    """
    prepare_process()
    _log.addFilter(_without_keys)
    app.on_response_prepare.append(_hide_server)
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        keepalive_timeout=IDLE_SECONDS,
        logger=_log,
        shutdown_timeout=grace,
    )
    await runner.setup()
    async with AsyncExitStack() as ending:
        ending.push_async_callback(runner.cleanup)
        if isinstance(address, socket.socket):
            accept = partial(_accept, runner.server, connections, Pace(SHARE, BURST))
            served = await asyncio.get_running_loop().create_server(accept, sock=address, backlog=_BACKLOG)
            ending.callback(served.close)
            yield address.getsockname()[:2]
        else:
            try:
                await web.TCPSite(runner, *address, backlog=_BACKLOG).start()
            except OSError as error:  # asyncio writes more into strerror
                reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
                raise ConfigError(f"{key}: cannot listen at {address[0]}:{address[1]}: {reason}") from error
            yield runner.addresses[0][:2]


def _accept(server: Any, most: Callable[[], int] | None, parsing: Pace) -> Any:
    is_full = most is not None and len(server.connections) >= most()
    return _Full() if is_full else PacedConnection(server(), parsing)


class _Full(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.abort()


async def _hide_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)


def _without_keys(record: logging.LogRecord) -> bool:
    """Removes episode keys from what aiohttp logs: tracebacks with the URLs of requests that failed."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        record.exc_text = _KEY.sub("/e/...", "".join(traceback.format_exception(error)))
    if isinstance(error, HttpProcessingError):  # the client's fault, and it gets the reason
        record.msg, record.args, record.exc_text = "refused a malformed request", (), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    record.exc_info = None
    return True


def uncancelled(handler: Handler) -> Handler:
    """A handler that runs to its end even if its client disconnects."""

    async def run(request: web.Request) -> web.StreamResponse:
        task = asyncio.ensure_future(handler(request))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, if nobody waits
        return await asyncio.shield(task)

    return run


async def body_chunks(
    request: web.Request, limit: Callable[[], float | None] = lambda: BODY_SECONDS
) -> AsyncIterator[bytes]:
    """The request's body as it arrives. Raises RequestRefused if it cannot be read, or none comes within `limit`."""
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(limit()):
                part = await request.content.readany()
            yield part
    except TimeoutError:
        raise RequestRefused(f"no more of the body arrived for {BODY_SECONDS:g} s", status=408) from None
    except web.RequestPayloadError as error:
        raise RequestRefused(f"the body cannot be read: {error}", code="malformed_body") from None


async def read_body(request: web.Request, limit: int, *, decompress: bool = False) -> bytes:
    """The body, as it was sent unless `decompress`. Raises RequestRefused (413) if it is larger than `limit` bytes."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    encoding = request.headers.get("Content-Encoding", "") if decompress else ""
    return b"".join([part async for part in decompressed(body_chunks(request), encoding, limit)])


async def decompressed(chunks: AsyncIterator[bytes], encoding: str, limit: int) -> AsyncIterator[bytes]:
    """A body without its Content-Encoding, in chunks of bounded size.

    Raises RequestRefused if it is larger than `limit` bytes, is not in that encoding, or the encoding is not allowed.
    """
    encoding = encoding.strip().lower()
    if encoding not in _WINDOW_BITS:
        problem = f"Content-Encoding is {encoding!r:.50}; allowed: gzip, deflate, identity"
        raise RequestRefused(problem, status=415, param="Content-Encoding")
    bits = _WINDOW_BITS[encoding]
    stream = zlib.decompressobj(bits) if bits else None
    size = sent = 0
    async for chunk in chunks:
        sent += len(chunk)
        while chunk:
            part, chunk = (chunk, b"") if stream is None else await _decompress(stream, chunk, encoding)
            size += len(part)
            if max(size, sent) > limit:
                raise _too_large(limit)
            yield part
    if stream is not None and not stream.eof:
        raise RequestRefused(f"the body is truncated {encoding}", code="malformed_body")


async def _decompress(stream: "zlib._Decompress", chunk: bytes, encoding: str) -> tuple[bytes, bytes]:
    """A part of bounded size, and what is left of the chunk; other tasks run in between."""
    await asyncio.sleep(0)
    try:
        part = stream.decompress(chunk, _PART_BYTES)
    except zlib.error as error:
        raise RequestRefused(f"the body is not {encoding}: {error}", code="malformed_body") from None
    if stream.unused_data:
        raise RequestRefused(f"the body goes on after the end of the {encoding} stream", code="malformed_body")
    return part, stream.unconsumed_tail


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(f"the body is larger than {limit} bytes", status=413, code="too_large")


def parse_json(body: bytes, *, max_values: int = MAX_VALUES, loads: Callable[[bytes], Any] = orjson.loads) -> Any:
    """Raises RequestRefused if the body is not JSON (400), or has too many values (413) or levels (400)."""
    brackets = body.count(b"[") + body.count(b"{")
    if (separators := brackets + body.count(b",")) > max_values:
        problem = f"the body has {separators} commas and brackets; allowed: {max_values}"
        raise RequestRefused(problem, status=413, code="too_large")
    try:
        with gc_paused() if len(body) >= LARGE_BODY else nullcontext():
            data = loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from None
    if brackets > MAX_DEPTH and _is_too_deep(data):
        problem = f"the body is nested more than {MAX_DEPTH} levels deep"
        raise RequestRefused(problem, code="malformed_json")
    return data


def _is_too_deep(data: Any) -> bool:
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [child for each in lists for child in each]
        if not level:
            return False
    return True


class ParsingTooSlow(Exception):
    """Raised within a `parse` that runs for longer than PARSE_SECONDS."""

    def __str__(self) -> str:
        return f"it has not ended within {PARSE_SECONDS:g} s"


async def parse_body(parse: Callable[[bytes], T], body: bytes, may_loop: bool = False, size: int = 0) -> T:
    """Runs `parse`, in a thread for large bodies; the memory of huge ones is returned when the task has ended.

    A body counts as at least `size`. One that `may_loop` runs in a thread always, and is ended by ParsingTooSlow: then
    this raises RequestRefused.
    """
    if (size := max(size, len(body))) < LARGE_BODY and not may_loop:
        return parse(body)
    if size >= _HUGE_BODY:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_return_memory_soon)
    return await (_parse_in_time(parse, body) if may_loop else asyncio.to_thread(parse, body))


async def _parse_in_time(parse: Callable[[bytes], T], body: bytes) -> T:
    threads: list[int] = []
    lock = threading.Lock()  # so that no thread is interrupted that does something else by now

    def run() -> T:
        threads.append(threading.get_ident())
        try:
            return parse(body)
        finally:
            with lock:
                threads.clear()

    work = asyncio.create_task(asyncio.to_thread(run))
    await asyncio.wait([work], timeout=PARSE_SECONDS)
    with lock:
        for thread in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(ParsingTooSlow))
    try:
        return await work
    except ParsingTooSlow as error:
        problem = f"the messages are too long to be made a prompt, or the server has too much to do: {error}"
        raise RequestRefused(problem, code="too_slow") from None


_timer: threading.Timer | None = None
"""Is about to return memory."""


def _return_memory_soon(task: asyncio.Task[Any]) -> None:
    global _timer
    if _timer is None:
        _timer = threading.Timer(_TRIM_SECONDS, _return_memory)
        _timer.daemon = True
        _timer.start()


def _return_memory() -> None:
    """Frees what failed requests have left in reference cycles, and returns the free pages of glibc's heap."""
    global _timer
    _timer = None
    gc.collect()
    return_free_pages()


def idempotency_key(request: web.Request) -> str | None:
    """The key of a request that may be repeated. Raises RequestRefused for an empty one.

    It is Latin-1: aiohttp decodes UTF-8, and other bytes to surrogates, which cannot be written as JSON.
    """
    if (key := request.headers.get(IDEMPOTENCY_KEY)) == "":
        raise RequestRefused(f"{IDEMPOTENCY_KEY} is empty; give a key, or leave the header out", param=IDEMPOTENCY_KEY)
    return None if key is None else key.encode(errors="surrogateescape").decode("latin-1")


def guard(access: AccessPolicy, is_public: Callable[[str], bool] = lambda path: False) -> Middleware:
    """Checks who sends a request, and turns errors into OpenAI-shaped bodies. `is_public` paths need no token."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            access.check(request.headers, is_public=is_public(request.path))
            return await handler(request)
        except ConnectionError:  # the client has left
            raise
        except Exception as error:  # reported to the client
            if request.writer.output_size > 0:  # too late: break the response off
                raise
            return _reported(request, error)

    return guarded


def _reported(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, ValidationError):
        error = validation_refusal(error)
    if isinstance(error, RequestRefused):
        return error_response(str(error), error.status, error.param, error.code)
    if isinstance(error, web.HTTPException):
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return error_response(f"{request.method} {request.path}: {error.reason}", error.status, headers=headers)
    if isinstance(error, InsituError):
        return error_response(str(error), 503 if isinstance(error, BackendUnavailable) else 500)
    _log.error("a request has failed", exc_info=error)
    return error_response(f"the server failed: {type(error).__name__}: {error}", 500)


def validation_refusal(error: ValidationError) -> RequestRefused:
    """pydantic's first error, with field and value."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = key_of(first["loc"])
    value = "" if first["type"] == "missing" else f" (it is {str(first['input'])[:80]!r})"
    return RequestRefused(f"{field or 'the body'}: {first['msg']}{value}", param=field or None, code=first["type"])


def error_response(
    message: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    **keys: Any,
) -> web.Response:
    """An error as OpenAI's API reports it, with further `keys` in the body."""
    body = {**keys, **error_body(redact(message), status, param, code)}
    return json_response(body, status, {**(headers or {}), **_HEADERS.get(status, {})})


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None, content_type: str = JSON
) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, headers=headers, content_type=content_type)


def metrics_response(samples: Iterable[Sample], about: Mapping[str, str]) -> web.Response:
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(text=metrics_text(samples, about), headers=headers)


def model_response(content: BaseModel) -> web.Response:
    return web.Response(text=content.model_dump_json(), content_type="application/json")


def prepare_process() -> None:
    """Prepares this process for serving: open files, and one heap. Raises ConfigError if it may open too few files."""
    if (allowed := raise_file_limit()) < MIN_OPEN_FILES:
        problem = f"this process may open {allowed} files (ulimit -n)"
        raise ConfigError(f"{problem}; a server needs at least {MIN_OPEN_FILES}")
    use_one_arena()
