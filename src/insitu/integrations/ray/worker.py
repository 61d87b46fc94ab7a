"""A worker: a process that builds workflows and runs attempts at their episodes, many at the same time.

    worker = EpisodeWorker()
    await worker.start(environment)
    await worker.open(opening)                      # {"llms": [...]}, or {"error": "...", "in_file": True}
    await worker.submit([(1, opening_id, "policy", request)])
    [(number, lines, error)], counts, report = await worker.results(5.0)    # the lines of `attempt_records`

All arguments and results are plain data. The methods run in the caller's event loop; workflows run in a loop and a
thread of the worker, so that it answers even while an agent blocks them.
"""

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine
from contextlib import AsyncExitStack, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import aiohttp

from insitu import __version__
from insitu.collect.collector import stray_completions
from insitu.collect.event_loop import new_loop
from insitu.collect.watchdog import Watchdog, where_thread_is
from insitu.errors import ConfigError, InsituError, PluginError, describe_error
from insitu.gateway.programs import kill_programs
from insitu.integrations.ray.openings import Opening, Target, read_config, this_host
from insitu.registry import LLM
from insitu.remote.attempt_records import EpisodeRequest, ServedPolicy, end_lines, line
from insitu.remote.hosted import HostedWorkflow
from insitu.schemas.episodes import Episode
from insitu.wire.http_server import raise_file_limit
from insitu.wire.json_values import decode
from insitu.wire.redaction import redact, redact_stream, remember_environment, remember_secret
from insitu.workflow.llms import ModelClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REACH_SECONDS = 10.0
_CLOSE_SECONDS = 8.0
"""How long attempts and workflows may take to end."""
_BLOCKED_SECONDS = 1.0
_BATCH_BYTES = 64 * 2**10
"""Of results that are returned together: Ray passes larger ones through shared memory, which costs more."""


Submitted = tuple[int, str, str | None, bytes]
"""A number for the attempt, the id of its workflow, the policy's current name if that changes, and its request."""


Ended = tuple[int, bytes, str | None]
"""The number of an attempt that has ended, the lines of `attempt_records`, and why there are none, if so."""


Counts = tuple[dict[str, int], dict[str, int]]
"""Completions requested outside every episode, by key of `llms` and by URL of the server."""


