"""The endpoints of `art run` and of `art.ServerlessBackend`.

Clients up to 0.5.7 use those of `art run`, later ones through a backend class. The serverless protocol has models with
ids, and jobs polled by their events.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from insitu.backend.http import ApiRoute
from insitu.backend.protocols import Services
from insitu.backend.protocols.art.jobs import ArtJob, ArtJobs, TrainRequest
from insitu.backend.protocols.art.models import ArtModels, RegisteredModel
from insitu.backend.protocols.art.responses import MetricsStream, json_endpoint, read_json
from insitu.backend.protocols.art.trajectories import drop_nulls, optional, parse_groups, parse_model
from insitu.errors import RequestRefused

SERVERLESS = "/v1/preview"
"""Path of the serverless endpoints, below the `/v1` that clients have as base_url."""


def art_routes(models: ArtModels, jobs: ArtJobs, services: Services) -> list[ApiRoute]:
    """The endpoints, at the root of the server."""
    endpoints = _RunEndpoints(models, jobs, services.options.token)

    async def metrics(request: Request) -> Response:
        running, waiting = services.engine.num_requests
        return PlainTextResponse(f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n")

    def get(path: str, handler: Any, summary: str, *, public: bool = False) -> ApiRoute:
        return ApiRoute("GET", path, json_endpoint(handler), summary, public=public)

    def post(path: str, handler: Any, summary: str, headers: tuple[str, ...] = ()) -> ApiRoute:
        return ApiRoute("POST", path, json_endpoint(handler), f"ART: {summary}", headers=headers)

    return [
        get("/healthcheck", endpoints.health, "ART: health check", public=True),
        ApiRoute("GET", "/metrics", metrics, "Running and waiting requests, by vLLM's names"),
        post("/close", endpoints.close, "close a client's session; the server keeps running"),
        post("/register", endpoints.register, "check that a model can be trained here"),
        post("/_get_step", endpoints.step, "a model's latest step"),
        post("/_prepare_backend_for_training", endpoints.prepare, "base URL and API key for sampling"),
        post("/_train_model", endpoints.train, "train; a line of metrics per gradient step", ("Idempotency-Key",)),
        post("/_log", endpoints.log, "log trajectories; their means are kept with the step"),
        post("/_delete_checkpoints", endpoints.delete_checkpoints, "delete all but the latest and best checkpoint"),
        post("/_delete_checkpoint_files", endpoints.delete_checkpoint_files, "delete all but the named and the latest"),
        post("/_experimental_pull_from_s3", endpoints.unsupported, "refused"),
        post("/_experimental_push_to_s3", endpoints.unsupported, "refused"),
        post("/_experimental_fork_checkpoint", endpoints.unsupported, "refused"),
        post("/_experimental_deploy", endpoints.unsupported, "refused"),
        get("/art/jobs", endpoints.list_jobs, "Latest training requests of ART clients, with their errors"),
        get("/art/jobs/{id}", endpoints.get_job, "One training request"),
    ]


def serverless_routes(models: ArtModels, jobs: ArtJobs) -> list[ApiRoute]:
    endpoints = _ServerlessEndpoints(models, jobs)

    def route(method: str, path: str, handler: Any, summary: str, headers: tuple[str, ...] = ()) -> ApiRoute:
        summary = f"ART serverless: {summary}"
        return ApiRoute(method, SERVERLESS + path, json_endpoint(handler), summary, headers=headers)

    return [
        route("POST", "/models", endpoints.create, "create a model, or return the existing one"),
        route("DELETE", "/models/{id}", endpoints.delete, "delete a model"),
        route("GET", "/models/{id}/checkpoints", endpoints.checkpoints, "a model's steps with their metrics"),
        route("DELETE", "/models/{id}/checkpoints", endpoints.delete_checkpoints, "delete some of a model's steps"),
        route("POST", "/models/{id}/log", endpoints.log, "as /_log"),
        route("POST", "/training-jobs", endpoints.train, "train", ("Idempotency-Key",)),
        route("GET", "/training-jobs/{id}/events", endpoints.events, "a job's events so far"),
        route("POST", "/sft-training-jobs", endpoints.train_sft, "refused"),
    ]


class _Endpoints:
    """One method per endpoint; each returns the response's JSON."""

    def __init__(self, models: ArtModels, jobs: ArtJobs, token: str | None = None) -> None:
        self._models = models
        self._jobs = jobs
        self._token = token


