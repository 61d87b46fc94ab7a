"""What our aiohttp servers share: connections, their log, request bodies, access and error responses."""

import asyncio
import logging
import re
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware
from pydantic import ValidationError

from insitu.errors import RequestRefused
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_format import error_body
from insitu.wire.http_limits import BODY_SECONDS, IDLE_SECONDS, prepare_process
from insitu.wire.redaction import redact

_log = logging.getLogger(__name__)
_KEY = re.compile(r"/e/[^/\s'\"]+")


def server_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """A runner for `app` that closes idle connections. Raises ConfigError if the process may open too few files."""
    prepare_process()
    _log.addFilter(_without_keys)
    return web.AppRunner(
        app, access_log=None, handler_cancellation=True, keepalive_timeout=IDLE_SECONDS, logger=_log, **options
    )


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


async def read_body(request: web.Request, limit: int) -> bytes:
    """The body as it was sent. Raises RequestRefused if it is larger than `limit` bytes or stops arriving."""
    too_large = RequestRefused(f"the body is larger than {limit} bytes", status=413, code="too_large")
    if (request.content_length or 0) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(BODY_SECONDS):
                parts.append(await request.content.readany())
            size += len(parts[-1])
            if size > limit:
                raise too_large
    except TimeoutError:
        raise RequestRefused(f"no more of the body arrived for {BODY_SECONDS:g} s", status=408) from None
    except web.RequestPayloadError as error:
        raise RequestRefused(f"the body cannot be read: {error}", code="malformed_body") from None
    return b"".join(parts)


def guard(access: AccessPolicy, is_public: Callable[[web.Request], bool]) -> Middleware:
    """Checks who sends a request, and turns errors into OpenAI-shaped bodies. `is_public` requests need no token."""

    @web.middleware
    async def guarded(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            access.check(request.headers, is_public=is_public(request))
            return await handler(request)
        except RequestRefused as error:
            return error_response(str(error), error.status, error.param, error.code)
        except web.HTTPException as error:
            return error_response(f"{request.method} {request.path}: {error.text or error.reason}", error.status)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            param = ".".join(map(str, first["loc"])) or None
            return error_response(f"{param or 'the body'}: {first['msg']}", 400, param)

    return guarded


def error_response(message: str, status: int, param: str | None = None, code: str | None = None) -> web.Response:
    """An error as OpenAI's API reports it."""
    content = error_body(redact(message), status, param, code)
    return web.json_response(content, status=status)
