"""Says what a run is waiting for when nothing completes, and gives up if the file says so.

await watchdog.watch(collect_everything)    # logs what is waited for; raises Stalled

with watchdog.waiting("row '7', generation 2 of epoch 1", lambda: "waits for a slot"):  # or a training job
    with doing(ledger.activity):    # what the episode is doing from now on
        ...
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_stack
from typing import Any, TypeVar

from insitu.errors import Stalled, users_place
from insitu.wire.endings import end_tasks
from insitu.workflow.event_loop import giving_up

logger = logging.getLogger(__name__)

T = TypeVar("T")
Activity = Callable[[], str]

_LISTED = 5
_CHECKS = 4
"""How often what is watched is looked at within the shortest configured time."""


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
        self.has_stalled = False

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
        except BaseException:  # re-raised
            await end_tasks(task)  # also if this is cancelled just after it has failed
            raise
        return task.result()

    def _check(self) -> None:
        if not self._waits:
            return
        now = time.monotonic()
        if self._timeout is not None and now - self._moved_at >= self._timeout:
            self.has_stalled = True
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
            arguments = (self._unwatched, self.interval, threading.get_ident(), giving_up.get())
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
