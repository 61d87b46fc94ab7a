"""The service's end of a connection that carries attempts (see `attempt_records`), whatever carries its bytes.

    stream = AttemptStream(hosted, workflows, check_policy)
    await stream.begin(first_line)              # raises RequestRefused
    await stream.run(other_lines, write)        # until the client ends its lines and all attempts have ended

The methods run in the loop of the HTTP server; attempts run in that of the workflows, so that a client hears from the
service even while an agent blocks them.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from insitu.collect.event_loop import run_in_loop
from insitu.collect.watchdog import Watchdog, where_thread_is
from insitu.errors import RequestRefused, describe_error
from insitu.remote.attempt_records import Counts, EpisodeRequest, ServedPolicy, line, result_line
from insitu.remote.client import HEARTBEAT_SECONDS
from insitu.remote.hosted import HostedWorkflow
from insitu.wire.http_format import decode, error_body
from insitu.wire.http_server import parse_body, parse_json, validation_refusal
from insitu.wire.redaction import redact

_BLOCKED_SECONDS = 1.0
"""A loop that does not run for this long is blocked."""


class WorkflowLoop:
    """The event loop of the workflows, and its thread; made there."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()


class AttemptStream:
    """Runs the attempts of one client, and cancels those in flight when the client leaves.

    `check_policy` raises RequestRefused for the URL of a model server that may not be used.
    """

    def __init__(self, hosted: HostedWorkflow, workflows: WorkflowLoop, check_policy: Callable[[str], None]) -> None:
        self._hosted = hosted
        self._workflows = workflows
        self._check_policy = check_policy
        self._attempts: dict[int, Future[bytes]] = {}
        self._outbox: list[bytes] = []
        self._wake = asyncio.Event()
        self._watchdog = Watchdog(None, None)
        self._counted: dict[ServedPolicy | None, Counts] = {}
        """What the workflow of each policy has requested outside every episode, as far as the client knows."""

    async def begin(self, text: bytes) -> None:
        """Begins or cancels an attempt."""
        message = await parse_body(_parsed, text)
        if isinstance(message, int):
            if (cancelled := self._attempts.pop(message, None)) is not None:
                cancelled.cancel()
            return
        if message.policy is not None:
            self._check_policy(message.policy.base_url)
        if message.attempt in self._attempts:
            raise RequestRefused(f"attempt {message.attempt} is in progress", param="attempt")
        work = self._attempt(message)
        attempt = self._attempts[message.attempt] = asyncio.run_coroutine_threadsafe(work, self._workflows.loop)
        loop = asyncio.get_running_loop()
        attempt.add_done_callback(lambda ended: loop.call_soon_threadsafe(self._end, message.attempt, ended))

    async def run(self, lines: AsyncIterator[bytes], write: Callable[[bytes], Awaitable[None]]) -> None:
        reading = asyncio.create_task(self._read(lines), name="read attempts")
        reading.add_done_callback(lambda _: self._wake.set())
        report_at = 0.0
        try:
            while self._attempts or self._outbox or not reading.done():
                with suppress(TimeoutError):
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
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self.cancel()

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
        if body.policy not in self._counted:
            self._counted[body.policy] = self._hosted.outside_completions(body.policy)
        with self._watchdog.waiting(str(body.attempt), lambda: "it begins"):
            result = await self._hosted.attempt(body)
        return result_line(body.attempt, result, **self._new_counts())

    def _new_counts(self) -> dict[str, Counts]:
        """Completions requested outside every episode since the last time, by the workflows that the client uses."""
        stray, outside = Counter[str](), Counter[str]()
        for policy, before in self._counted.items():
            now = self._counted[policy] = self._hosted.outside_completions(policy)
            stray += now[0] - before[0]
            outside += now[1] - before[1]
        return {"counts": (stray, outside)} if outside else {}

    async def _report(self) -> bytes:
        """What each attempt is doing, and where an agent blocks all of them."""
        blocked, counts = None, {}

        async def count() -> dict[str, Counts]:
            return self._new_counts()

        try:
            async with asyncio.timeout(_BLOCKED_SECONDS):
                counts = await run_in_loop(self._workflows.loop, count())
        except TimeoutError:
            blocked = where_thread_is(self._workflows.thread)
        activities = {name: redact(text) for name, text in self._watchdog.activities().items()}
        return line(report={"activities": activities, "blocked": blocked}, **counts)


def _parsed(text: bytes) -> EpisodeRequest | int:
    """A request, or the number of an attempt to cancel; raises RequestRefused."""
    data = parse_json(text, loads=decode)
    if isinstance(data, dict) and isinstance(number := data.get("cancel"), int):
        return number
    try:
        return EpisodeRequest.model_validate(data)
    except ValidationError as error:
        raise validation_refusal(error) from None


def _number_in(text: bytes) -> int | None:
    """The number of an attempt that was refused, if its line has one."""
    try:
        number: Any = decode(text)["attempt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return number if isinstance(number, int) else None


def _refusal(error: RequestRefused, number: int | None = None) -> bytes:
    body = error_body(str(error), error.status, error.param, error.code)
    return line(attempt=number, status=error.status, **body)
