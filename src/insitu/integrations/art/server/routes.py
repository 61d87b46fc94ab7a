"""The endpoints of `art run` and of `art.ServerlessBackend`, their request bodies and responses.

ART clients up to 0.5.7 call the `art run` endpoints directly; later ones through a backend class. In the serverless
protocol models have ids, and clients follow training jobs by polling their events.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from pydantic import BaseModel

from insitu.backend.http import ApiRoute
from insitu.backend.protocols import Services
from insitu.errors import BackendError, BackendUnavailable, JobFailed, RequestRefused
from insitu.integrations.art.server import trajectories as bodies
from insitu.integrations.art.server.jobs import ArtJob, ArtJobs, TrainRequest
from insitu.integrations.art.server.models import ArtModels, RegisteredModel
from insitu.integrations.art.server.trajectories import ArtModel, parse
from insitu.wire.http_format import BODY_DIFFERS, IDEMPOTENCY_KEY, parse_count
from insitu.wire.http_server import error_response, idempotency_key, json_response, parse_body, parse_json, read_body

logger = logging.getLogger(__name__)

_UNSUPPORTED = ("pull_from_s3", "push_to_s3", "fork_checkpoint", "deploy")
_SMOOTHING = "benchmark_smoothing"

Result = Callable[..., Awaitable[Any]]
"""A request, and its body if it has one, to the JSON body of the response, or to the response."""


class _Body(NamedTuple):
    """A request body that is still to be parsed; the digest is that of its bytes."""

    data: Any
    digest: str


async def _read(request: web.Request, kind: type[BaseModel]) -> Any:
    """A request body as `kind`; as a `_Body` if it trains, because only a request that is new is parsed.

    With trajectories it may be large: a sampled token with its logprobs takes about 100 bytes and 8 values, and a body
    may hold about two million.
    """
    size, values = (2**28, 2**24) if issubclass(kind, bodies.ArtGroups) else (2**20, 2**16)

    def load(content: bytes) -> _Body:
        return _Body(parse_json(content, max_values=values), hashlib.blake2b(content, digest_size=16).hexdigest())

    body = await parse_body(load, await read_body(request, size))
    return body if issubclass(kind, bodies.TrainingBody) else await asyncio.to_thread(parse, kind, body.data)


class _Uploads:
    """Limits how many bodies with trajectories are in memory at the same time."""

    def __init__(self, parallel: int = 2, waiting: int = 64) -> None:
        self._slots, self._places = asyncio.Semaphore(parallel), asyncio.Semaphore(parallel + waiting)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a slot. Raises RequestRefused (429) if too many requests are waiting already."""
        if self._places.locked():
            raise RequestRefused("too many requests with trajectories are waiting", status=429, code="queue_full")
        async with self._places, self._slots:
            yield


def _error(error: BackendError) -> web.Response:
    """In ART's format (`detail`) and OpenAI's (`error`)."""
    if isinstance(error, RequestRefused):
        return error_response(str(error), error.status, error.param, error.code, detail=str(error))
    return error_response(str(error), 503 if isinstance(error, BackendUnavailable) else 500, detail=str(error))


def routes(services: Services) -> list[ApiRoute]:
    models, uploads = ArtModels(services), _Uploads()
    parts = models, ArtJobs(models, services), services.options.token
    art_run = _art_run_routes(_ArtRunEndpoints(*parts), uploads)
    return art_run + _serverless_routes(_ServerlessEndpoints(*parts), uploads)


def _routes_below(prefix: str, title: str, uploads: _Uploads) -> Callable[..., ApiRoute]:
    """A function that makes a route below a path; `title` begins its summary."""

    def route(
        method: str, path: str, handler: Result, summary: str, kind: type[BaseModel] | None = None, **options: Any
    ) -> ApiRoute:
        async def endpoint(request: web.Request) -> web.StreamResponse:
            try:
                if kind is None:
                    result = await handler(request)
                else:
                    async with uploads.slot() if issubclass(kind, bodies.ArtGroups) else nullcontext():
                        result = await handler(request, await _read(request, kind))
            except BackendError as error:
                if isinstance(error, RequestRefused):
                    logger.warning("%s %r refused: %s", request.method, request.path, error)
                return _error(error)
            return result if isinstance(result, web.StreamResponse) else json_response(result)

        return ApiRoute(method, prefix + path, endpoint, title + summary, request=[kind] if kind else [], **options)

    return route


