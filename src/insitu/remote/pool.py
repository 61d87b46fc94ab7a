"""The services that run the episodes of a run: started, given attempts, watched, and replaced when they are lost.

pool = ServicePool("worker")
pool.starters = [make_service] * 4
await pool.open(workflow, description, expected=4, limit=60)
async with pool.service(alone=False) as service:
    await service.sessions[workflow].attempt(number, request)
await pool.close()
"""

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from insitu.errors import BackendError, BackendUnavailable, InsituError, format_error
from insitu.remote.client import ServiceLost, ServiceSession
from insitu.wire.endings import end_tasks

logger = logging.getLogger(__name__)

KEY = "general.executor"
_SETTLE_SECONDS = 30.0
"""How long the first services wait for the others."""
_FIRST_REST, _MOST_DOUBLINGS = 0.5, 6
"""Seconds between two starts that fail."""


class RemoteService(ABC):
    """A process that serves workflows, as its clients see it; `capacity` is how many attempts it runs at the same time.

    `name` is what messages call it.
    """

    name = "a service that has not started"

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self.reserved = False
        """For one attempt alone."""
        self.lost: str | None = None
        """Why it has ended."""
        self.lost_episodes = 0
        self.sessions: dict[str, ServiceSession] = {}
        """By the id of their workflow."""
        self._stack = AsyncExitStack()
        self._ended = asyncio.Event()
        self._released = asyncio.Event()

    @abstractmethod
    async def start(self) -> None:
        """Raises BackendUnavailable if it may succeed later, and another InsituError if not."""

    @abstractmethod
    async def open(self, workflow: str, description: Any) -> None:
        """Makes a session for a workflow. Raises like `start`."""

    async def connect(self, session: ServiceSession) -> ServiceSession:
        """Opens a session that lasts as long as the service."""
        await self._stack.enter_async_context(session)
        await session.check()
        await session.connect()
        return session

    def note_lost(self, why: str) -> None:
        if self.lost is None:
            self.lost, self.lost_episodes = why, self.in_flight
            self._released.set()
            self._ended.set()

    async def until_lost(self) -> str:
        """Returns why it is lost, in words."""
        await self._ended.wait()
        return str(self.lost)

    async def until_alone(self) -> None:
        """Waits until one attempt is left, or the process has ended."""
        while self.in_flight > 1 and self.lost is None:
            self._released.clear()
            await self._released.wait()

    def release(self) -> None:
        self.in_flight -= 1
        self._released.set()

    async def close(self, *, gently: bool) -> None:
        """Ends the process, or the connections to it; `gently`: it is not lost."""
        await self._stack.aclose()


