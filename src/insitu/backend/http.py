"""What all routes share: responses, error handlers, request bodies, access, and the OpenAPI document."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, FailFast, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from insitu.errors import BackendUnavailable, InsituError, RequestRefused
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_format import error_body
from insitu.wire.http_limits import BODY_SECONDS
from insitu.wire.redaction import redact

RETRY_AFTER = "5"
"""Seconds after which a client may repeat a request that a full queue refused."""


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
    return JSON(error_body(redact(message), status, param, code), status_code=status, headers=headers)


def refused_response(error: RequestRefused) -> JSON:
    return error_response(str(error), error.status, error.param, error.code, refusal_headers(error.status))


def refusal_headers(status: int) -> dict[str, str]:
    return {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": RETRY_AFTER}}.get(status, {})


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestRefused):
        return refused_response(error)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(message, error.status_code, headers=error.headers)
    if isinstance(error, BackendUnavailable):
        return error_response(str(error), 503)
    known = isinstance(error, InsituError)
    return error_response(str(error) if known else f"the server failed: {type(error).__name__}: {error}", 500)


EXCEPTION_HANDLERS: dict[Any, Any] = dict.fromkeys((RequestRefused, HTTPException, InsituError, Exception), _on_error)


class StopAtFirstError(FailFast):
    """For lists in requests: an error per entry would take hundreds of times the memory of the request."""

    __hash__ = object.__hash__  # members of unions must be hashable


async def body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    """The request's body as it arrives. Raises RequestRefused if it stops arriving, or the client leaves."""
    more = True
    while more:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await receive()
        except TimeoutError:
            raise RequestRefused(f"no more of the body arrived for {BODY_SECONDS:g} s", status=408) from None
        if message["type"] == "http.disconnect":
            raise RequestRefused("the client disconnected before its request was complete", status=400)
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def read_body(receive: Receive, limit: int) -> bytes:
    """The request's body. Raises RequestRefused (413) as soon as it exceeds `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in body_chunks(receive):
        size += len(part)
        if size > limit:
            raise RequestRefused(f"the body is larger than {limit} bytes", status=413, code="too_large")
        parts.append(part)
    return b"".join(parts)


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


class AccessGate:
    """Refuses requests that `policy` does not allow; `public_paths` need no token."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy, public_paths: Collection[str]) -> None:
        self._app = app
        self._policy = policy
        self._public_paths = frozenset(public_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                self._policy.check(headers, is_public=scope["path"] in self._public_paths)
            except RequestRefused as error:
                await refused_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every response with a status of 400 or above."""

    error: ErrorDetail


class ApiRoute(Route):
    """One method of one path. `request` lists the line types of a JSON Lines body; `events` is the model of each event.

    `query` names its query parameters. `public` routes need no token.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Any,
        summary: str,
        *,
        request: Sequence[type[BaseModel]] = (),
        request_type: str = "application/json",
        response: type[BaseModel] | None = None,
        events: type[BaseModel] | None = None,
        headers: Sequence[str] = (),
        query: Sequence[str] = (),
        public: bool = False,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method = method
        self.summary = summary
        self.request = request
        self.request_type = request_type
        self.response = response
        self.events = events
        self.headers = headers
        self.query = query
        self.public = public

    @property
    def models(self) -> set[type[BaseModel]]:
        return {*self.request, *filter(None, (self.response, self.events))}

    def operation(self) -> dict[str, Any]:
        """The OpenAPI operation object."""
        path_params = [part[1:-1] for part in self.path_format.split("/") if part.startswith("{")]
        text = {"type": "string"}
        parameters: list[dict[str, Any]]
        parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in path_params]
        parameters += [{"name": name, "in": "header", "schema": text} for name in self.headers]
        parameters += [{"name": name, "in": "query", "schema": text} for name in self.query]
        content = {}
        if self.response is not None:
            content["application/json"] = {"schema": _ref(self.response)}
        if self.events is not None:
            content["text/event-stream"] = {"schema": _ref(self.events)}
        failure = {"application/json": {"schema": _ref(ErrorBody)}}
        responses = {
            "200": {"description": "Done", "content": content},
            "default": {"description": "Refused or failed", "content": failure},
        }
        operation: dict[str, Any] = {"summary": self.summary, "responses": responses}
        if parameters:
            operation["parameters"] = parameters
        if self.request:
            kinds = [_ref(model) for model in self.request]
            schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
            operation["requestBody"] = {"required": True, "content": {self.request_type: {"schema": schema}}}
        return operation


def openapi_document(routes: Sequence[ApiRoute], version: str) -> dict[str, Any]:
    models = {ErrorBody}.union(*(route.models for route in routes))
    ordered = sorted(models, key=lambda model: model.__name__)
    template = "#/components/schemas/{model}"
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=template)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path_format, {})[route.method.lower()] = route.operation()
    return {
        "openapi": "3.1.0",
        "info": {"title": "insitu backend", "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
