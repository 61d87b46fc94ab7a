"""The endpoints of `art run` and of `art.ServerlessBackend`.

ART clients up to 0.5.7 call the `art run` endpoints directly; later ones through a backend class. In the serverless
protocol models have ids, and clients follow training jobs by polling their events.
"""

from collections.abc import Sequence
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from insitu.backend.http import ApiRoute
from insitu.backend.protocols import Services
from insitu.errors import RequestRefused
from insitu.integrations.art.server.jobs import ArtJob, ArtJobs, TrainRequest
from insitu.integrations.art.server.models import ArtModels, RegisteredModel
from insitu.integrations.art.server.responses import (
    TRAJECTORIES,
    Uploads,
    json_endpoint,
    read_as,
    read_json,
    stream_metrics,
)
from insitu.integrations.art.server.trajectories import (
    ArtKeepRequest,
    ArtLogRequest,
    ArtModel,
    ArtModelRequest,
    ArtPrepareRequest,
    ArtTrainRequest,
    ServerlessLogRequest,
    ServerlessStepsRequest,
    ServerlessTrainRequest,
    parse,
)
from insitu.wire.http_server import latin1_header

SERVERLESS_PREFIX = "/v1/preview"
"""Path prefix of the serverless endpoints; clients are configured with a base_url ending in `/v1`."""


_UNSUPPORTED = (
    "/_experimental_pull_from_s3",
    "/_experimental_push_to_s3",
    "/_experimental_fork_checkpoint",
    "/_experimental_deploy",
)


def art_run_routes(models: ArtModels, jobs: ArtJobs, uploads: Uploads, services: Services) -> list[ApiRoute]:
    """The `art run` routes, mounted at the server root."""
    endpoints = _ArtRunEndpoints(models, jobs, uploads, services.options.token)

    def get(path: str, handler: Any, summary: str, *, public: bool = False) -> ApiRoute:
        return ApiRoute("GET", path, json_endpoint(handler), summary, public=public)

    def post(path: str, handler: Any, summary: str, body: type[BaseModel] | None, **options: Any) -> ApiRoute:
        request = [body] if body is not None else []
        return ApiRoute("POST", path, json_endpoint(handler), f"ART: {summary}", request=request, **options)

    def unsupported(path: str) -> ApiRoute:
        return post(path, endpoints.unsupported, "not supported", ArtModelRequest)

    return [
        get("/healthcheck", endpoints.health, "ART: health check", public=True),
        post("/close", endpoints.close, "close a client's session; the server keeps running", None),
        post("/register", endpoints.register, "check that a model can be trained here", ArtModel),
        post("/_get_step", endpoints.step, "a model's latest step", ArtModel),
        post("/_prepare_backend_for_training", endpoints.prepare, "URL and API key for sampling", ArtPrepareRequest),
        post(
            "/_train_model",
            endpoints.train,
            "train; streams metrics per gradient step",
            ArtTrainRequest,
            headers=("Idempotency-Key",),
        ),
        post("/_log", endpoints.log, "log trajectories; stores their mean metrics for the current step", ArtLogRequest),
        post(
            "/_delete_checkpoints",
            endpoints.delete_checkpoints,
            "delete all but the latest and best checkpoints",
            ArtModel,
            query=("benchmark", "benchmark_smoothing"),
        ),
        post(
            "/_delete_checkpoint_files",
            endpoints.delete_checkpoint_files,
            "delete all but the latest and listed",
            ArtKeepRequest,
        ),
        *map(unsupported, _UNSUPPORTED),
        get("/art/jobs", endpoints.list_jobs, "Recent training requests from ART clients, including refused ones"),
        get("/art/jobs/{id}", endpoints.get_job, "One training request"),
    ]


