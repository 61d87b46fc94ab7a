"""What every route shares: JSON answers, errors in OpenAI's shape, body limits and the bearer token."""

import base64
import hmac
import logging
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from insitu.errors import BackendError, RequestRefused

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/healthcheck")
"""Which tell whether the server is up, and nothing else."""
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every answer from 400 on."""

    error: ErrorDetail


class JSON(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
    what = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(what, error.status_code, headers=error.headers)


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
    """The request's body. Raises RequestRefused (413) as soon as it is larger than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused("the client left before its request was complete", status=400)
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise RequestRefused(f"the body is larger than {limit} bytes", status=413)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class TokenGate:
    """Lets only requests with `Authorization: Bearer TOKEN` through; the health checks are open.

    Or with the token as the password of basic authentication, which is what clients that know no tokens make of
    `http://user:TOKEN@host:port`.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._admits(scope):
            answer = error_response("the bearer token is missing or wrong", 401, headers={"www-authenticate": "Bearer"})
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, credentials = given.partition(b" ")
        if scheme.lower() == b"basic":
            try:
                credentials = base64.b64decode(credentials, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(credentials, self._token)
