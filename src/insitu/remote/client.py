"""The client of a workflow service (`insitu serve`), and the routes that both know.

A trainer requests one attempt with `POST /v1/episodes`; the response is JSON lines (see `attempt_records`), streamed as
things happen. An empty line is a heartbeat; a stream without `end` is a lost attempt.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ValidationError

from insitu.collect.episodes import AttemptResult, EpisodeOptions, fail
from insitu.collect.watchdog import doing, seconds_since
from insitu.errors import BackendError, BackendUnavailable, ConfigError, EpisodeTimeout, RequestRefused
from insitu.remote.attempt_records import ServedPolicy, request_fields, take_line
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, Outcome
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.wire.connection import CONNECT_TIMEOUT, Retry, is_transient, retry_after
from insitu.wire.http_format import split_userinfo
from insitu.wire.json_values import decode, encode
from insitu.wire.redaction import remember_secret

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


class Description(BaseModel):
    """The response to `GET /v1/episodes`."""

    protocol: int
    source: str
    llms: list[str]


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
            policy = ServedPolicy.of(self.policy) if self.policy else None
            request = request_fields(item, key, options) | {"policy": policy}
            async with limit, aclosing(self._lines(encode(request))) as lines:
                with doing(activity):
                    async for line in lines:
                        heard = time.monotonic()
                        if line and (end := take_line(episode, decode(line))) is not None:
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
