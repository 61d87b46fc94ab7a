"""The event loop of a command: a signal ends it even if agents ignore cancellation, and a watchdog looks after it.

The watchdog says what a run is waiting for when nothing completes, and gives up if the file says so:

    await watchdog.watch(collect_everything)    # logs what is waited for; raises Stalled

    with watchdog.waiting("row '7', generation 2 of epoch 1", lambda: "waits for a slot"):  # or a training job
        with doing(ledger.activity):    # what the episode is doing from now on
            ...
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from traceback import walk_stack
from types import FrameType
from typing import Any, TypeVar

from insitu.errors import InsituError, Stalled, describe_error, users_place
from insitu.gateway.programs import kill_programs
from insitu.wire.log_lines import log_line
from insitu.wire.redaction import outlive_readers
from insitu.wire.signals import stop_signals

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_SECONDS = 25.0
"""How long cleanup may take after a signal before the process ends without it."""
_CLOSE_SECONDS = 5.0
_MOST_THREADS = 1024
"""For blocking agents. Threads are created on demand; asyncio's default limit depends on the CPUs (6 for two)."""
_THREAD_NAME = "insitu"

left_behind: list[Any] = []
"""Tasks that ignore their cancellation and threads that block: Python would wait for them for ever when it exits."""
_LISTED = 5
_CHECKS = 4
"""How often what is watched is looked at within the shortest configured time."""

Activity = Callable[[], str]

