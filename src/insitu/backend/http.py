"""Routes of the backend with what its OpenAPI document says about them."""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel, FailFast
from pydantic.json_schema import models_json_schema

from insitu.schemas.documentation import DocumentedSchema
from insitu.wire.http_server import Handler, uncancelled


class StopAtFirstError(FailFast):
    """For lists in requests: an error per entry would take hundreds of times the memory of the request."""

    __hash__ = object.__hash__  # members of unions must be hashable


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every response with a status of 400 or above."""

    error: ErrorDetail


@dataclass(frozen=True)
class ApiRoute:
    """One method of one path. `request` lists the line types of a JSON Lines body; `events` is the model of each event.

    `query` names its query parameters. `public` routes need no token. The endpoint runs to its end even if the client
    disconnects, unless its response may be `streamed`, or has events.
    """

    method: str
    path: str
    endpoint: Handler
    summary: str
    _: KW_ONLY
    request: Sequence[type[BaseModel]] = ()
    request_type: str = "application/json"
    response: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    streamed: bool = False
    headers: Sequence[str] = ()
    query: Sequence[str] = ()
    public: bool = False

    def add_to(self, app: web.Application) -> None:
        handler = self.endpoint if self.streamed or self.events is not None else uncancelled(self.endpoint)
        if self.method == "GET":
            app.router.add_get(self.path, handler)  # and HEAD
        else:
            app.router.add_route(self.method, self.path, handler)

    @property
    def documented_path(self) -> str:
        """Without the patterns of its parameters."""
        return re.sub(r":[^}]*}", "}", self.path)

    def operation(self) -> dict[str, Any]:
        """The OpenAPI operation object."""
        path_params = [part[1:-1] for part in self.documented_path.split("/") if part.startswith("{")]
        places = ("path", path_params), ("header", self.headers), ("query", self.query)
        parameters: list[dict[str, Any]] = [
            {"name": name, "in": place, "schema": {"type": "string"}, **({"required": True} if place == "path" else {})}
            for place, names in places
            for name in names
        ]
        kinds = {"application/json": self.response, "text/event-stream": self.events}
        content = {kind: {"schema": _ref(model)} for kind, model in kinds.items() if model is not None}
        failure = {"application/json": {"schema": _ref(ErrorBody)}}
        responses = {
            "200": {"description": "Done", "content": content},
            "default": {"description": "Refused or failed", "content": failure},
        }
        operation: dict[str, Any] = {"summary": self.summary, "responses": responses}
        if parameters:
            operation["parameters"] = parameters
        if self.request:
            schemas = [_ref(model) for model in self.request]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            operation["requestBody"] = {"required": True, "content": {self.request_type: {"schema": schema}}}
        return operation


def openapi_document(routes: Sequence[ApiRoute], version: str) -> dict[str, Any]:
    named = (model for route in routes for model in (*route.request, route.response, route.events, ErrorBody))
    ordered = sorted({*filter(None, named)}, key=lambda model: model.__name__)
    template = "#/components/schemas/{model}"
    inputs = [(model, "validation") for model in ordered]
    _, schemas = models_json_schema(inputs, ref_template=template, schema_generator=DocumentedSchema)  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.documented_path, {})[route.method.lower()] = route.operation()
    return {
        "openapi": "3.1.0",
        "info": {"title": "insitu backend", "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
