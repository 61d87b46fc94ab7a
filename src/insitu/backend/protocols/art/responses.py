"""Request bodies, responses and errors as ART clients expect them, and the streamed response of a training request."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from insitu.backend.http import JSON, MAX_JOB_BYTES, parse_body, read_body, wait_for_disconnect
from insitu.backend.protocols.art.jobs import ArtJob
from insitu.backend.protocols.art.trajectories import parse_object
from insitu.errors import BackendError, JobFailed, RequestRefused
from insitu.http_format import error_body, gc_paused

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Any]]


def json_endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler's result as JSON, and its errors in ART's format (`detail`) and OpenAI's (`error`)."""

    async def endpoint(request: Request) -> Response:
        try:
            result = await handler(request)
        except RequestRefused as error:
            logger.warning("%s %s refused: %s", request.method, request.url.path, error)
            return error_response(str(error), error.status, error.param, error.code)
        except BackendError as error:
            return error_response(str(error), 500)
        return result if isinstance(result, Response) else JSON(result)

    return endpoint


def error_response(message: str, status: int, param: str | None = None, code: str | None = None) -> Response:
    return JSON({"detail": message, **error_body(message, status, param, code)}, status_code=status)


class Body(NamedTuple):
    """A parsed request body and the digest of its bytes."""

    data: dict[str, Any]
    digest: bytes


async def read_json(request: Request) -> Body:
    return await parse_body(_parse, await read_body(request.receive, MAX_JOB_BYTES))


def _parse(body: bytes) -> Body:
    with gc_paused():
        return Body(parse_object(body), hashlib.blake2b(body).digest())


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
        except JobFailed as error:
            logger.error("model %s: %s", self._job.model.key, error)
            if not started:
                await error_response(str(error), 500)(scope, receive, send)
            return  # a started response without an end breaks the connection
        finally:
            disconnected = watcher.done()
            watcher.cancel()
        self._job.end_was_delivered = not disconnected
        await send({"type": "http.response.body", "body": b""})
