"""The ART server at the other end, in place of the backend class that releases of ART from 0.5.9 on no longer ship."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import orjson

from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.http_format import gc_paused

logger = logging.getLogger(__name__)

_SHORT = aiohttp.ClientTimeout(total=60, sock_connect=10)
_LOADING = aiohttp.ClientTimeout(total=3600, sock_connect=10)
_TRAINING = aiohttp.ClientTimeout(total=None, sock_connect=10)
"""The open answer is the job: it ends when the training does."""
_OF_GATEWAYS = (502, 503, 504)


def remote_backend(art: Any, base_url: str, api_key: str) -> Any:
    """A backend of the installed release's own kind (`art.Backend`) for the server at `base_url`."""
    kind = type("RemoteBackend", (_RemoteBackend, art.Backend), {"__init__": _RemoteBackend.__init__})
    return kind(base_url, api_key)


class _RemoteBackend:
    """The methods that models of ART call on their backend, over HTTP. Errors say what the server answered."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None
        self.inference_url = ""
        """Where the model is served, up to and including `/v1`; known once the server has prepared it."""
        self._inference_key = api_key
        self._names: set[str] = set()
        self._steps: dict[str, int] = {}

    async def close(self) -> None:
        """Close our connections; the server is somebody's own and stays."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def register(self, model: Any) -> None:
        await self._post("/register", model.safe_model_dump())

    async def _get_step(self, model: Any) -> int:
        step = await self._post("/_get_step", model.safe_model_dump())
        if type(step) is not int:
            raise self._strange("/_get_step", step)
        self._steps[model.name] = step
        return step

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        body = {"model": model.safe_model_dump(), "config": config}
        told = await self._post("/_prepare_backend_for_training", body, limit=_LOADING)
        if not (isinstance(told, list) and len(told) == 2 and all(isinstance(each, str) for each in told)):
            raise self._strange("/_prepare_backend_for_training", told)
        self.inference_url, self._inference_key = self._reachable(told[0]), told[1]
        await self._get_step(model)
        await self.list_names()
        return self.inference_url, self._inference_key

    def _reachable(self, address: str) -> str:
        """The address the server tells, with the host we know it by where it tells the one it listens on (0.0.0.0)."""
        parts = urlsplit(address)
        if parts.hostname not in ("0.0.0.0", "::", "localhost", "127.0.0.1"):
            return address
        known = urlsplit(self._base_url).hostname or "127.0.0.1"
        host = f"[{known}]" if ":" in known else known
        return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))

    async def list_names(self) -> set[str]:
        """The names of models that the inference server answers to."""
        if not self.inference_url:
            raise BackendError("no model has been registered with the ART server yet: initialize the adapter first")
        key = {"Authorization": f"Bearer {self._inference_key}"}
        listed = await self._request("GET", f"{self.inference_url}/models", None, _SHORT, **key)
        try:
            self._names = {str(model["id"]) for model in listed["data"]}
        except (TypeError, LookupError):
            raise self._strange(f"{self.inference_url}/models", listed) from None
        return self._names

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        """The name to sample it by: servers differ in whether the newest weights have one without their step."""
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
        """The metrics of each gradient step, as it happens. A server that knows `Idempotency-Key` trains a key once."""
        body = {"config": config.model_dump(), "dev_config": dict(dev_config), "verbose": verbose}
        data = await asyncio.to_thread(_with_groups, model, trajectory_groups, body)
        headers = {"Idempotency-Key": key} if key else {}
        try:
            async with self._open("POST", self._base_url + "/_train_model", data, _TRAINING, **headers) as answer:
                if answer.status >= 400:
                    raise await _refusal(answer)
                async for line in answer.content:
                    if line.strip():
                        yield self._metrics(line)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise self._unavailable(error) from error

    async def failure_of(self, key: str) -> str | None:
        """Why the training of this key has failed, where the server tells: `insitu backend` does, at /art/jobs."""
        try:
            listed = await self._request("GET", f"{self._base_url}/art/jobs", None, _SHORT)
            latest = next(job for job in listed["jobs"] if str(job["key"]).endswith(f"/{key}"))
            return str(latest["message"]) if latest["status"] in ("failed", "canceled") else None
        except (BackendError, StopIteration, TypeError, LookupError):  # ART's own server has no such list
            return None

    def _metrics(self, line: bytes) -> dict[str, float]:
        try:
            told = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if line.startswith(b"{") and not line.endswith(b"\n"):
                raise self._unavailable(ConnectionError("the answer breaks off within a line")) from error
            told = line.decode(errors="replace")
        if not isinstance(told, dict):
            raise self._strange("/_train_model", told)
        return told

    async def train(self, model: Any, trajectory_groups: Iterable[Any], **options: Any) -> Any:
        """Releases from 0.5.9 on train by their backend; `options` are keys of the two kinds of TrainConfig."""
        from art.types import TrainConfig, TrainResult

        config = TrainConfig(**{k: options.pop(k) for k in [*options] if k in TrainConfig.model_fields})
        lines = [line async for line in self._train_model(model, list(trajectory_groups), config, options)]
        return TrainResult(step=await self._get_step(model), metrics=averages(lines))

    async def _train_sft(self, *args: Any, **options: Any) -> AsyncIterator[dict[str, float]]:
        raise BackendError("supervised training has no route in ART's protocol: it cannot be done on a remote server")
        yield {}

    async def _log(self, model: Any, trajectory_groups: Iterable[Any], split: str = "val") -> None:
        data = await asyncio.to_thread(_with_groups, model, trajectory_groups, {"split": split})
        await self._request("POST", self._base_url + "/_log", data, _LOADING)

    async def _delete_checkpoints(self, model: Any, benchmark: str, benchmark_smoothing: float) -> None:
        path = f"/_delete_checkpoints?benchmark={benchmark}&benchmark_smoothing={benchmark_smoothing}"
        await self._post(path, model.safe_model_dump())

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        await self._post(
            "/_delete_checkpoint_files", {"model": model.safe_model_dump(), "steps_to_keep": steps_to_keep}
        )

    async def health(self) -> str | None:
        """What is wrong with the server, or None: it is asked at its own address, `/healthcheck`, then `/health`."""
        problem = None
        for path in ("/healthcheck", "/health"):
            try:
                async with self._open("GET", self._base_url + path, None, _SHORT) as answer:
                    if answer.status == 200:
                        return None
                    problem = f"{self._base_url}{path} answered {answer.status}"
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                return str(self._unavailable(error))
        return problem

    async def _post(self, path: str, body: Any, limit: aiohttp.ClientTimeout = _SHORT) -> Any:
        return await self._request("POST", self._base_url + path, await asyncio.to_thread(orjson.dumps, body), limit)

    async def _request(
        self, method: str, url: str, data: bytes | None, limit: aiohttp.ClientTimeout, **headers: str
    ) -> Any:
        try:
            async with self._open(method, url, data, limit, **headers) as answer:
                if answer.status >= 400:
                    raise await _refusal(answer)
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise self._unavailable(error) from error
        try:
            return orjson.loads(text or b"null")
        except orjson.JSONDecodeError as error:
            raise self._strange(url, text.decode(errors="replace")) from error

    def _open(self, method: str, url: str, data: bytes | None, limit: aiohttp.ClientTimeout, **headers: str) -> Any:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(headers=self._headers)
        return self._session.request(method, url, data=data, timeout=limit, headers=headers)

    def _strange(self, where: str, answer: Any) -> BackendError:
        url = where if "://" in where else self._base_url + where
        return BackendError(f"{url} answered {str(answer)[:80]!r}: is it an ART server?")

    def _unavailable(self, error: BaseException) -> BackendUnavailable:
        return BackendUnavailable(f"no answer from the ART server at {self._base_url}: {type(error).__name__}: {error}")