def _art_run_routes(run: "_ArtRunEndpoints", uploads: _Uploads) -> list[ApiRoute]:
    """The routes of `art run`, mounted at the server root."""
    route, about_jobs = _routes_below("", "ART: ", uploads), _routes_below("/art/jobs", "", uploads)
    sampling, train = "URL and API key for sampling", "train; streams metrics per gradient step"
    log = "log trajectories; stores their mean metrics for the current step"
    best, listed = "delete all but the latest and best checkpoints", "delete all but the latest and listed"
    return [
        route("GET", "/healthcheck", run.health, "health check", public=True),
        route("POST", "/close", run.close, "close a client's session; the server keeps running"),
        route("POST", "/register", run.register, "check that a model can be trained here", ArtModel),
        route("POST", "/_get_step", run.step, "a model's latest step", ArtModel),
        route("POST", "/_prepare_backend_for_training", run.prepare, sampling, bodies.ArtPrepareRequest),
        route("POST", "/_train_model", run.train, train, bodies.ArtTrainRequest, headers=(IDEMPOTENCY_KEY,)),
        route("POST", "/_log", run.log, log, bodies.ArtLogRequest),
        route("POST", "/_delete_checkpoints", run.keep_best, best, ArtModel, query=("benchmark", _SMOOTHING)),
        route("POST", "/_delete_checkpoint_files", run.keep, listed, bodies.ArtKeepRequest),
        *(
            route("POST", f"/_experimental_{name}", run.unsupported, "not supported", bodies.ArtModelRequest)
            for name in _UNSUPPORTED
        ),
        about_jobs("GET", "", run.list_jobs, "Recent training requests from ART clients, including refused ones"),
        about_jobs("GET", "/{id}", run.get_job, "One training request"),
    ]


def _serverless_routes(serverless: "_ServerlessEndpoints", uploads: _Uploads) -> list[ApiRoute]:
    """The routes of `art.ServerlessBackend`, whose clients are configured with a base_url ending in `/v1`."""
    route = _routes_below("/v1/preview", "ART serverless: ", uploads)
    model, pages, keyed = "/models/{id}", ("after", "limit"), (IDEMPOTENCY_KEY,)
    checkpoints, by_step = f"{model}/checkpoints", "delete checkpoints by step"
    listing = "a model's checkpoints with metrics"
    return [
        route("POST", "/models", serverless.create, "create a model, or return the existing one", ArtModel),
        route("DELETE", model, serverless.delete, "delete a model"),
        route("GET", checkpoints, serverless.checkpoints, listing, query=("order", *pages)),
        route("DELETE", checkpoints, serverless.delete_checkpoints, by_step, bodies.ServerlessStepsRequest),
        route("POST", f"{model}/log", serverless.log, "log trajectories (same as /_log)", bodies.ServerlessLogRequest),
        route("POST", "/training-jobs", serverless.train, "train", bodies.ServerlessTrainRequest, headers=keyed),
        route("GET", "/training-jobs/{id}/events", serverless.events, "a job's events so far", query=pages),
        route("POST", "/sft-training-jobs", serverless.train_sft, "not supported"),
    ]


class _Endpoints:
    """One method per endpoint."""

    def __init__(self, models: ArtModels, jobs: ArtJobs, token: str | None) -> None:
        self._models = models
        self._jobs = jobs
        self._token = token

    async def _log(self, registered: RegisteredModel, body: bodies.ServerlessLogRequest) -> None:
        await registered.metrics_log.log(registered.step, body.split or "val", body.trajectory_groups)


class _ArtRunEndpoints(_Endpoints):
    """The endpoints of `art run`."""

    async def health(self, request: web.Request) -> dict[str, str]:
        return {"status": "ok"}

    async def close(self, request: web.Request) -> None:
        """Does nothing: the backend outlives its clients."""

    async def register(self, request: web.Request, model: ArtModel) -> None:
        """Only validates the model: clients time out after five seconds, so weights are loaded in `prepare`."""
        if model.trainable:
            self._models.check(model)

    async def step(self, request: web.Request, model: ArtModel) -> int:
        return (await self._models.open(model)).step if model.trainable else 0

    async def prepare(self, request: web.Request, body: bodies.ArtPrepareRequest) -> list[str]:
        """Base URL and API key for sampling: the server's token if set, otherwise the client's `api_key`."""
        await self._models.open(body.model)
        return [f"{request.scheme}://{request.host}/v1", self._token or body.config.server_args.api_key or "default"]

    async def train(self, request: web.Request, body: _Body) -> web.StreamResponse:
        model = parse(bodies.ArtModelRequest, body.data).model
        job = await self._jobs.start(TrainRequest(model, bodies.ArtTrainRequest, *body, idempotency_key(request)))
        differs = job.job.differs_from(body.digest)
        del body  # it may be large, and the job may take long
        return await _stream_metrics(request, job, {BODY_DIFFERS: "true"} if differs else {})

    async def log(self, request: web.Request, body: bodies.ArtLogRequest) -> None:
        if body.model.trainable:
            await self._log(await self._models.open(body.model), body)

    async def keep_best(self, request: web.Request, model: ArtModel) -> None:
        """Deletes all checkpoints except the latest and the best by the logged metrics."""
        registered = await self._models.open(model)
        versions = registered.learner.versions
        best = registered.metrics_log.best(request.query.get("benchmark", "val/reward"), _smoothing(request), versions)
        await self._models.delete_steps(registered, set(versions) - {best})

    async def keep(self, request: web.Request, body: bodies.ArtKeepRequest) -> None:
        """Deletes all checkpoints except the latest and the listed ones."""
        registered = await self._models.open(body.model)
        await self._models.delete_steps(registered, set(registered.learner.versions) - {*body.steps_to_keep})

    async def unsupported(self, request: web.Request, body: bodies.ArtModelRequest) -> None:
        where = f"the checkpoints of {body.model.key} are in {self._models.folder(body.model) / 'checkpoints'}"
        raise RequestRefused(f"{request.path} is not supported here; {where}", code="unsupported")

    async def list_jobs(self, request: web.Request) -> dict[str, Any]:
        return self._jobs.state()

    async def get_job(self, request: web.Request) -> dict[str, Any]:
        return self._jobs.get(request.match_info["id"]).state()