def serverless_routes(models: ArtModels, jobs: ArtJobs, uploads: Uploads) -> list[ApiRoute]:
    endpoints = _ServerlessEndpoints(models, jobs, uploads)

    def route(
        method: str, path: str, handler: Any, summary: str, body: type[BaseModel] | None = None, **options: Any
    ) -> ApiRoute:
        path, summary, request = SERVERLESS_PREFIX + path, f"ART serverless: {summary}", [body] if body else []
        return ApiRoute(method, path, json_endpoint(handler), summary, request=request, **options)

    one, steps, pages = "/models/{id}", "/models/{id}/checkpoints", ("after", "limit")
    keys, train = ("Idempotency-Key",), ServerlessTrainRequest
    return [
        route("POST", "/models", endpoints.create, "create a model, or return the existing one", ArtModel),
        route("DELETE", one, endpoints.delete, "delete a model"),
        route("GET", steps, endpoints.checkpoints, "a model's checkpoints with metrics", query=("order", *pages)),
        route("DELETE", steps, endpoints.delete_checkpoints, "delete checkpoints by step", ServerlessStepsRequest),
        route("POST", f"{one}/log", endpoints.log, "log trajectories (same as /_log)", ServerlessLogRequest),
        route("POST", "/training-jobs", endpoints.train, "train", train, headers=keys),
        route("GET", "/training-jobs/{id}/events", endpoints.events, "a job's events so far", query=pages),
        route("POST", "/sft-training-jobs", endpoints.train_sft, "not supported"),
    ]


class _Endpoints:
    """One method per endpoint; each returns the JSON body of the response."""

    def __init__(self, models: ArtModels, jobs: ArtJobs, uploads: Uploads, token: str | None = None) -> None:
        self._models = models
        self._jobs = jobs
        self._uploads = uploads
        self._token = token

    async def _log(self, registered: RegisteredModel, body: ServerlessLogRequest) -> None:
        await registered.metrics_log.log(registered.step, body.split or "val", body.trajectory_groups)


class _ArtRunEndpoints(_Endpoints):
    """The endpoints of `art run`."""

    async def health(self, request: web.Request) -> dict[str, str]:
        return {"status": "ok"}

    async def close(self, request: web.Request) -> None:
        """Does nothing: the backend outlives its clients."""

    async def register(self, request: web.Request) -> None:
        """Only validates the model: clients time out after five seconds, so weights are loaded in `prepare`."""
        model = await read_as(ArtModel, request)
        if model.trainable:
            self._models.check(model)

    async def step(self, request: web.Request) -> int:
        model = await read_as(ArtModel, request)
        return (await self._models.open(model)).step if model.trainable else 0

    async def prepare(self, request: web.Request) -> list[str]:
        """Base URL and API key for sampling: the server's token if set, otherwise the client's `api_key`."""
        body = await read_as(ArtPrepareRequest, request)
        await self._models.open(body.model)
        return [f"{request.scheme}://{request.host}/v1", self._token or body.config.server_args.api_key or "default"]

    async def train(self, request: web.Request) -> web.StreamResponse:
        async with self._uploads.slot():
            data, digest = await read_json(request)
            model, key = parse(ArtModelRequest, data).model, latin1_header(request, "Idempotency-Key")
            train_request = TrainRequest(model, ArtTrainRequest, data, key, digest)
            return await stream_metrics(request, await self._jobs.start(train_request))

    async def log(self, request: web.Request) -> None:
        async with self._uploads.slot():
            body = await read_as(ArtLogRequest, request, TRAJECTORIES)
            if body.model.trainable:
                await self._log(await self._models.open(body.model), body)

    async def delete_checkpoints(self, request: web.Request) -> None:
        """Deletes all checkpoints except the latest and the best by the logged metrics."""
        registered = await self._models.open(await read_as(ArtModel, request))
        metric = request.query.get("benchmark", "val/reward")
        smoothing = _parse_smoothing(request.query.get("benchmark_smoothing", "1"))
        versions = registered.learner.versions
        best = registered.metrics_log.best(metric, smoothing, versions)
        await self._models.delete_steps(registered, set(versions) - {best})

    async def delete_checkpoint_files(self, request: web.Request) -> None:
        body = await read_as(ArtKeepRequest, request)
        registered = await self._models.open(body.model)
        await self._models.delete_steps(registered, set(registered.learner.versions) - {*body.steps_to_keep})

    async def unsupported(self, request: web.Request) -> None:
        model = (await read_as(ArtModelRequest, request)).model
        raise RequestRefused(
            f"{request.path} is not supported here; the checkpoints of {model.key} are in "
            f"{self._models.folder(model) / 'checkpoints'}",
            code="unsupported",
        )

    async def list_jobs(self, request: web.Request) -> dict[str, Any]:
        return self._jobs.state()

    async def get_job(self, request: web.Request) -> dict[str, Any]:
        return self._jobs.get(request.match_info["id"]).state()


