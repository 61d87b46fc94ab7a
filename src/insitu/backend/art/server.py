"""The protocol of `art run`: what clients up to 0.5.7 speak by themselves, and later ones through a backend class."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from insitu.backend.art.answers import LineStream, answering, body_of
from insitu.backend.art.jobs import ArtJobs, Ask
from insitu.backend.art.messages import optional, read_groups, read_model
from insitu.backend.art.models import ArtModels
from insitu.backend.inference.engine import Engine
from insitu.errors import RequestRefused


def art_routes(models: ArtModels, jobs: ArtJobs, engine: Engine, token: str | None) -> list[Route]:
    """Its endpoints, which lie at the root of the server."""
    protocol = _Protocol(models, jobs, token)

    async def metrics(request: Request) -> Response:
        running, waiting = engine.load
        return PlainTextResponse(f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n")

    posts = {
        "/close": protocol.close,
        "/register": protocol.register,
        "/_get_step": protocol.step,
        "/_prepare_backend_for_training": protocol.prepare,
        "/_train_model": protocol.train,
        "/_log": protocol.log,
        "/_delete_checkpoints": protocol.delete_checkpoints,
        "/_delete_checkpoint_files": protocol.delete_checkpoint_files,
        "/_experimental_pull_from_s3": protocol.elsewhere,
        "/_experimental_push_to_s3": protocol.elsewhere,
        "/_experimental_fork_checkpoint": protocol.elsewhere,
        "/_experimental_deploy": protocol.elsewhere,
    }
    return [
        Route("/healthcheck", answering(protocol.health)),
        Route("/metrics", metrics),
        *(Route(path, answering(handler), methods=["POST"]) for path, handler in posts.items()),
        Route("/art/jobs", answering(protocol.list_jobs)),
        Route("/art/jobs/{id}", answering(protocol.job)),
    ]


class _Protocol:
    """A method an endpoint; each returns what its answer says."""

    def __init__(self, models: ArtModels, jobs: ArtJobs, token: str | None) -> None:
        self._models = models
        self._jobs = jobs
        self._token = token

    async def health(self, request: Request) -> dict[str, str]:
        return {"status": "ok"}

    async def close(self, request: Request) -> None:
        """The backend outlives its clients."""

    async def register(self, request: Request) -> None:
        """Quick, because clients give up after five seconds: weights are got ready in `prepare`."""
        data, _ = await body_of(request)
        if data.get("trainable", True):
            self._models.check(read_model(data, "the body"))

    async def step(self, request: Request) -> int:
        data, _ = await body_of(request)
        if not data.get("trainable", True):
            return 0
        return (await self._models.open(read_model(data, "the body"))).step

    async def prepare(self, request: Request) -> list[str]:
        """Where to sample from, and the key for it: our own where there is one, or else the one that was asked for."""
        data, _ = await body_of(request)
        await self._models.open(read_model(data.get("model")))
        server = optional(optional(data, "config", dict) or {}, "server_args", dict, "config") or {}
        asked = optional(server, "api_key", str, "config.server_args")
        return [f"{request.url.scheme}://{request.url.netloc}/v1", self._token or asked or "default"]

    async def train(self, request: Request) -> Response:
        data, digest = await body_of(request)
        ask = Ask(
            read_model(data.get("model")),
            data.get("trajectory_groups"),
            optional(data, "config", dict) or {},
            optional(data, "dev_config", dict) or {},
            request.headers.get("idempotency-key"),
            digest,
        )
        return LineStream(await self._jobs.start(ask))

    async def log(self, request: Request) -> None:
        data, _ = await body_of(request)
        if (optional(data, "model", dict) or {}).get("trainable", True):
            registered = await self._models.open(read_model(data.get("model")))
            split = optional(data, "split", str) or "val"
            groups = await asyncio.to_thread(read_groups, data.get("trajectory_groups"))
            registered.history.log(registered.step, split, groups)

    async def delete_checkpoints(self, request: Request) -> None:
        """All but the latest and the best by what was logged."""
        data, _ = await body_of(request)
        registered = await self._models.open(read_model(data, "the body"))
        metric = request.query_params.get("benchmark", "val/reward")
        smoothing = _smoothing(request.query_params.get("benchmark_smoothing", "1"))
        versions = registered.learner.versions
        kept = {registered.history.best(metric, smoothing, versions)}
        await self._models.delete_steps(registered, set(versions) - kept)

    async def delete_checkpoint_files(self, request: Request) -> None:
        data, _ = await body_of(request)
        registered = await self._models.open(read_model(data.get("model")))
        kept = set(optional(data, "steps_to_keep", list) or [])
        await self._models.delete_steps(registered, set(registered.learner.versions) - kept)

    async def elsewhere(self, request: Request) -> None:
        data, _ = await body_of(request)
        model = read_model(data.get("model"))
        raise RequestRefused(
            f"{request.url.path} is not supported here; the checkpoints of {model.key} lie in "
            f"{self._models.folder(model) / 'checkpoints'}",
            code="unsupported",
        )

    async def list_jobs(self, request: Request) -> dict[str, Any]:
        return self._jobs.state()

    async def job(self, request: Request) -> dict[str, Any]:
        return self._jobs.get(request.path_params["id"]).state()


def _smoothing(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise RequestRefused(
            f"benchmark_smoothing is {text!r}; allowed: above 0 and up to 1", status=422, param="benchmark_smoothing"
        )
    return value
