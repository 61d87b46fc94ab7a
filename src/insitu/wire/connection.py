"""Requests to a server that may be unavailable for a while: silence is detected, transient errors are retried.

connection = Connection("the backend at http://h:8700", headers, read_timeout=60, retry_timeout=600)

async def state() -> JobState:
    async with connection.open("GET", "http://h:8700/v1/train/jobs/j1") as response:
        return connection.parsed("job j1", await response.read(), JobState.model_validate_json)

await connection.retry("GET /v1/train/jobs/j1", state)
"""

import asyncio
import errno
import logging
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.wire.http_format import DONE, MALFORMED, error_message, load_json, parse_token_ids

logger = logging.getLogger(__name__)

T = TypeVar("T")

pause: ContextVar[Callable[[float], Awaitable[None]]] = ContextVar("insitu_pause", default=asyncio.sleep)
"""Lets the seconds before the next attempt pass; tests shorten them."""
CONNECT_TIMEOUT = 10.0
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 10.0
_MOST_DOUBLINGS = 32
"""The delay doubles at most so often: a longer one would be too large for a float."""
_REPORT_AFTER = 5.0
"""Seconds after which the first failure of a request is logged; a shorter one is logged if the next attempt fails."""
_MOST_BYTES = 2**28
"""The largest response that is read at once."""
_CHUNK_BYTES = 1 << 18
MAX_LINE = 1 << 24
"""Bytes of a line of a streamed completion; one with the logprobs of a token and its alternatives has thousands."""
_TRANSIENT_REFUSALS = frozenset((408, 425, 429))
_REFUSED = (aiohttp.ClientConnectorError, ConnectionRefusedError, socket.gaierror)
"""No such host, or nothing at that port; HTTP libraries other than aiohttp raise the last two."""
_NOBODY_LISTENS = (errno.ECONNREFUSED, None)
"""Of a refused connection; None: of one that several addresses have refused. Not of names, networks and routes."""
_jitter = random.Random()
"""Not the global generator, which a workflow may have seeded."""


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status >= 500 or status in _TRANSIENT_REFUSALS


