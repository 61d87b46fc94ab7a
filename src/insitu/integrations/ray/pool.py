"""The workers of a run: started, given work, watched, and replaced when they end."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Self

from insitu import __version__
from insitu.collect.watchdog import seconds_since
from insitu.errors import BackendError, ConfigError, InsituError, PluginError, format_error
from insitu.integrations.ray.cluster import KEY, Cluster
from insitu.integrations.ray.openings import Opening
from insitu.integrations.ray.worker import Submitted
from insitu.wire.json_values import encode

logger = logging.getLogger(__name__)

REPORT_SECONDS = 5.0
"""How often a worker is asked what its episodes are doing."""
_SETTLE_SECONDS = 30.0
"""How long the first workers wait for the others."""
_CLOSE_SECONDS = 12.0
_MOST_FAILED_STARTS = 3
_RETRY_SECONDS = 5.0


class WorkerLost(BackendError):
    """A worker has ended, or its machine has."""


class Worker:
    """A worker process as its pool sees it; `capacity` is how many attempts it runs at the same time."""

    def __init__(self, cluster: Cluster, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self.reserved = False
        """For one attempt alone."""
        self.place = "a worker that has not started"
        self.stray, self.outside = Counter[str](), Counter[str]()
        self.lost: str | None = None
        """Why it has ended."""
        self.lost_episodes = 0
        self._cluster = cluster
        self._actor = cluster.create_worker(capacity)
        self._opened: set[str] = set()
        self._activities: dict[str, str] = {}
        self._blocked: str | None = None
        self._host = ""
        self._heard = time.monotonic()
        self._released = asyncio.Event()
        self._attempts: dict[int, asyncio.Future[bytes]] = {}
        self._outbox: list[Submitted] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises WorkerLost if the process has ended."""
        exceptions = self._cluster.ray.exceptions
        if self.lost is not None:
            raise WorkerLost(self.lost)
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except exceptions.RayTaskError as error:
            raise InsituError(f"{self.place} failed to {method}: {_brief(error)}: this is a fault of insitu") from error
        except exceptions.RayError as error:
            self.note_lost(_brief(error))
            raise WorkerLost(self.lost) from error

    def note_lost(self, why: str) -> None:
        if self.lost is None:
            self.lost, self.lost_episodes = why, self.in_flight
            self._released.set()
            for attempt in self._attempts.values():
                if not attempt.done():
                    attempt.set_exception(WorkerLost(why))

    async def start(self, environment: dict[str, str]) -> None:
        about = await self.call("start", environment)
        self._host = about["host"]
        self.place = f"the worker with pid {about['pid']} on {about['host']}"
        if about["insitu"] != __version__:
            raise ConfigError(
                f"{KEY}: {self.place} has insitu {about['insitu']}, but this process has {__version__}: use one "
                "release everywhere"
            )

    def has(self, opening: Opening) -> bool:
        return opening.id in self._opened

    async def open(self, opening: Opening) -> None:
        """Raises the error that it reports."""
        if self.has(opening):
            return
        try:
            opening.check_host(self._host)
            report = await self.call("open", encode(opening))
            if "error" in report:
                raise (ConfigError if report["in_file"] else PluginError)(report["error"])
        except (ConfigError, PluginError) as error:
            raise type(error)(f"{KEY}: {self.place}: {error}") from None
        self._opened.add(opening.id)

    async def attempt(self, number: int, opening: str, model: str | None, request: bytes) -> bytes:
        """The lines of an attempt; raises WorkerLost. Attempts that begin at the same time are sent together."""
        if self.lost is not None:
            raise WorkerLost(self.lost)
        loop = asyncio.get_running_loop()
        ended = self._attempts[number] = loop.create_future()
        self._outbox.append((number, opening, model, request))
        if len(self._outbox) == 1:
            loop.call_soon(self._send)
        try:
            return await ended
        except asyncio.CancelledError:
            if self.lost is None:
                self._actor.cancel.remote(number)
            raise
        finally:
            del self._attempts[number]

    def _send(self) -> None:
        attempts, self._outbox = self._outbox, []
        if self.lost is None:
            self._actor.submit.remote(attempts)

    async def watch(self, interval: float) -> None:
        """Takes the results of attempts, and reports of what they are doing, until the process has ended."""
        try:
            while self.lost is None:
                ended, (stray, outside), report = await self.call("results", interval)
                self._heard = time.monotonic()
                self.stray, self.outside = Counter(stray), Counter(outside)
                for number, lines, error in ended:
                    self._take(number, lines, error)
                if report is not None:
                    self._activities, self._blocked = report["activities"], report["blocked"]
        except WorkerLost:
            return
        except InsituError as error:
            self.note_lost(str(error))
            raise

    def _take(self, number: int, lines: bytes, error: str | None) -> None:
        attempt = self._attempts.get(number)
        if attempt is None or attempt.done():  # it has been cancelled
            return
        if error is None:
            attempt.set_result(lines)
        else:
            attempt.set_exception(InsituError(f"{self.place} failed to run an attempt: {error}: a fault of insitu"))

    async def until_alone(self) -> None:
        """Waits until one attempt is left, or the process has ended."""
        while self.in_flight > 1 and self.lost is None:
            self._released.clear()
            await self._released.wait()

    def release(self) -> None:
        self.in_flight -= 1
        self._released.set()

    def activity(self, number: int) -> str:
        if time.monotonic() - self._heard > 3 * REPORT_SECONDS:
            return f"{self.place} has sent nothing for {seconds_since(self._heard)}"
        if self._blocked is not None:
            return f"{self.place} is blocked by {self._blocked}"
        return f"on {self.place}: {self._activities.get(str(number), 'it begins')}"

    async def close(self, *, gently: bool) -> None:
        """Ends the process; `gently`: after its attempts and workflows have."""
        if gently and self.lost is None:
            with suppress(TimeoutError, InsituError):
                await asyncio.wait_for(self.call("close"), _CLOSE_SECONDS)
        self.note_lost("it was stopped")
        await asyncio.to_thread(self._cluster.ray.kill, self._actor)


