"""What our HTTP servers share: listening, access, request bodies, error responses and shutdown, on aiohttp.

async with listening(web.Application(middlewares=[guard(access)]), ("127.0.0.1", 0)) as (host, port):
    ...

A request's handler is cancelled when its client disconnects; `uncancelled` is for those that must not stop halfway.
"""

import asyncio
import logging
import re
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware
from pydantic import ValidationError

from insitu.errors import BackendUnavailable, InsituError, RequestRefused
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_format import error_body
from insitu.wire.http_limits import BODY_SECONDS, IDLE_SECONDS, prepare_process
from insitu.wire.redaction import redact

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)
_KEY = re.compile(r"/e/[^/\s'\"]+")
_BACKLOG = 4096
"""Connections waiting to be accepted: hundreds of agents may start at the same time."""
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}
"""Headers of refusals, by status."""


@asynccontextmanager
async def listening(
    app: web.Application, address: tuple[str, int] | socket.socket, *, grace: float = 0.5
) -> AsyncIterator[tuple[str, int]]:
    """Serves at an address (port 0: a free one) or a bound socket while the context is open; yields host and port.

    Idle connections are closed; in the end, requests get `grace` seconds. Raises ConfigError if the process may open
    too few files, and OSError if the address cannot be bound.
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
    try:
        if isinstance(address, socket.socket):
            await web.SockSite(runner, address, backlog=_BACKLOG).start()
        else:
            await web.TCPSite(runner, *address, backlog=_BACKLOG).start()
        yield runner.addresses[0][:2]
    finally:
        await runner.cleanup()


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


async def body_chunks(request: web.Request) -> AsyncIterator[bytes]:
    """The request's body as it arrives. Raises RequestRefused if it stops arriving, or cannot be read."""
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(BODY_SECONDS):
                part = await request.content.readany()
            yield part
    except TimeoutError:
        raise RequestRefused(f"no more of the body arrived for {BODY_SECONDS:g} s", status=408) from None
    except web.RequestPayloadError as error:
        raise RequestRefused(f"the body cannot be read: {error}", code="malformed_body") from None


async def read_body(request: web.Request, limit: int) -> bytes:
    """The body as it was sent. Raises RequestRefused (413) if it is larger than `limit` bytes."""
    too_large = RequestRefused(f"the body is larger than {limit} bytes", status=413, code="too_large")
    if (request.content_length or 0) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in body_chunks(request):
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def latin1_header(request: web.Request, name: str) -> str | None:
    """A header as Latin-1: aiohttp decodes UTF-8, and other bytes to surrogates, which cannot be written as JSON."""
    value = request.headers.get(name)
    return None if value is None else value.encode(errors="surrogateescape").decode("latin-1")


def guard(access: AccessPolicy, is_public: Callable[[web.Request], bool] = lambda request: False) -> Middleware:
    """Checks who sends a request, and turns errors into OpenAI-shaped bodies. `is_public` requests need no token."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            access.check(request.headers, is_public=is_public(request))
            return await handler(request)
        except ConnectionError:  # the client has left
            raise
        except Exception as error:  # reported to the client
            if request.writer.output_size > 0:  # too late: break the response off
                raise
            return _reported(request, error)

    return guarded


def _reported(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, RequestRefused):
        return error_response(str(error), error.status, error.param, error.code)
    if isinstance(error, ValidationError):
        return _reported(request, validation_refusal(error))
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
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "function-")))
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


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, headers=headers, content_type="application/json")