def retry_after(headers: Mapping[str, str]) -> float:
    """The seconds in a `Retry-After` header, which holds seconds or a date; 0 if there is none.

    A date is compared with the server's own clock, the `Date` header, if it sends one.
    """
    text = headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            now = parsedate_to_datetime(headers["Date"]) if "Date" in headers else datetime.now(UTC)
            seconds = (parsedate_to_datetime(text) - now).total_seconds()
        except (TypeError, ValueError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def response_error(response: aiohttp.ClientResponse, content: bytes, *, final_500: bool = False) -> BackendError:
    """The error of a response whose status is 400 or higher, with the server's message.

    `final_500`: a status of 500 is not transient but the request's failure, such as that of a training job.
    """
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    keys = body if isinstance(body, dict) else {}
    error = keys["error"] if isinstance(keys.get("error"), dict) else {}
    text = error_message(body) or keys.get("detail") or content[:500].decode(errors="replace") or "no reason given"
    message, status = f"{response.method} {response.url.path}: {text}", response.status
    if final_500 and status == 500:
        return BackendError(f"{message} (status {status})")
    if is_transient(status):
        return BackendUnavailable(f"{message} (status {status})", retry_after=retry_after(response.headers))
    return RequestRefused(message, status=status, param=error.get("param"), code=error.get("code"))


@dataclass(eq=False)
class Retry:
    """Repeats requests that raise BackendUnavailable, with exponential backoff, for up to `timeout` seconds.

    `key` is the configuration key of the timeout. Requests may be concurrent: an outage is logged once, and so is its
    end. `exit_report` says how the server ended if it is a child process; nothing is retried then.
    """

    server: str
    timeout: float
    exit_report: Callable[[], str | None] = lambda: None
    key: str = "retry_timeout"
    reached: bool = False
    """Whether a request has succeeded. Before, a refused connection is final: the address is probably wrong."""
    _away_at: float = -math.inf  # when the server was last away, or returned, by time.monotonic()
    _waiting: int = 0  # requests that have logged the outage

    async def __call__(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `request`; `what` names it in messages."""
        started, failures, waiting = time.monotonic(), 0, False
        try:
            while True:
                try:
                    result = await request()
                    break
                except BackendUnavailable as error:
                    failures += 1
                    now = self._away_at = time.monotonic()
                    self._raise_if_final(what, error, now - started)
                    if not waiting and (failures > 1 or now - started > _REPORT_AFTER):
                        waiting = True
                        self._waiting += 1
                        if self._waiting == 1:
                            logger.warning("%s: %s; retrying for up to %g s", what, error, self.timeout)
                    backoff = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(failures - 1, _MOST_DOUBLINGS))
                    wait = max(backoff * _jitter.uniform(0.5, 1.0), error.retry_after)
                    await pause.get()(min(wait, started + self.timeout - now))
        finally:
            self._waiting -= waiting
        self.reached = True
        if failures:
            self._away_at = time.monotonic()
        if waiting and not self._waiting:
            logger.warning("%s responds again after %.0f s", self.server, time.monotonic() - started)
        return result

    async def was_away(
        self, since: float, check: Callable[[], Awaitable[Any]], wait: Callable[[], Awaitable[Any]]
    ) -> bool:
        """Whether the server was away at some time after `since`, by `time.monotonic()`; if it still is, waits for it.

        `check` is a request that is not repeated, `wait` one that is.
        """
        try:
            await check()
        except BackendUnavailable:
            self._away_at = time.monotonic()
            await wait()
        return self._away_at > since

    def _raise_if_final(self, what: str, error: BackendUnavailable, elapsed: float) -> None:
        if report := self.exit_report():
            raise BackendUnavailable(report) from error
        if not self.reached and _is_refused(error):
            raise error
        if elapsed >= self.timeout:
            gave_up = f"; gave up after {elapsed:.0f} s ({self.key})" if self.timeout else ""
            raise BackendUnavailable(f"{what}: {error}{gave_up}") from error


def _is_refused(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, _REFUSED):
        error = error.__cause__ or error.__context__  # httpx drops the cause and keeps the context
    return error is not None


async def read_at_most(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body of a response; None, and the connection is closed, if it has more than `most` bytes."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > most:
            response.close()
            return None
    return bytes(content)


@dataclass(eq=False, repr=False)
class Connection:
    """An HTTP session with one server, named `server` in messages.

    A request fails after `read_timeout` seconds in which the server neither takes nor sends data. `connector` makes
    what its sockets come from, if not aiohttp's default: TCP, at most 100 of them.
    """

    server: str
    headers: Mapping[str, str]
    read_timeout: float
    retry_timeout: float
    exit_report: Callable[[], str | None] = lambda: None
    connector: Callable[[], aiohttp.BaseConnector | None] = lambda: None
    verified: bool = False
    """Whether the server is known to be the right one. Until then a body that cannot be parsed is final."""
    refused: int = 0
    """Number of refused connections: more than before means that the server was down in between."""
    _session: aiohttp.ClientSession | None = None
    _responses: set[aiohttp.ClientResponse] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.retry = Retry(self.server, self.retry_timeout, self.exit_report)

    async def close(self) -> None:
        """Ends the requests in progress with BackendUnavailable."""
        session, self._session = self._session, None
        for response in [*self._responses]:
            response.close()  # the session would leave those who read its body waiting
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        read_timeout: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response of any status. Raises BackendUnavailable for a lost connection and for silence.

        `read_timeout` overrides that of the connection; `math.inf` allows any silence.
        """
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(headers=self.headers, connector=self.connector())
        silence = self.read_timeout if read_timeout is None else read_timeout
        seconds = None if math.isinf(silence) else silence
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=seconds)
        headers = headers or {}
        body: bytes | AsyncIterator[bytes] | None = data
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(seconds) as limit:  # of the time between writes, which aiohttp does not limit
                if data is not None and len(data) > _CHUNK_BYTES:
                    headers = {**headers, "Content-Length": str(len(data))}
                    body = _chunks(data, limit, seconds)
                response = await self._session.request(
                    method, url, data=body, headers=headers, timeout=limits, allow_redirects=False
                )
            self._responses.add(response)
            async with response:
                if 300 <= response.status < 400 and "Location" in response.headers:
                    problem = f"{self.server} redirects to {response.headers['Location']}, which is not followed"
                    raise BackendError(f"{problem}: give that address")
                yield response
        except aiohttp.ConnectionTimeoutError as error:
            raise self._unavailable(f"no connection within {CONNECT_TIMEOUT:g} s") from error
        except TimeoutError as error:
            raise self._unavailable(f"no data for {silence:g} s (read_timeout)") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            self.refused += isinstance(error, aiohttp.ClientConnectorError) and error.errno in _NOBODY_LISTENS
            raise self._unavailable(f"{type(error).__name__}: {error}") from error
        finally:
            if response is not None:
                self._responses.discard(response)

    async def lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The lines of a streamed response; the last one may be incomplete."""
        try:
            async for line in response.content:
                yield line
        except ValueError as error:  # longer than aiohttp's buffer
            raise self._unavailable(f"a line is too long: {error}") from error

    async def request(
        self,
        method: str,
        url: str,
        parse: Callable[[bytes], T],
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        read_timeout: float | None = None,
        *,
        retried: bool = True,
        final_500: bool = False,
    ) -> T:
        """The parsed response of an idempotent request, repeated after transient errors if `retried`.

        A status of 400 or higher is an error, see `response_error`.
        """
        where = f"{method} {urlsplit(url).path}"

        async def attempt() -> T:
            async with self.open(method, url, data, headers, read_timeout) as response:
                body = await read_at_most(response, _MOST_BYTES)
                if body is None:
                    raise BackendError(f"{self.server} answered {where} with more than {_MOST_BYTES} bytes")
                if response.status >= 400:
                    raise response_error(response, body, final_500=final_500)
            return self.parsed(where, body, parse)

        return await (self.retry(where, attempt) if retried else attempt())

    def parsed(self, where: str, body: bytes, parse: Callable[[bytes], T]) -> T:
        """`parse(body)`. A body that cannot be parsed is a transient error if the server is verified."""
        try:
            return parse(body)
        except MALFORMED as error:
            problem = f"{self.server} returned unexpected data for {where}: {body[:80]!r}"
            if self.verified:
                raise BackendUnavailable(problem) from error
            raise BackendError(f"{problem}; is it the right server?") from error

    def _unavailable(self, problem: str) -> BackendUnavailable:
        return BackendUnavailable(f"no answer from {self.server}: {problem}")


async def _chunks(data: bytes, limit: asyncio.Timeout, seconds: float | None) -> AsyncIterator[bytes]:
    """Parts of a request body; `limit` expires `seconds` after the server last took one."""
    loop = asyncio.get_running_loop()
    for start in range(0, len(data), _CHUNK_BYTES):
        if seconds is not None:
            with suppress(RuntimeError):  # the response has begun, and the limit has ended
                limit.reschedule(loop.time() + seconds)
        yield data[start : start + _CHUNK_BYTES]


def event_data(line: bytes) -> bytes | None:
    """The payload of a `data:` line of an event stream; None for any other line, and for one without payload."""
    return line[5:].strip() or None if line.startswith(b"data:") else None


def parse_events(buffer: bytes) -> tuple[list[Any], bytes]:
    """Splits a stream into the JSON of its complete events, one line of data each, and the incomplete rest."""
    *lines, rest = buffer.split(b"\n")
    if len(rest) > MAX_LINE:
        raise aiohttp.ClientPayloadError(f"a line of the stream has more than {MAX_LINE} bytes")
    payloads = map(event_data, lines)
    return [load_json(data) for data in payloads if data is not None and data != DONE], rest


def sampled_tokens(logprobs: Any) -> tuple[list[Any], list[float] | None]:
    """The tokens and their logprobs in `logprobs` of a choice: of a chat (`content`) or of a text (`tokens`)."""
    if not isinstance(logprobs, dict):
        return [], None
    if (entries := logprobs.get("content")) is None:
        return logprobs.get("tokens") or [], logprobs.get("token_logprobs")
    return [entry.get("token") for entry in entries], [entry["logprob"] for entry in entries]


def sent_logprobs(logprobs: Any) -> list[dict[str, Any]] | None:
    """The entries of `logprobs` of a choice: those of a chat as they are, those of a text in the same form."""
    if not isinstance(logprobs, dict):
        return None
    if (entries := logprobs.get("content")) is not None:
        return list(entries)
    tokens, values = sampled_tokens(logprobs)
    return chat_entries(tokens, values) if values and len(tokens) == len(values) else None


def chat_entries(tokens: Iterable[str], logprobs: Iterable[float]) -> list[dict[str, Any]]:
    """`logprobs.content` of a choice of a chat, as OpenAI's API returns it."""
    return [
        {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]


def choice_tokens(choice: dict[str, Any]) -> tuple[list[int] | None, list[float] | None]:
    """The ids of the sampled tokens, which may be written in the logprobs instead, and their logprobs.

    The logprobs of a completion without tokens, which may be null, are empty.
    """
    tokens, logprobs = sampled_tokens(choice.get("logprobs"))
    token_ids = choice.get("token_ids")
    if token_ids is None:
        return parse_token_ids(tokens), logprobs
    return token_ids, [] if logprobs is None and token_ids == [] else logprobs