class WorkerPool:
    """Keeps `workers` processes with the same workflows open. At most `episodes` are in flight on all of them."""

    def __init__(self, cluster: Cluster, episodes: int, report_interval: float) -> None:
        self._cluster = cluster
        self._size = cluster.config.workers
        self._capacity = -(-episodes // self._size)
        self._interval = report_interval
        self._ready: list[Worker] = []
        self._workers: list[Worker] = []
        """Those that are ready, and those that start."""
        self._openings: dict[str, Opening] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()
        self._failure: InsituError | None = None
        self._has_started = False
        self._ended_stray, self._ended_outside = Counter[str](), Counter[str]()
        self._numbers = count(1)
        self.lost_workers = 0

    @property
    def working_dir(self) -> str | None:
        return self._cluster.working_dir

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        closing = [worker.close(gently=worker in self._ready) for worker in self._workers]
        await asyncio.gather(*closing, *self._closing, return_exceptions=True)

    @property
    def stray(self) -> Counter[str]:
        return sum((worker.stray for worker in self._ready), Counter(self._ended_stray))

    @property
    def outside(self) -> Counter[str]:
        return sum((worker.outside for worker in self._ready), Counter(self._ended_outside))

    async def open(self, opening: Opening) -> None:
        """Opens a workflow on all workers. Raises the error of the first one that cannot."""
        if opening.id not in self._openings:
            self._openings[opening.id] = opening
            for _ in range(self._size - len(self._keepers)):
                self._keepers.append(asyncio.create_task(self._keep(), name="keep a worker"))
            opened = await asyncio.gather(*(w.open(opening) for w in self._ready), return_exceptions=True)
            for error in opened:
                if isinstance(error, BaseException) and not isinstance(error, WorkerLost):
                    del self._openings[opening.id]
                    raise error
        if not self._has_started:
            await self._settle()

    async def _settle(self) -> None:
        """Waits for the workers that the cluster has room for; raises if none has started within the time limit."""
        started, settled = time.monotonic(), None
        limit, room = self._cluster.config.start_timeout, await asyncio.to_thread(self._cluster.room)
        while len(self._ready) < max(room, 1):
            if self._failure is not None:
                raise self._failure
            if self._ready and settled is None:
                settled = time.monotonic()
            end = started + limit if settled is None else settled + _SETTLE_SECONDS
            if time.monotonic() >= end:
                break
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - time.monotonic())
        if not self._ready:
            raise BackendError(
                f"{KEY}: no worker has started within start_timeout: {limit:g} s; the machines of the cluster have "
                f"room for {room} of {self._size} workers"
            )
        self._has_started = True
        if len(self._ready) < self._size:
            logger.warning(
                "%s: %d of %d workers run; the others start once the cluster has room for them",
                KEY,
                len(self._ready),
                self._size,
            )

    async def _keep(self) -> None:
        """Keeps one worker running: starts it, watches it until it has ended, and starts another."""
        failures = 0
        try:
            while self._failure is None:
                worker = Worker(self._cluster, self._capacity)
                self._workers.append(worker)
                delay = await self._start(worker, failures)
                if delay is None:
                    failures = 0
                    await self._use(worker)
                else:
                    failures += 1
                self._workers.remove(worker)
                self._close(worker)
                await asyncio.sleep(delay or 0.0)
        except Exception as error:  # a keeper that ends would leave episodes waiting for ever
            failure = error if isinstance(error, InsituError) else InsituError(f"{KEY}: {format_error(error)}")
            if self._ready:  # the episodes go on there, until the last one has ended
                logger.warning("%s; workers that end are not replaced any more, %d run", failure, len(self._ready))
            self._fail(failure)

    async def _start(self, worker: Worker, failures: int) -> float | None:
        """Starts a worker and opens all workflows; if that fails, returns how long to wait before the next one."""
        try:
            await worker.start(self._cluster.environment)
            while missing := [opening for opening in self._openings.values() if not worker.has(opening)]:
                await worker.open(missing[0])
        except WorkerLost as lost:
            if failures + 1 == _MOST_FAILED_STARTS:
                message = f"{KEY}: a worker has ended {_MOST_FAILED_STARTS} times while it started: {lost}"
                raise BackendError(message) from lost
            return _RETRY_SECONDS * failures
        except InsituError as error:
            if not self._has_started:
                raise
            logger.warning("%s; it gets no episodes", error)
            return 6 * _RETRY_SECONDS
        return None

    async def _use(self, worker: Worker) -> None:
        """Gives a worker episodes until it has ended."""
        self._ready.append(worker)
        self._wake(worker.capacity)
        await worker.watch(self._interval)
        self._ready.remove(worker)
        self._ended_stray.update(worker.stray)
        self._ended_outside.update(worker.outside)
        self.lost_workers += 1
        logger.warning(
            "%s has ended; its %d episodes are run again by others (%s)",
            worker.place,
            worker.lost_episodes,
            worker.lost,
        )

    def _close(self, worker: Worker) -> None:
        closing = asyncio.create_task(worker.close(gently=False), name="end a worker")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _fail(self, error: InsituError) -> None:
        self._failure = self._failure or error
        self._wake(len(self._waiting))

    def _wake(self, places: int) -> None:
        """Lets as many attempts look for a worker."""
        self._changed.set()
        while places and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                places -= 1

    @asynccontextmanager
    async def worker(self, *, alone: bool) -> AsyncIterator[tuple[Worker, int]]:
        """A worker with room for an attempt, and the attempt's number; `alone`: the worker runs nothing else."""
        worker = await self._take()
        try:
            while alone:
                worker.reserved = True
                await worker.until_alone()
                if worker.lost is None:
                    break
                worker.release()
                worker = await self._take()
            yield worker, next(self._numbers)
        finally:
            worker.release()
            worker.reserved = worker.reserved and not alone
            self._wake(worker.capacity if alone else 1)

    async def _take(self) -> Worker:
        while True:
            free = [w for w in self._ready if w.in_flight < w.capacity and not w.reserved and w.lost is None]
            if free:
                worker = min(free, key=lambda each: each.in_flight)
                worker.in_flight += 1
                return worker
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
        """What an attempt without a worker waits for."""
        busy = sum(worker.in_flight for worker in self._ready)
        return f"waits for a worker: {len(self._ready)} of {self._size} run, with {busy} episodes"


def _brief(error: Exception) -> str:
    """Ray's messages are long; their first sentences say what has happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
