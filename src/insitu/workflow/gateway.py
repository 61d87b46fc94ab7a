"""The gateway: a reverse proxy that records the model calls of agents we did not build, one address for each episode.

    async with Gateway([plain_llm, ...]) as gateway:
        with scope.activate(), gateway.admit(scope) as door:
            ... run an agent with OPENAI_BASE_URL=door.openai_url, ANTHROPIC_BASE_URL=door.anthropic_url

What the agent sends in its own dialect becomes a chat completion for the server behind, and the answer goes back in
that dialect; the recorder in between is the one of the in-process transport.
"""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import web

from insitu.errors import CaptureError, ConfigError, RequestRefused
from insitu.workflow.capture import Exchange
from insitu.workflow.context import EpisodeScope
from insitu.workflow.dialects import Dialect, Turn, anthropic, chat, events_of, responses
from insitu.workflow.llms import PlainLLM
from insitu.workflow.steps import Place, place

logger = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Bytes of a request; more is refused with 413."""
_REMEMBERED_KEYS = 65_536
_DIALECTS: dict[str, Dialect] = {
    "v1/chat/completions": chat,
    "v1/responses": responses,
    "v1/messages": anthropic,
}
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding")
    + ("upgrade", "host", "content-length", "content-encoding", "accept-encoding", "authorization", "x-api-key")
)


@dataclass(frozen=True)
class Elsewhere:
    """Where requests go that name none of the known models, or are no model calls (embeddings, files)."""

    base_url: str
    api_key: str = "none"


@dataclass(frozen=True)
class Door:
    """What one episode's agent is given: addresses that are good for it alone, and end with it."""

    key: str
    address: str
    scope: EpisodeScope = field(repr=False)
    place: Place = field(repr=False)
    memory: dict[str, Any] = field(default_factory=dict, repr=False)
    """What a dialect remembers of this episode's answers."""

    @property
    def openai_url(self) -> str:
        return f"{self.address}/e/{self.key}/v1"

    @property
    def anthropic_url(self) -> str:
        return f"{self.address}/e/{self.key}"


