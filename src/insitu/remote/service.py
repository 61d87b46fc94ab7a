"""Serves a workflow: episodes for trainers in other processes, and single requests.

    POST /v1/episodes   attempts at episodes: lines of JSON both ways, while the client stays (`attempt_records`)
    GET  /v1/episodes   protocol version, configuration file and llms
    POST /generate      {"input": ...}, or {"input_message": ...} -> {"value": ...}
    POST /v1/chat/completions   the answer to the last user message, as a chat completion of OpenAI, whole or streamed
    GET  /health

A request is cancelled when its client disconnects. The HTTP server has an event loop and a thread, the workflows have
those in which `listening` is entered.
"""

import asyncio
import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from yarl import URL

from insitu.collect.episodes import classify, isolated
from insitu.collect.watchdog import Watchdog, where_thread_is
from insitu.config import Config
from insitu.errors import InputError, InsituError, RequestRefused, describe_error, not_found
from insitu.remote.attempt_records import Counts, EpisodeRequest, LineCutter, ServedPolicy, line, result_line
from insitu.remote.client import EPISODES, HEARTBEAT_SECONDS, JSON_LINES, LINE_LIMIT, PROTOCOL, Description
from insitu.remote.hosted import HostedWorkflow, ServePolicy
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import DropReason
from insitu.schemas.kinds import LLM
from insitu.wire.addresses import http_url, is_loopback_address
from insitu.wire.endings import end_tasks
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_format import DONE, error_body, format_event
from insitu.wire.http_server import (
    BODY_SECONDS,
    body_chunks,
    error_response,
    guard,
    listening,
    parse_body,
    parse_json,
    read_body,
    validation_refusal,
)
from insitu.wire.json_values import decode, encode
from insitu.wire.redaction import redact, redact_bytes, remember_secret
from insitu.workflow.context import EpisodeScope
from insitu.workflow.event_loop import loop_in_thread, run_in_loop

logger = logging.getLogger(__name__)

_BASE_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]{1,5})?(/[\w.~/-]*)?", re.ASCII)
"""No user, query or other part that one library reads as the host and another does not."""
_BLOCKED_SECONDS = 1.0
"""A loop that does not run for this long is blocked."""
_STATUS = {DropReason.BACKEND_ERROR: 502, DropReason.TIMEOUT: 504}


_INPUTS = ("input", "input_message")
_MODEL = "workflow"
"""The model of chat completions: the agent, whatever the request asks for."""


def _generated_input(body: Any) -> Any:
    """The input in the body of `/generate`. Raises RequestRefused."""
    if not isinstance(body, dict):
        raise RequestRefused(
            f"the body is a JSON {type(body).__name__}; expected an object with input or input_message"
        )
    if unknown := sorted(body.keys() - {*_INPUTS}):
        raise RequestRefused(not_found("the key", unknown[0], _INPUTS), param=unknown[0])
    given = [key for key in _INPUTS if key in body]
    if len(given) != 1:
        raise RequestRefused(f"{' and '.join(given) or 'no input'} given; expected one of input and input_message")
    if body[given[0]] is None:
        raise RequestRefused(f"{given[0]} is null; expected the input of the workflow", param=given[0])
    return body[given[0]]


def _last_question(body: Any) -> str:
    """The text of the last user message in the body of a chat completion. Raises RequestRefused."""
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list):
        raise RequestRefused("messages is missing; expected a list of messages", param="messages")
    asked = [each for each in messages if isinstance(each, dict) and each.get("role") == "user"]
    content = asked[-1].get("content") if asked else None
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise RequestRefused("messages has no user message, or its last one is not text", param="messages")
    return content


