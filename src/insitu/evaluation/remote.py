"""The client of a workflow service (`insitu serve`), and the protocol that both speak.

A trainer requests one attempt with `POST /v1/episodes`; the response is JSON lines, streamed as things happen:

    {"input": "2 + 2", "row": {"id": 17, ...}, "key": ["r1", 3, "17", 2, 0],
     "options": {"seed": 7, "timeout": null, "training": ["player"], ...},
     "policy": {"base_url": "http://127.0.0.1:8700/v1", "model": "policy", "api_key": "none"}}

    {"step": {"parent_id": "root", "function_ancestry": {...}, "payload": {"event_type": "FUNCTION_START", ...}}}
                                                an empty line: a heartbeat
    {"call": {"index": 0, "token_ids": [7, 2], "logprobs": [-0.1, -0.7], ...}}
    {"end": {"outcome": "ok", "output": "4", "seconds": 0.3, ...}}

A stream without `end` is a lost attempt.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticSerializationError, from_json, to_json

from insitu.connection import CONNECT_TIMEOUT, Retry, is_transient, retry_after
from insitu.errors import BackendError, BackendUnavailable, ConfigError, EpisodeTimeout, RequestRefused
from insitu.evaluation.episodes import AttemptResult, EpisodeOptions, fail
from insitu.evaluation.watchdog import doing, seconds_since
from insitu.http_format import split_userinfo
from insitu.redaction import remember_secret
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, ModelCall, Outcome
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.schemas.steps import IntermediateStep, StreamEventData, TraceMetadata, TTCEventData
from insitu.workflow.conversion import JSON_OPTIONS, json_form, to_jsonable

PROTOCOL = 3
EPISODES = "/v1/episodes"
GENERATE = "/generate"
"""The documented route, with which an endpoint may be written."""
HEARTBEAT_SECONDS = 5.0
"""An idle stream carries an empty line this often."""
TOKEN_VARIABLE = "INSITU_SERVE_TOKEN"
"""The environment variable with the bearer token, on both sides."""
_SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
_JSON_LINES = "application/x-ndjson"
_NOT_SENT = ("retries", "result")  # applied on this side, between and after attempts


class ServedPolicy(BaseModel):
    """Where the trainer's model is served, for the llms of `_type: policy` in this episode.

    `renamed`: the model's name changes with every version of the weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str
    api_key: str = Field(default="none", repr=False)
    renamed: bool = False

    @classmethod
    def of(cls, endpoint: PolicyEndpoint) -> "ServedPolicy":
        now = endpoint.current_model
        name = endpoint.model if now is None else now()
        return cls(base_url=endpoint.base_url, model=name, api_key=endpoint.api_key, renamed=now is not None)


class EpisodeRequest(BaseModel):
    """One attempt at an episode; without `policy` the service serves its own model."""

    model_config = ConfigDict(extra="forbid")

    input: Any = None
    row: Any = None
    key: EpisodeKey
    options: EpisodeOptions = EpisodeOptions()
    policy: ServedPolicy | None = None

    @field_validator("key")
    @classmethod
    def _check_key(cls, key: EpisodeKey) -> EpisodeKey:
        if has_lone_surrogate(key.text()):
            raise ValueError("it has a lone surrogate, which no file can hold")
        return key


class EpisodeEnd(BaseModel):
    """The outcome of an attempt; its steps and calls have their own lines."""

    outcome: Outcome
    output: Any = None
    reason: DropReason | None = None
    error: str | None = None
    transient: bool = False
    seconds: float = 0.0
    step_rewards: list[float] | None = None
    rewarded_functions: list[str] = []
    failed_requests: dict[str, int] = {}
    requested: dict[str, int] = {}
    abandoned_attempts: int = 0


class Description(BaseModel):
    """The response to `GET /v1/episodes`."""

    protocol: int
    source: str
    llms: list[str]