class _RunEndpoints(_Endpoints):
    """The endpoints of `art run`."""

    async def health(self, request: Request) -> dict[str, str]:
        return {"status": "ok"}

    async def close(self, request: Request) -> None:
        """Does nothing: the backend outlives its clients."""

    async def register(self, request: Request) -> None:
        """Only checks the model, because clients time out after five seconds; `prepare` loads its weights."""
        data, _ = await read_json(request)
        if data.get("trainable", True):
            self._models.check(parse_model(data, "the body"))

    async def step(self, request: Request) -> int:
        data, _ = await read_json(request)
        return (await self._models.open(parse_model(data, "the body"))).step if data.get("trainable", True) else 0

    async def prepare(self, request: Request) -> list[str]:
        """Returns the base URL and the API key for sampling: our token, or else the key the client chose."""
        data, _ = await read_json(request)
        await self._open(data)
        server = optional(optional(data, "config", dict) or {}, "server_args", dict, "config") or {}
        api_key = optional(server, "api_key", str, "config.server_args")
        return [f"{request.url.scheme}://{request.url.netloc}/v1", self._token or api_key or "default"]

    async def train(self, request: Request) -> Response:
        data, digest = await read_json(request)
        train_request = TrainRequest(
            parse_model(data.get("model")),
            data.get("trajectory_groups"),
            optional(data, "config", dict) or {},
            optional(data, "dev_config", dict) or {},
            request.headers.get("idempotency-key"),
            digest,
        )
        return MetricsStream(await self._jobs.start(train_request))

    async def log(self, request: Request) -> None:
        data, _ = await read_json(request)
        if (optional(data, "model", dict) or {}).get("trainable", True):
            registered = await self._open(data)
            split = optional(data, "split", str) or "val"
            groups = await asyncio.to_thread(parse_groups, data.get("trajectory_groups"))
            registered.metrics_log.log(registered.step, split, groups)

    async def delete_checkpoints(self, request: Request) -> None:
        """Deletes all checkpoints except the latest and the best by the logged metrics."""
        data, _ = await read_json(request)
        registered = await self._models.open(parse_model(data, "the body"))
        metric = request.query_params.get("benchmark", "val/reward")
        smoothing = _parse_smoothing(request.query_params.get("benchmark_smoothing", "1"))
        versions = registered.learner.versions
        best = registered.metrics_log.best(metric, smoothing, versions)
        await self._models.delete_steps(registered, set(versions) - {best})

    async def delete_checkpoint_files(self, request: Request) -> None:
        data, _ = await read_json(request)
        registered = await self._open(data)
        kept = set(optional(data, "steps_to_keep", list) or [])
        await self._models.delete_steps(registered, set(registered.learner.versions) - kept)

    async def unsupported(self, request: Request) -> None:
        data, _ = await read_json(request)
        model = parse_model(data.get("model"))
        raise RequestRefused(
            f"{request.url.path} is not supported here; the checkpoints of {model.key} are in "
            f"{self._models.folder(model) / 'checkpoints'}",
            code="unsupported",
        )

    async def list_jobs(self, request: Request) -> dict[str, Any]:
        return self._jobs.state()

    async def get_job(self, request: Request) -> dict[str, Any]:
        return self._jobs.get(request.path_params["id"]).state()

    async def _open(self, data: dict[str, Any]) -> RegisteredModel:
        return await self._models.open(parse_model(data.get("model")))