def _stream(completion: dict[str, Any], message: dict[str, Any]) -> web.Response:
    """A chat completion as the events of a stream: one piece, and the end."""
    chunk = {**completion, "object": "chat.completion.chunk"}
    pieces = ({"delta": message, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"})
    chunks = [{**chunk, "choices": [{"index": 0, "logprobs": None, **piece}]} for piece in pieces]
    events = [*(redact_bytes(encode(each)) for each in chunks), DONE]
    return web.Response(body=b"".join(map(format_event, events)), content_type="text/event-stream")


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
        app.router.add_post("/v1/chat/completions", self._chat)
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        loop, stack = asyncio.new_event_loop(), AsyncExitStack()
        async with aclosing(self.hosted):
            with loop_in_thread(loop, "insitu serve"):
                try:
                    served = stack.enter_async_context(listening(app, (host, port)))
                    yield http_url(host, (await run_in_loop(loop, served))[1])
                finally:
                    await run_in_loop(loop, stack.aclose())

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "episodes": self.hosted.episodes})

    async def _describe(self, request: web.Request) -> web.Response:
        """Refuses a trainer whose model server this service may not use before the trainer sends episodes."""
        if (base_url := request.query.get("base_url")) is not None:
            self.check_policy(base_url, request.remote)
        return _json(Description(protocol=PROTOCOL, source=self.config.source, llms=self.config.names(LLM)))

    async def _generate(self, request: web.Request) -> web.Response:
        given = _generated_input(await _parse_line(await read_body(request, LINE_LIMIT, decompress=True)))
        return await self._answered(given, "input", lambda value: _json({"value": value}))

    async def _chat(self, request: web.Request) -> web.Response:
        """Other keys than these are ignored: the agent says how it samples."""
        body = await _parse_line(await read_body(request, LINE_LIMIT, decompress=True))
        question = _last_question(body)
        completion = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": _MODEL}

        def completed(value: Any) -> web.Response:
            message = {"role": "assistant", "content": value if isinstance(value, str) else encode(value).decode()}
            if body.get("stream"):
                return _stream(completion, message)
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            return _json({**completion, "object": "chat.completion", "choices": [choice]})

        return await self._answered(question, "messages", completed)

    async def _answered(self, given: Any, param: str, shaped: Callable[[Any], web.Response]) -> web.Response:
        """The response with the workflow's answer. Raises RequestRefused for an input, `param`, that it cannot have."""

        async def generate() -> web.Response:
            async with self.hosted.workflow() as workflow:
                with EpisodeScope(seed=secrets.randbits(63), input_message=given):
                    return shaped(await workflow.ainvoke(given))

        ran = await run_in_loop(self.loop, isolated(generate))
        if ran.error is None:
            assert ran.value is not None
            return ran.value
        error = ran.error
        if isinstance(error, InputError) and error.function == WORKFLOW:
            raise RequestRefused(str(error), param=param, code="invalid_input")
        logger.debug("the workflow failed", exc_info=error)
        reason, _ = classify(error)
        message = str(error) if isinstance(error, InsituError) else f"the workflow raised {describe_error(error)}"
        return error_response(message, _STATUS.get(reason, 500), code=str(reason))

    async def _episodes(self, request: web.Request) -> web.StreamResponse:
        """Carries attempts; a first line that is refused has an error as its response."""
        stream = AttemptStream(self, request.remote)
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

    def check_policy(self, base_url: str, client: str | None) -> None:
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