def encode(value: Any) -> bytes:
    """JSON of any value a workflow may return; raises ValueError if it is nested too deeply."""
    try:
        return to_json(value, inf_nan_mode="constants", **JSON_OPTIONS)
    except (PydanticSerializationError, UnicodeEncodeError):  # lone surrogates are escaped
        try:
            return json.dumps(to_jsonable(value)).encode()
        except UnicodeEncodeError:  # in a key
            return json.dumps(value, default=json_form).encode()


def decode(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:  # lone surrogates again, or not JSON
        return json.loads(text)


def has_lone_surrogate(text: str) -> bool:
    """Whether a text, as JSON may hold it, cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def read_call(record: dict[str, Any]) -> ModelCall:
    return ModelCall(**{**record, "functions": tuple(record["functions"])})


def read_step(record: Any) -> IntermediateStep:
    """A step from its JSON; TraceMetadata and TTCEventData are recognised by their fields."""
    if isinstance(record, dict) and isinstance(payload := record.get("payload"), dict):
        metadata, data = payload.get("metadata"), payload.get("data")
        if isinstance(metadata, dict) and metadata.keys() >= TraceMetadata.model_fields.keys():
            metadata = TraceMetadata(**metadata)
        if isinstance(data, dict):
            is_candidate = data.keys() >= TTCEventData.model_fields.keys()
            data = (TTCEventData if is_candidate else StreamEventData)(**data)
        record = {**record, "payload": {**payload, "metadata": metadata, "data": data}}
    return IntermediateStep.model_validate(record)


class RemoteWorkflow:
    """A workflow service. `timeout` in seconds per attempt; `policy` replaces the service's llms of `_type: policy`."""

    def __init__(self, url: str, timeout: float) -> None:
        address, userinfo = split_userinfo(url)
        self._password = (userinfo or "").partition(":")[2]
        self.url = address.rstrip("/").removesuffix(EPISODES).removesuffix(GENERATE).rstrip("/")
        self.policy: PolicyEndpoint | None = None
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint is {address!r}; it must begin with http:// or https://")
        remember_secret(self._password)

    async def __aenter__(self) -> "RemoteWorkflow":
        token = self._password or os.environ.get(TOKEN_VARIABLE)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            connector=aiohttp.TCPConnector(limit=0),  # the number of episodes in flight is limited elsewhere
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def check(self, trained: Collection[str] = (), *, reached: bool = False) -> None:
        """Raises BackendUnavailable or ConfigError unless this is a workflow service with the llms in `trained`.

        Retries transient errors for up to `timeout` seconds, and refused connections too if the service has been
        `reached` before. Raises RequestRefused if the service may not send requests to `policy`.
        """
        retry = Retry(f"the workflow service at {self.url}", self._timeout, key="endpoint_timeout")
        retry.reached = reached
        about = await retry(f"GET {EPISODES}", self._description)
        if about.protocol != PROTOCOL:
            raise ConfigError(
                f"endpoint {self.url} speaks protocol {about.protocol}, not {PROTOCOL}: use one release on both sides"
            )
        if missing := sorted(set(trained) - set(about.llms)):
            raise ConfigError(
                f"endpoint {self.url} serves {about.source}, which has no llm called {' or '.join(missing)}; "
                f"available: {', '.join(about.llms) or 'none'} (start the service with the file that is trained)"
            )

    async def _description(self) -> Description:
        params = {"base_url": self.policy.base_url} if self.policy else {}
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT), self._open("GET", params=params) as response:
                if response.status in (404, 405):
                    raise self._not_ours(f"GET {EPISODES} returned {response.status}")
                if response.status >= 400:
                    raise await self._refusal(response)
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BackendUnavailable(
                f"no answer from the workflow service at {self.url}: {type(error).__name__}: {error}"
            ) from error
        try:
            return Description.model_validate_json(body)
        except ValidationError as error:
            raise self._not_ours(f"GET {EPISODES} returned {body!r:.100}") from error

    async def attempt(self, item: EvalInputItem, key: EpisodeKey, options: EpisodeOptions) -> AttemptResult:
        """Makes one attempt. Failures of the service itself are `backend_error`s."""
        episode = Episode(key, Outcome.OK)
        heard = started = time.monotonic()
        limit = asyncio.timeout(self._timeout)
        transient = True

        def activity() -> str:
            return f"the workflow service at {urlsplit(self.url).netloc} has sent nothing for {seconds_since(heard)}"

        try:
            request = {
                "input": item.input_obj,
                "row": item.full_dataset_entry,
                "key": key,
                "options": {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _NOT_SENT},
                "policy": ServedPolicy.of(self.policy) if self.policy else None,
            }
            async with limit, aclosing(self._lines(encode(request))) as lines:
                with doing(activity):
                    async for line in lines:
                        heard = time.monotonic()
                        if line and (end := _take(episode, decode(line))) is not None:
                            return AttemptResult(episode, end.transient)
            raise BackendUnavailable(f"the workflow service at {self.url} ended the stream before the episode")
        except (aiohttp.ClientError, OSError, BackendUnavailable) as error:  # TimeoutError is an OSError
            service = f"the workflow service at {self.url}"
            failure: Exception = error
            reason = DropReason.BACKEND_ERROR
            if limit.expired() and heard > started and time.monotonic() - heard < _SILENCE_SECONDS:
                failure = EpisodeTimeout(f"no answer within endpoint_timeout: {self._timeout:g} s")
                reason = DropReason.TIMEOUT
            elif limit.expired():
                failure = BackendUnavailable(f"{service} is silent ({self._timeout:g} s)")
            elif not isinstance(error, BackendError):
                failure = BackendUnavailable(f"the connection to {service} is lost: {type(error).__name__}: {error}")
            fail(episode, reason, failure)
        except (RequestRefused, ValueError) as error:  # would fail again
            fail(episode, DropReason.BACKEND_ERROR, error)
            transient = False
        episode.seconds = time.monotonic() - started
        return AttemptResult(episode, transient)

    async def _lines(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """The complete lines of the response."""
        async with self._open("POST", data=request, headers={"Content-Type": "application/json"}) as response:
            if response.status >= 400:
                raise await self._refusal(response)
            if response.content_type != _JSON_LINES:
                raise self._not_ours(f"it returned {response.content_type}")
            parts: list[bytes] = []
            async for chunk in response.content.iter_any():
                first, *others = chunk.split(b"\n")
                parts.append(first)
                for other in others:
                    yield b"".join(parts)
                    parts = [other]

    def _open(self, method: str, **options: Any) -> Any:
        if self._session is None:
            raise BackendError("the connection to the workflow service is not open")
        return self._session.request(method, self.url + EPISODES, allow_redirects=False, **options)

    def _not_ours(self, what: str) -> ConfigError:
        return ConfigError(f"endpoint {self.url} is not a workflow service (insitu serve): {what}")

    async def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        body = await response.read()
        try:
            message = decode(body)["error"]["message"]
        except (ValueError, TypeError, KeyError):
            message = f"status {response.status}: {body!r:.200}"
        message = f"the workflow service at {self.url} refused the request: {message}"
        if is_transient(response.status):
            return BackendUnavailable(message, retry_after=retry_after(response.headers))
        return RequestRefused(message, status=response.status)


def _take(episode: Episode, line: dict[str, Any]) -> EpisodeEnd | None:
    """Adds a line to the episode; returns the end if the line is one."""
    if "step" in line:
        episode.steps.append(read_step(line["step"]))
    elif "call" in line:
        episode.calls.append(read_call(line["call"]))
    elif "end" in line:
        end = EpisodeEnd.model_validate(line["end"])
        for name in EpisodeEnd.model_fields:
            if name != "transient":
                setattr(episode, name, getattr(end, name))
        return end
    else:
        raise ValueError(f"a line of the workflow service is not a step, call or end: {line!r:.200}")
    return None
