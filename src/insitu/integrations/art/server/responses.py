"""Request bodies, responses and errors as ART clients expect them, and the streamed response of a training request."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from insitu.backend.http import JSON, read_body, refusal_headers, wait_for_disconnect
from insitu.errors import BackendError, BackendUnavailable, JobFailed, RequestRefused
from insitu.integrations.art.server.jobs import ArtJob
from insitu.integrations.art.server.trajectories import parse_object
from insitu.wire.http_format import error_body
from insitu.wire.http_limits import parse_body

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Any]]


def json_endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler's result as JSON, and its errors in ART's format (`detail`) and OpenAI's (`error`)."""

    async def endpoint(request: Request) -> Response:
        try:
            result = await handler(request)
        except RequestRefused as error:
            logger.warning("%s %r refused: %s", request.method, request.url.path, error)
            return error_response(str(error), error.status, error.param, error.code)
        except BackendError as error:
            return error_response(str(error), 503 if isinstance(error, BackendUnavailable) else 500)
        return result if isinstance(result, Response) else JSON(result)

    return endpoint


def error_response(message: str, status: int, param: str | None = None, code: str | None = None) -> Response:
    body = {"detail": message, **error_body(message, status, param, code)}
    return JSON(body, status_code=status, headers=refusal_headers(status))


class Body(NamedTuple):
    """A parsed request body and the digest of its bytes."""

    data: dict[str, Any]
    digest: bytes


class BodyLimit(NamedTuple):
    """How large a request body may be; a sampled token with its logprobs takes about 100 bytes and 8 values."""

    size: int
    values: int


MODEL = BodyLimit(2**20, 2**16)
"""A model with its configuration."""
TRAJECTORIES = BodyLimit(2**28, 2**24)
"""Trajectory groups of about two million sampled tokens."""


async def read_json(request: Request, limit: BodyLimit = MODEL) -> Body:
    def parse(body: bytes) -> Body:
        return Body(parse_object(body, limit.values), hashlib.blake2b(body).digest())

    return await parse_body(parse, await read_body(request.receive, limit.size))


class Uploads:
    """Limits how many bodies with trajectories are in memory at the same time."""

    def __init__(self, parallel: int = 2, waiting: int = 64) -> None:
        self._slots = asyncio.Semaphore(parallel)
        self._free = parallel + waiting

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a slot. Raises RequestRefused (429) if too many requests are waiting already."""
        if self._free == 0:
            raise RequestRefused("too many requests with trajectories are waiting", status=429, code="queue_full")
        self._free -= 1
        try:
            async with self._slots:
                yield
        finally:
            self._free += 1


class MetricsStream(Response):
    """A job's metrics as JSON lines while it trains.

    An error before the first line becomes an error response. A later one breaks the connection, as ART does; its cause
    is in the log and at /art/jobs.
    """

    def __init__(self, job: ArtJob) -> None:
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(wait_for_disconnect(receive))
        started = False
        try:
            async for line in self._job.metric_lines():
                if not started:
                    started = True
                    headers = [(b"content-type", b"application/x-ndjson")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                body = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except (JobFailed, RequestRefused) as error:
            logger.error("model %s: %s", self._job.model.key, error)
            if not started:
                status = error.status if isinstance(error, RequestRefused) else 500
                await error_response(str(error), status)(scope, receive, send)
            return  # a started response without an end breaks the connection
        finally:
            disconnected = watcher.done()
            watcher.cancel()
        # or: another response of the same job may have been delivered first
        self._job.end_was_delivered = self._job.end_was_delivered or not disconnected
        await send({"type": "http.response.body", "body": b""})
