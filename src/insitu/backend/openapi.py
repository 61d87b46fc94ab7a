"""Routes that describe themselves, and the OpenAPI 3.1 document made of their descriptions."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route


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

    `public` routes need no token.
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
        self.public = public

    @property
    def models(self) -> set[type[BaseModel]]:
        return {*self.request, *filter(None, (self.response, self.events))}

    def operation(self) -> dict[str, Any]:
        """The OpenAPI operation object."""
        path_params = [part[1:-1] for part in self.path_format.split("/") if part.startswith("{")]
        text = {"type": "string"}
        parameters: list[dict[str, Any]] = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in path_params
        ]
        parameters += [{"name": name, "in": "header", "schema": text} for name in self.headers]
        content = {}
        if self.response is not None:
            content["application/json"] = {"schema": _ref(self.response)}
        if self.events is not None:
            content["text/event-stream"] = {"schema": _ref(self.events)}
        operation: dict[str, Any] = {
            "summary": self.summary,
            "responses": {
                "200": {"description": "Done", "content": content},
                "default": {
                    "description": "Refused or failed",
                    "content": {"application/json": {"schema": _ref(ErrorBody)}},
                },
            },
        }
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
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
