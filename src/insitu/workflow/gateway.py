"""The gateway: a reverse proxy that records the model calls of agents we did not build, one address for each episode.

    async with Gateway([plain_llm, ...]) as gateway:
        with scope.activate(), gateway.admit(scope) as door:
            ... run an agent with OPENAI_BASE_URL=door.openai_url, ANTHROPIC_BASE_URL=door.anthropic_url

What the agent sends in its own dialect becomes a chat completion for the server behind, and the answer goes back in
that dialect; the recorder in between is the one of the in-process transport.
"""

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
from yarl import URL

from insitu.errors import CaptureError, ConfigError, RequestRefused
from insitu.http_format import MALFORMED, http_url
from insitu.workflow import relay
from insitu.workflow.context import EpisodeScope
from insitu.workflow.dialects import CHAT, DIALECTS, Dialect, Turn, anthropic, chat, request_of
from insitu.workflow.llms import PlainLLM
from insitu.workflow.relay import MAX_BODY, Route
from insitu.workflow.steps import Place, place

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
"""Most completions one request may ask for (`n`)."""
_PATIENCE = 600.0
"""Seconds to wait for a model's server where its block says nothing, as the OpenAI client does."""
_BACKLOG = 4096
"""Connections that may wait to be accepted: hundreds of agents may begin at once."""
_REMEMBERED_KEYS = 1024
_NOT_THE_AGENTS = ("train/", "preview/", "load_lora_adapter", "unload_lora_adapter")
"""Routes that change what a model's server serves (`insitu backend`, vLLM); the gateway's key is good for them."""


@dataclass(frozen=True)
class Elsewhere:
    """Where requests go that name none of the known models, or are no model calls (embeddings, files)."""

    base_url: str
    api_key: str = "none"


@dataclass(frozen=True)
class Listen:
    """Where to listen, and the `address` that agents are told where it is another; `{port}` in it is the port."""

    host: str = "127.0.0.1"
    port: int = 0
    address: str | None = None

    def told(self, host: str, port: int) -> str:
        """The address for agents, of a gateway that is bound to these."""
        if self.address is not None:
            return self.address.replace("{port}", str(port)).rstrip("/")
        return http_url(host, port)


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

    def note(self, failure: str | None) -> None:
        self.failure = failure

    @property
    def openai_url(self) -> str:
        return f"{self.address}/e/{self.key}/v1"

    @property
    def anthropic_url(self) -> str:
        return f"{self.address}/e/{self.key}"