async def _stream_metrics(request: web.Request, job: ArtJob, headers: dict[str, str]) -> web.StreamResponse:
    """Streams a job's metrics as JSON lines while it trains, after these headers.

    An error before the first line becomes an error response. A later one breaks the connection, as ART does; its cause
    is in the log and at /art/jobs.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"} | headers)
    try:
        async for line in job.metric_lines():
            if not response.prepared:
                await response.prepare(request)
            await response.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    except (JobFailed, RequestRefused) as error:
        logger.error("model %s: %s", job.model.key, error)
        if not response.prepared:
            return _error(error)
        if request.transport is not None:
            request.transport.abort()
        return response
    # or: another response of the same job may have been delivered first
    job.end_was_delivered = job.end_was_delivered or request.transport is not None
    return response


def _smoothing(request: web.Request) -> float:
    text = request.query.get(_SMOOTHING, "1")
    with suppress(ValueError):
        if 0 < (value := float(text)) <= 1:
            return value
    raise RequestRefused(f"{_SMOOTHING} must be in (0, 1], got {text!r}", status=422, param=_SMOOTHING)


class _ServerlessEndpoints(_Endpoints):
    """The endpoints of `art.ServerlessBackend`."""

    async def create(self, request: web.Request, model: ArtModel) -> dict[str, Any]:
        registered = await self._models.open(model)
        names = registered.model.model_dump(include={"entity", "project", "name", "base_model"})
        return {"id": registered.id, **names, "run_id": None}

    async def delete(self, request: web.Request) -> None:
        await self._jobs.delete_model(request.match_info["id"])

    async def checkpoints(self, request: web.Request) -> dict[str, Any]:
        registered = self._get_model(request)
        steps = sorted(registered.learner.versions, reverse=request.query.get("order") == "desc")
        metrics = registered.metrics_log.metrics
        entries = [{"id": f"{registered.id}-{step}", "step": step, "metrics": metrics(step)} for step in steps]
        return _paginate(entries, request)

    async def delete_checkpoints(self, request: web.Request, body: bodies.ServerlessStepsRequest) -> dict[str, Any]:
        steps = {*body.steps}
        deleted = await self._models.delete_steps(self._get_model(request), steps)
        return {"deleted_count": len(deleted), "not_found_steps": sorted(steps - set(deleted))}

    async def log(self, request: web.Request, body: bodies.ServerlessLogRequest) -> None:
        await self._log(self._get_model(request), body)

    async def train(self, request: web.Request, body: _Body) -> dict[str, Any]:
        registered = self._models.get(str(body.data.get("model_id") if isinstance(body.data, dict) else None))
        model = registered.model.model_copy(update={"base_path": ""})  # the service has no legacy defaults
        key = idempotency_key(request)
        job = await self._jobs.start(TrainRequest(model, bodies.ServerlessTrainRequest, *body, key))
        return {"id": job.job.state.id} | ({"body_differs": True} if job.job.differs_from(body.digest) else {})

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
    if limit is not None and parse_count(limit) is None:
        raise RequestRefused(f"limit must be a non-negative integer, got {limit!r}", param="limit")
    remaining = entries[ids.index(after) + 1 :] if after is not None else entries
    page = remaining[: int(limit)] if limit else remaining
    return {"data": page, "has_more": len(page) < len(remaining)}
