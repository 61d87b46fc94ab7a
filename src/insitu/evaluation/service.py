"""Serves a workflow: episodes for trainers in other processes, and single requests.

    POST /v1/episodes   one attempt at an episode, streamed as JSON lines (see `remote`)
    GET  /v1/episodes   protocol version, configuration file and llms
    POST /generate      {"input": ...} -> {"value": ...}
    GET  /health

A request is cancelled when its client disconnects.
"""

import asyncio
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from yarl import URL

from insitu.builder import Builder
from insitu.config import Config
from insitu.errors import InputError, InsituError, RequestRefused, describe_error
from insitu.evaluation.episodes import AttemptResult, classify, fail, in_process, isolated
from insitu.evaluation.remote import (
    EPISODES,
    HEARTBEAT_SECONDS,
    PROTOCOL,
    Description,
    EpisodeEnd,
    EpisodeRequest,
    ServedPolicy,
    decode,
    encode,
)
from insitu.gateway.listener import read_body, server_runner
from insitu.http_access import AccessPolicy, is_loopback_address
from insitu.http_format import error_body, http_url
from insitu.http_limits import parse_body, parse_json
from insitu.redaction import redact_bytes
from insitu.registry import LLM
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import DropReason, Episode, Outcome
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.schemas.steps import IntermediateStep
from insitu.workflow.context import EpisodeScope

logger = logging.getLogger(__name__)

ServePolicy = Callable[[Builder], AbstractAsyncContextManager[None]]
_BODY_LIMIT = 64 * 2**20
_MAX_IDLE = 4
"""Number of idle workflows kept for the next episode of their trainer."""
_BASE_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]{1,5})?(/[\w.~/-]*)?", re.ASCII)
"""No user, query or other part that one library reads as the host and another does not."""
_Body = TypeVar("_Body", bound=BaseModel)
_STATUS = {DropReason.BACKEND_ERROR: 502, DropReason.TIMEOUT: 504}


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input: Any


_current_model: ContextVar[str] = ContextVar("insitu_current_model")
"""The trainer's model name, for servers where it changes with every version."""


class _PolicyBuilder(Builder):
    """A builder that resolves llms of `_type: policy` to one trainer's model."""

    def __init__(self, config: Config, policy: ServedPolicy) -> None:
        super().__init__(config)
        self._policy = policy

    async def policy_endpoint(self) -> PolicyEndpoint:
        served = self._policy
        current_model = (lambda: _current_model.get(served.model)) if served.renamed else None
        return PolicyEndpoint(served.base_url, served.model, served.api_key, current_model=current_model)