class Gateway:
    """Serves on 127.0.0.1 until it is closed.

    `llms` are the models it knows, by their keys and served names, and by `aliases` (name -> key). A name that is none
    of these goes to `elsewhere`, or where that is not given to the first of `llms`: an agent whose model name is fixed
    in its code can be trained as it is.
    """

    def __init__(
        self,
        llms: Sequence[PlainLLM],
        aliases: Mapping[str, str] | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        if not llms:
            raise ConfigError("a gateway needs at least one model of the section llms")
        self._by_name = {llm.model: llm for llm in reversed(llms)} | {llm.name: llm for llm in llms}
        for alias, name in (aliases or {}).items():
            if name not in self._by_name:
                raise ConfigError(f"models: {alias} stands for {name!r}; there is: {', '.join(self._by_name)}")
            self._by_name[alias] = self._by_name[name]
        self._first = llms[0]
        self._elsewhere = elsewhere
        self._doors: dict[str, Door] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.address = ""
        self.refused = 0
        """Requests with a key that is unknown, or whose episode has ended."""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/e/{key}/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
            auto_decompress=True,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    @contextmanager
    def admit(self, scope: EpisodeScope) -> Iterator[Door]:
        """A door for this episode, standing where the running code stands; it is shut at the end of the block."""
        door = Door(secrets.token_urlsafe(18), self.address, scope, place.get())
        self._doors[door.key] = door
        try:
            yield door
        finally:
            del self._doors[door.key]
            self._ended[door.key] = scope.key.text() if scope.key else "a run"
            if len(self._ended) > _REMEMBERED_KEYS:
                self._ended.popitem(last=False)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        key, tail = request.match_info["key"], request.match_info["tail"]
        dialect = _DIALECTS.get(tail, chat)
        try:
            door = self._door(key)
            body = await request.read()
            turn = self._turn(door, dialect, body) if request.method == "POST" and tail in _DIALECTS else None
            llm = self._llm_for(turn) if turn is not None else None
            if turn is None or llm is None:
                return await self._forward(request, tail, body)
            return await self._call(request, door, llm, turn)
        except RequestRefused as error:
            return _json(dialect.error(error.status, str(error), error.code), error.status)
        except CaptureError as error:
            return _json(dialect.error(424, str(error), "capture_error"), 424)
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is larger than {MAX_BODY} bytes"
            return _json(dialect.error(413, message), 413)
        except aiohttp.ClientError as error:
            message = f"no answer from the model's server: {type(error).__name__}: {error}"
            return _json(dialect.error(502, message, "upstream"), 502)

    def _door(self, key: str) -> Door:
        door = self._doors.get(key)
        if door is not None and not door.scope.closed:
            return door
        self.refused += 1
        if door is not None or key in self._ended:
            name = self._ended.get(key, "")
            logger.info("a request of %s came after its end", name)
            raise RequestRefused(f"the episode {name} of this address has ended", status=410, code="episode_ended")
        raise RequestRefused("this address belongs to no episode", status=401, code="unknown_episode")

    def _turn(self, door: Door, dialect: Dialect, body: bytes) -> Turn:
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from None
        if not isinstance(data, dict):
            raise RequestRefused(f"the body is a JSON {type(data).__name__}; expected an object", code="malformed_json")
        try:
            return dialect.turn(data, door.memory)
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestRefused(f"the request cannot be understood: {type(error).__name__} {error}") from error

    def _llm_for(self, turn: Turn) -> PlainLLM | None:
        """The model a request means; None where it is to be sent elsewhere as it is."""
        known = self._by_name.get(str(turn.chat.get("model")))
        return known if known is not None or self._elsewhere is not None else self._first

    async def _call(self, request: web.Request, door: Door, llm: PlainLLM, turn: Turn) -> web.StreamResponse:
        asked = {**llm.params, **turn.chat, "model": llm.model}
        exchange = llm.recorder.begin("POST", "/chat/completions", orjson.dumps(asked), door.scope, door.place)
        if exchange is None:
            raise RequestRefused("messages is missing, or no list", param="messages")
        url = f"{str(llm.client.base_url).rstrip('/')}/chat/completions"
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.client.api_key}"}
        assert self._session is not None
        try:
            async with self._session.post(url, data=exchange.content, headers=headers) as answer:
                if exchange.streamed and answer.status < 400:
                    return await _stream(request, answer, exchange, turn)
                shown = exchange.answer(answer.status, answer.headers, await answer.read())
        except BaseException as error:  # whatever ends the call is a failed attempt; raised again
            exchange.fail(type(error).__name__)
            raise
        if answer.status >= 400 or turn.verbatim:
            return web.Response(body=shown, status=answer.status, content_type="application/json")
        return _json(turn.reply(orjson.loads(shown)), answer.status)

    async def _forward(self, request: web.Request, tail: str, body: bytes) -> web.StreamResponse:
        """Send a request elsewhere as it is, and its answer back as it comes."""
        plain = self._first
        target = self._elsewhere or Elsewhere(str(plain.client.base_url), plain.client.api_key)
        url = f"{target.base_url.rstrip('/')}/{tail.removeprefix('v1/')}"
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        headers |= {"Authorization": f"Bearer {target.api_key}", "x-api-key": target.api_key}
        assert self._session is not None
        async with self._session.request(
            request.method, url, params=request.query, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response


async def _stream(
    request: web.Request, answer: aiohttp.ClientResponse, exchange: Exchange, turn: Turn
) -> web.StreamResponse:
    """Pass a streamed answer on as it comes. What breaks it off is recorded, and told inside the stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    reason: str | None = "the agent closed the connection"
    rest = b""
    try:
        await response.prepare(request)
        try:
            async for chunk in answer.content.iter_any():
                shown = exchange.feed(chunk)
                if turn.verbatim:
                    await response.write(shown)
                    continue
                events, rest = events_of(rest + shown)
                for event in events:
                    await response.write(b"".join(turn.event(event)))
        except aiohttp.ClientError as error:
            reason = f"the stream broke off: {error!r}"
            logger.info("%s", reason)
            await response.write(b"data: " + orjson.dumps({"error": {"message": reason, "type": "server_error"}}) + b"\n\n")
            return response
        reason = None
        if not turn.verbatim:
            await response.write(b"".join(turn.end()))
        return response
    finally:
        exchange.end(answer.headers, reason)


def _json(data: dict[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")
