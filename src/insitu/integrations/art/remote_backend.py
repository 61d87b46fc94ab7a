"""HTTP client for an ART server; ART itself ships none since 0.5.9."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from statistics import fmean
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

import orjson
from pydantic import BaseModel, StrictInt, TypeAdapter

from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.wire.addresses import url_host
from insitu.wire.connection import Connection, is_transient, response_error
from insitu.wire.http_format import BODY_DIFFERS
from insitu.wire.json_values import gc_paused

T = TypeVar("T")

_LOADING_SECONDS = 3600.0
"""Silence allowed while the server loads a model or stores trajectories."""


_METRIC_NAMES = {
    "loss": ("loss/train", "loss", "policy_loss"),
    "kl": ("loss/kl_policy_ref", "kl_policy_ref", "kl_div"),
    "entropy": ("loss/entropy", "entropy"),
    "grad_norm": ("loss/grad_norm", "grad_norm"),
    "learning_rate": ("loss/learning_rate", "learning_rate"),
    "tokens": ("data/step_trainer_tokens",),
    "steps": ("data/step_num_gradient_steps", "num_gradient_steps"),
}
"""Our metric names -> their names in releases of ART."""


class _Job(BaseModel):
    key: str | None
    status: str
    message: str | None


class _Jobs(BaseModel):
    jobs: list[_Job]


_STEP = TypeAdapter(StrictInt)
_ADDRESS = TypeAdapter(tuple[str, str])
_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


def remote_backend(art: Any, base_url: str, api_key: str, read_timeout: float, retry_timeout: float) -> Any:
    """Returns an `art.Backend` for the server at `base_url`. `art` is the imported module of the installed release."""
    backend_type = type("RemoteBackend", (_RemoteBackend, art.Backend), {"__init__": _RemoteBackend.__init__})
    return backend_type(base_url, api_key, read_timeout, retry_timeout)


class _RemoteBackend:
    """Implements over HTTP the backend methods that ART's models call. Errors quote the server's response."""

    def __init__(self, base_url: str, api_key: str, read_timeout: float = 60.0, retry_timeout: float = 600.0) -> None:
        self._base_url = base_url
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self.connection = Connection(f"the ART server at {base_url}", headers, read_timeout, retry_timeout)
        self.inference_url = ""
        """Where the model is served, including `/v1`. Empty until `_prepare_backend_for_training`."""
        self._inference_key = api_key
        self._served_names: set[str] = set()
        self._latest_steps: dict[str, int] = {}

    async def close(self) -> None:
        """Closes the connections. The server keeps running."""
        await self.connection.close()

    async def register(self, model: Any) -> None:
        await self._post("/register", model.safe_model_dump(), _parse_any)

    async def _get_step(self, model: Any) -> int:
        step = await self._post("/_get_step", model.safe_model_dump(), _STEP.validate_json)
        self._latest_steps[model.name] = step
        return step

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        body, path = {"model": model.safe_model_dump(), "config": config}, "/_prepare_backend_for_training"
        url, self._inference_key = await self._post(path, body, _ADDRESS.validate_json, _LOADING_SECONDS)
        self.inference_url = self._reachable_url(url)
        await self._get_step(model)
        await self.refresh_served_names()
        self.connection.verified = True
        return self.inference_url, self._inference_key

    def _reachable_url(self, url: str) -> str:
        """Replaces a bind or loopback host in the server's inference URL with the host of `base_url`."""
        parts = urlsplit(url)
        if parts.hostname not in ("0.0.0.0", "::", "localhost", "127.0.0.1", "::1"):
            return url
        host = url_host(urlsplit(self._base_url).hostname or "127.0.0.1")
        return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))

    async def refresh_served_names(self) -> set[str]:
        """The model names of the inference server."""
        if not self.inference_url:
            raise BackendError("no model is registered with the ART server: initialize the adapter first")
        auth = {"Authorization": f"Bearer {self._inference_key}"}
        url = f"{self.inference_url}/models"
        self._served_names = await self.connection.request("GET", url, _served_names, headers=auth)
        return self._served_names

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        """The model name to request. ART from 0.5.10 on serves even the latest weights as `name@step` only."""
        names, versioned = self._served_names, f"{model.name}@"
        if step is None and model.name not in names and any(name.startswith(versioned) for name in names):
            step = self._latest_steps.get(model.name, 0)
        return str(model.name) if step is None else f"{model.name}@{step}"

    async def _train_model(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        config: Any,
        dev_config: Any,
        verbose: bool = False,
        idempotency_key: str | None = None,
    ) -> AsyncIterator[dict[str, float]]:
        """Streams the metrics of each gradient step.

        Servers that support `Idempotency-Key` run at most one job per key. Raises BackendError if its body differs.
        """
        body = {"config": config.model_dump(), "dev_config": dict(dev_config), "verbose": verbose}
        data = await asyncio.to_thread(_body_with_groups, model, trajectory_groups, body)
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        url = f"{self._base_url}/_train_model"  # silent until the first gradient step is done, however long that takes
        async with self.connection.open("POST", url, data, headers, math.inf) as response:
            if response.status >= 400:
                raise response_error(response, await response.read(), final_500=True)
            if BODY_DIFFERS in response.headers:
                problem = f"{self.connection.server} has a job with the key {idempotency_key!r} and other trajectories"
                raise BackendError(f"{problem} or settings: continue the run with the settings that it had")
            async for line in self.connection.lines(response):
                if line.strip():
                    yield self._parse_metrics(line)

    async def find_job(self, idempotency_key: str) -> _Job | None:
        """The training job with this idempotency key; None if there is none, so that it can be submitted again.

        Raises BackendError if the server is unreachable or lists no jobs (only `insitu backend` does).
        """
        listed = await self.connection.request("GET", f"{self._base_url}/art/jobs", _Jobs.model_validate_json)
        return next((job for job in listed.jobs if (job.key or "").endswith(f"/{idempotency_key}")), None)

    def _parse_metrics(self, line: bytes) -> dict[str, float]:
        if line.startswith(b"{") and not line.endswith(b"\n"):
            try:
                orjson.loads(line)
            except orjson.JSONDecodeError as error:
                problem = f"{self.connection.server}: the response of /_train_model ended within a line"
                raise BackendUnavailable(problem) from error
        return self.connection.parsed(f"{self._base_url}/_train_model", line, _OBJECT.validate_json)

    async def train(self, model: Any, trajectory_groups: Iterable[Any], **options: Any) -> Any:
        """ART's `Backend.train` since 0.5.9. `options` may contain keys of `TrainConfig` and `art.dev.TrainConfig`."""
        from art.types import TrainConfig, TrainResult

        config = TrainConfig(**{k: options.pop(k) for k in [*options] if k in TrainConfig.model_fields})
        metrics = [step async for step in self._train_model(model, list(trajectory_groups), config, options)]
        return TrainResult(step=await self._get_step(model), metrics=mean_metrics(metrics))

    async def _train_sft(self, *args: Any, **options: Any) -> AsyncIterator[dict[str, float]]:
        raise BackendError("ART's protocol has no route for supervised training, so remote servers do not support it")
        yield {}  # makes this an async generator

    async def _log(self, model: Any, trajectory_groups: Iterable[Any], split: str = "val") -> None:
        data = await asyncio.to_thread(_body_with_groups, model, trajectory_groups, {"split": split})
        await self._post("/_log", data, _parse_any, _LOADING_SECONDS)

    async def _delete_checkpoints(self, model: Any, benchmark: str, benchmark_smoothing: float) -> None:
        query = urlencode({"benchmark": benchmark, "benchmark_smoothing": benchmark_smoothing})
        await self._post(f"/_delete_checkpoints?{query}", model.safe_model_dump(), _parse_any)

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        body = {"model": model.safe_model_dump(), "steps_to_keep": steps_to_keep}
        await self._post("/_delete_checkpoint_files", body, _parse_any)

    async def check_health(self, *, retried: bool = True) -> None:
        """Raises BackendError unless `/healthcheck` or `/health` returns 200; retries transient errors if `retried`."""
        await (self.connection.retry("GET /healthcheck", self._check_health) if retried else self._check_health())

    async def was_away(self, since: float) -> bool:
        """Whether the server was away at some time after `since`; if it still is, waits for up to `retry_timeout`."""
        return await self.connection.retry.was_away(since, self._check_health, self.check_health)

    async def _check_health(self) -> None:
        status, problems = 0, []
        for url in (f"{self._base_url}/healthcheck", f"{self._base_url}/health"):
            async with self.connection.open("GET", url) as response:
                if (status := response.status) == 200:
                    return
                problems.append(f"{url} returned {status}")
        problem = ", ".join(problems)
        raise BackendUnavailable(problem) if is_transient(status) else RequestRefused(problem, status=status)

    async def _post(self, path: str, body: Any, parse: Callable[[bytes], T], read_timeout: float | None = None) -> T:
        data = body if isinstance(body, bytes) else await asyncio.to_thread(orjson.dumps, body)
        final_500 = read_timeout is not None
        url = self._base_url + path
        return await self.connection.request("POST", url, parse, data, None, read_timeout, final_500=final_500)