class EpisodeWorker:
    """Runs attempts at episodes of the workflows that it has opened."""

    def __init__(self) -> None:
        self._loop, _ = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="insitu-worker", daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._opened: dict[str, tuple[HostedWorkflow, ServedPolicy | None]] = {}
        self._attempts: dict[int, asyncio.Task[bytes]] = {}
        self._watchdog = Watchdog(None, None)
        self._ended: deque[Ended] = deque()
        self._has_ended = asyncio.Event()
        self._callers: asyncio.AbstractEventLoop | None = None
        """The loop in which the methods run."""
        self._reported_at = 0.0

    async def start(self, environment: dict[str, str]) -> dict[str, Any]:
        """Sets environment variables, among them secrets, which then appear in no output of this process."""
        self._callers = asyncio.get_running_loop()
        os.environ.update(environment)
        remember_environment(os.environ)
        redact_stream(sys.stdout)
        redact_stream(sys.stderr)
        raise_file_limit()
        return {
            "insitu": __version__,
            "python": sys.version.split()[0],
            "host": this_host(),
            "pid": os.getpid(),
        }

    async def open(self, opening: bytes) -> dict[str, Any]:
        """Loads a file, checks that its policy can be reached, and builds its workflow.

        Returns the error if that fails, and whether it is the file's.
        """
        return await self._run(self._open(Opening.model_validate_json(opening)))

    async def submit(self, attempts: list[Submitted]) -> None:
        """Begins attempts."""
        self._loop.call_soon_threadsafe(self._begin, attempts)

    async def cancel(self, number: int) -> None:
        self._loop.call_soon_threadsafe(self._cancel, number)

    async def results(self, wait: float) -> tuple[list[Ended], Counts, dict[str, Any] | None]:
        """The attempts that have ended, what was requested outside all of them so far, and a report now and then.

        Waits up to `wait` seconds for an attempt to end.
        """
        due = self._reported_at + wait - time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(due, 0.0)):
                await self._has_ended.wait()
        self._has_ended.clear()
        ended: list[Ended] = []
        size = 0
        while self._ended and size < _BATCH_BYTES:
            ended.append(self._ended.popleft())
            size += len(ended[-1][1])
        if self._ended:
            self._has_ended.set()
        if time.monotonic() < self._reported_at + wait:
            return ended, self._counts(), None
        self._reported_at = time.monotonic()
        return ended, self._counts(), await self._report()

    async def _report(self) -> dict[str, Any]:
        """What each attempt is doing, and where an agent blocks all of them."""
        blocked = None
        answered = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(answered), _BLOCKED_SECONDS)
        except TimeoutError:
            blocked = where_thread_is(self._thread.ident or 0)
        activities = {name: redact(text) for name, text in self._watchdog.activities().items()}
        return {"activities": activities, "blocked": blocked}

    def _counts(self) -> Counts:
        stray, outside = Counter[str](), Counter[str]()
        for hosted, _ in [*self._opened.values()]:
            for builder in [*hosted.builders]:
                stray.update(stray_completions(builder))
                for llm in builder.built(LLM):
                    if isinstance(llm, ModelClient):
                        outside[llm.recorder.server] += llm.recorder.outside_completions
        return dict(stray), dict(outside)

    async def close(self) -> None:
        """Ends all attempts, closes the workflows, and kills the programs of external agents."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._run(self._close())
        except TimeoutError:
            logger.warning("the workflows of a worker did not end within %g s", _CLOSE_SECONDS)
        kill_programs()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop of the workflows."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _open(self, opening: Opening) -> dict[str, Any]:
        if opening.policy is not None:
            remember_secret(opening.policy["api_key"])
        try:
            if opening.id not in self._opened:
                await self._load(opening)
            hosted, policy = self._opened[opening.id]
            for target in opening.targets:
                await _reach(target, policy)
            if opening.build and (policy is None or policy.model):  # otherwise its name is known when an episode begins
                async with hosted.workflow(policy):
                    pass
        except Exception as error:  # building runs user code
            return _failure(error)
        return {"llms": hosted.config.names(LLM)}

    async def _load(self, opening: Opening) -> None:
        try:
            config = read_config(opening)
        except (ConfigError, PluginError) as error:
            problems = "; ".join(line.strip() for line in str(error).splitlines()).replace(":;", ":")
            raise ConfigError(
                f"the file cannot be loaded there: {problems} (what the workflow imports must be installed on every "
                "node, or be shipped by general.executor.runtime_env)"
            ) from error
        hosted = await self._stack.enter_async_context(HostedWorkflow(config, lambda _: nullcontext()))
        policy = ServedPolicy(**opening.policy) if opening.policy is not None else None
        self._opened[opening.id] = hosted, policy

    def _begin(self, attempts: list[Submitted]) -> None:
        for attempt in attempts:
            number = attempt[0]
            task = self._attempts[number] = self._loop.create_task(self._attempt(*attempt), name="episode")
            task.add_done_callback(partial(self._end, number))

    def _cancel(self, number: int) -> None:
        if (task := self._attempts.get(number)) is not None:
            task.cancel()

    def _end(self, number: int, task: "asyncio.Task[bytes]") -> None:
        del self._attempts[number]
        if task.cancelled():
            return
        error = task.exception()
        self._ended.append((number, task.result(), None) if error is None else (number, b"", describe_error(error)))
        if self._callers is not None:
            self._callers.call_soon_threadsafe(self._has_ended.set)

    async def _attempt(self, number: int, opening_id: str, model: str | None, request: bytes) -> bytes:
        hosted, policy = self._opened[opening_id]
        body = EpisodeRequest.model_validate(decode(request))
        if policy is not None:
            body.policy = policy if model is None else policy.model_copy(update={"model": model})
        with self._watchdog.waiting(str(number), lambda: "it begins"):
            episode, transient = await hosted.attempt(body)
        return b"".join(_lines(episode, transient))

    async def _close(self) -> None:
        tasks = [*self._attempts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()


def _lines(episode: Episode, transient: bool) -> list[bytes]:
    lines: list[bytes] = []
    unserializable = None
    for step in episode.steps:
        try:
            lines.append(line(step=step))
        except ValueError as error:
            unserializable = error
    return [*lines, *end_lines(episode, transient, unserializable)]


def _failure(error: Exception) -> dict[str, Any]:
    text = str(error) if isinstance(error, InsituError) else describe_error(error)
    return {"error": redact(text), "in_file": isinstance(error, ConfigError)}


async def _reach(target: Target, policy: ServedPolicy | None) -> None:
    """Raises ConfigError unless the server answers requests from here."""
    key = policy.api_key if policy is not None else "none"
    timeout = aiohttp.ClientTimeout(total=_REACH_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {key}"}) as session:
            async with session.get(f"{target.base_url.rstrip('/')}/models") as response:
                status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if status < 400 and policy is not None and policy.model and not _lists(body, policy.model):
            problem = f"another server answers there: it has no model {policy.model!r}"
        elif status < 500:
            return
        else:
            problem = f"it answers with status {status}"
    raise target.unreachable(problem)


def _lists(body: bytes, model: str) -> bool:
    """Whether a list of models, as servers of the OpenAI API give it, has this one; true if it is something else."""
    try:
        names = [entry["id"] for entry in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError):
        return True
    return model in names
