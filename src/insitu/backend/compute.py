"""The one thread that touches the model's weights: sampling steps and training micro-batches take turns in it."""

import asyncio
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


class Compute:
    """Runs everything that reads or writes weights, one thing at a time, so that neither side needs a lock.

    Three kinds of work share the thread: single calls come first, then one sampling step while there is something to
    sample, then one step of a driven generator. So a long training step delays sampling by one micro-batch at most.
    """

    def __init__(self) -> None:
        self.sampler: Callable[[], bool] | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._driven: deque[_Drive] = deque()
        self._thread = threading.Thread(target=self._run, name="insitu-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Stop after what is being computed now, waiting `timeout` seconds for it; driven generators are closed."""
        self._inbox.put(_stop)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def wake(self) -> None:
        """There may be something to sample; callable from any thread."""
        self._inbox.put(_nothing)

    async def call(self, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)`, computed in the thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = fn(*args)
            except BaseException as error:  # belongs to whoever awaits the call
                _post(loop, _fail, done, error)
            else:
                _post(loop, _resolve, done, value)

        self._inbox.put(run)
        return await done

    async def drive(self, steps: Generator[E, None, R], on_event: Callable[[E], None]) -> R:
        """Advance `steps` to its end, other work in between; each thing it yields goes to `on_event` on the event loop.

        A cancelled caller is released only when the generator has been closed, in the thread.
        """
        drive = _Drive(asyncio.get_running_loop(), steps, on_event)
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
        """Consumes the inbox; waits for it only when there is nothing to sample and nothing to drive."""
        busy = False
        while True:
            task = self._next(block=not busy)
            while task is not None:
                if task is _stop:
                    return self._close_driven()
                task()
                task = self._next(block=False)
            busy = self._sample()
            if self._driven:
                drive = self._driven.popleft()
                if drive.advance():
                    self._driven.append(drive)
            busy = busy or bool(self._driven)

    def _next(self, block: bool) -> Callable[[], None] | None:
        try:
            return self._inbox.get(block)
        except queue.Empty:
            return None

    def _sample(self) -> bool:
        return self.sampler() if self.sampler is not None else False

    def _close_driven(self) -> None:
        for drive in self._driven:
            drive.cancelled = True
            drive.advance()


class _Drive:
    """A generator under way, and the future that its end resolves."""

    def __init__(self, loop: asyncio.AbstractEventLoop, steps: Generator[Any, None, Any], on_event: Callable) -> None:
        self.loop = loop
        self.steps = steps
        self.on_event = on_event
        self.done: asyncio.Future[Any] = loop.create_future()
        self.cancelled = False

    def advance(self) -> bool:
        """One step; whether there is another."""
        try:
            if self.cancelled:
                self.steps.close()
                _post(self.loop, self.done.cancel)
                return False
            event = next(self.steps)
        except StopIteration as end:
            _post(self.loop, _resolve, self.done, end.value)
            return False
        except BaseException as error:  # belongs to whoever awaits the drive
            _post(self.loop, _fail, self.done, error)
            return False
        _post(self.loop, self.on_event, event)
        return True


def _post(loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], *args: Any) -> None:
    """Run `fn` on the event loop, unless the loop has closed and nobody waits any longer."""
    try:
        loop.call_soon_threadsafe(fn, *args)
    except RuntimeError:
        logger.debug("the event loop closed before a result reached it")


def _resolve(future: asyncio.Future, value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future, error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _nothing() -> None:
    """Wakes the thread."""


def _stop() -> None:
    """Ends the thread."""
