"""The protocol of `art run`, spoken by clients up to 0.5.7 and by later ones through a backend class."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from insitu.backend.http import ApiRoute
from insitu.backend.protocols import Services
from insitu.backend.protocols.art.jobs import ArtJobs, TrainRequest
from insitu.backend.protocols.art.models import ArtModels, RegisteredModel
from insitu.backend.protocols.art.responses import MetricsStream, json_endpoint, read_json
from insitu.backend.protocols.art.trajectories import optional, parse_groups, parse_model
from insitu.errors import RequestRefused


def art_routes(models: ArtModels, jobs: ArtJobs, services: Services) -> list[ApiRoute]:
    """The endpoints, at the root of the server."""
    endpoints = _Endpoints(models, jobs, services.options.token)

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


class _Endpoints:
    """One method per endpoint; each returns the response's JSON."""

    def __init__(self, models: ArtModels, jobs: ArtJobs, token: str | None) -> None:
        self._models = models
        self._jobs = jobs
        self._token = token

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
        if not data.get("trainable", True):
            return 0
        return (await self._models.open(parse_model(data, "the body"))).step

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
        raise RequestRefused(
            f"benchmark_smoothing is {text!r}; allowed: above 0, at most 1", status=422, param="benchmark_smoothing"
        )
    return value