def _parse_smoothing(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        problem = f"benchmark_smoothing is {text!r}; allowed: above 0, at most 1"
        raise RequestRefused(problem, status=422, param="benchmark_smoothing")
    return value


class _ServerlessEndpoints(_Endpoints):
    """The endpoints of `art.ServerlessBackend`."""

    async def create(self, request: Request) -> dict[str, Any]:
        data, _ = await read_json(request)
        registered = await self._models.open(parse_model(data, "the body"))
        model = registered.model
        return {
            "id": registered.id,
            "entity": model.entity,
            "project": model.project,
            "name": model.name,
            "base_model": model.base_model,
            "run_id": None,
        }

    async def delete(self, request: Request) -> None:
        registered = self._model(request)
        if self._jobs.is_training(registered.model):
            raise RequestRefused(f"{registered.model.key} is being trained", status=409, code="model_busy")
        await self._models.delete(registered)

    async def checkpoints(self, request: Request) -> dict[str, Any]:
        registered = self._model(request)
        steps = sorted(registered.learner.versions, reverse=request.query_params.get("order") == "desc")
        metrics = registered.metrics_log.metrics
        return _page([{"id": f"{registered.id}-{k}", "step": k, "metrics": metrics(k)} for k in steps], request)

    async def delete_checkpoints(self, request: Request) -> dict[str, Any]:
        data, _ = await read_json(request)
        registered = self._model(request)
        steps = set(optional(data, "steps", list) or [])
        deleted = await self._models.delete_steps(registered, steps)
        return {"deleted_count": len(deleted), "not_found_steps": sorted(steps - set(deleted))}

    async def log(self, request: Request) -> None:
        data, _ = await read_json(request)
        registered = self._model(request)
        groups = await asyncio.to_thread(parse_groups, data.get("trajectory_groups"))
        registered.metrics_log.log(registered.step, optional(data, "split", str) or "val", groups)

    async def train(self, request: Request) -> dict[str, str]:
        data, digest = await read_json(request)
        registered = self._models.get(str(data.get("model_id")))
        train_request = TrainRequest(
            replace(registered.model, generation="B"),  # the service has the defaults of that generation
            data.get("trajectory_groups"),
            {},
            drop_nulls(optional(data, "experimental_config", dict) or {}),
            request.headers.get("idempotency-key"),
            digest,
        )
        return {"id": (await self._jobs.start(train_request)).job.state.id}

    async def events(self, request: Request) -> dict[str, Any]:
        """The events after `after`; clients repeat a request until they have seen a gradient step."""
        job = self._jobs.get(request.path_params["id"])
        events = _events(job)
        job.delivered = job.delivered or events[-1]["type"] == "training_ended"
        return _page(events, request)

    async def train_sft(self, request: Request) -> None:
        problem = "supervised training is not supported here: its data would be stored at W&B"
        raise RequestRefused(problem, status=501, code="unsupported")

    def _model(self, request: Request) -> RegisteredModel:
        return self._models.get(request.path_params["id"])


def _events(job: ArtJob) -> list[dict[str, Any]]:
    """Numbered from 0; the first is always the start, from which clients take the number of gradient steps."""
    events: list[tuple[str, dict[str, Any]]] = [("training_started", {"num_sequences": job.steps})]
    events += [("gradient_step", line) for line in job.lines_so_far()]
    state = job.job.state
    if state.status == "completed":
        events.append(("training_ended", {}))
    elif job.job.ended:
        events.append(("training_failed", {"error_message": f"job {state.id}: {state.message}"}))
    return [{"id": str(number), "type": kind, "data": data} for number, (kind, data) in enumerate(events)]


def _page(entries: Sequence[dict[str, Any]], request: Request) -> dict[str, Any]:
    """At most `limit` of the entries after the id `after`."""
    ids = [entry["id"] for entry in entries]
    after = request.query_params.get("after")
    if after is not None and after not in ids:
        raise RequestRefused(f"after is {after!r}, which is not an id of this list", param="after")
    rest = list(entries[ids.index(after) + 1 :] if after is not None else entries)
    limit = request.query_params.get("limit")
    if limit is not None and not limit.isdecimal():
        raise RequestRefused(f"limit is {limit!r}; allowed: a number", param="limit")
    page = rest[: int(limit)] if limit else rest
    return {"data": page, "has_more": len(page) < len(rest)}
