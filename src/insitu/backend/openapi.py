"""The OpenAPI 3.1 document of the server, written from the models its routes parse and answer with."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from insitu.backend.http import ErrorBody
from insitu.backend.inference.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from insitu.backend.inference.text import TextCompletion, TextRequest
from insitu.backend.training.uploads import JobHeader
from insitu.schemas.episodes import TrainingRow
from insitu.schemas.training_jobs import JobState


class Health(BaseModel):
    """The server is up; `policy_version` is that of the newest weights."""

    status: str
    policy_version: int


class ModelEntry(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    policy_version: int | None = None


class ModelList(BaseModel):
    object: str
    data: list[ModelEntry]


@dataclass(frozen=True)
class Operation:
    """One method of one path. `lines` are the kinds of line of a body, or of events, that is not a single object."""

    summary: str
    takes: tuple[type[BaseModel], ...] = ()
    takes_type: str = "application/json"
    gives: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    headers: tuple[str, ...] = ()


OPERATIONS = {
    ("GET", "/health"): Operation("Whether the server serves", gives=Health),
    ("GET", "/v1/models"): Operation("The names of the model and its versions", gives=ModelList),
    ("GET", "/v1/models/{model}"): Operation("One of them", gives=ModelEntry),
    ("POST", "/v1/chat/completions"): Operation(
        "Sample an answer; with `stream`, events that end with [DONE]",
        takes=(ChatRequest,),
        gives=ChatCompletion,
        events=ChatCompletionChunk,
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue a text; with `stream`, events that end with [DONE]",
        takes=(TextRequest,),
        gives=TextCompletion,
        events=TextCompletion,
    ),
    ("GET", "/openapi.json"): Operation("This document"),
    ("POST", "/v1/train/jobs"): Operation(
        "Submit a training job: gzipped JSON lines, the settings, then the rows",
        takes=(JobHeader, TrainingRow),
        takes_type="application/x-ndjson",
        gives=JobState,
        headers=("Idempotency-Key",),
    ),
    ("GET", "/v1/train/jobs/{id}"): Operation("How a job is doing", gives=JobState),
    ("GET", "/v1/train/jobs/{id}/events"): Operation("A job's states as they change", events=JobState),
    ("POST", "/v1/train/jobs/{id}/cancel"): Operation("Stop a job", gives=JobState),
    ("GET", "/healthcheck"): Operation("Whether the server serves, as ART asks"),
    ("GET", "/metrics"): Operation("Requests under way, by vLLM's names"),
    ("GET", "/art/jobs"): Operation("Latest training requests of ART clients, with their errors"),
    ("GET", "/art/jobs/{id}"): Operation("One of them"),
    ("POST", "/close"): Operation("ART: a client goes; the server stays"),
    ("POST", "/register"): Operation("ART: whether a model can be trained here"),
    ("POST", "/_get_step"): Operation("ART: a model's latest step"),
    ("POST", "/_prepare_backend_for_training"): Operation("ART: where to sample from, and the key"),
    ("POST", "/_train_model"): Operation(
        "ART: train; a line of metrics for each gradient step", headers=("Idempotency-Key",)
    ),
    ("POST", "/_log"): Operation("ART: trajectories whose means are kept with the step"),
    ("POST", "/_delete_checkpoints"): Operation("ART: keep the latest and the best checkpoint"),
    ("POST", "/_delete_checkpoint_files"): Operation("ART: keep the named checkpoints and the latest"),
    ("POST", "/_experimental_pull_from_s3"): Operation("ART: refused"),
    ("POST", "/_experimental_push_to_s3"): Operation("ART: refused"),
    ("POST", "/_experimental_fork_checkpoint"): Operation("ART: refused"),
    ("POST", "/_experimental_deploy"): Operation("ART: refused"),
    ("POST", "/v1/preview/models"): Operation("ART serverless: a model, new or as it is"),
    ("DELETE", "/v1/preview/models/{id}"): Operation("ART serverless: delete a model"),
    ("GET", "/v1/preview/models/{id}/checkpoints"): Operation("ART serverless: its steps with their metrics"),
    ("DELETE", "/v1/preview/models/{id}/checkpoints"): Operation("ART serverless: delete some"),
    ("POST", "/v1/preview/models/{id}/log"): Operation("ART serverless: as /_log"),
    ("POST", "/v1/preview/training-jobs"): Operation("ART serverless: train", headers=("Idempotency-Key",)),
    ("GET", "/v1/preview/training-jobs/{id}/events"): Operation("ART serverless: a job's events so far"),
    ("POST", "/v1/preview/sft-training-jobs"): Operation("ART serverless: refused"),
}


def document(routes: list[BaseRoute], version: str) -> dict[str, Any]:
    """The document of the routes that are served."""
    served = {
        (method, route.path_format): OPERATIONS.get((method, route.path_format), Operation(route.name))
        for route in routes
        if isinstance(route, Route)
        for method in sorted(route.methods or {"POST"})
        if method != "HEAD"
    }
    models: set[type[BaseModel]] = {ErrorBody}
    for operation in served.values():
        models |= {*operation.takes, *filter(None, (operation.gives, operation.events))}
    ordered = sorted(models, key=lambda model: model.__name__)
    template = "#/components/schemas/{model}"
    _, schemas = models_json_schema([(m, "validation") for m in ordered], ref_template=template)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in served.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation)
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


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    text = {"type": "string"}
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    parameters += [{"name": name, "in": "header", "schema": text} for name in operation.headers]
    content = {}
    if operation.gives is not None:
        content["application/json"] = {"schema": _ref(operation.gives)}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": _ref(operation.events)}
    spelt: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Done", "content": content},
            "default": {"description": "Refused or failed", "content": _json(ErrorBody)},
        },
    }
    if parameters:
        spelt["parameters"] = parameters
    if operation.takes:
        kinds = [_ref(model) for model in operation.takes]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        spelt["requestBody"] = {"required": True, "content": {operation.takes_type: {"schema": schema}}}
    return spelt


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(model)}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
