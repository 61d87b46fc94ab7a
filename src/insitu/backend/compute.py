"""The single thread that accesses the weights, sharing its time between sampling and training."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from insitu.errors import BackendUnavailable, format_error

T = TypeVar("T")
E = TypeVar("E")
R = TypeVar("R")

logger = logging.getLogger(__name__)

SAMPLING_SHARE = 0.75
"""Of the thread's time while a job trains and completions are sampled. By `benchmarks/one_device.py`, completions keep
two thirds of their speed, and a job takes three times as long; with 0.9, seven times, for a tenth more tokens."""

_POLL_SECONDS = 0.001
"""A sampling step waits at most this long for work in another thread."""


class Parked:
    """Yielded by a generator that waits for `ComputeThread.resume`."""


PARKED = Parked()


class ComputeThread:
    """Runs everything that reads or writes weights sequentially, so that no locks are needed.

    Each iteration runs all pending calls, one sampling step, and, if it is due, one step of an interleaved generator (a
    training job). After such a step, of a micro-batch, sampling gets `sampling_share` of the time of both before the
    next one is due, or less if there is nothing left to sample. So training delays a sampling step by at most one
    micro-batch, and sampling delays training by a bounded factor. `sampling_step()` returns whether there is more to
    sample. `synchronize`, if set, waits for the device, whose work would otherwise count as that of the next
    sampling step. If the thread fails, all that waits for it gets BackendUnavailable, `on_failure` is called with it,
    and `check_alive` raises it from then on.

    On a CPU, operations of no other thread that stays should use several cores: libgomp keeps a team of threads for
    each thread whose operations do, and once these are more than the cores, none waits actively (`active_waiting`).
    """

    def __init__(self) -> None:
        self.sampling_share = SAMPLING_SHARE
        self.clock: Callable[[], float] = perf_counter
        self.synchronize: Callable[[], None] | None = None
        self.sampling_step: Callable[[], bool] | None = None
        self.on_failure: Callable[[BackendUnavailable], None] | None = None
        self._failure: BackendUnavailable | None = None
        self._waiting: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] = {}
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: shut down
        self._generators: deque[_InterleavedGenerator] = deque()
        self._parked: dict[Any, _InterleavedGenerator] = {}
        self._thread = threading.Thread(target=self._run, name="insitu-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Stops the thread after its current step and closes the running generators; waits up to `timeout` seconds."""
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def check_alive(self) -> None:
        """Raises BackendUnavailable if the thread has failed."""
        if self._failure is not None:
            raise self._failure

    def wake(self) -> None:
        """Wakes the thread because there may be new sampling work; thread-safe."""
        self._requests.put(lambda: None)

    async def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Runs `fn(*args)` in the thread and returns its result. Raises BackendUnavailable if the thread fails."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = self._future(loop)

        def run() -> None:
            try:
                call_in_loop(loop, set_outcome, done, fn(*args))
            except BaseException as error:  # re-raised in the awaiting caller
                call_in_loop(loop, set_outcome, done, error)

        self._requests.put(run)
        return await done

    def resume(self, steps: Generator[Any, None, Any]) -> None:
        """Continues a generator that is parked, or will be without having seen what is there now; thread-safe."""

        def resume() -> None:
            if (generator := self._parked.pop(steps, None)) is not None:
                self._generators.append(generator)

        self._requests.put(resume)

    async def run_interleaved(self, steps: Generator[E | Parked | None, None, R], on_event: Callable[[E], None]) -> R:
        """Runs the generator to completion, interleaved with other work. One that yields PARKED waits for `resume`.

        Calls `on_event` on the event loop with each other value it yields, except None. If the caller is cancelled,
        returns only after the generator has been closed in the thread. Raises BackendUnavailable if the thread fails.
        """
        loop = asyncio.get_running_loop()
        generator = _InterleavedGenerator(loop, self._future(loop), steps, on_event)
        self._requests.put(lambda: self._generators.append(generator))
        try:
            return await asyncio.shield(generator.done)
        except asyncio.CancelledError:
            generator.cancelled = True
            self.resume(steps)
            await asyncio.wait([generator.done])
            if not generator.done.cancelled():
                generator.done.exception()  # marks the exception as retrieved
            raise

    def _future(self, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[Any]":
        """A future that fails with the thread."""
        future = loop.create_future()
        self._waiting[future] = loop
        future.add_done_callback(self._waiting.pop)
        if self._failure is not None:  # checked last: the thread may fail at any time
            future.set_exception(self._failure)
        return future

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the thread is never joined: its callers would wait forever
            logger.critical("the compute thread has failed", exc_info=error)
            self._failure = BackendUnavailable(
                f"the compute thread of the backend has failed ({format_error(error)}); restart the backend"
            )
            for future, loop in list(self._waiting.items()):
                call_in_loop(loop, set_outcome, future, self._failure)
            if self.on_failure is not None:
                self.on_failure(self._failure)

    def _work(self) -> None:
        """Main loop; blocks on the queue only when idle."""
        busy = False
        owed = 0.0  # seconds of sampling before the next step of a generator
        while True:
            block = not busy
            with contextlib.suppress(queue.Empty):
                while (request := self._requests.get(block)) is not None:
                    request()
                    block = False
                for generator in (*self._generators, *self._parked.values()):
                    generator.cancelled = True
                    generator.advance()
                return
            began = self.clock()
            samples = self.sampling_step is not None and self.sampling_step()
            owed = owed - (self.clock() - began) if samples else 0.0
            if self._generators and (owed <= 0 or any(generator.cancelled for generator in self._generators)):
                owed = self._train(samples) * self.sampling_share / (1 - self.sampling_share)
            busy = samples or bool(self._generators)

    def _train(self, samples: bool) -> float:
        """Runs one step of the generator whose turn it is; returns the seconds that it took from sampling."""
        began = self.clock()
        generator = self._generators.popleft()
        if generator.advance():
            self._generators.append(generator)
        elif generator.parked:
            self._parked[generator.steps] = generator
        if samples and self.synchronize is not None:
            self.synchronize()
        return self.clock() - began


@dataclass(eq=False)
class _InterleavedGenerator:
    """A running generator and the future for its return value."""

    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[Any]"
    steps: Generator[Any, None, Any]
    on_event: Callable[..., Any]
    cancelled: bool = False
    parked: bool = False

    def advance(self) -> bool:
        """Runs one step; returns whether the generator continues by itself."""
        self.parked = False
        try:
            if self.cancelled:
                self.steps.close()
                call_in_loop(self.loop, self.done.cancel)
                return False
            event = next(self.steps)
        except BaseException as error:  # the end, or re-raised in the awaiting caller
            outcome = error.value if isinstance(error, StopIteration) else error
            call_in_loop(self.loop, set_outcome, self.done, outcome)
            return False
        self.parked = event is PARKED
        if event is not None and not self.parked:
            call_in_loop(self.loop, self.on_event, event)
        return not self.parked


def in_another_thread(work: Callable[[], T], undo: Callable[[T], None]) -> Generator[None, None, T]:
    """Runs `work`, which accesses no weights that sampling changes, and yields until it is done.

    If the generator is closed before, waits for the work and undoes it.
    """
    with ThreadPoolExecutor(1, "insitu-work") as thread:
        working = thread.submit(work)
        try:
            while wait([working], _POLL_SECONDS).not_done:
                yield None
        except GeneratorExit:
            if working.exception() is None:
                undo(working.result())
            raise
    return working.result()


def call_in_loop(loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], *args: Any) -> None:
    """Calls `fn` on the event loop, from any thread; does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(fn, *args)
    except RuntimeError:
        logger.debug("dropped a result: the event loop is closed")


def set_outcome(future: asyncio.Future[Any], outcome: Any) -> None:
    """Sets the future's result, or its exception if `outcome` is one; does nothing if it is already done."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
