"""Attempts made by a workflow service (`insitu serve`), which streams their steps and calls back."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import fields
from typing import Any

import aiohttp
from pydantic import ValidationError

from insitu.errors import BackendError, BackendUnavailable, ConfigError, EpisodeTimeout, RequestRefused
from insitu.evaluation.episode_protocol import (
    EPISODES,
    HEARTBEAT_SECONDS,
    PROTOCOL,
    TOKEN_VARIABLE,
    Description,
    EpisodeEnd,
    ServedPolicy,
    decode,
    encode,
    read_call,
    read_step,
)
from insitu.evaluation.episodes import AttemptResult, EpisodeOptions, fail
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, Outcome
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint

_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
_JSON_LINES = "application/x-ndjson"
_NOT_SENT = ("retries", "result")  # applied on this side, between and after attempts


class RemoteWorkflow:
    """A workflow service. `timeout` in seconds per attempt; `policy` replaces the service's llms of `_type: policy`."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url.rstrip("/").removesuffix(EPISODES)
        self.policy: PolicyEndpoint | None = None
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint is {url!r}; it must begin with http:// or https://")

    async def __aenter__(self) -> "RemoteWorkflow":
        token = os.environ.get(TOKEN_VARIABLE)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0),  # the number of episodes in flight is limited elsewhere
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def check(self, trained: Collection[str] = ()) -> None:
        """Raises BackendUnavailable or ConfigError unless this is a workflow service with the llms in `trained`."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS), self._open("GET") as response:
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
            about = Description.model_validate_json(body)
        except ValidationError as error:
            raise self._not_ours(f"GET {EPISODES} returned {body!r:.100}") from error
        if about.protocol != PROTOCOL:
            raise ConfigError(
                f"endpoint {self.url} speaks protocol {about.protocol}, not {PROTOCOL}: use one release on both sides"
            )
        if missing := sorted(set(trained) - set(about.llms)):
            raise ConfigError(
                f"endpoint {self.url} serves {about.source}, which has no llm called {' or '.join(missing)}; "
                f"available: {', '.join(about.llms) or 'none'} (start the service with the file that is trained)"
            )

    async def attempt(self, item: EvalInputItem, key: EpisodeKey, options: EpisodeOptions) -> AttemptResult:
        """Makes one attempt. Failures of the service itself are `backend_error`s."""
        episode = Episode(key, Outcome.OK)
        heard = started = time.monotonic()
        limit = asyncio.timeout(self._timeout)
        transient = True
        try:
            request = {
                "input": item.input_obj,
                "row": item.full_dataset_entry,
                "key": key,
                "options": {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _NOT_SENT},
                "policy": ServedPolicy.of(self.policy) if self.policy else None,
            }
            async with limit, aclosing(self._lines(encode(request))) as lines:
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
        return (
            BackendUnavailable(message) if response.status >= 500 else RequestRefused(message, status=response.status)
        )


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