def spelt(group: Any) -> orjson.Fragment:
    """A trajectory group as JSON; one that is JSON already as it is.

    Messages and tools as they are: ART's types would leave out what they do not know, the name of a tool's message.
    """
    if isinstance(group, orjson.Fragment):
        return group
    with gc_paused():
        ours = {"messages_and_choices", "tools", "additional_histories"}
        told = group.model_dump(exclude={"trajectories": {"__all__": ours}})
        for trajectory, data in zip(group.trajectories, told["trajectories"], strict=True):
            data |= _history(trajectory)
            data["additional_histories"] = [_history(history) for history in trajectory.additional_histories]
        return orjson.Fragment(orjson.dumps(told))


def _history(history: Any) -> dict[str, Any]:
    turns = history.messages_and_choices
    return {
        "messages_and_choices": [turn if isinstance(turn, dict) else turn.model_dump() for turn in turns],
        "tools": history.tools,
    }


def _with_groups(model: Any, groups: Iterable[Any], more: dict[str, Any]) -> bytes:
    return orjson.dumps({"model": model.safe_model_dump(), "trajectory_groups": [*map(spelt, groups)], **more})


async def _refusal(answer: aiohttp.ClientResponse) -> BackendError:
    """The server's own words: ART's `detail`, or the `error` of OpenAI's shape. Of a gateway before it: no answer."""
    text = await answer.text()
    message, where = text[:500] or "no reason given", f"{answer.method} {answer.url.path}"
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = None
    if isinstance(body, dict):
        told = body.get("error")
        message = str(body.get("detail") or (told.get("message") if isinstance(told, dict) else told) or message)
    if answer.status < 500:
        return RequestRefused(f"the ART server refused {where} ({answer.status}): {message}", status=answer.status)
    kind = BackendUnavailable if answer.status in _OF_GATEWAYS else BackendError
    return kind(f"the ART server failed at {where} ({answer.status}): {message}")


def averages(lines: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each number over the gradient steps that told it."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
