"""HTTP client for an ART server; ART itself ships none since 0.5.9."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import aiohttp
import orjson

from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.http_format import error_message, gc_paused, url_host

_DEFAULT_TIMEOUT = aiohttp.ClientTimeout(total=60, sock_connect=10)
_LONG_TIMEOUT = aiohttp.ClientTimeout(total=3600, sock_connect=10)
_TRAIN_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
"""No limit: the response streams until the training ends."""
_UNAVAILABLE_STATUSES = (502, 503, 504)


def remote_backend(art: Any, base_url: str, api_key: str) -> Any:
    """Returns an `art.Backend` for the server at `base_url`. `art` is the imported module of the installed release."""
    backend_type = type("RemoteBackend", (_RemoteBackend, art.Backend), {"__init__": _RemoteBackend.__init__})
    return backend_type(base_url, api_key)


class _RemoteBackend:
    """Implements over HTTP the backend methods that ART's models call. Errors quote the server's response."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None
        self.inference_url = ""
        """Where the model is served, including `/v1`. Empty until `_prepare_backend_for_training`."""
        self._inference_key = api_key
        self._served_names: set[str] = set()
        self._latest_steps: dict[str, int] = {}

    async def close(self) -> None:
        """Closes the connections. The server keeps running."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def register(self, model: Any) -> None:
        await self._post("/register", model.safe_model_dump())

    async def _get_step(self, model: Any) -> int:
        step = await self._post("/_get_step", model.safe_model_dump())
        if type(step) is not int:
            raise self._unexpected("/_get_step", step)
        self._latest_steps[model.name] = step
        return step

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        body = {"model": model.safe_model_dump(), "config": config}
        response = await self._post("/_prepare_backend_for_training", body, timeouts=_LONG_TIMEOUT)
        if not (isinstance(response, list) and len(response) == 2 and all(isinstance(r, str) for r in response)):
            raise self._unexpected("/_prepare_backend_for_training", response)
        self.inference_url, self._inference_key = self._reachable_url(response[0]), response[1]
        await self._get_step(model)
        await self.refresh_served_names()
        return self.inference_url, self._inference_key

    def _reachable_url(self, url: str) -> str:
        """Replaces a bind or loopback host in the server's inference URL with the host of `base_url`."""
        parts = urlsplit(url)
        if parts.hostname not in ("0.0.0.0", "::", "localhost", "127.0.0.1", "::1"):
            return url
        host = url_host(urlsplit(self._base_url).hostname or "127.0.0.1")
        return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))

    async def refresh_served_names(self) -> set[str]:
        """Fetches the names that the inference server serves, from which `_model_inference_name` chooses."""
        if not self.inference_url:
            raise BackendError("no model is registered with the ART server: initialize the adapter first")
        auth = {"Authorization": f"Bearer {self._inference_key}"}
        models = await self._request("GET", f"{self.inference_url}/models", None, _DEFAULT_TIMEOUT, **auth)
        try:
            self._served_names = {str(model["id"]) for model in models["data"]}
        except (TypeError, LookupError):
            raise self._unexpected(f"{self.inference_url}/models", models) from None
        return self._served_names

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        """The model name to request. ART from 0.5.10 on serves even the latest weights as `name@step` only."""
        only_versioned = model.name not in self._served_names and any(
            name.startswith(f"{model.name}@") for name in self._served_names
        )
        if step is None and only_versioned:
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

        Servers that support `Idempotency-Key` run at most one job per key.
        """
        body = {"config": config.model_dump(), "dev_config": dict(dev_config), "verbose": verbose}
        data = await asyncio.to_thread(_body_with_groups, model, trajectory_groups, body)
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        async with self._open("POST", self._base_url + "/_train_model", data, _TRAIN_TIMEOUT, **headers) as response:
            if response.status >= 400:
                raise await _error_from_response(response)
            async for line in response.content:
                if line.strip():
                    yield self._parse_metrics(line)

    async def failure_message(self, idempotency_key: str) -> str | None:
        """The failure message of the training job with this idempotency key.

        None if it has not failed, the server is unreachable or it lists no jobs (only `insitu backend` does).
        """
        try:
            jobs = await self._request("GET", f"{self._base_url}/art/jobs", None, _DEFAULT_TIMEOUT)
            job = next(job for job in jobs["jobs"] if str(job["key"]).endswith(f"/{idempotency_key}"))
            return str(job["message"]) if job["status"] in ("failed", "canceled") else None
        except (BackendError, StopIteration, TypeError, LookupError):
            return None

    def _parse_metrics(self, line: bytes) -> dict[str, float]:
        try:
            metrics = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if line.startswith(b"{") and not line.endswith(b"\n"):
                raise self._unavailable(ConnectionError("the response ended in the middle of a line")) from error
            metrics = line.decode(errors="replace")
        if not isinstance(metrics, dict):
            raise self._unexpected("/_train_model", metrics)
        return metrics

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
        await self._request("POST", self._base_url + "/_log", data, _LONG_TIMEOUT)

    async def _delete_checkpoints(self, model: Any, benchmark: str, benchmark_smoothing: float) -> None:
        query = urlencode({"benchmark": benchmark, "benchmark_smoothing": benchmark_smoothing})
        await self._post(f"/_delete_checkpoints?{query}", model.safe_model_dump())

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        body = {"model": model.safe_model_dump(), "steps_to_keep": steps_to_keep}
        await self._post("/_delete_checkpoint_files", body)

    async def health_problem(self) -> str | None:
        """The problem with the server, or None if `/healthcheck` or `/health` returns 200."""
        problems = []
        for path in ("/healthcheck", "/health"):
            try:
                async with self._open("GET", self._base_url + path, None, _DEFAULT_TIMEOUT) as response:
                    if response.status == 200:
                        return None
                    problems.append(f"{self._base_url}{path} returned {response.status}")
            except BackendUnavailable as error:
                return str(error)
        return ", ".join(problems)

    async def _post(self, path: str, body: Any, timeouts: aiohttp.ClientTimeout = _DEFAULT_TIMEOUT) -> Any:
        return await self._request("POST", self._base_url + path, await asyncio.to_thread(orjson.dumps, body), timeouts)

    async def _request(
        self, method: str, url: str, data: bytes | None, timeouts: aiohttp.ClientTimeout, **headers: str
    ) -> Any:
        async with self._open(method, url, data, timeouts, **headers) as response:
            if response.status >= 400:
                raise await _error_from_response(response)
            text = await response.read()
        try:
            return orjson.loads(text or b"null")
        except orjson.JSONDecodeError as error:
            raise self._unexpected(url, text.decode(errors="replace")) from error

    @asynccontextmanager
    async def _open(
        self, method: str, url: str, data: bytes | None, timeouts: aiohttp.ClientTimeout, **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request. Raises BackendUnavailable if the connection fails or times out."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(headers=self._headers)
        try:
            async with self._session.request(method, url, data=data, timeout=timeouts, headers=headers) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise self._unavailable(error) from error

    def _unexpected(self, where: str, body: Any) -> BackendError:
        url = where if "://" in where else self._base_url + where
        return BackendError(f"{url} returned unexpected data {str(body)[:80]!r}: is it an ART server?")

    def _unavailable(self, error: BaseException) -> BackendUnavailable:
        problem = f"{type(error).__name__}: {error}"
        return BackendUnavailable(f"the connection to the ART server at {self._base_url} failed: {problem}")


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


async def _error_from_response(response: aiohttp.ClientResponse) -> BackendError:
    """The exception for an error response, with ART's `detail`, OpenAI's `error.message`, or the response text."""
    text = await response.text()
    where = f"{response.method} {response.url.path}"
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = None
    detail = body.get("detail") if isinstance(body, dict) else None
    message = str(detail or error_message(body) or text[:500] or "no reason given")
    if response.status < 500:
        return RequestRefused(f"the ART server rejected {where} ({response.status}): {message}", status=response.status)
    error_type = BackendUnavailable if response.status in _UNAVAILABLE_STATUSES else BackendError
    return error_type(f"{where} failed on the ART server ({response.status}): {message}")


def mean_metrics(step_metrics: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the gradient steps that reported it."""
    values_by_name: dict[str, list[float]] = {}
    for metrics in step_metrics:
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values_by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}
