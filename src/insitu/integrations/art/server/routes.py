"""The endpoints of `art run` and of `art.ServerlessBackend`.

ART clients up to 0.5.7 call the `art run` endpoints directly; later ones through a backend class. In the serverless
protocol models have ids, and clients follow training jobs by polling their events.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
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
    Result,
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
    TrainingBody,
    parse,
)
from insitu.wire.http_server import latin1_header

_UNSUPPORTED = ("pull_from_s3", "push_to_s3", "fork_checkpoint", "deploy")
_KEY = "Idempotency-Key"
_SMOOTHING = "benchmark_smoothing"


def routes(services: Services) -> list[ApiRoute]:
    models = ArtModels(services)
    parts = models, ArtJobs(models, services), Uploads(), services.options.token
    return [*_art_run_routes(_ArtRunEndpoints(*parts)), *_serverless_routes(_ServerlessEndpoints(*parts))]


def _routes_below(prefix: str, title: str) -> Callable[..., ApiRoute]:
    """A function that makes a route below a path; `title` begins its summary."""

    def route(
        method: str, path: str, handler: Result, summary: str, body: type[BaseModel] | None = None, **options: Any
    ) -> ApiRoute:
        request = [body] if body is not None else []
        return ApiRoute(method, prefix + path, json_endpoint(handler), title + summary, request=request, **options)

    return route


def _art_run_routes(run: "_ArtRunEndpoints") -> list[ApiRoute]:
    """The routes of `art run`, mounted at the server root."""
    route, about_jobs, keys = _routes_below("", "ART: "), _routes_below("/art/jobs", ""), (_KEY,)
    log = "log trajectories; stores their mean metrics for the current step"
    best = "delete all but the latest and best checkpoints"
    return [
        route("GET", "/healthcheck", run.health, "health check", public=True),
        route("POST", "/close", run.close, "close a client's session; the server keeps running"),
        route("POST", "/register", run.register, "check that a model can be trained here", ArtModel),
        route("POST", "/_get_step", run.step, "a model's latest step", ArtModel),
        route("POST", "/_prepare_backend_for_training", run.prepare, "URL and API key for sampling", ArtPrepareRequest),
        route(
            "POST",
            "/_train_model",
            run.train,
            "train; streams metrics per gradient step",
            ArtTrainRequest,
            headers=keys,
        ),
        route("POST", "/_log", run.log, log, ArtLogRequest),
        route("POST", "/_delete_checkpoints", run.keep_best, best, ArtModel, query=("benchmark", _SMOOTHING)),
        route("POST", "/_delete_checkpoint_files", run.keep, "delete all but the latest and listed", ArtKeepRequest),
        *(
            route("POST", f"/_experimental_{name}", run.unsupported, "not supported", ArtModelRequest)
            for name in _UNSUPPORTED
        ),
        about_jobs("GET", "", run.list_jobs, "Recent training requests from ART clients, including refused ones"),
        about_jobs("GET", "/{id}", run.get_job, "One training request"),
    ]


def _serverless_routes(serverless: "_ServerlessEndpoints") -> list[ApiRoute]:
    """The routes of `art.ServerlessBackend`, whose clients are configured with a base_url ending in `/v1`."""
    route, model, pages = _routes_below("/v1/preview", "ART serverless: "), "/models/{id}", ("after", "limit")
    checkpoints, by_step = f"{model}/checkpoints", "delete checkpoints by step"
    listing = "a model's checkpoints with metrics"
    return [
        route("POST", "/models", serverless.create, "create a model, or return the existing one", ArtModel),
        route("DELETE", model, serverless.delete, "delete a model"),
        route("GET", checkpoints, serverless.checkpoints, listing, query=("order", *pages)),
        route("DELETE", checkpoints, serverless.delete_checkpoints, by_step, ServerlessStepsRequest),
        route("POST", f"{model}/log", serverless.log, "log trajectories (same as /_log)", ServerlessLogRequest),
        route("POST", "/training-jobs", serverless.train, "train", ServerlessTrainRequest, headers=(_KEY,)),
        route("GET", "/training-jobs/{id}/events", serverless.events, "a job's events so far", query=pages),
        route("POST", "/sft-training-jobs", serverless.train_sft, "not supported"),
    ]


class _Endpoints:
    """One method per endpoint; each returns the JSON body of the response."""

    def __init__(self, models: ArtModels, jobs: ArtJobs, uploads: Uploads, token: str | None) -> None:
        self._models = models
        self._jobs = jobs
        self._uploads = uploads
        self._token = token

    async def _log(self, registered: RegisteredModel, body: ServerlessLogRequest) -> None:
        await registered.metrics_log.log(registered.step, body.split or "val", body.trajectory_groups)

    async def _start(
        self, request: web.Request, model_of: Callable[[Any], ArtModel], kind: type[TrainingBody]
    ) -> ArtJob:
        """Reads a training request, whose body says which model, and starts its job."""
        data, digest = await read_json(request)
        key = latin1_header(request, _KEY)
        return await self._jobs.start(TrainRequest(model_of(data), kind, data, key, digest))


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
            job = await self._start(request, lambda data: parse(ArtModelRequest, data).model, ArtTrainRequest)
            return await stream_metrics(request, job)

    async def log(self, request: web.Request) -> None:
        async with self._uploads.slot():
            body = await read_as(ArtLogRequest, request, TRAJECTORIES)
            if body.model.trainable:
                await self._log(await self._models.open(body.model), body)

    async def keep_best(self, request: web.Request) -> None:
        """Deletes all checkpoints except the latest and the best by the logged metrics."""
        registered = await self._models.open(await read_as(ArtModel, request))
        metric = request.query.get("benchmark", "val/reward")
        versions = registered.learner.versions
        best = registered.metrics_log.best(metric, _smoothing(request), versions)
        await self._models.delete_steps(registered, set(versions) - {best})

    async def keep(self, request: web.Request) -> None:
        """Deletes all checkpoints except the latest and the listed ones."""
        body = await read_as(ArtKeepRequest, request)
        registered = await self._models.open(body.model)
        await self._models.delete_steps(registered, set(registered.learner.versions) - {*body.steps_to_keep})

    async def unsupported(self, request: web.Request) -> None:
        model = (await read_as(ArtModelRequest, request)).model
        where = f"the checkpoints of {model.key} are in {self._models.folder(model) / 'checkpoints'}"
        raise RequestRefused(f"{request.path} is not supported here; {where}", code="unsupported")

    async def list_jobs(self, request: web.Request) -> dict[str, Any]:
        return self._jobs.state()

    async def get_job(self, request: web.Request) -> dict[str, Any]:
        return self._jobs.get(request.match_info["id"]).state()


def _smoothing(request: web.Request) -> float:
    text = request.query.get(_SMOOTHING, "1")
    with suppress(ValueError):
        if 0 < (value := float(text)) <= 1:
            return value
    raise RequestRefused(f"{_SMOOTHING} must be in (0, 1], got {text!r}", status=422, param=_SMOOTHING)


class _ServerlessEndpoints(_Endpoints):
    """The endpoints of `art.ServerlessBackend`."""

    async def create(self, request: web.Request) -> dict[str, Any]:
        registered = await self._models.open(await read_as(ArtModel, request))
        names = registered.model.model_dump(include={"entity", "project", "name", "base_model"})
        return {"id": registered.id, **names, "run_id": None}

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
        def model_of(data: Any) -> ArtModel:
            registered = self._models.get(str(data.get("model_id") if isinstance(data, dict) else None))
            return registered.model.model_copy(update={"base_path": ""})  # the service has no legacy defaults

        async with self._uploads.slot():
            return {"id": (await self._start(request, model_of, ServerlessTrainRequest)).job.state.id}

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
    return [{"id": str(index), "type": kind, "data": data} for index, (kind, data) in enumerate(events)]


def _paginate(entries: Sequence[dict[str, Any]], request: web.Request) -> dict[str, Any]:
    """Cursor pagination: up to `limit` entries after the one with id `after`."""
    ids = [entry["id"] for entry in entries]
    after, limit = request.query.get("after"), request.query.get("limit")
    if after is not None and after not in ids:
        raise RequestRefused(f"unknown cursor after={after!r}", param="after")
    if limit is not None and not limit.isdecimal():
        raise RequestRefused(f"limit must be a non-negative integer, got {limit!r}", param="limit")
    remaining = entries[ids.index(after) + 1 :] if after is not None else entries
    page = remaining[: int(limit)] if limit else remaining
    return {"data": page, "has_more": len(page) < len(remaining)}
