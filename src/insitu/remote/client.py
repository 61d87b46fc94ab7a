"""The client's end of a connection that carries attempts to a workflow service (`insitu serve`).

    async with ServiceSession("http://127.0.0.1:8000", "the workflow service at ...") as session:
        await session.check(trained={"player"})
        result = await session.attempt(request)         # raises ServiceLost

All attempts of a session share one request, whose body and response last as long as the session: lines of JSON, as in
`attempt_records`. What begins at the same time is sent together. A connection that ends, or a service that sends no
report for a minute, fails the attempts in flight, once for all.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection
from itertools import count
from typing import Any, Self

import aiohttp
from pydantic import BaseModel, ValidationError

from insitu.collect.watchdog import seconds_since
from insitu.errors import BackendUnavailable, ConfigError, RequestRefused
from insitu.remote.attempt_records import Counts, LineCutter
from insitu.wire.addresses import split_userinfo
from insitu.wire.connection import CONNECT_TIMEOUT, is_transient, retry_after
from insitu.wire.endings import end_tasks
from insitu.wire.http_format import error_message
from insitu.wire.json_values import decode, encode
from insitu.wire.redaction import remember_secret

PROTOCOL = 6
EPISODES = "/v1/episodes"
GENERATE = "/generate"
"""The documented route, with which an endpoint may be written."""
JSON_LINES = "application/x-ndjson"
LINE_LIMIT = 64 * 2**20
"""The bytes of a line that a service reads."""
HEARTBEAT_SECONDS = 1.0
"""A service sends a report this often."""
TOKEN_VARIABLE = "INSITU_SERVE_TOKEN"
"""The environment variable with the bearer token, on both sides."""
_SILENT_AFTER = 3
"""A service is silent if so many reports are overdue."""
_LOST_AFTER = 60


class Description(BaseModel):
    """The response to `GET /v1/episodes`."""

    protocol: int
    source: str
    llms: list[str]


class ServiceLost(BackendUnavailable):
    """The connection to a workflow service, or its process, has ended."""


class ServiceSession:
    """A connection to a workflow service, called `name` in messages. A password in `url` is the token.

    `on_lost` is called with the reason when the session ends, `on_counts` with completions that its workflows have
    requested outside every episode.
    """

    def __init__(
        self,
        url: str,
        name: str | None = None,
        on_lost: Callable[[str], object] = lambda _: None,
        on_counts: Callable[[Counts], object] = lambda _: None,
    ) -> None:
        address, userinfo = split_userinfo(url)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint is {address!r}; it must begin with http:// or https://")
        self._token = (userinfo or "").partition(":")[2] or os.environ.get(TOKEN_VARIABLE)
        remember_secret(self._token)
        self.url = address.rstrip("/").removesuffix(EPISODES).removesuffix(GENERATE).rstrip("/")
        self.name = name or f"the workflow service at {self.url}"
        self.lost: str | None = None
        """Why the session has ended."""
        self._on_lost = on_lost
        self._on_counts = on_counts
        self._numbers = count(1)
        self._attempts: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._outbox: list[bytes] = [b"\n"]
        self._wake = asyncio.Event()
        self._wake.set()
        self._report: dict[str, Any] = {"activities": {}, "blocked": None}
        self._heard = time.monotonic()
        self._overdue = 0
        """Reports that have not come."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._lose("was closed")
        await end_tasks(*self._tasks)
        await self._http.close()

    async def check(self, trained: Collection[str] = (), policy_url: str | None = None) -> None:
        """Raises BackendUnavailable or ConfigError unless this is a workflow service with the llms in `trained`.

        Raises RequestRefused if the service may not send requests to the model server at `policy_url`.
        """
        _, body = await self._request("GET", params={"base_url": policy_url} if policy_url else {})
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

    async def connect(self) -> None:
        """Opens the connection for attempts. Raises BackendUnavailable, ConfigError or RequestRefused."""
        response, _ = await self._request("POST", data=self._upload(), headers={"Content-Type": JSON_LINES})
        if response.content_type != JSON_LINES:
            raise self._not_ours(f"it returned {response.content_type}")
        self._tasks = [asyncio.create_task(work, name="session") for work in (self._read(response), self._listen())]

    def new_number(self) -> int:
        """A number for an attempt, with which `activity` knows it."""
        return next(self._numbers)

    async def attempt(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        """The line with the result of an attempt.

        Raises ServiceLost, RequestRefused if the service refuses it, and ValueError if it cannot be serialized. When
        the caller is cancelled, so is the attempt.
        """
        text = encode({"attempt": number, **request})
        if len(text) > LINE_LIMIT:
            raise RequestRefused(f"the attempt takes {len(text)} bytes of JSON; allowed: {LINE_LIMIT}", status=413)
        if self.lost is not None:
            raise ServiceLost(self.lost)
        ended = self._attempts[number] = asyncio.get_running_loop().create_future()
        self._send(text)
        try:
            return await ended
        except asyncio.CancelledError:
            self._send(encode({"cancel": number}))
            raise
        finally:
            del self._attempts[number]

    @property
    def is_silent(self) -> bool:
        return self._overdue >= _SILENT_AFTER

    def activity(self, number: int) -> str:
        """What an attempt is doing, as its service last said."""
        if self.is_silent:
            return f"{self.name} has sent nothing for {seconds_since(self._heard)}"
        if self._report["blocked"] is not None:
            return f"{self.name} is blocked by {self._report['blocked']}"
        return f"on {self.name}: {self._report['activities'].get(str(number), 'it begins')}"

    def _send(self, text: bytes) -> None:
        self._outbox += (text, b"\n")
        self._wake.set()

    async def _upload(self) -> AsyncGenerator[bytes, None]:
        """The lines to the service, for as long as the session lasts."""
        while self.lost is None:
            await self._wake.wait()
            self._wake.clear()
            chunk, self._outbox = b"".join(self._outbox), []
            if chunk:
                yield chunk

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        """Takes the lines of the service until the connection ends."""
        problem = "has ended the connection"
        lines = LineCutter()
        try:
            async with response:
                async for chunk in response.content.iter_any():
                    self._overdue, self._heard = 0, time.monotonic()
                    for text in lines.cut(chunk):
                        self._take(decode(text))
        except (aiohttp.ClientError, OSError) as error:
            problem = f"has lost the connection: {type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError) as error:
            problem = f"has sent a line that is not part of the protocol: {error}"
        finally:
            self._lose(problem)

    def _take(self, message: dict[str, Any]) -> None:
        if "counts" in message:
            self._on_counts(message["counts"])
        if "report" in message:
            self._report = message["report"]
            return
        attempt = self._attempts.get(message["attempt"])
        if attempt is None or attempt.done():  # it has been cancelled
            return
        if "error" in message:
            attempt.set_exception(self._refused(message, message["status"]))
        else:
            attempt.set_result(message)

    async def _listen(self) -> None:
        """Counts reports that are overdue; while this process is blocked itself, none is."""
        while self._overdue < _LOST_AFTER:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._overdue += 1
        self._lose(f"has sent nothing for {seconds_since(self._heard)}")

    def _lose(self, problem: str) -> None:
        if self.lost is not None:
            return
        self.lost = f"{self.name} {problem}"
        for attempt in self._attempts.values():
            if not attempt.done():
                attempt.set_exception(ServiceLost(self.lost))
        self._wake.set()
        self._on_lost(self.lost)

    async def _request(self, method: str, **options: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        """A response, and its body unless that is streamed."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                response = await self._http.request(method, self.url + EPISODES, allow_redirects=False, **options)
                is_stream = response.status < 400 and method == "POST"
                body = b"" if is_stream else await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise BackendUnavailable(f"no answer from {self.name}: {type(error).__name__}: {error}") from error
        if response.status in (404, 405):
            raise self._not_ours(f"{method} {EPISODES} returned {response.status}")
        if response.status >= 400:
            try:
                content = decode(body)
            except ValueError:
                content = body
            raise self._refused(content, response.status, retry_after(response.headers))
        return response, body

    def _not_ours(self, what: str) -> ConfigError:
        return ConfigError(f"endpoint {self.url} is not a workflow service (insitu serve): {what}")

    def _refused(self, content: Any, status: int, wait: float = 0.0) -> Exception:
        message = error_message(content) or f"status {status}: {content!r:.200}"
        problem = f"{self.name} refused the request: {message}"
        if is_transient(status):
            return BackendUnavailable(problem, retry_after=wait)
        return RequestRefused(problem, status=status)