class ServicePool:
    """Keeps services with the same workflows open, and replaces those that are lost, while attempts wait.

    `starters` make one each, which messages call a `noun`. If one cannot be started `most_failures` times in a row,
    lost services are not replaced any more.
    """

    def __init__(self, noun: str, most_failures: float = math.inf) -> None:
        self.starters: Sequence[Callable[[], RemoteService]] = ()
        self._noun = noun
        self._most_failures = most_failures
        self._ready: list[RemoteService] = []
        self._services: list[RemoteService] = []
        """The services that are ready, and those that start."""
        self._workflows: dict[str, Any] = {}
        """The descriptions of the workflows."""
        self._keepers: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()
        self._failure: InsituError | None = None
        self._has_started = False

    async def close(self) -> None:
        """Ends the services."""
        await end_tasks(*self._keepers)
        closing = [service.close(gently=service in self._ready) for service in self._services]
        await asyncio.gather(*closing, *self._closing, return_exceptions=True)

    async def open(self, workflow: str, description: Any, expected: int, limit: float) -> bool:
        """Opens a workflow, with this id, on all services. Raises the error of the first one that cannot.

        Waits at first for `expected` services, for at most `limit` seconds. Returns whether one has started.
        """
        if workflow not in self._workflows:
            self._workflows[workflow] = description
            for make in self.starters[len(self._keepers) :]:
                self._keepers.append(asyncio.create_task(self._keep(make), name="keep a service"))
            opening = (each.open(workflow, description) for each in self._ready)
            for error in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(error, BaseException) and not isinstance(error, ServiceLost):
                    del self._workflows[workflow]
                    raise error
        if not self._has_started:
            await self._settle(expected, time.monotonic() + limit)
        return self._has_started

    async def _settle(self, expected: int, end: float) -> None:
        """Waits for services. The first one waits for the others for a while."""
        has_first = False
        while len(self._ready) < expected and time.monotonic() < end:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - time.monotonic())
            if self._ready and not has_first:
                has_first, end = True, min(end, time.monotonic() + _SETTLE_SECONDS)
        self._has_started = bool(self._ready)
        if len(self._ready) < len(self.starters):
            running = f"{len(self._ready)} of {len(self.starters)} {self._noun}s run"
            logger.warning("%s: %s; the others get episodes once they do", KEY, running)

    async def _keep(self, make: Callable[[], RemoteService]) -> None:
        """Keeps one service running: starts it, watches it until it is lost, and starts another."""
        failures = 0
        try:
            while self._failure is None:
                service = make()
                self._services.append(service)
                rest = await self._start(service, failures)
                failures = 0 if rest is None else failures + 1
                if rest is None:
                    await self._use(service)
                self._services.remove(service)
                closing = asyncio.create_task(service.close(gently=False), name="end a service")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
                await asyncio.sleep(rest or 0.0)
        except Exception as error:  # a keeper that ends would leave episodes waiting for ever
            failure = error if isinstance(error, InsituError) else InsituError(f"{KEY}: {format_error(error)}")
            if self._ready:  # the episodes go on there, until the last one has ended
                count = len(self._ready)
                logger.warning("%s; %ss that end are not replaced any more, %d run", failure, self._noun, count)
            self._failure = self._failure or failure
            self._wake(len(self._waiting))

    async def _start(self, service: RemoteService, failures: int) -> float | None:
        """Starts a service and opens all workflows; if that fails, returns how long to wait before the next one."""
        try:
            await service.start()
            while missing := [each for each in self._workflows if each not in service.sessions]:
                await service.open(missing[0], self._workflows[missing[0]])
        except BackendUnavailable as error:
            if failures + 1 >= self._most_failures:
                message = f"{KEY}: a {self._noun} could not be started {failures + 1} times: {error}"
                raise BackendError(message) from error
            return _FIRST_REST * 2.0 ** min(failures, _MOST_DOUBLINGS)
        except InsituError as error:
            if not self._has_started:
                raise
            logger.warning("%s; it gets no episodes", error)
            return _FIRST_REST * 2.0**_MOST_DOUBLINGS
        return None

    async def _use(self, service: RemoteService) -> None:
        """Gives a service episodes until it is lost."""
        self._ready.append(service)
        self._wake(len(self._waiting))
        cause = await service.until_lost()
        self._ready.remove(service)
        if self._failure is not None:  # no other is started
            self._wake(len(self._waiting))
        lost = service.lost_episodes
        logger.warning("%s has ended; its %d episodes are run again (%s)", service.name, lost, cause)

    def _wake(self, places: int) -> None:
        """Lets as many attempts look for a service."""
        self._changed.set()
        while places > 0 and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                places -= 1

    @asynccontextmanager
    async def service(self, *, alone: bool) -> AsyncIterator[RemoteService]:
        """The service with the fewest attempts that has room for one more; `alone`: it runs nothing else."""
        service = await self._take()
        try:
            while alone:
                service.reserved = True
                await service.until_alone()
                if service.lost is None:
                    break
                service.release()
                service = await self._take()
            yield service
        finally:
            service.release()
            service.reserved = service.reserved and not alone
            self._wake(len(self._waiting) if alone else 1)

    async def _take(self) -> RemoteService:
        while True:
            free = [s for s in self._ready if s.in_flight < s.capacity and not s.reserved and s.lost is None]
            if free:
                service = min(free, key=lambda each: each.in_flight)
                service.in_flight += 1
                return service
            if self._failure is not None and not self._ready:
                raise self._failure
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake(1)
                raise

    def activity(self) -> str:
        """What an attempt without a service waits for."""
        busy = sum(service.in_flight for service in self._ready)
        running = f"{len(self._ready)} of {len(self.starters)} run, with {busy} episodes"
        return f"waits for a {self._noun}: {running}"
