"""Request bodies, responses and errors as ART clients expect them."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from insitu.errors import BackendError, BackendUnavailable, JobFailed, RequestRefused
from insitu.integrations.art.server.jobs import ArtJob
from insitu.integrations.art.server.trajectories import T, parse
from insitu.wire.http_server import Handler, error_response, json_response, parse_body, parse_json, read_body

logger = logging.getLogger(__name__)

Result = Callable[[web.Request], Awaitable[Any]]


def json_endpoint(handler: Result) -> Handler:
    """Returns the handler's result as JSON, and its errors in ART's format (`detail`) and OpenAI's (`error`)."""

    async def endpoint(request: web.Request) -> web.StreamResponse:
        try:
            result = await handler(request)
        except BackendError as error:
            if isinstance(error, RequestRefused):
                logger.warning("%s %r refused: %s", request.method, request.path, error)
            return art_error(error)
        return result if isinstance(result, web.StreamResponse) else json_response(result)

    return endpoint


def art_error(error: BackendError) -> web.Response:
    if isinstance(error, RequestRefused):
        return error_response(str(error), error.status, error.param, error.code, detail=str(error))
    return error_response(str(error), 503 if isinstance(error, BackendUnavailable) else 500, detail=str(error))


class BodyLimit(NamedTuple):
    """How large a request body may be; a sampled token with its logprobs takes about 100 bytes and 8 values."""

    size: int
    values: int


MODEL = BodyLimit(2**20, 2**16)
"""A model with its configuration."""
TRAJECTORIES = BodyLimit(2**28, 2**24)
"""Trajectory groups of about two million sampled tokens."""


async def read_json(request: web.Request, limit: BodyLimit = TRAJECTORIES) -> tuple[Any, bytes]:
    """The content of a request body, and the digest of its bytes."""

    def load(body: bytes) -> tuple[Any, bytes]:
        return parse_json(body, max_values=limit.values), hashlib.blake2b(body).digest()

    return await parse_body(load, await read_body(request, limit.size))


async def read_as(kind: type[T], request: web.Request, limit: BodyLimit = MODEL) -> T:
    data, _ = await read_json(request, limit)
    return await asyncio.to_thread(parse, kind, data)


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


async def stream_metrics(request: web.Request, job: ArtJob) -> web.StreamResponse:
    """Streams a job's metrics as JSON lines while it trains.

    An error before the first line becomes an error response. A later one breaks the connection, as ART does; its cause
    is in the log and at /art/jobs.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    try:
        async for line in job.metric_lines():
            if not response.prepared:
                await response.prepare(request)
            await response.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    except (JobFailed, RequestRefused) as error:
        logger.error("model %s: %s", job.model.key, error)
        if not response.prepared:
            return art_error(error)
        if request.transport is not None:
            request.transport.abort()
        return response
    # or: another response of the same job may have been delivered first
    job.end_was_delivered = job.end_was_delivered or request.transport is not None
    return response