class AttemptStream:
    """Runs the attempts of one client, and cancels those in flight when the client leaves.

    Its methods run in the loop of the HTTP server, attempts in that of the workflows, so that the client hears from the
    service even while an agent blocks them.
    """

    def __init__(self, service: WorkflowService, client: str | None) -> None:
        self._service = service
        self._client = client
        self._attempts: dict[int, Future[bytes]] = {}
        self._outbox: list[bytes] = []
        self._wake = asyncio.Event()
        self._watchdog = Watchdog(None, None)
        self._counted: dict[ServedPolicy | None, Counts] = {}
        """What the workflow of each policy has requested outside every episode, as far as the client knows."""

    async def begin(self, text: bytes) -> None:
        """Begins or cancels an attempt. Raises RequestRefused."""
        data = await _parse_line(text)
        if isinstance(data, dict) and isinstance(data.get("cancel"), int):
            if (cancelled := self._attempts.pop(data["cancel"], None)) is not None:
                cancelled.cancel()
            return
        try:
            request = EpisodeRequest.model_validate(data)
        except ValidationError as error:
            raise validation_refusal(error) from None
        number = request.attempt
        if request.policy is not None:
            remember_secret(request.policy.api_key)
            self._service.check_policy(request.policy.base_url, self._client)
        if number in self._attempts:
            raise RequestRefused(f"attempt {number} is in progress", param="attempt")
        attempt = asyncio.run_coroutine_threadsafe(self._attempt(request), self._service.loop)
        self._attempts[number] = attempt
        loop = asyncio.get_running_loop()
        attempt.add_done_callback(lambda ended: loop.call_soon_threadsafe(self._end, number, ended))

    async def run(self, lines: AsyncIterator[bytes], write: Callable[[bytes], Awaitable[None]]) -> None:
        reading = asyncio.create_task(self._read(lines), name="read attempts")
        reading.add_done_callback(lambda _: self._wake.set())
        report_at = 0.0
        try:
            while self._attempts or self._outbox or not reading.done():
                with suppress(TimeoutError):  # not by `wait_for`, which may lose a cancellation before Python 3.12
                    async with asyncio.timeout(max(report_at - time.monotonic(), 0.0)):
                        await self._wake.wait()
                self._wake.clear()
                if time.monotonic() >= report_at:
                    report_at = time.monotonic() + HEARTBEAT_SECONDS
                    self._outbox.append(await self._report())
                chunk, self._outbox = b"".join(self._outbox), []
                if chunk:
                    await write(chunk)
        finally:
            await end_tasks(reading)

    def cancel(self) -> None:
        """Cancels all attempts."""
        for attempt in self._attempts.values():
            attempt.cancel()
        self._attempts.clear()

    async def _read(self, lines: AsyncIterator[bytes]) -> None:
        try:
            async for text in lines:
                try:
                    if text:
                        await self.begin(text)
                except RequestRefused as error:
                    self._send(_refusal(error, _number_in(text)))
        except RequestRefused as error:  # the lines themselves cannot be read
            self._send(_refusal(error))

    def _send(self, text: bytes) -> None:
        self._outbox.append(text)
        self._wake.set()

    def _end(self, number: int, attempt: "Future[bytes]") -> None:
        if self._attempts.get(number) is not attempt:  # it was cancelled by the client
            return
        del self._attempts[number]
        error = RuntimeError("it was cancelled") if attempt.cancelled() else attempt.exception()
        if error is None:
            self._send(attempt.result())
        else:
            self._send(_refusal(RequestRefused(f"the attempt failed: {describe_error(error)}", status=500), number))

    async def _attempt(self, body: EpisodeRequest) -> bytes:
        """The line of an attempt; runs in the loop of the workflows."""
        policy = body.policy and body.policy.unversioned  # a workflow serves all versions
        if policy not in self._counted:
            self._counted[policy] = self._service.hosted.stray_completions(policy)
        with self._watchdog.waiting(str(body.attempt), lambda: "it begins"):
            result = await self._service.hosted.attempt(body)
        return result_line(body.attempt, result, **await self._new_counts())

    async def _new_counts(self) -> dict[str, Counts]:
        """Completions requested outside every episode since the last time, by the workflows that the client uses.

        Runs in the loop of the workflows.
        """
        stray = Counter[str]()
        for policy, before in self._counted.items():
            now = self._counted[policy] = self._service.hosted.stray_completions(policy)
            stray += now - before
        return {"counts": stray} if stray else {}

    async def _report(self) -> bytes:
        """What each attempt is doing, and where an agent blocks all of them."""
        blocked, counts = None, {}
        try:
            async with asyncio.timeout(_BLOCKED_SECONDS):
                counts = await run_in_loop(self._service.loop, self._new_counts())
        except TimeoutError:
            blocked = where_thread_is(self._service.thread)
        activities = {name: redact(text) for name, text in self._watchdog.activities().items()}
        return line(report={"activities": activities, "blocked": blocked}, **counts)


def _number_in(text: bytes) -> int | None:
    """The number of an attempt that was refused, if its line has one."""
    try:
        number: Any = decode(text)["attempt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return number if isinstance(number, int) else None


async def _parse_line(text: bytes) -> Any:
    return await parse_body(partial(parse_json, loads=decode), text)


def _refusal(error: RequestRefused, number: int | None = None) -> bytes:
    body = error_body(str(error), error.status, error.param, error.code)
    return line(attempt=number, status=error.status, **body)


async def _lines(request: web.Request) -> AsyncGenerator[bytes, None]:
    """The lines of a body as they arrive. Raises RequestRefused if one is too long, or its rest does not arrive."""
    lines = LineCutter()
    async for chunk in body_chunks(request, lambda: BODY_SECONDS if lines.rest else None):
        for text in lines.cut(chunk):
            yield text
        if len(lines.rest) > LINE_LIMIT:
            raise RequestRefused(f"the body is larger than {LINE_LIMIT} bytes", status=413, code="too_large")
    if lines.rest:
        yield bytes(lines.rest)


def _json(content: Any) -> web.Response:
    return web.Response(body=redact_bytes(encode(content)), content_type="application/json")
