"""Proxy plumbing of the gateway: request validation, header filtering, streaming."""

import io
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict

from insitu.capture.recorder import Exchange
from insitu.errors import CaptureError, RequestRefused
from insitu.formats.dialects import StreamTranslator, Translation
from insitu.wire.http_format import MALFORMED, error_message
from insitu.wire.http_server import parse_json

logger = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Maximum size of a request body in bytes, compressed or not."""
MAX_VALUES = 2**19
"""Commas and brackets in a request body: a megabyte of code or numbers, which exceeds the context of any model."""
_VALUE_BYTES = 128
"""An estimate of the memory of a small Python object; nested empty objects can take several times as much."""
_LARGE = 2**20
_NOT_FORWARDED = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "expect", "alt-svc"),
        *("authorization", "x-api-key", "api-key", "x-goog-api-key", "x-session-id"),
    )
)
"""Hop-by-hop headers, and credentials: the key or the session of an agent is that of its endpoint."""


class Route(NamedTuple):
    """A path below an episode's address and `v1`, decoded and as it was sent."""

    text: str
    raw: str


def largest_body(request: web.BaseRequest) -> int:
    """How many bytes the body of a request may have once it has been read."""
    if not request.body_exists:
        return 0
    is_plain = "Content-Encoding" not in request.headers
    return min(length, MAX_BODY) if is_plain and (length := request.content_length) is not None else MAX_BODY


def parse_route(request: web.Request) -> Route:
    """Drops empty segments; raises RequestRefused for `.` and `..`, which would leave the episode's address."""
    parts = [part for part in request.rel_url.raw_path.split("/")[3:] if part]
    if any(segment in (".", "..") for part in parts for segment in unquote(part).split("/")):
        raise RequestRefused("the path has a segment `.` or `..`", code="invalid_path")
    raw = "/".join(parts[1:] if parts[:1] == ["v1"] else parts)
    return Route(unquote(raw), raw)


def parse_request(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises RequestRefused if it is not one."""
    data = parse_json(body, max_values=MAX_VALUES)
    if not isinstance(data, dict):
        raise RequestRefused(f"the body is a JSON {type(data).__name__}; expected an object", code="malformed_json")
    return data


def memory_of(body: bytes) -> int:
    """About what its values take in memory."""
    return max(len(body), _VALUE_BYTES * sum(map(body.count, (b",", b"[", b"{"))))


def payload(body: bytes) -> bytes | io.BytesIO | None:
    """A body to send; a large one in chunks, so that it does not hold up other episodes."""
    return (body or None) if len(body) < _LARGE else io.BytesIO(body)


def forwarded_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers that the other side of the gateway gets."""
    connection = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    dropped = _NOT_FORWARDED | connection
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def response_headers(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """The headers for a response whose body has been decompressed."""
    headers = forwarded_headers(answer.headers)
    headers.pop("Content-Encoding", None)
    return headers


def translate_response(translation: Translation, status: int, content: bytes) -> bytes:
    """A completion or an error of the server in the agent's dialect."""
    try:
        body = orjson.loads(content)
        if status < 400:
            return orjson.dumps(translation.response(body))
        message = error_message(body)
    except MALFORMED as error:
        if status < 400:
            raise aiohttp.ClientPayloadError(f"its response is not a chat completion: {error!r}") from error
        message = None
    return orjson.dumps(translation.error(message or content[:500].decode(errors="replace"), status))


async def forward(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Passes a response on as it comes in."""
    response = web.StreamResponse(status=answer.status, headers=response_headers(answer))
    await response.prepare(request)
    try:
        while chunk := await answer.content.readany():
            await response.write(chunk)
    except (aiohttp.ClientError, ConnectionError):  # too late for an error status: break the response off
        if request.transport is not None:
            request.transport.abort()
    return response


async def stream(
    request: web.Request,
    answer: aiohttp.ClientResponse,
    exchange: Exchange,
    translation: Translation,
    on_end: Callable[[str | None], None],
) -> web.StreamResponse:
    """Passes a streamed completion on as it comes in; a failure is recorded and reported as an event.

    `on_end` is called with the failure, None if there is none, before the agent sees the end.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    translator = StreamTranslator(translation)
    try:
        await response.prepare(request)
        failure = exchange.end(answer.headers, await _pass_stream(response, answer, exchange, translator))
        on_end(failure)
        await response.write(translator.end(failure))
    except CaptureError as error:
        await response.write(translator.end(str(error)))
    except ConnectionError:
        logger.debug("an agent has closed its connection")
    finally:  # without effect if it has ended; an agent need not read on after the last choice has finished
        cut_off = None if exchange.all_choices_finished else "the agent closed the connection"
        exchange.end(answer.headers, cut_off, by_server=False)
    return response


async def _pass_stream(
    response: web.StreamResponse, answer: aiohttp.ClientResponse, exchange: Exchange, translator: StreamTranslator
) -> str | None:
    """Returns why the upstream failed, or None; raises errors of writing to the agent."""
    while True:
        try:
            chunk = await answer.content.readany()
        except aiohttp.ClientError as error:
            return f"the stream from the model server was cut off: {error!r}"
        if not chunk:
            return None
        try:
            translated = translator.feed(exchange.feed(chunk))
        except (*MALFORMED, aiohttp.ClientPayloadError) as error:
            return f"the stream from the model server cannot be parsed: {error!r}"
        failure = translator.failure
        if exchange.done_received:
            failure = exchange.end(answer.headers, failure)
        await response.write(translated)
        if failure is not None:
            return failure
