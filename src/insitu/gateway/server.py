"""The gateway: a reverse proxy that records the model calls of external agents, with an endpoint for each episode.

    async with Gateway([llm, ...]) as gateway:
        with scope, gateway.endpoint(scope) as endpoint:
            ... run an agent with OPENAI_BASE_URL=endpoint.openai_url, ANTHROPIC_BASE_URL=endpoint.anthropic_url

A request in the agent's dialect becomes a completion request for the model's server, and the response is translated
back; the recorder in between is the one of the in-process transport.
"""

import hashlib
import logging
import secrets
import socket
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Annotated, Any, NamedTuple, Self

import aiohttp
import orjson
from aiohttp import web
from pydantic import AfterValidator, Field, SecretStr, model_validator
from yarl import URL

from insitu.capture.ledger import CallLedger, current_call_site
from insitu.capture.transport import client_timeout, new_session
from insitu.errors import CaptureError, ConfigError, RequestRefused
from insitu.formats.dialects import ChatTranslation, Dialect, Translation, dialects, translate
from insitu.gateway import proxy
from insitu.gateway.endpoint import BURST, RATE, EpisodeEndpoint
from insitu.gateway.proxy import MAX_BODY, Route
from insitu.schemas.components import Block
from insitu.wire.addresses import authorized, http_url
from insitu.wire.http_format import CHAT, COMPACT, JSON, retry_header
from insitu.wire.http_server import listening, parse_body, read_body
from insitu.wire.open_files import raise_file_limit
from insitu.wire.paced_connections import Pace
from insitu.wire.redaction import EPISODE_KEY, redact_bytes
from insitu.workflow.context import EpisodeScope
from insitu.workflow.llms import ModelClient

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
"""Maximum `n` of a request."""
MAX_CONNECTIONS = 1024
"""Connections to the socket of an agent's network namespace at once."""
_SHARE_OF_FILES = 4
"""Connections to all agents' sockets take at most one in so many of the files that this process may open."""
_MAX_MESSAGE = 2000
"""Characters of an error: some repeat a key or a value of the request."""
_CONNECT_TIMEOUT = 30.0
_READ_TIMEOUT = 600.0
"""Seconds to wait for a model's server if its configuration has no timeout; the OpenAI client's default."""
_REMEMBERED_KEYS = 1024
_SESSIONS = "sessions"
_SESSION_HEADER = "X-Session-ID"
_OPERATOR_ROUTES = ("train/", "preview/", "load_lora_adapter", "unload_lora_adapter")
"""Routes that change what a server serves (`insitu backend`, vLLM); the gateway's API key would allow them."""


def _check_url(value: str) -> str:
    url = URL(value.replace("{port}", "1"))  # raises ValueError itself, for a port that is not a number, for example
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{value!r} is not an HTTP URL; expected http://host:port/path")
    return value


Address = Annotated[str, AfterValidator(_check_url)]


class Upstream(Block):
    """An OpenAI-compatible server for unrecognised model names, and for other requests such as embeddings."""

    base_url: Address
    """URL up to and including `/v1`."""
    api_key: SecretStr | None = None
    """API key."""


class GatewayConfig(Block):
    """Bind address and public URL of the gateway; by default, only this machine can reach it."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to bind; `0.0.0.0` binds all interfaces."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 picks a free one."""
    address: Address | None = None
    """Public URL given to agents in a container or on another machine; `{port}` is replaced by the port."""

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        if self.address is None and self.host in ("0.0.0.0", "::"):
            raise ValueError(f"agents cannot connect to host {self.host}: set `address`, the URL given to them")
        if self.address is not None and self.port == 0 and "{port}" not in self.address:
            raise ValueError("port 0 is a different port on each start: set `port`, or use {port} in `address`")
        return self


