"""What crosses the gateway: routes, bodies, headers and streams, checked on the way in and cleaned on the way on."""

import io
import logging
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict

from insitu.errors import CaptureError, RequestRefused
from insitu.http_format import MALFORMED, error_message, parse_events
from insitu.workflow.capture import Exchange
from insitu.workflow.dialects import Turn, shown_of

logger = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Bytes of a request, compressed or not; more is refused with 413."""
_PIECEWISE = 2**20
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_OF_ONE_CONNECTION = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "expect", "alt-svc"),
        *("authorization", "x-api-key", "api-key", "x-goog-api-key"),
    )
)
"""Headers that are between two neighbours, the key of the episode among them."""


class Route(NamedTuple):
    """What is asked for below an episode's address and `v1`, as text and as it was encoded."""

    text: str
    raw: str


def route_of(request: web.Request) -> Route:
    """Without empty steps; RequestRefused for a path that would leave the address."""
    parts = [part for part in request.rel_url.raw_path.split("/")[3:] if part]
    if any(step in (".", "..") for part in parts for step in unquote(part).split("/")):
        raise RequestRefused("the path has a step `.` or `..`", code="invalid_path")
    raw = "/".join(parts[1:] if parts[:1] == ["v1"] else parts)
    return Route(unquote(raw), raw)


async def body_of(request: web.Request) -> bytes:
    """The body as it was sent."""
    if (request.content_length or 0) > MAX_BODY:
        raise _too_large()
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:
        raise RequestRefused(f"the body cannot be read: {error}", code="malformed_body") from None


def _too_large() -> RequestRefused:
    return RequestRefused(f"the body is larger than {MAX_BODY} bytes", status=413, code="too_large")


def json_of(body: bytes, encoding: str) -> dict[str, Any]:
    """The JSON object in a body, which may be compressed."""
    try:
        data = orjson.loads(_inflated(body, encoding.strip().lower()))
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from None
    if not isinstance(data, dict):
        raise RequestRefused(f"the body is a JSON {type(data).__name__}; expected an object", code="malformed_json")
    return data


def _inflated(body: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW_BITS:
        raise RequestRefused(f"content-encoding is {encoding!r:.50}; allowed: gzip, deflate", status=415)
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        found = stream.decompress(body, MAX_BODY + 1)
    except zlib.error as error:
        raise RequestRefused(f"the body is not {encoding}: {error}", code="malformed_body") from None
    if len(found) > MAX_BODY:
        raise _too_large()
    if not stream.eof:
        raise RequestRefused(f"the body is {encoding} without its end", code="malformed_body")
    return found


def payload(body: bytes) -> bytes | io.BytesIO | None:
    """A body to send; a large one is sent in pieces, so that other episodes go on."""
    return (body or None) if len(body) < _PIECEWISE else io.BytesIO(body)


def passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers for the other side of the gateway."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    own = _OF_ONE_CONNECTION | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in own)


def answered(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """The headers of an answer, whose body has been decompressed."""
    headers = passed_on(answer.headers)
    headers.pop("Content-Encoding", None)
    return headers


def translated(turn: Turn, status: int, shown: bytes) -> bytes:
    """An answer of the server, or its refusal, in the agent's dialect."""
    try:
        found = orjson.loads(shown)
        if status < 400:
            return orjson.dumps(turn.reply(found))
        said = error_message(found)
    except MALFORMED as error:
        if status < 400:
            raise aiohttp.ClientPayloadError(f"its answer is no chat completion: {error!r}") from error
        said = None
    return orjson.dumps(turn.error(said or shown[:500].decode(errors="replace"), status))


async def pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass an answer on as it comes."""
    response = web.StreamResponse(status=answer.status, headers=answered(answer))
    await response.prepare(request)
    try:
        while chunk := await answer.content.readany():
            await response.write(chunk)
    except (aiohttp.ClientError, ConnectionError):  # too late for a status: the agent is to see it broken off
        if request.transport is not None:
            request.transport.abort()
    return response


async def stream(
    request: web.Request,
    answer: aiohttp.ClientResponse,
    exchange: Exchange,
    turn: Turn,
    note: Callable[[str | None], None],
) -> web.StreamResponse:
    """Pass a streamed answer on as it comes. What breaks it off is recorded, noted, and told inside the stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        failure = exchange.end(answer.headers, await _events(response, answer, exchange, turn))
        note(failure)
        await response.write(b"".join(turn.end(failure)))
    except CaptureError as error:
        await response.write(b"".join(turn.end(str(error))))
    except ConnectionError:
        logger.debug("an agent has closed its connection")
    finally:  # unless it has ended already; an agent need not wait for more than the last piece
        exchange.end(answer.headers, None if exchange.is_whole else "the agent closed the connection")
    return response


async def _events(
    response: web.StreamResponse, answer: aiohttp.ClientResponse, exchange: Exchange, turn: Turn
) -> str | None:
    """Pass on what comes; gives the reason if it broke off. An error to write is the agent's, and raised."""
    rest = b""
    while True:
        try:
            chunk = await answer.content.readany()
        except aiohttp.ClientError as error:
            return f"the stream of the model's server broke off: {error!r}"
        if not chunk:
            return None
        failure = None
        try:
            shown = exchange.feed(chunk)
            if not turn.verbatim:
                events, rest = parse_events(rest + shown)
                shown, failure = shown_of(turn, events)
        except MALFORMED as error:
            return f"the stream of the model's server cannot be understood: {error!r}"
        if exchange.is_done:
            failure = exchange.end(answer.headers, failure)
        await response.write(shown)
        if failure is not None:
            return failure