def _served_names(content: bytes) -> set[str]:
    return {str(model["id"]) for model in orjson.loads(content)["data"]}


def _parse_any(content: bytes) -> Any:
    return orjson.loads(content or b"null")


def serialize_group(group: Any) -> orjson.Fragment:
    """Serializes a trajectory group to JSON; a serialized group is returned as it is.

    Messages and tools are copied unvalidated, because ART's types drop unknown keys such as a tool message's name.
    """
    if isinstance(group, orjson.Fragment):
        return group
    with gc_paused():
        verbatim = {"messages_and_choices", "tools", "additional_histories"}
        record = group.model_dump(exclude={"trajectories": {"__all__": verbatim}})
        for trajectory, data in zip(group.trajectories, record["trajectories"], strict=True):
            data |= _dump_history(trajectory)
            data["additional_histories"] = [_dump_history(history) for history in trajectory.additional_histories]
        return orjson.Fragment(orjson.dumps(record))


def _dump_history(history: Any) -> dict[str, Any]:
    turns = [turn if isinstance(turn, dict) else turn.model_dump() for turn in history.messages_and_choices]
    return {"messages_and_choices": turns, "tools": history.tools}


def _body_with_groups(model: Any, groups: Iterable[Any], fields: dict[str, Any]) -> bytes:
    serialized = [serialize_group(group) for group in groups]
    return orjson.dumps({"model": model.safe_model_dump(), "trajectory_groups": serialized, **fields})


def mean_metrics(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the records, such as those of gradient steps, that have it."""
    values_by_name: dict[str, list[float]] = defaultdict(list)
    for metrics in records:
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values_by_name[name].append(value)
    return {name: fmean(values) for name, values in values_by_name.items()}


def known_metrics(metrics: Mapping[str, float]) -> dict[str, Any]:
    """The server's metrics, plus those with an equivalent of ours under our names."""
    reported = {ours: [metrics[name] for name in theirs if name in metrics] for ours, theirs in _METRIC_NAMES.items()}
    return {**metrics, **{name: values[0] for name, values in reported.items() if values}}