class Gateway:
    """Serves at `listen` until it is closed.

    `llms` are the models it knows, by their keys and served names, and by `aliases` (name -> key). A name that is none
    of these goes to `elsewhere`, or where that is not given to the first of `llms`: an agent whose model name is fixed
    in its code can be trained as it is.
    """

    def __init__(
        self,
        llms: Sequence[PlainLLM],
        aliases: Mapping[str, str] | None = None,
        elsewhere: Elsewhere | None = None,
        listen: Listen | None = None,
    ) -> None:
        if not llms:
            raise ConfigError("a gateway needs at least one model of the section llms")
        self._by_name = {llm.model: llm for llm in reversed(llms)} | {llm.name: llm for llm in llms}
        for alias, name in (aliases or {}).items():
            if name not in self._by_name:
                raise ConfigError(f"models: {alias} stands for {name!r}; available: {', '.join(self._by_name)}")
            self._by_name[alias] = self._by_name[name]
        self._first = llms[0]
        self._elsewhere = elsewhere
        self._listen = listen or Listen()
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
        options: dict[str, Any] = {"access_log": None, "handler_cancellation": True, "auto_decompress": False}
        self._runner = web.AppRunner(app, shutdown_timeout=1.0, **options)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._listen.host, self._listen.port, backlog=_BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            where = f"{self._listen.host}:{self._listen.port}"
            raise ConfigError(f"gateway: cannot listen at {where}: {error.strerror or error}") from error
        self.address = self._listen.told(*self._runner.addresses[0][:2])
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
        dialect: Dialect = anthropic if "anthropic-version" in request.headers else chat
        door = None
        try:
            door = self._door(request.match_info["key"])
            route = relay.route_of(request)
            dialect = DIALECTS.get(route.text, dialect)
            if "websocket" in request.headers.get("Upgrade", "").lower():
                raise RequestRefused("websockets are not passed on; ask by POST", code="unsupported")
            body = await relay.body_of(request)
            if request.method != "POST" or route.text not in DIALECTS:
                return await self._forward(request, route, body)
            asked = relay.json_of(body, request.headers.get("Content-Encoding", ""))
            llm = self._llm_for(asked.get("model"))
            if llm is None:
                return await self._forward(request, route, body)
            return await self._call(request, door, llm, _turn(door, dialect, asked))
        except RequestRefused as error:
            return _json(dialect.error(str(error), error.status, error.param, error.code), error.status)
        except CaptureError as error:
            return _json(dialect.error(str(error), 424, code="capture_error"), 424)
        except aiohttp.ClientError as error:
            status, what = (504, "in time") if isinstance(error, TimeoutError) else (502, "whole")
            failure = f"no answer {what} from the model's server: {type(error).__name__}: {error}"
            if door is not None:
                door.failure = failure
            return _json(dialect.error(failure, status, code="upstream"), status)

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
        asked = request_of(turn, llm.params, llm.model)
        choices = asked.get("n") or 1
        if not isinstance(choices, int) or not 1 <= choices <= MAX_CHOICES:
            raise RequestRefused(f"n is {choices!r:.50}; allowed: 1 to {MAX_CHOICES}", param="n")
        exchange = llm.recorder.begin("POST", f"/{turn.route}", orjson.dumps(asked), door.scope, door.place)
        if exchange is None:
            key, kind = ("messages", "list") if turn.route == CHAT else ("prompt", "text, nor token ids")
            raise RequestRefused(f"{key} is missing, or no {kind}", param=key)
        try:
            async with self._post(llm, turn.route, exchange.content) as answer:
                if exchange.streamed and answer.status < 400:
                    return await relay.stream(request, answer, exchange, turn, door.note)
                shown = exchange.answer(answer.status, answer.headers, await answer.read())
                if exchange.unreadable is not None:
                    raise aiohttp.ClientPayloadError(f"its answer is no completion: {exchange.unreadable}")
        except BaseException as error:  # whatever ends the call is a failed attempt; raised again
            exchange.fail(type(error).__name__)
            raise
        busy = answer.status == 429 or answer.status >= 500
        door.note(f"it answered with status {answer.status}" if busy else None)
        headers = relay.answered(answer)
        if not turn.verbatim:
            shown = relay.translated(turn, answer.status, shown)
            headers["Content-Type"] = "application/json"
        return web.Response(body=shown, status=answer.status, headers=headers)

    def _post(self, llm: PlainLLM, route: str, content: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.client.api_key}"}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=llm.config.timeout or _PATIENCE)
        assert self._session is not None
        url = _under(llm.client.base_url, route)
        return self._session.post(url, data=relay.payload(content), headers=headers, timeout=limit)

    async def _forward(self, request: web.Request, route: Route, body: bytes) -> web.StreamResponse:
        """Send a request elsewhere as it is, and its answer back as it comes."""
        plain = self._first
        if self._elsewhere is None and route.text.startswith(_NOT_THE_AGENTS):
            raise RequestRefused(f"{route.text} is not for agents", status=403, code="not_for_agents")
        target = self._elsewhere or Elsewhere(str(plain.client.base_url), plain.client.api_key)
        query = request.rel_url.raw_query_string
        url = URL(_under(target.base_url, route.raw) + (f"?{query}" if query else ""), encoded=True)
        headers = relay.passed_on(request.headers)
        headers.update({"Authorization": f"Bearer {target.api_key}", "x-api-key": target.api_key})
        assert self._session is not None
        async with self._session.request(
            request.method, url, data=relay.payload(body), headers=headers, allow_redirects=False
        ) as answer:
            return await relay.pass_on(request, answer)


def _under(base_url: Any, route: str) -> str:
    return f"{str(base_url).rstrip('/')}/{route}"


def _turn(door: Door, dialect: Dialect, data: dict[str, Any]) -> Turn:
    try:
        return dialect.turn(data, door.memory.setdefault(dialect, {}))
    except MALFORMED as error:
        raise RequestRefused(f"the request cannot be understood: {type(error).__name__} {error}") from error


def _json(data: dict[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")