class _Deployment:
    """The workflow built for one policy; `users` counts its running episodes.

    One task opens the workflow, waits for `close`, and closes it.
    """

    def __init__(self, opened: AbstractAsyncContextManager[Any]) -> None:
        self.users = 0
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self.task = asyncio.create_task(self._live(opened), name="workflow")

    async def _live(self, opened: AbstractAsyncContextManager[Any]) -> None:
        try:
            async with opened as workflow:
                self.ready.set_result(workflow)
                await self._closed.wait()
        except Exception as error:  # building and closing run user code
            if self._closed.is_set():
                logger.warning("a workflow could not be closed: %s", describe_error(error))
            elif self.ready.done():  # its backend is lost
                logger.warning("a workflow has stopped, the next request builds it again: %s", describe_error(error))
            else:
                self.ready.set_exception(error)
                self.ready.exception()  # marks it as retrieved: without waiters asyncio would log a warning

    @property
    def failed(self) -> bool:
        return self.ready.done() and self.ready.exception() is not None

    def close(self) -> None:
        self._closed.set()
        if not self.ready.done():
            self.task.cancel()


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
        self._serve_policy = serve_policy
        self._access = access or AccessPolicy()
        self._policy_origins = {URL(url).origin() for url in policy_urls}
        self._deployments: OrderedDict[ServedPolicy | None, _Deployment] = OrderedDict()  # most recently used last
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serves on this address (port 0: a free one) while the context is open; yields the URL."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get(EPISODES, self._describe)
        app.router.add_post(EPISODES, self._episode)
        app.router.add_post("/generate", self._generate)
        runner = server_runner(app, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield http_url(host, runner.addresses[0][1])
        finally:
            await runner.cleanup()
            for policy in list(self._deployments):
                self._close(policy)
            await asyncio.gather(*self._closing, return_exceptions=True)

    @asynccontextmanager
    async def workflow(self, policy: ServedPolicy | None = None) -> AsyncIterator[Any]:
        """The workflow with this policy, built on first use and shared."""
        key = policy
        if policy is not None and policy.renamed:
            key = policy.model_copy(update={"model": ""})
            _current_model.set(policy.model)
        deployment = self._deployments.get(key)
        if deployment is None or deployment.task.done():
            deployment = self._deployments[key] = _Deployment(self._opened(policy))
        self._deployments.move_to_end(key)
        deployment.users += 1
        try:
            yield await asyncio.shield(deployment.ready)  # a cancelled request must not cancel the others
        finally:
            deployment.users -= 1
            if deployment.failed and self._deployments.get(key) is deployment:
                self._close(key)  # the next request tries again
            idle = [k for k, d in self._deployments.items() if not d.users]
            for idle_key in idle[:-_MAX_IDLE]:
                self._close(idle_key)

    @asynccontextmanager
    async def _opened(self, policy: ServedPolicy | None) -> AsyncIterator[Any]:
        if policy is not None:
            async with _PolicyBuilder(self.config, policy) as builder:
                yield await builder.get_workflow()
        else:
            async with Builder(self.config) as builder, self._serve_policy(builder):
                yield await builder.get_workflow()

    def _close(self, policy: ServedPolicy | None) -> None:
        deployment = self._deployments.pop(policy)
        deployment.close()
        self._closing.add(deployment.task)
        deployment.task.add_done_callback(self._closing.discard)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Checks who asks, and turns errors into OpenAI-shaped bodies."""
        try:
            self._access.check(request.headers, is_public=request.path == "/health")
            return await handler(request)
        except RequestRefused as error:
            return _error(str(error), error.status, error.param, error.code)
        except web.HTTPException as error:
            return _error(f"{request.method} {request.path}: {error.text or error.reason}", error.status)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            param = ".".join(map(str, first["loc"])) or None
            return _error(f"{param or 'the body'}: {first['msg']}", 400, param)

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "episodes": sum(d.users for d in self._deployments.values())})

    async def _describe(self, request: web.Request) -> web.Response:
        """Refuses a trainer whose model server this service may not use before the trainer sends episodes."""
        if (base_url := request.query.get("base_url")) is not None:
            self._check_policy(base_url, request.remote)
        return _json(Description(protocol=PROTOCOL, source=self.config.source, llms=self.config.names(LLM)))

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _read(request, GenerateRequest)

        async def generate() -> web.Response:
            async with self.workflow() as workflow:
                with EpisodeScope(seed=secrets.randbits(63), input_message=body.input).activate():
                    return _json({"value": await workflow.ainvoke(body.input)})

        ran = await isolated(generate)
        if ran.error is None:
            assert ran.value is not None
            return ran.value
        error = ran.error
        if isinstance(error, InputError) and error.function == WORKFLOW:
            raise RequestRefused(str(error), param="input", code="invalid_input")
        logger.debug("the workflow failed", exc_info=error)
        reason, _ = classify(error)
        message = str(error) if isinstance(error, InsituError) else f"the workflow raised {describe_error(error)}"
        return _error(message, _STATUS.get(reason, 500), code=str(reason))

    async def _episode(self, request: web.Request) -> web.StreamResponse:
        body = await _read(request, EpisodeRequest)
        if body.policy is not None:
            self._check_policy(body.policy.base_url, request.remote)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            await response.prepare(request)
            await self._stream_attempt(response, body)
        except ConnectionResetError:
            logger.info("the client of episode %s disconnected", body.key.text())
        return response

    async def _stream_attempt(self, response: web.StreamResponse, body: EpisodeRequest) -> None:
        await response.write(b"\n")
        steps: asyncio.Queue[IntermediateStep | None] = asyncio.Queue()  # None: end of the attempt
        attempt = asyncio.create_task(self._attempt(body, steps.put_nowait), name=body.key.text())
        attempt.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            unserializable = await _stream_steps(response, steps)
            await _write_end(response, *await attempt, unserializable)
        finally:
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)

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

    async def _attempt(self, body: EpisodeRequest, on_step: Callable[[IntermediateStep], None]) -> AttemptResult:
        item = EvalInputItem(id=body.key.row_id, input_obj=body.input, full_dataset_entry=body.row)
        async with AsyncExitStack() as stack:
            try:
                workflow = await stack.enter_async_context(self.workflow(body.policy))
            except Exception as error:  # a workflow that cannot be built is not the episode's fault
                episode = Episode(body.key, Outcome.FAILED)
                fail(episode, DropReason.BACKEND_ERROR, error)
                return AttemptResult(episode)
            return await in_process(workflow, on_step)(item, body.key, body.options)


async def _read(request: web.Request, model: type[_Body]) -> _Body:
    def parse(body: bytes) -> _Body:
        return model.model_validate(parse_json(body, loads=decode))

    return await parse_body(parse, await read_body(request, _BODY_LIMIT))


async def _stream_steps(
    response: web.StreamResponse, steps: "asyncio.Queue[IntermediateStep | None]"
) -> ValueError | None:
    """Writes steps and heartbeats until the attempt has ended. Returns the error if a step cannot be serialized."""
    unserializable = None
    while True:
        line = b"\n"
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                step = await steps.get()
            if step is None:
                return unserializable
            line = _line(step=step)
        except TimeoutError:
            pass
        except ValueError as error:
            unserializable = error
            continue
        await response.write(line)


async def _write_end(
    response: web.StreamResponse, episode: Episode, transient: bool, unserializable: ValueError | None
) -> None:
    for call in episode.calls:
        await response.write(_line(call=call))
    end = {name: getattr(episode, name) for name in EpisodeEnd.model_fields if name != "transient"}
    try:
        if unserializable is not None:
            raise unserializable
        line = _line(end={**end, "transient": transient})
    except ValueError as error:
        message = f"WorkflowError: the result or a step cannot be serialized as JSON: {error}"
        failed = {"outcome": Outcome.FAILED, "output": None, "reason": DropReason.WORKFLOW_ERROR, "error": message}
        line = _line(end=end | failed)
    await response.write(line)


def _line(**content: Any) -> bytes:
    return redact_bytes(encode(content)) + b"\n"


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=redact_bytes(encode(content)), status=status, content_type="application/json")


def _error(message: str, status: int, param: str | None = None, code: str | None = None) -> web.Response:
    return _json(error_body(message, status, param, code), status)