def _parse_smoothing(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        problem = f"benchmark_smoothing must be in (0, 1], got {text!r}"
        raise RequestRefused(problem, status=422, param="benchmark_smoothing")
    return value


class _ServerlessEndpoints(_Endpoints):
    """The endpoints of `art.ServerlessBackend`."""

    async def create(self, request: web.Request) -> dict[str, Any]:
        registered = await self._models.open(await read_as(ArtModel, request))
        model = registered.model
        return {
            "id": registered.id,
            "entity": model.entity,
            "project": model.project,
            "name": model.name,
            "base_model": model.base_model,
            "run_id": None,
        }

    async def delete(self, request: web.Request) -> None:
        registered = self._get_model(request)
        if self._jobs.is_training(registered.model):
            problem = f"{registered.model.key} cannot be deleted while a training job is pending or running"
            raise RequestRefused(problem, status=409, code="model_busy")
        await self._models.delete(registered)

    async def checkpoints(self, request: web.Request) -> dict[str, Any]:
        registered = self._get_model(request)
        steps = sorted(registered.learner.versions, reverse=request.query.get("order") == "desc")
        metrics = registered.metrics_log.metrics
        entries = [{"id": f"{registered.id}-{step}", "step": step, "metrics": metrics(step)} for step in steps]
        return _paginate(entries, request)

    async def delete_checkpoints(self, request: web.Request) -> dict[str, Any]:
        steps = {*(await read_as(ServerlessStepsRequest, request)).steps}
        registered = self._get_model(request)
        deleted = await self._models.delete_steps(registered, steps)
        return {"deleted_count": len(deleted), "not_found_steps": sorted(steps - set(deleted))}

    async def log(self, request: web.Request) -> None:
        registered = self._get_model(request)
        async with self._uploads.slot():
            await self._log(registered, await read_as(ServerlessLogRequest, request, TRAJECTORIES))

    async def train(self, request: web.Request) -> dict[str, str]:
        async with self._uploads.slot():
            data, digest = await read_json(request)
            registered = self._models.get(str(data.get("model_id") if isinstance(data, dict) else None))
            model = registered.model.model_copy(update={"base_path": ""})  # the service has no legacy defaults
            key = latin1_header(request, "Idempotency-Key")
            train_request = TrainRequest(model, ServerlessTrainRequest, data, key, digest)
            return {"id": (await self._jobs.start(train_request)).job.state.id}

    async def events(self, request: web.Request) -> dict[str, Any]:
        """The events after `after`; clients repeat a request until they have seen a gradient step."""
        job = self._jobs.get(request.match_info["id"])
        events = _events(job)
        job.end_was_delivered = job.end_was_delivered or events[-1]["type"] == "training_ended"
        return _paginate(events, request)

    async def train_sft(self, request: web.Request) -> None:
        problem = "supervised training is not supported here: its data would be stored at W&B"
        raise RequestRefused(problem, code="unsupported")

    def _get_model(self, request: web.Request) -> RegisteredModel:
        return self._models.get(request.match_info["id"])


def _events(job: ArtJob) -> list[dict[str, Any]]:
    """Always starts with `training_started`; ART clients read its `num_sequences` as the number of gradient steps."""
    events: list[tuple[str, dict[str, Any]]] = [("training_started", {"num_sequences": job.steps})]
    events += [("gradient_step", metrics) for metrics in job.gradient_step_metrics()]
    state = job.job.state
    if state.status == "completed":
        events.append(("training_ended", {}))
    elif job.job.ended:
        events.append(("training_failed", {"error_message": f"job {state.id}: {state.message}"}))
    return [
        {"id": str(event_id), "type": event_type, "data": data} for event_id, (event_type, data) in enumerate(events)
    ]


def _paginate(entries: Sequence[dict[str, Any]], request: web.Request) -> dict[str, Any]:
    """Cursor pagination: up to `limit` entries after the one with id `after`."""
    ids = [entry["id"] for entry in entries]
    after = request.query.get("after")
    if after is not None and after not in ids:
        raise RequestRefused(f"unknown cursor after={after!r}", param="after")
    remaining = list(entries[ids.index(after) + 1 :] if after is not None else entries)
    limit = request.query.get("limit")
    if limit is not None and not limit.isdecimal():
        raise RequestRefused(f"limit must be a non-negative integer, got {limit!r}", param="limit")
    page = remaining[: int(limit)] if limit else remaining
    return {"data": page, "has_more": len(page) < len(remaining)}
