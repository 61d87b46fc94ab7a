"""What all routes share: JSON responses, error handlers, body limits, disconnects and the bearer token."""

import asyncio
import base64
import hmac
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from insitu.errors import BackendError, RequestRefused
from insitu.http_format import error_body

MAX_JOB_BYTES = 1 << 30
"""Limit for the body of a training request, decompressed."""
THREAD_PARSE_BYTES = 1 << 16
"""Bodies from this size on are parsed in a thread, so that they do not hold up other responses."""

T = TypeVar("T")


class JSON(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_response(
    message: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSON:
    return JSON(error_body(message, status, param, code), status_code=status, headers=headers)


def refused_response(error: RequestRefused) -> JSON:
    return error_response(str(error), error.status, error.param, error.code)


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return refused_response(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(message, error.status_code, headers=error.headers)


async def _on_backend(request: Request, error: Exception) -> Response:
    return error_response(str(error), 500)


async def _on_anything(request: Request, error: Exception) -> Response:
    return error_response(f"the server failed: {type(error).__name__}: {error}", 500)


EXCEPTION_HANDLERS: dict[Any, Any] = {
    RequestRefused: _on_refused,
    HTTPException: _on_http,
    BackendError: _on_backend,
    Exception: _on_anything,
}


async def read_body(receive: Receive, limit: int) -> bytes:
    """The request's body. Raises RequestRefused (413) as soon as it exceeds `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused("the client disconnected before its request was complete", status=400)
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise RequestRefused(f"the body is larger than {limit} bytes", status=413)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """Runs `parse`, for large bodies in a thread."""
    return parse(body) if len(body) < THREAD_PARSE_BYTES else await asyncio.to_thread(parse, body)


def parse_json(body: bytes) -> Any:
    """Raises RequestRefused (400) if the body is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from error


def validation_refusal(error: ValidationError) -> RequestRefused:
    """pydantic's first error, with field and value."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "function-")))
    value = "" if first["type"] == "missing" else f" (it is {str(first['input'])[:80]!r})"
    return RequestRefused(f"{field or 'the body'}: {first['msg']}{value}", param=field or None, code=first["type"])


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class TokenGate:
    """Requires `Authorization: Bearer TOKEN` except for `public_paths`.

    Basic authentication with the token as password is accepted too: that is what clients without token support send for
    `http://user:TOKEN@host:port`.
    """

    def __init__(self, app: ASGIApp, token: str, public_paths: Collection[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._public_paths and not self._authorized(scope):
            headers = {"www-authenticate": "Bearer"}
            response = error_response("the bearer token is missing or wrong", 401, headers=headers)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, credentials = header.partition(b" ")
        if scheme.lower() == b"basic":
            try:
                credentials = base64.b64decode(credentials, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(credentials, self._token)
