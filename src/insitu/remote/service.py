"""Serves a workflow: episodes for trainers in other processes, and single requests.

    POST /v1/episodes   attempts at episodes: lines of JSON both ways, while the client stays (`attempt_records`)
    GET  /v1/episodes   protocol version, configuration file and llms
    POST /generate      {"input": ...} -> {"value": ...}
    GET  /health

A request is cancelled when its client disconnects. The HTTP server has an event loop and a thread, the workflows have
those in which `listening` is entered.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict
from yarl import URL

from insitu.collect.episodes import classify, isolated
from insitu.collect.event_loop import loop_in_thread, run_in_loop
from insitu.config import Config
from insitu.errors import InputError, InsituError, RequestRefused, describe_error
from insitu.registry import LLM
from insitu.remote.attempt_records import LineCutter
from insitu.remote.attempt_stream import AttemptStream, WorkflowLoop
from insitu.remote.client import EPISODES, JSON_LINES, LINE_LIMIT, PROTOCOL, Description
from insitu.remote.hosted import HostedWorkflow, ServePolicy
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import DropReason
from insitu.wire.http_access import AccessPolicy, is_loopback_address
from insitu.wire.http_format import decode, encode, http_url
from insitu.wire.http_server import (
    BODY_SECONDS,
    body_chunks,
    error_response,
    guard,
    listening,
    parse_body,
    parse_json,
    read_body,
)
from insitu.wire.redaction import redact_bytes
from insitu.workflow.context import EpisodeScope

logger = logging.getLogger(__name__)

_BASE_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]{1,5})?(/[\w.~/-]*)?", re.ASCII)
"""No user, query or other part that one library reads as the host and another does not."""
_Body = TypeVar("_Body", bound=BaseModel)
_STATUS = {DropReason.BACKEND_ERROR: 502, DropReason.TIMEOUT: 504}


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input: Any


class WorkflowService:
    """Serves the workflow of `config`, built once per policy.

    `serve_policy(builder)` starts the file's own policy model, for requests without a trainer's. `policy_urls` are the
    model servers that trainers may name; none: those of this machine, if the trainer is on it, too.
    """

    def __init__(
        self,
        config: Config,
        serve_policy: ServePolicy,
        access: AccessPolicy | None = None,
        policy_urls: Collection[str] = (),
    ) -> None:
        self.config = config
        self.hosted = HostedWorkflow(config, serve_policy)
        self._access = access or AccessPolicy()
        self._policy_origins = {URL(url).origin() for url in policy_urls}

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serves on this address (port 0: a free one) while the context is open; yields the URL."""
        app = web.Application(middlewares=[guard(self._access, lambda path: path == "/health")])
        app.router.add_get("/health", self._health)
        app.router.add_get(EPISODES, self._describe)
        app.router.add_post(EPISODES, self._episodes)
        app.router.add_post("/generate", self._generate)
        self._workflows = WorkflowLoop()
        loop, stack = asyncio.new_event_loop(), AsyncExitStack()
        async with self.hosted:
            with loop_in_thread(loop, "insitu serve"):
                try:
                    served = stack.enter_async_context(listening(app, (host, port), decompress=True))
                    yield http_url(host, (await run_in_loop(loop, served))[1])
                finally:
                    await run_in_loop(loop, stack.aclose())

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "episodes": self.hosted.episodes})

    async def _describe(self, request: web.Request) -> web.Response:
        """Refuses a trainer whose model server this service may not use before the trainer sends episodes."""
        if (base_url := request.query.get("base_url")) is not None:
            self._check_policy(base_url, request.remote)
        return _json(Description(protocol=PROTOCOL, source=self.config.source, llms=self.config.names(LLM)))

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _read(request, GenerateRequest)

        async def generate() -> web.Response:
            async with self.hosted.workflow() as workflow:
                with EpisodeScope(seed=secrets.randbits(63), input_message=body.input).activate():
                    return _json({"value": await workflow.ainvoke(body.input)})

        ran = await run_in_loop(self._workflows.loop, isolated(generate))
        if ran.error is None:
            assert ran.value is not None
            return ran.value
        error = ran.error
        if isinstance(error, InputError) and error.function == WORKFLOW:
            raise RequestRefused(str(error), param="input", code="invalid_input")
        logger.debug("the workflow failed", exc_info=error)
        reason, _ = classify(error)
        message = str(error) if isinstance(error, InsituError) else f"the workflow raised {describe_error(error)}"
        return error_response(message, _STATUS.get(reason, 500), code=str(reason))

    async def _episodes(self, request: web.Request) -> web.StreamResponse:
        """Carries attempts; a first line that is refused has an error as its response."""
        check_policy = partial(self._check_policy, client=request.remote)
        stream = AttemptStream(self.hosted, self._workflows, check_policy)
        lines = _lines(request)
        response = web.StreamResponse(headers={"Content-Type": JSON_LINES})
        try:
            if first := await anext(lines, b""):
                await stream.begin(first)
            await response.prepare(request)
            await stream.run(lines, response.write)
        except ConnectionResetError:
            logger.info("a client has disconnected")
        finally:
            stream.cancel()
        return response

    def _check_policy(self, base_url: str, client: str | None) -> None:
        """Raises RequestRefused unless this service may send requests to the trainer's model server."""
        try:
            url = URL(base_url) if _BASE_URL.fullmatch(base_url) else URL()
        except ValueError:  # a port above 65535
            url = URL()
        if not url.host:
            problem = f"policy.base_url is {base_url!r:.200}; expected http://host:port/path"
            raise RequestRefused(problem, param="policy.base_url", code="invalid_url")
        if url.origin() in self._policy_origins:
            return
        if not self._policy_origins and is_loopback_address(url.host) and is_loopback_address(client or ""):
            return
        allowed = ", ".join(sorted(map(str, self._policy_origins)))
        raise RequestRefused(
            f"policy.base_url is {base_url!r:.200}, which this service may not send requests to; "
            f"allowed: {allowed or 'model servers on its machine, for trainers on its machine'} (--policy_url)",
            status=403,
            param="policy.base_url",
            code="policy_not_allowed",
        )


async def _read(request: web.Request, model: type[_Body]) -> _Body:
    def parse(body: bytes) -> _Body:
        return model.model_validate(parse_json(body, loads=decode))

    return await parse_body(parse, await read_body(request, LINE_LIMIT))


async def _lines(request: web.Request) -> AsyncGenerator[bytes, None]:
    """The lines of a body as they arrive. Raises RequestRefused if one is too long, or its rest does not arrive."""
    lines = LineCutter()
    async for chunk in body_chunks(request, lambda: BODY_SECONDS if lines.size else None):
        for text in lines.cut(chunk):
            yield text
        if lines.size > LINE_LIMIT:
            raise RequestRefused(f"the body is larger than {LINE_LIMIT} bytes", status=413, code="too_large")
    if lines.size:
        yield lines.rest


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=redact_bytes(encode(content)), status=status, content_type="application/json")
