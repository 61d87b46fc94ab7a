"""Requests in and answers out, as ART clients expect them: bodies, errors, and the stream that is a training job."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from insitu.backend.art.jobs import Run
from insitu.backend.art.messages import read_object
from insitu.backend.http import JSON, error_body, read_body
from insitu.backend.training.uploads import MAX_JOB_BYTES
from insitu.errors import BackendError, JobFailed, RequestRefused
from insitu.schemas.bulk import collection_paused

logger = logging.getLogger(__name__)

LONG_BODY = 2**16
"""Bytes from which a body is parsed in a thread of its own."""

Handler = Callable[[Request], Awaitable[Any]]


def answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """What `handler` gives as JSON, and what it raises in both shapes: `detail`, which is ART's, and our `error`."""

    async def endpoint(request: Request) -> Response:
        try:
            answer = await handler(request)
        except RequestRefused as error:
            logger.warning("%s %s refused: %s", request.method, request.url.path, error)
            return failure(str(error), error.status, error.param, error.code)
        except BackendError as error:
            return failure(str(error), 500)
        return answer if isinstance(answer, Response) else JSON(answer)

    endpoint.__name__ = getattr(handler, "__name__", "endpoint")
    return endpoint


def failure(message: str, status: int, param: str | None = None, code: str | None = None) -> Response:
    return JSON({"detail": message, **error_body(message, status, param, code)}, status_code=status)


class Body(NamedTuple):
    """What a request says, and a digest of how it says it."""

    data: dict[str, Any]
    digest: bytes


async def body_of(request: Request) -> Body:
    body = await read_body(request.receive, MAX_JOB_BYTES)
    return _understood(body) if len(body) < LONG_BODY else await asyncio.to_thread(_understood, body)


def _understood(body: bytes) -> Body:
    with collection_paused():  # the JSON reader lets nobody else run meanwhile
        return Body(read_object(body), hashlib.blake2b(body).digest())


class LineStream(Response):
    """A run's lines while it trains. Its status waits for the first line: what fails before that is an error answer.

    What fails later breaks the connection off, as ART does; the cause is in the log and at /art/jobs.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(_left(receive))
        begun = False
        try:
            async for line in self._lines():
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": NDJSON})
                await send({"type": "http.response.body", "body": line, "more_body": True})
        except JobFailed as error:
            logger.error("model %s: %s", self._run.model.key, error)
            if not begun:
                await failure(str(error), 500)(scope, receive, send)
            return  # an answer that has begun and does not end is a broken connection
        finally:
            gone = left.done()
            left.cancel()
        self._run.delivered = not gone
        await send({"type": "http.response.body", "body": b""})

    async def _lines(self) -> AsyncIterator[bytes]:
        async for line in self._run.lines():
            yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


NDJSON = [(b"content-type", b"application/x-ndjson")]


async def _left(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
