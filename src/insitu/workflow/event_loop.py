"""The event loop of a command, which a signal ends even if agents ignore cancellation; and loops in other threads."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from types import FrameType
from typing import Any, TypeVar

from insitu.capture.ledger import InheritingThreads
from insitu.errors import InsituError, describe_error
from insitu.wire.endings import stop_signals
from insitu.wire.log_lines import log_line
from insitu.wire.redaction import outlive_readers
from insitu.workflow.programs import kill_programs

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_SECONDS = 25.0
"""How long cleanup may take after a signal before the process ends without it."""
_CLOSE_SECONDS = 5.0
_MOST_THREADS = 1024
"""For blocking agents. Threads are created on demand; asyncio's default limit depends on the CPUs (6 for two)."""

left_behind: list[Any] = []
"""Tasks that ignore their cancellation and threads that block: Python would wait for them for ever when it exits."""

giving_up: ContextVar[Callable[[str], object] | None] = ContextVar("insitu_end_process", default=None)
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
    context.run(giving_up.set, lambda reason: _end_process(f"failed: {reason}", 1))
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

    async def cancellable() -> T:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await main()

    with ThreadPoolExecutor(1, "insitu run") as pool:  # waits for its thread
        ended = pool.submit(copy_context().run, run_async, cancellable())
        try:
            return ended.result()
        except KeyboardInterrupt:
            loop, task = begun.result()
            if task is not None and not ended.done():
                loop.call_soon_threadsafe(task.cancel)
            raise


class AgentThreads(ThreadPoolExecutor):
    """Threads of blocking agents. `started` are they: other pools of this process are none of its business."""

    def __init__(self) -> None:
        self.started: list[threading.Thread] = []
        super().__init__(_MOST_THREADS, "insitu", lambda: self.started.append(threading.current_thread()))


def new_loop() -> tuple[asyncio.AbstractEventLoop, AgentThreads]:
    """An event loop for episodes, and its threads."""
    base: Any = asyncio.SelectorEventLoop
    with suppress(ModuleNotFoundError):
        from uvloop import Loop as base

    loop, executor = type("Loop", (InheritingThreads, base), {})(), AgentThreads()
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
            for each in before:  # a third one would interrupt this, and say it again
                signal.signal(each, signal.SIG_IGN)
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


def _close(loop: asyncio.AbstractEventLoop, executor: AgentThreads, *, everything: bool) -> None:
    """Cancels what still runs and leaves behind what does not end; `everything`: also threads that agents started."""

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
    for thread in executor.started:
        thread.join(_CLOSE_SECONDS)
    ours = threading.current_thread()
    others = [each for each in threading.enumerate() if everything and not each.daemon and each is not ours]
    left_behind.extend(each for each in {*executor.started, *others} if each.is_alive())
    loop.close()
