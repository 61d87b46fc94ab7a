"""Request bodies, responses and errors as ART clients expect them, and the bodies as the OpenAPI document has them.

The models of bodies do not validate: clients of different releases send different keys, which `trajectories` accepts or
names.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from insitu.errors import BackendError, BackendUnavailable, JobFailed, RequestRefused
from insitu.integrations.art.server.jobs import ArtJob
from insitu.integrations.art.server.trajectories import parse_object
from insitu.wire.http_server import Handler, error_response, json_response, parse_body, read_body

logger = logging.getLogger(__name__)

Result = Callable[[web.Request], Awaitable[Any]]


def json_endpoint(handler: Result) -> Handler:
    """Returns the handler's result as JSON, and its errors in ART's format (`detail`) and OpenAI's (`error`)."""

    async def endpoint(request: web.Request) -> web.StreamResponse:
        try:
            result = await handler(request)
        except RequestRefused as error:
            logger.warning("%s %r refused: %s", request.method, request.path, error)
            return art_error(str(error), error.status, error.param, error.code)
        except BackendError as error:
            return art_error(str(error), 503 if isinstance(error, BackendUnavailable) else 500)
        return result if isinstance(result, web.StreamResponse) else json_response(result)

    return endpoint


def art_error(message: str, status: int, param: str | None = None, code: str | None = None) -> web.Response:
    return error_response(message, status, param, code, detail=message)


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


async def read_json(request: web.Request, limit: BodyLimit = MODEL) -> Body:
    def parse(body: bytes) -> Body:
        return Body(parse_object(body, limit.values), hashlib.blake2b(body).digest())

    return await parse_body(parse, await read_body(request, limit.size))


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
            return art_error(str(error), error.status if isinstance(error, RequestRefused) else 500)
        if request.transport is not None:
            request.transport.abort()
        return response
    # or: another response of the same job may have been delivered first
    job.end_was_delivered = job.end_was_delivered or request.transport is not None
    return response


_MORE_KEYS = ConfigDict(extra="allow")


class ArtModelBody(BaseModel):
    """A model in training."""

    model_config = _MORE_KEYS

    name: str
    project: str
    entity: str | None = None
    base_model: str | None = None
    trainable: bool = True
    config: dict[str, Any] | None = Field(default=None, alias="_internal_config")


class ArtTrajectoryBody(BaseModel):
    """A conversation with its reward: messages, and choices as they were sampled."""

    model_config = _MORE_KEYS

    messages_and_choices: list[dict[str, Any]]
    reward: float = 0.0
    metrics: dict[str, float] = {}
    tools: list[dict[str, Any]] | None = None


class ArtGroupBody(BaseModel):
    """Trajectories that are compared with one another."""

    model_config = _MORE_KEYS

    trajectories: list[ArtTrajectoryBody]


class ArtModelRequest(BaseModel):
    model: ArtModelBody
    config: dict[str, Any] | None = None


class ArtTrainRequest(BaseModel):
    model: ArtModelBody
    trajectory_groups: list[ArtGroupBody]
    config: dict[str, Any] = {}
    dev_config: dict[str, Any] = {}


class ArtLogRequest(BaseModel):
    model: ArtModelBody
    trajectory_groups: list[ArtGroupBody]
    split: str = "val"


class ArtKeepRequest(BaseModel):
    model: ArtModelBody
    steps_to_keep: list[int]


class ServerlessStepsRequest(BaseModel):
    steps: list[int]


class ServerlessLogRequest(BaseModel):
    trajectory_groups: list[ArtGroupBody]
    split: str = "val"


class ServerlessTrainRequest(BaseModel):
    model_id: str
    trajectory_groups: list[ArtGroupBody]
    experimental_config: dict[str, Any] = {}