_giving_up: ContextVar[Callable[[str], object] | None] = ContextVar("insitu_end_process", default=None)
"""Ends this process with a message, if it belongs to a command: nothing else ends a run with a blocked event loop."""


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine, on uvloop if it is installed (half the client-side cost of a request).

    Blocking agents run in threads, one per episode in flight. Ctrl-C, SIGTERM and the end of the terminal cancel it,
    and KeyboardInterrupt is raised after cleanup. A second signal, cleanup that takes longer than `STOP_SECONDS`, or an
    agent that blocks the loop for `eval.general.stall_timeout` ends the process. It goes on when its output ends.
    """
    outlive_readers()
    loop, executor = new_loop()
    context = copy_context()
    context.run(_giving_up.set, lambda reason: _end_process(f"failed: {reason}", 1))
    task = loop.create_task(main, context=context)
    with _stop_on_signals(lambda: loop.call_soon_threadsafe(task.cancel)) as stopping:
        try:
            return _run(loop, task)
        except asyncio.CancelledError:
            if not stopping.is_set():
                raise InsituError("the run was cancelled by code of an agent or plugin, not by a signal") from None
            raise KeyboardInterrupt from None
        except (KeyboardInterrupt, SystemExit) as error:
            raise InsituError(f"code of a plugin raised {describe_error(error)}") from error
        finally:
            _close(loop, executor, everything=stopping.is_set())


def run_anywhere(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`run_async`, also where an event loop is running already, as in a notebook: then it runs in another thread.

    KeyboardInterrupt there cancels it, and is raised after cleanup.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_async(main())
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()
    ended: Future[T] = Future()

    async def cancellable() -> T:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await main()

    def run() -> None:
        try:
            ended.set_result(run_async(cancellable()))
        except BaseException as error:  # raised in the other thread
            ended.set_exception(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), name="insitu run")
    thread.start()
    try:
        return ended.result()
    except KeyboardInterrupt:
        loop, task = begun.result()
        if task is not None and not ended.done():
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise


def new_loop() -> tuple[asyncio.AbstractEventLoop, ThreadPoolExecutor]:
    """An event loop for episodes, and its threads."""
    try:
        import uvloop
    except ModuleNotFoundError:
        base: Any = asyncio.SelectorEventLoop
    else:
        base = uvloop.Loop

    class Loop(base):
        """Threads inherit the context, as with `asyncio.to_thread`: their model calls belong to the episode."""

        def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
            if executor is None or isinstance(executor, ThreadPoolExecutor):
                return super().run_in_executor(executor, copy_context().run, func, *args)
            return super().run_in_executor(executor, func, *args)

    loop: asyncio.AbstractEventLoop = Loop()
    executor = ThreadPoolExecutor(_MOST_THREADS, _THREAD_NAME)
    loop.set_default_executor(executor)
    return loop, executor


@contextmanager
def loop_in_thread(loop: asyncio.AbstractEventLoop, name: str) -> Iterator[None]:
    """Runs an event loop in a separate thread, and closes it."""
    thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def run_in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the loop of another thread; cancelling the caller cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


@contextmanager
def _stop_on_signals(stop: Callable[[], object]) -> Iterator[threading.Event]:
    """Calls `stop` on the first signal that ends a command, which sets the event; ends the process on the second.

    The process also ends if the block does not within `STOP_SECONDS`: an agent may block the event loop.
    """
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    watchdog = threading.Timer(STOP_SECONDS, _end_process, ("interrupted", 130))
    watchdog.daemon = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            _end_process("interrupted", 130)
        stopping.set()
        watchdog.start()
        stop()

    before = {number: signal.signal(number, on_signal) for number in stop_signals()}
    try:
        yield stopping
    finally:
        watchdog.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_process(message: str, code: int) -> None:
    """Ends the process without cleanup, which a blocked event loop prevents."""
    with suppress(OSError):  # its terminal may be gone
        os.write(sys.stderr.fileno(), f"{log_line(message)}\n".encode(errors="replace"))
    kill_programs()
    os._exit(code)  # the backend process notices that its parent is gone


def _run(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[T]") -> T:
    """Runs the loop until `task` has ended.

    SystemExit and KeyboardInterrupt in a task leave the loop as well. Signals do not raise them here, so they are the
    error of an agent's task, and of nothing else.
    """
    while True:
        try:
            return loop.run_until_complete(task)
        except (KeyboardInterrupt, SystemExit) as error:
            if task.done():
                raise
            logger.warning("a task raised %s, which ends nothing but the task", describe_error(error))


def _close(loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor, *, everything: bool) -> None:
    """Cancels what still runs and leaves behind what does not end; `everything`: also the threads of agents."""

    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, running = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            left_behind.extend(running)
        await asyncio.wait({asyncio.create_task(loop.shutdown_asyncgens())}, timeout=_CLOSE_SECONDS)

    _run(loop, loop.create_task(cancel_all()))
    executor.shutdown(wait=False, cancel_futures=True)
    for thread in threading.enumerate():
        is_ours = thread.name.startswith(_THREAD_NAME)
        if not thread.daemon and thread is not threading.current_thread() and (is_ours or everything):
            thread.join(_CLOSE_SECONDS if is_ours else 0)
            if thread.is_alive():
                left_behind.append(thread)
    loop.close()


class _Wait:
    """Something in progress. The latest of its `activities` says what it is doing, and for how long."""

    def __init__(self, name: str, activity: Activity) -> None:
        self.activities = [activity]
        self.name = name
        self._since = time.monotonic()

    def describe(self) -> str:
        return f"{self.name} (started {seconds_since(self._since)} ago; {self.activities[-1]()})"


_current: ContextVar[_Wait | None] = ContextVar("insitu_wait", default=None)


@contextmanager
def doing(activity: Activity) -> Iterator[None]:
    """In the body, the episode that the code belongs to is doing this."""
    wait = _current.get()
    if wait is None:
        yield
        return
    wait.activities.append(activity)
    try:
        yield
    finally:
        wait.activities.remove(activity)  # evaluators run concurrently: it may not be the latest


class Watchdog:
    """What a run waits for. `warning` and `timeout` are seconds without progress; None: no warning, no limit."""

    def __init__(self, warning: float | None, timeout: float | None) -> None:
        self._warning = warning
        self._timeout = timeout
        self._waits: dict[_Wait, None] = {}
        """In the order of their start."""
        self._watched = 0
        self._loop_ran_at = 0.0
        self._moved_at = self._reported_at = time.monotonic()

    @property
    def interval(self) -> float | None:
        """Seconds between two checks; None if nothing is to be reported."""
        limits = [limit for limit in (self._warning, self._timeout) if limit is not None]
        return min(limits) / _CHECKS if limits else None

    @contextmanager
    def waiting(self, name: str, activity: Activity) -> Iterator[None]:
        """What the body does is waited for; its end is progress, however it ends."""
        wait = _Wait(name, activity)
        if not self._waits:
            self.note_progress()
        self._waits[wait] = None
        token = _current.set(wait)
        try:
            yield
        finally:
            _current.reset(token)
            del self._waits[wait]
            self.note_progress()

    def activities(self) -> dict[str, str]:
        """What is in progress, by the name it was given, and what it is doing."""
        return {wait.name: wait.activities[-1]() for wait in [*self._waits]}

    def note_progress(self) -> None:
        self._moved_at = time.monotonic()

    async def watch(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work`, and checks meanwhile whether anything completes.

        Logs what is waited for after `warning` seconds, and again after as many. Raises Stalled after `timeout`
        seconds, and cancels `work`.
        """
        task = asyncio.create_task(work(), name="watched")
        try:
            with self._monitored_loop():
                while not task.done():
                    await asyncio.wait({task}, timeout=self.interval)
                    self._loop_ran_at = time.monotonic()
                    if not task.done():
                        self._check()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # also if this is cancelled just after it has failed
        return task.result()

    def _check(self) -> None:
        if not self._waits:
            return
        now = time.monotonic()
        if self._timeout is not None and now - self._moved_at >= self._timeout:
            raise Stalled(f"{self._report()}; {self._gave_up}")
        if self._warning is not None and now - max(self._moved_at, self._reported_at) >= self._warning:
            self._reported_at = now
            logger.warning("%s", self._report())

    @contextmanager
    def _monitored_loop(self) -> Iterator[None]:
        """Has a thread report a blocked event loop, since nothing in the loop can."""
        if self.interval is None:
            yield
            return
        if not self._watched:
            self._unwatched, self._loop_ran_at = threading.Event(), time.monotonic()
            arguments = (self._unwatched, self.interval, threading.get_ident(), _giving_up.get())
            threading.Thread(target=self._monitor, args=arguments, name="watchdog", daemon=True).start()
        self._watched += 1
        try:
            yield
        finally:
            self._watched -= 1
            if not self._watched:
                self._unwatched.set()

    def _monitor(
        self, ended: threading.Event, interval: float, thread: int, give_up: Callable[[str], object] | None
    ) -> None:
        """Looks every `interval` seconds whether the event loop of `thread` still runs."""
        reported_at = 0.0
        while not ended.wait(interval):
            now, ran_at = time.monotonic(), self._loop_ran_at
            place = where_thread_is(thread)
            report = f"the event loop, and so every episode, has been blocked for {seconds_since(ran_at)} by {place}"
            if self._timeout is not None and now - ran_at >= self._timeout and give_up is not None:
                give_up(f"{report}; {self._gave_up}")
            if self._warning is not None and now - max(ran_at, reported_at) >= self._warning:
                reported_at = now
                logger.warning("%s", report)

    @property
    def _gave_up(self) -> str:
        return f"gave up after eval.general.stall_timeout: {self._timeout:g} s"

    def _report(self) -> str:
        oldest = "; ".join(wait.describe() for wait in [*self._waits][:_LISTED])
        more = f"; and {len(self._waits) - _LISTED} more" if len(self._waits) > _LISTED else ""
        return f"nothing has completed for {seconds_since(self._moved_at)}, waiting for {oldest}{more}"


def where_thread_is(thread: int) -> str:
    """The user's line that a thread is executing."""
    frame = sys._current_frames().get(thread)
    return users_place((each.f_code.co_filename, line) for each, line in reversed([*walk_stack(frame)]))


def seconds_since(moment: float) -> str:
    seconds = time.monotonic() - moment
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
