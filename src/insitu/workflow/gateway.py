"""The gateway: a reverse proxy that records the model calls of agents we did not build, one address for each episode.

    async with Gateway([plain_llm, ...]) as gateway:
        with scope.activate(), gateway.admit(scope) as door:
            ... run an agent with OPENAI_BASE_URL=door.openai_url, ANTHROPIC_BASE_URL=door.anthropic_url

What the agent sends in its own dialect becomes a chat completion for the server behind, and the answer goes back in
that dialect; the recorder in between is the one of the in-process transport.
"""

import io
import logging
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from insitu.errors import CaptureError, ConfigError, RequestRefused
from insitu.workflow.capture import Exchange
from insitu.workflow.context import EpisodeScope
from insitu.workflow.dialects import Dialect, Turn, anthropic, chat, events_of, responses
from insitu.workflow.llms import PlainLLM
from insitu.workflow.steps import Place, place

logger = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Bytes of a request; more is refused with 413."""
MAX_CHOICES = 128
"""Most completions one request may ask for (`n`)."""
_PIECEWISE = 2**20
_REMEMBERED_KEYS = 1024
_TEXT_COMPLETIONS = "v1/completions"
_DIALECTS: dict[str, Dialect] = {
    "v1/chat/completions": chat,
    "v1/responses": responses,
    "v1/messages": anthropic,
}
_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade", "host"),
        *("transfer-encoding", "content-length", "content-encoding", "accept-encoding", "authorization", "x-api-key"),
    )
)


@dataclass(frozen=True)
class Elsewhere:
    """Where requests go that name none of the known models, or are no model calls (embeddings, files)."""

    base_url: str
    api_key: str = "none"


@dataclass
class Door:
    """What one episode's agent is given: addresses that are good for it alone, and end with it."""

    key: str = field(repr=False)
    address: str
    scope: EpisodeScope = field(repr=False)
    place: Place = field(repr=False)
    memory: dict[Dialect, dict[str, Any]] = field(default_factory=dict, repr=False)
    """What each dialect remembers of this episode's answers."""
    failure: str | None = None
    """Why the latest call had no answer, where the fault was the model's server's."""

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
        self._ended: OrderedDict[str, tuple[str, weakref.ref[EpisodeScope]]] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.address = ""
        self.late_calls = 0
        """Requests refused because their episode had ended; counted on the episode too."""
        self.unknown_keys = 0
        """Requests refused because no episode ever had their key (or one that ended long ago)."""

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
            self._ended[door.key] = (scope.key.text() if scope.key else "a run"), weakref.ref(scope)
            if len(self._ended) > _REMEMBERED_KEYS:
                self._ended.popitem(last=False)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        tail = request.match_info["tail"]
        dialect = _DIALECTS.get(tail, chat)
        try:
            door = self._door(request.match_info["key"])
            if (request.content_length or 0) > MAX_BODY:
                raise web.HTTPRequestEntityTooLarge(MAX_BODY, request.content_length or 0)
            body = await request.read()
            told = request.method == "POST" and (tail in _DIALECTS or tail == _TEXT_COMPLETIONS)
            data = _read(body) if told else {}
            llm = self._llm_for(data.get("model")) if told else None
            if llm is None:
                return await self._forward(request, body)
            if tail not in _DIALECTS:
                return await self._text_completion(request, door, llm, data)
            return await self._call(request, door, llm, _turn(door, dialect, data))
        except RequestRefused as error:
            return _json(dialect.error(error.status, str(error), error.code), error.status)
        except CaptureError as error:
            return _json(dialect.error(424, str(error), "capture_error"), 424)
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is larger than {MAX_BODY} bytes"
            return _json(dialect.error(413, message, "too_large"), 413)
        except aiohttp.ClientError as error:
            status, what = (504, "in time") if isinstance(error, TimeoutError) else (502, "whole")
            door.failure = f"no answer {what} from the model's server: {type(error).__name__}: {error}"
            return _json(dialect.error(status, door.failure, "upstream"), status)

    def _door(self, key: str) -> Door:
        door = self._doors.get(key)
        if door is not None and not door.scope.closed:
            return door
        name, scope = self._ended.get(key, ("", lambda: None)) if door is None else ("", lambda: door.scope)
        ended = scope()
        if door is None and key not in self._ended:
            self.unknown_keys += 1
            raise RequestRefused(
                "this address belongs to no episode, or to one that ended long ago", status=401, code="unknown_episode"
            )
        level = logging.INFO if self.late_calls else logging.WARNING  # there may be many
        logger.log(level, "a request of %s came after its end and is refused: has an agent been left running?", name)
        self.late_calls += 1
        if ended is not None:
            ended.late_calls += 1
        raise RequestRefused(f"the episode {name} of this address has ended", status=410, code="episode_ended")

    def _llm_for(self, name: Any) -> PlainLLM | None:
        """The model a request means; None where it is to be sent elsewhere as it is."""
        known = self._by_name.get(str(name))
        return known if known is not None or self._elsewhere is not None else self._first

    async def _call(self, request: web.Request, door: Door, llm: PlainLLM, turn: Turn) -> web.StreamResponse:
        asked = {**llm.params, **turn.chat, "model": llm.model}
        choices = asked.get("n") or 1
        if not isinstance(choices, int) or not 1 <= choices <= MAX_CHOICES:
            raise RequestRefused(f"n is {choices!r:.50}; allowed: 1 to {MAX_CHOICES}", param="n")
        if "max_completion_tokens" in turn.chat and "max_tokens" not in turn.chat:
            asked.pop("max_tokens", None)  # the agent's own limit, by its newer name
        exchange = llm.recorder.begin("POST", "/chat/completions", orjson.dumps(asked), door.scope, door.place)
        if exchange is None:
            raise RequestRefused("messages is missing, or no list", param="messages")
        try:
            async with self._post(llm, "chat/completions", exchange.content) as answer:
                if exchange.streamed and answer.status < 400:
                    return await _stream(request, answer, exchange, turn, door)
                shown = exchange.answer(answer.status, answer.headers, await answer.read())
        except BaseException as error:  # whatever ends the call is a failed attempt; raised again
            exchange.fail(type(error).__name__)
            raise
        busy = answer.status == 429 or answer.status >= 500
        door.failure = f"it answered with status {answer.status}" if busy else None
        if not turn.verbatim:
            shown = orjson.dumps(_translated(turn, answer.status, shown))
        return web.Response(body=shown, status=answer.status, headers=_passed_on(answer.headers))

    async def _text_completion(
        self, request: web.Request, door: Door, llm: PlainLLM, data: dict[str, Any]
    ) -> web.StreamResponse:
        """Passed on, and not recorded: it has no messages. So it is refused where what it samples is to be trained."""
        if door.scope.trains(llm.name):
            raise RequestRefused(
                f"text completions of {llm.name} cannot be trained; ask /v1/chat/completions, /v1/responses or "
                "/v1/messages",
                code="unsupported",
            )
        async with self._post(llm, "completions", orjson.dumps({**data, "model": llm.model})) as answer:
            return await _pass_on(request, answer)

    def _post(self, llm: PlainLLM, route: str, content: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.client.api_key}"}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=llm.config.timeout)
        assert self._session is not None
        return self._session.post(
            _under(llm.client.base_url, route), data=_data(content), headers=headers, timeout=limit
        )

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Send a request elsewhere as it is, and its answer back as it comes."""
        plain = self._first
        target = self._elsewhere or Elsewhere(str(plain.client.base_url), plain.client.api_key)
        route = request.rel_url.raw_path.removeprefix(f"/e/{request.match_info['key']}/").removeprefix("v1/")
        query = request.rel_url.raw_query_string
        url = URL(_under(target.base_url, route) + (f"?{query}" if query else ""), encoded=True)
        headers = _passed_on(request.headers)
        headers.update({"Authorization": f"Bearer {target.api_key}", "x-api-key": target.api_key})
        assert self._session is not None
        async with self._session.request(
            request.method, url, data=_data(body), headers=headers, allow_redirects=False
        ) as answer:
            return await _pass_on(request, answer)


def _under(base_url: Any, route: str) -> str:
    return f"{str(base_url).rstrip('/')}/{route}"


def _data(body: bytes) -> bytes | io.BytesIO | None:
    """A body to send; a large one is sent in pieces, so that other episodes go on."""
    return (body or None) if len(body) < _PIECEWISE else io.BytesIO(body)


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)


def _read(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from None
    if not isinstance(data, dict):
        raise RequestRefused(f"the body is a JSON {type(data).__name__}; expected an object", code="malformed_json")
    return data


def _turn(door: Door, dialect: Dialect, data: dict[str, Any]) -> Turn:
    try:
        return dialect.turn(data, door.memory.setdefault(dialect, {}))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RequestRefused(f"the request cannot be understood: {type(error).__name__} {error}") from error


def _translated(turn: Turn, status: int, shown: bytes) -> dict[str, Any]:
    """An answer of the server, or its refusal, in the agent's dialect."""
    try:
        data = orjson.loads(shown)
        if status < 400:
            return turn.reply(data)
        said = data["error"]["message"]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        if status < 400:
            raise aiohttp.ClientPayloadError(f"its answer is no chat completion: {error!r}") from error
        said = shown[:500].decode(errors="replace")
    return turn.error(status, str(said))


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
    await response.prepare(request)
    try:
        while chunk := await answer.content.readany():
            await response.write(chunk)
    except (aiohttp.ClientError, ConnectionError):  # too late for a status: the agent is to see it broken off
        if request.transport is not None:
            request.transport.abort()
    return response


async def _stream(
    request: web.Request, answer: aiohttp.ClientResponse, exchange: Exchange, turn: Turn, door: Door
) -> web.StreamResponse:
    """Pass a streamed answer on as it comes. What breaks it off is recorded, and told inside the stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        door.failure = await _events(response, answer, exchange, turn)
        exchange.end(answer.headers, door.failure)
        await response.write(b"".join(turn.end(door.failure)))
    except CaptureError as error:
        await response.write(b"".join(turn.end(str(error))))
    except ConnectionError:
        logger.debug("an agent has closed its connection")
    finally:
        exchange.end(answer.headers, "the agent closed the connection")  # unless it has ended already
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
        shown = exchange.feed(chunk)
        if not turn.verbatim:
            events, rest = events_of(rest + shown)
            failed = next((str(event["error"]) for event in events if "error" in event), None)
            shown = b"".join(part for event in events if "error" not in event for part in turn.event(event))
            if failed is not None:
                return failed
        await response.write(shown)


def _json(data: dict[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")