class Gateway:
    """Serves at `bind` until it is closed.

    `llms` are known by their keys and served names, and by `aliases` (name -> key). Requests for other models go to
    `upstream`, or to the first of `llms` if there is none: an agent with a hard-coded model name can be trained too.
    """

    def __init__(
        self,
        llms: Sequence[ModelClient],
        aliases: Mapping[str, str] | None = None,
        upstream: Upstream | None = None,
        bind: GatewayConfig | None = None,
    ) -> None:
        if not llms:
            raise ConfigError("a gateway needs at least one model of the section llms")
        self._by_name = {llm.model: llm for llm in reversed(llms)} | {llm.name: llm for llm in llms}
        for alias, name in (aliases or {}).items():
            if name not in self._by_name:
                raise ConfigError(f"models: {alias} refers to {name!r}; available: {', '.join(self._by_name)}")
            self._by_name[alias] = self._by_name[name]
        self._default = llms[0]
        self._upstream = upstream
        self._bind = bind or GatewayConfig()
        self._endpoints: dict[bytes, EpisodeEndpoint] = {}  # by the hash of the key, as `_ended`
        self._ended: OrderedDict[bytes, tuple[str, weakref.ref[CallLedger]]] = OrderedDict()
        self._open = AsyncExitStack()
        self._session: aiohttp.ClientSession
        self._unknown = Pace(RATE, BURST)
        self.address = ""
        self.port = 0
        self._listeners = 0
        self.late_calls = 0
        """Requests refused because their episode had ended; also counted in its ledger."""
        self.unknown_keys = 0
        """Requests refused because their key belongs to no running episode."""

    async def __aenter__(self) -> Self:
        bind = self._bind
        served = listening(self._application(), (bind.host, bind.port), grace=1.0, key="gateway")
        host, port = await self._open.enter_async_context(served)
        self.address = (bind.address or http_url(host, port)).replace("{port}", str(port)).rstrip("/")
        self.port = port
        self._session = new_session(through_proxies=False)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open.aclose()
        await self._session.close()

    def _application(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/e/{key}/{tail:.*}", self._handle)
        return app

    @asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serves on another listening socket, such as one in the network namespace of an agent."""
        self._listeners += 1
        try:
            async with listening(self._application(), listener, connections=self._most_connections):
                yield
        finally:
            self._listeners -= 1

    def _most_connections(self) -> int:
        """The most connections to each of these sockets, so that all together leave enough file descriptors."""
        return min(MAX_CONNECTIONS, raise_file_limit() // _SHARE_OF_FILES // self._listeners)

    @contextmanager
    def endpoint(self, scope: EpisodeScope, address: str | None = None) -> Iterator[EpisodeEndpoint]:
        """Opens an endpoint for an episode; its calls are recorded at the current call site.

        `address` is where the agent reaches the gateway, if not at its own address.
        """
        ledger = scope.ledger
        site = current_call_site.get()._replace(ledger=ledger, is_explicit=True)
        endpoint = EpisodeEndpoint(EPISODE_KEY + secrets.token_urlsafe(18), address or self.address, site, ledger)
        hashed = _hashed(endpoint.key)
        self._endpoints[hashed] = endpoint
        try:
            yield endpoint
        finally:
            for key in (hashed, *map(_hashed, endpoint.sessions)):
                del self._endpoints[key]
                self._ended[key] = ledger.name, weakref.ref(ledger)
                if len(self._ended) > _REMEMBERED_KEYS:
                    self._ended.popitem(last=False)

    @property
    def session_url(self) -> str:
        """A base URL of all episodes, for an agent with one client; `X-Session-ID` says which one a request is of."""
        return f"{self.address}/e/{_SESSIONS}/v1"

    def add_session(self, endpoint: EpisodeEndpoint, session: str) -> None:
        """Admits requests to `session_url` with this id, which nobody can guess, as those of the endpoint's episode."""
        if session not in endpoint.sessions:
            endpoint.sessions.append(session)
            self._endpoints[_hashed(session)] = endpoint

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        dialect = next((each for each in dialects().values() if each.header in headers), ChatTranslation)
        endpoint = None
        try:
            key = request.match_info["key"]
            key = headers.get(_SESSION_HEADER, "") if key == _SESSIONS else key
            known = self._endpoints.get(_hashed(key))
            await (self._unknown if known is None else known.pace).turn()
            endpoint = self._find_endpoint(key)
            route = proxy.parse_route(request)
            dialect = dialects().get(route.text, dialect)
            with endpoint.request(max(proxy.largest_body(request), endpoint.remembered)) as hold:
                response = await self._answer(request, endpoint, route, dialect, hold)
                if not response.prepared:  # until the agent has read it, the request counts as in flight
                    # An agent that has gone is no failure of the model's server.
                    with suppress(ConnectionResetError):
                        await response.prepare(request)
                        await response.write_eof()
                return response
        except RequestRefused as error:
            message, param = f"{error!s:.{_MAX_MESSAGE}}", error.param and error.param[:_MAX_MESSAGE]
            return _json(dialect.error(message, error.status, param, error.code), error.status)
        except CaptureError as error:
            is_agents = endpoint is not None and endpoint.ledger.capture_error is None
            status, code = (400, "unsupported") if is_agents else (424, "capture_error")
            return _json(dialect.error(str(error), status, code=code), status)
        except aiohttp.ClientError as error:
            status, what = (504, "no answer in time") if isinstance(error, TimeoutError) else (502, "no answer")
            failure = f"{what} from the model's server: {type(error).__name__}: {error}"
            if endpoint is not None:
                endpoint.failure = failure
            return _json(dialect.error(failure, status, code="upstream"), status)

    async def _answer(
        self,
        request: web.Request,
        endpoint: EpisodeEndpoint,
        route: Route,
        dialect: Dialect,
        hold: Callable[[int], None],
    ) -> web.StreamResponse:
        if "websocket" in request.headers.get("Upgrade", "").lower():
            raise RequestRefused("websockets are not supported; use POST", code="unsupported")
        if request.method != "POST" or route.text not in dialects():
            body = await read_body(request, MAX_BODY)
            hold(len(body))
            return await self._forward(request, route, body)
        body = await read_body(request, MAX_BODY, decompress=True)
        hold(max(proxy.memory_of(body), endpoint.remembered))
        memory = endpoint.memories.setdefault(dialect, {})
        asked = await parse_body(partial(self._parsed, dialect, memory), body, size=endpoint.remembered)
        self._find_endpoint(endpoint.key)  # the episode may have ended since
        if asked is None:
            return await self._forward(request, route, body, decompressed=True)
        size = proxy.memory_of(asked.content)
        endpoint.record(asked.choices * size)
        hold(size)
        if not asked.translation.verbatim:
            endpoint.remembered = max(endpoint.remembered, size)
        return await self._complete(request, endpoint, asked)

    def _parsed(self, dialect: Dialect, memory: dict[str, Any], body: bytes) -> "_Asked | None":
        """What a body asks of a model, or None if it is to be forwarded."""
        data = proxy.parse_request(body)
        llm = self._by_name.get(str(data.get("model")), self._default if self._upstream is None else None)
        if llm is None:
            return None
        translation = translate(dialect, data, memory)
        request = translation.completion_request(llm.params, llm.model)
        n = request.get("n") or 1
        if not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
            raise RequestRefused(f"n is {n!r:.50}; allowed: 1 to {MAX_CHOICES}", param="n")
        return _Asked(llm, translation, orjson.dumps(request), n)

    def _find_endpoint(self, key: str) -> EpisodeEndpoint:
        """Raises RequestRefused if the episode of `key` has ended, or is unknown."""
        hashed = _hashed(key)
        endpoint = self._endpoints.get(hashed)
        if endpoint is not None and not endpoint.ledger.closed:
            return endpoint
        if endpoint is None and hashed not in self._ended:
            self.unknown_keys += 1
            raise RequestRefused("this address belongs to no running episode", status=401, code="unknown_episode")
        name, ledger = self._ended[hashed] if endpoint is None else (endpoint.ledger.name, weakref.ref(endpoint.ledger))
        level = logging.INFO if self.late_calls else logging.WARNING  # there may be many
        logger.log(level, "refused a request of %s, which has ended: is an agent still running?", name)
        self.late_calls += 1
        if (ended := ledger()) is not None:
            ended.note_late_call()
        raise RequestRefused(f"the episode {name} of this address has ended", status=410, code="episode_ended")

    async def _complete(self, request: web.Request, endpoint: EpisodeEndpoint, asked: "_Asked") -> web.StreamResponse:
        llm, translation = asked.llm, asked.translation
        exchange = llm.recorder.begin("POST", f"/{translation.route}", asked.content, endpoint.site)
        if exchange is None:
            key, kind = ("messages", "a list") if translation.route == CHAT else ("prompt", "text or token ids")
            raise RequestRefused(f"{key} is missing, or is not {kind}", param=key)
        base_url, credentials = authorized(str(llm.client.base_url), llm.client.api_key)
        url = f"{base_url}/{translation.route}"
        headers: Any = {"Content-Type": JSON, "Authorization": credentials, **exchange.headers}
        timeout = client_timeout(_CONNECT_TIMEOUT, llm.config.timeout or _READ_TIMEOUT)
        try:
            while True:
                payload = proxy.payload(exchange.content)
                async with self._session.post(
                    url, data=payload, headers=headers, allow_redirects=False, timeout=timeout
                ) as answer:
                    if exchange.streamed and answer.status < 300:  # redirects are not followed
                        return await proxy.stream(request, answer, exchange, translation, endpoint.note_failure)
                    received = await answer.read()
                if not exchange.must_resend(answer.status, received):
                    break
            received = exchange.complete(answer.status, answer.headers, received)
            if exchange.parse_error is not None:
                raise aiohttp.ClientPayloadError(f"its response is not a completion: {exchange.parse_error}")
        except BaseException as error:  # also a cancellation is a failed attempt; re-raised
            exchange.fail(type(error).__name__, by_server=isinstance(error, aiohttp.ClientError))
            raise
        is_busy = answer.status == 429 or answer.status >= 500
        endpoint.failure = f"it answered with status {answer.status}" if is_busy else None
        headers = proxy.response_headers(answer)
        headers.update(retry_header(answer.status, llm.recorder.retried_statuses))
        if not translation.verbatim:
            received = proxy.translate_response(translation, answer.status, received)
        if not translation.verbatim or answer.content_type == COMPACT:
            headers["Content-Type"] = JSON
        return web.Response(body=received, status=answer.status, headers=headers)

    async def _forward(
        self, request: web.Request, route: Route, body: bytes, *, decompressed: bool = False
    ) -> web.StreamResponse:
        """Sends a request upstream, and returns the response as it comes in."""
        if self._upstream is None and route.text.startswith(_OPERATOR_ROUTES):
            raise RequestRefused(f"{route.text} is not available to agents", status=403, code="not_for_agents")
        if self._upstream is None:
            base_url, api_key = str(self._default.client.base_url), self._default.client.api_key
            read_timeout = self._default.config.timeout or _READ_TIMEOUT
        else:
            base_url, key = self._upstream.base_url, self._upstream.api_key
            api_key, read_timeout = key.get_secret_value() if key else "none", _READ_TIMEOUT
        query = request.rel_url.raw_query_string
        base_url, credentials = authorized(base_url, api_key)
        url = URL(f"{base_url}/{route.raw}" + (f"?{query}" if query else ""), encoded=True)
        headers = proxy.forwarded_headers(request.headers)
        headers.update({"Authorization": credentials, "x-api-key": api_key})
        if decompressed:
            headers.pop("Content-Encoding", None)
        timeout = client_timeout(_CONNECT_TIMEOUT, read_timeout)
        async with self._session.request(
            request.method, url, data=proxy.payload(body), headers=headers, allow_redirects=False, timeout=timeout
        ) as answer:
            return await proxy.forward(request, answer)


class _Asked(NamedTuple):
    """A request for completions: to which model, and how it is sent there."""

    llm: ModelClient
    translation: Translation
    content: bytes
    choices: int


def _hashed(key: str) -> bytes:
    """What a key is looked up by: how long a look-up of the key itself takes may tell how much of a guess is right."""
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _json(data: dict[str, Any], status: int) -> web.Response:
    """An error for an agent, which gets no secret."""
    return web.Response(body=redact_bytes(orjson.dumps(data)), status=status, content_type="application/json")
