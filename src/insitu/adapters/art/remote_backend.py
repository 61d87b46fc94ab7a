"""HTTP client of an ART server, replacing the remote backend class that ART no longer ships from 0.5.9 on."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import orjson

from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.http_format import error_message, gc_paused, url_host

logger = logging.getLogger(__name__)

_SHORT = aiohttp.ClientTimeout(total=60, sock_connect=10)
_LOADING = aiohttp.ClientTimeout(total=3600, sock_connect=10)
_TRAINING = aiohttp.ClientTimeout(total=None, sock_connect=10)
"""No limit: the response streams until the training ends."""
_GATEWAY_STATUSES = (502, 503, 504)


def remote_backend(art: Any, base_url: str, api_key: str) -> Any:
    """An `art.Backend` of the installed release for the server at `base_url`."""
    backend_type = type("RemoteBackend", (_RemoteBackend, art.Backend), {"__init__": _RemoteBackend.__init__})
    return backend_type(base_url, api_key)


class _RemoteBackend:
    """The methods that ART's models call on their backend, over HTTP. Errors quote the server's response."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None
        self.inference_url = ""
        """Where the model is served, including `/v1`. Empty until `_prepare_backend_for_training`."""
        self._inference_key = api_key
        self._names: set[str] = set()
        self._steps: dict[str, int] = {}

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
        self._steps[model.name] = step
        return step

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        body = {"model": model.safe_model_dump(), "config": config}
        response = await self._post("/_prepare_backend_for_training", body, limit=_LOADING)
        if not (isinstance(response, list) and len(response) == 2 and all(isinstance(r, str) for r in response)):
            raise self._unexpected("/_prepare_backend_for_training", response)
        self.inference_url, self._inference_key = self._reachable(response[0]), response[1]
        await self._get_step(model)
        await self.list_names()
        return self.inference_url, self._inference_key

    def _reachable(self, url: str) -> str:
        """The server's inference URL, with our host name for the server if it reports its bind address (0.0.0.0)."""
        parts = urlsplit(url)
        if parts.hostname not in ("0.0.0.0", "::", "localhost", "127.0.0.1"):
            return url
        host = url_host(urlsplit(self._base_url).hostname or "127.0.0.1")
        return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))

    async def list_names(self) -> set[str]:
        """The model names of the inference server."""
        if not self.inference_url:
            raise BackendError("no model is registered with the ART server: initialize the adapter first")
        auth = {"Authorization": f"Bearer {self._inference_key}"}
        models = await self._request("GET", f"{self.inference_url}/models", None, _SHORT, **auth)
        try:
            self._names = {str(model["id"]) for model in models["data"]}
        except (TypeError, LookupError):
            raise self._unexpected(f"{self.inference_url}/models", models) from None
        return self._names

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        """The name to sample with. On some servers even the latest weights are only served as `name@step`."""
        only_steps = model.name not in self._names and any(name.startswith(f"{model.name}@") for name in self._names)
        if step is None and only_steps:
            step = self._steps.get(model.name, 0)
        return str(model.name) if step is None else f"{model.name}@{step}"

    async def _train_model(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        config: Any,
        dev_config: Any,
        verbose: bool = False,
        key: str | None = None,
    ) -> AsyncIterator[dict[str, float]]:
        """Streams the metrics of each gradient step. Servers that support `Idempotency-Key` train a key once."""
        body = {"config": config.model_dump(), "dev_config": dict(dev_config), "verbose": verbose}
        data = await asyncio.to_thread(_body_with_groups, model, trajectory_groups, body)
        headers = {"Idempotency-Key": key} if key else {}
        async with self._open("POST", self._base_url + "/_train_model", data, _TRAINING, **headers) as response:
            if response.status >= 400:
                raise await _error_of(response)
            async for line in response.content:
                if line.strip():
                    yield self._metrics(line)

    async def failure_of(self, key: str) -> str | None:
        """Why the training job of this key failed, if the server reports it (`insitu backend` does, at /art/jobs)."""
        try:
            jobs = await self._request("GET", f"{self._base_url}/art/jobs", None, _SHORT)
            latest = next(job for job in jobs["jobs"] if str(job["key"]).endswith(f"/{key}"))
            return str(latest["message"]) if latest["status"] in ("failed", "canceled") else None
        except (BackendError, StopIteration, TypeError, LookupError):  # ART's own server has no such route
            return None

    def _metrics(self, line: bytes) -> dict[str, float]:
        try:
            metrics = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if line.startswith(b"{") and not line.endswith(b"\n"):
                raise self._unavailable(ConnectionError("the response ended within a line")) from error
            metrics = line.decode(errors="replace")
        if not isinstance(metrics, dict):
            raise self._unexpected("/_train_model", metrics)
        return metrics

    async def train(self, model: Any, trajectory_groups: Iterable[Any], **options: Any) -> Any:
        """Used by ART from 0.5.9 on. `options` are keys of `TrainConfig` and `art.dev.TrainConfig`."""
        from art.types import TrainConfig, TrainResult

        config = TrainConfig(**{k: options.pop(k) for k in [*options] if k in TrainConfig.model_fields})
        lines = [line async for line in self._train_model(model, list(trajectory_groups), config, options)]
        return TrainResult(step=await self._get_step(model), metrics=mean_metrics(lines))

    async def _train_sft(self, *args: Any, **options: Any) -> AsyncIterator[dict[str, float]]:
        raise BackendError("ART's protocol has no route for supervised training, so remote servers do not support it")
        yield {}

    async def _log(self, model: Any, trajectory_groups: Iterable[Any], split: str = "val") -> None:
        data = await asyncio.to_thread(_body_with_groups, model, trajectory_groups, {"split": split})
        await self._request("POST", self._base_url + "/_log", data, _LOADING)

    async def _delete_checkpoints(self, model: Any, benchmark: str, benchmark_smoothing: float) -> None:
        path = f"/_delete_checkpoints?benchmark={benchmark}&benchmark_smoothing={benchmark_smoothing}"
        await self._post(path, model.safe_model_dump())

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        body = {"model": model.safe_model_dump(), "steps_to_keep": steps_to_keep}
        await self._post("/_delete_checkpoint_files", body)

    async def health(self) -> str | None:
        """The problem with the server, or None if `/healthcheck` or `/health` returns 200."""
        problem = None
        for path in ("/healthcheck", "/health"):
            try:
                async with self._open("GET", self._base_url + path, None, _SHORT) as response:
                    if response.status == 200:
                        return None
                    problem = f"{self._base_url}{path} answered {response.status}"
            except BackendUnavailable as error:
                return str(error)
        return problem

    async def _post(self, path: str, body: Any, limit: aiohttp.ClientTimeout = _SHORT) -> Any:
        return await self._request("POST", self._base_url + path, await asyncio.to_thread(orjson.dumps, body), limit)

    async def _request(
        self, method: str, url: str, data: bytes | None, limit: aiohttp.ClientTimeout, **headers: str
    ) -> Any:
        async with self._open(method, url, data, limit, **headers) as response:
            if response.status >= 400:
                raise await _error_of(response)
            text = await response.read()
        try:
            return orjson.loads(text or b"null")
        except orjson.JSONDecodeError as error:
            raise self._unexpected(url, text.decode(errors="replace")) from error

    @asynccontextmanager
    async def _open(
        self, method: str, url: str, data: bytes | None, limit: aiohttp.ClientTimeout, **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises BackendUnavailable for a lost connection."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(headers=self._headers)
        try:
            async with self._session.request(method, url, data=data, timeout=limit, headers=headers) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise self._unavailable(error) from error

    def _unexpected(self, where: str, body: Any) -> BackendError:
        url = where if "://" in where else self._base_url + where
        return BackendError(f"{url} answered {str(body)[:80]!r}: is it an ART server?")

    def _unavailable(self, error: BaseException) -> BackendUnavailable:
        return BackendUnavailable(f"no answer from the ART server at {self._base_url}: {type(error).__name__}: {error}")


def serialize_group(group: Any) -> orjson.Fragment:
    """A trajectory group as JSON. Returns a group that is serialized already unchanged.

    Messages and tools are written as they are, because ART's types drop unknown keys such as a tool message's name.
    """
    if isinstance(group, orjson.Fragment):
        return group
    with gc_paused():
        verbatim = {"messages_and_choices", "tools", "additional_histories"}
        record = group.model_dump(exclude={"trajectories": {"__all__": verbatim}})
        for trajectory, data in zip(group.trajectories, record["trajectories"], strict=True):
            data |= _history(trajectory)
            data["additional_histories"] = [_history(history) for history in trajectory.additional_histories]
        return orjson.Fragment(orjson.dumps(record))


def _history(history: Any) -> dict[str, Any]:
    turns = [turn if isinstance(turn, dict) else turn.model_dump() for turn in history.messages_and_choices]
    return {"messages_and_choices": turns, "tools": history.tools}


def _body_with_groups(model: Any, groups: Iterable[Any], fields: dict[str, Any]) -> bytes:
    serialized = [serialize_group(group) for group in groups]
    return orjson.dumps({"model": model.safe_model_dump(), "trajectory_groups": serialized, **fields})


async def _error_of(response: aiohttp.ClientResponse) -> BackendError:
    """With the message of the server: ART's `detail`, OpenAI's `error`, or else the text."""
    text = await response.text()
    where = f"{response.method} {response.url.path}"
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = None
    detail = body.get("detail") if isinstance(body, dict) else None
    message = str(detail or error_message(body) or text[:500] or "no reason given")
    if response.status < 500:
        return RequestRefused(f"the ART server refused {where} ({response.status}): {message}", status=response.status)
    error_type = BackendUnavailable if response.status in _GATEWAY_STATUSES else BackendError
    return error_type(f"the ART server failed at {where} ({response.status}): {message}")


def mean_metrics(lines: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the gradient steps that reported it."""
    values_by_name: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values_by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}
