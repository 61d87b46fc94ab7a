"""The single thread that touches the weights: sampling steps and training micro-batches alternate in it."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E")
R = TypeVar("R")

logger = logging.getLogger(__name__)


class ComputeThread:
    """Runs everything that reads or writes weights sequentially, so that no locks are needed.

    Each round runs all pending calls, then one sampling step, then one step of a driven generator (training). So a
    training job delays sampling by one micro-batch at most. `sampler` returns whether it has more to sample.
    """

    def __init__(self) -> None:
        self.sampler: Callable[[], bool] | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._driven: deque[_DrivenGenerator] = deque()
        self._thread = threading.Thread(target=self._run, name="insitu-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Stops after the current step, waiting up to `timeout` seconds; closes driven generators."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def wake(self) -> None:
        """Signals that there may be something to sample; thread-safe."""
        self._inbox.put(lambda: None)

    async def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Runs `fn(*args)` in the thread and returns its result."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                post(loop, settle, done, fn(*args))
            except BaseException as error:  # raised in the awaiting caller
                post(loop, settle, done, error)

        self._inbox.put(run)
        return await done

    async def drive(self, steps: Generator[E, None, R], on_event: Callable[[E], None]) -> R:
        """Runs `steps` to its end, interleaved with other work; passes what it yields to `on_event` on the event loop.

        If the caller is cancelled, returns only after the generator has been closed in the thread.
        """
        drive = _DrivenGenerator(asyncio.get_running_loop(), steps, on_event)
        self._inbox.put(lambda: self._driven.append(drive))
        try:
            return await asyncio.shield(drive.done)
        except asyncio.CancelledError:
            drive.cancelled = True
            self.wake()
            await asyncio.wait([drive.done])
            if not drive.done.cancelled():
                drive.done.exception()
            raise

    def _run(self) -> None:
        """Consumes the inbox; blocks on it only if there is nothing to sample or drive."""
        busy = False
        while True:
            block = not busy
            with contextlib.suppress(queue.Empty):
                while (task := self._inbox.get(block)) is not None:
                    task()
                    block = False
                for drive in self._driven:
                    drive.cancelled = True
                    drive.advance()
                return
            busy = self.sampler is not None and self.sampler()
            if self._driven:
                drive = self._driven.popleft()
                if drive.advance():
                    self._driven.append(drive)
            busy = busy or bool(self._driven)


class _DrivenGenerator:
    """A running generator and the future of its result."""

    def __init__(self, loop: asyncio.AbstractEventLoop, steps: Generator[Any, None, Any], on_event: Callable) -> None:
        self.loop = loop
        self.steps = steps
        self.on_event = on_event
        self.done: asyncio.Future[Any] = loop.create_future()
        self.cancelled = False

    def advance(self) -> bool:
        """Runs one step; returns whether the generator continues."""
        try:
            if self.cancelled:
                self.steps.close()
                post(self.loop, self.done.cancel)
                return False
            event = next(self.steps)
        except StopIteration as end:
            post(self.loop, settle, self.done, end.value)
            return False
        except BaseException as error:  # raised in the awaiting caller
            post(self.loop, settle, self.done, error)
            return False
        post(self.loop, self.on_event, event)
        return True


def post(loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], *args: Any) -> None:
    """Runs `fn` on the event loop; does nothing if the loop has closed."""
    try:
        loop.call_soon_threadsafe(fn, *args)
    except RuntimeError:
        logger.debug("the event loop closed before a result reached it")


def settle(future: asyncio.Future, outcome: Any) -> None:
    """Sets the future's result, or its exception if `outcome` is one; does nothing if it is done or cancelled."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
