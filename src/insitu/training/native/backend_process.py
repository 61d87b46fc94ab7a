"""The `insitu backend` that a run starts for itself, as a child process."""

import asyncio
import logging
import math
import os
import re
import resource
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from insitu.disk.files import readable_bytes
from insitu.disk.memory import kill_counter, machine_memory, memory_kills
from insitu.errors import BackendUnavailable
from insitu.wire.child_process import ChildProcess
from insitu.wire.redaction import remember_secret

logger = logging.getLogger(__name__)

_READY_LINE = r"insitu backend ready at (http://\S+) for process {}\s"
"""With the process it is for: one that an earlier run has left may write to the same log."""
_LOOK_SECONDS = 0.02
"""How often the log of a backend that is starting is read."""
_COUNT_SECONDS = 1.0
"""How often it is counted what the kernel has ended for lack of memory, while a backend runs."""
_END_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""

_OWN_PREFIX = "insitu backend: "

_MEMORY_RESTARTS = 1
"""How often a process is started again that the kernel has ended for lack of memory: what it did would be repeated."""

MEMORY_KEYS = "training.lora, dtype, quantization, max_length, kv_memory, eval.general.max_concurrency"
"""Keys of a file with which a run takes less memory."""


def _peak_of_children() -> int:
    """Bytes that the largest of this process's children held which have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


class BackendProcess:
    """An `insitu backend` child process that logs to `log_path`.

    It exits when this process ends, even if this process is killed with SIGKILL. `keep_running` starts it again up to
    `max_restarts` times. `secret_variables` are added to its environment.
    """

    def __init__(
        self, arguments: Sequence[str], log_path: Path, max_restarts: int, secret_variables: Mapping[str, str]
    ) -> None:
        self.token = secrets.token_urlsafe()
        """Required with every request, to keep other users of this machine out."""
        remember_secret(self.token)
        self._arguments = arguments
        self._log_path = log_path
        self._secret_variables = secret_variables
        self._port = 0
        self._startup_timeout = 0.0
        self._max_restarts = max_restarts
        self._restarts = 0
        self.restarted_at = -math.inf
        """When it was last ready after a restart, by `time.monotonic()`."""
        self._kept_running = False
        self.ready = asyncio.Event()
        """Set while it runs, and clear while it is started again."""
        self._process: ChildProcess | None = None
        self.kills: deque[tuple[Path, int]] = deque(maxlen=2)
        """Processes that the kernel had ended for lack of memory in its cgroup a moment ago, and the moment before, and
        the file that says so: in days it ends others."""
        self._counted_at = -math.inf
        self._reason: str | None = None
        """What `_memory_reason` has found when it was first asked, if it was; others may be ended later."""
        self._given_up: str | None = None
        """Why the last start has failed."""
        self._peak = 0
        """Bytes of the largest child process that had ended by then."""

    async def start(self, startup_timeout: float) -> str:
        """Returns the URL once the backend is ready. Raises BackendUnavailable with the end of its log otherwise.

        A process that has ended can be started again, at the same URL.
        """
        command = [sys.executable, "-m", "insitu", "backend", *self._arguments, "--port", str(self._port)]
        command += ["--parent_pid", str(os.getpid())]
        environment = {**os.environ, **self._secret_variables, "INSITU_BACKEND_TOKEN": self.token}
        self.kills.clear()
        self._reason, self._peak = None, _peak_of_children()
        self._process = process = ChildProcess(command, self._log_path, environment, append=True)
        ready_line = re.compile(_READY_LINE.format(os.getpid()))
        try:
            async with asyncio.timeout(startup_timeout):
                while (match := ready_line.search(process.output())) is None:
                    self._count(process)
                    if process.ended:
                        problem = f"insitu backend {process.outcome()} before it was ready"
                        reason = self._own_reason(process) or f"; {self._memory_reason() or process.end_of_log()}"
                        raise BackendUnavailable(f"{problem}{reason}")
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            await self.stop()
            problem = f"insitu backend was not ready after {startup_timeout:g} s; {process.end_of_log()}"
            raise BackendUnavailable(problem) from None
        except BaseException:  # the process must not outlive a failed start
            await self.stop()
            raise
        url = match[1]
        logger.info("backend process %d at %s", self._process.pid, url)
        self._port, self._startup_timeout = int(url.rpartition(":")[2]), startup_timeout
        self.ready.set()
        return url

    @property
    def pid(self) -> int | None:
        """None if it is not started."""
        return self._process.pid if self._process is not None else None

    async def keep_running(self) -> None:
        """Starts the process again whenever it has ended, to continue from its last checkpoint.

        Raises BackendUnavailable with the end of its log once it has been started again `max_restarts` times.
        """
        self._kept_running = True
        try:
            while (process := self._process) is not None:
                await self._counted(process)
                self.ready.clear()
                await self._start_again(str(self.exit_report()))
        finally:
            self._kept_running = False

    async def _start_again(self, report: str) -> None:
        """A start that fails is one of those allowed: another process may have taken the port for a moment."""
        while self._restarts < (most := self._restarts_allowed()):
            self._restarts += 1
            logger.warning("%s\nstarting it again (%d of %d)", report, self._restarts, most)
            try:
                await self.start(self._startup_timeout)
            except BackendUnavailable as failure:
                report = self._given_up = str(failure)
                if isinstance(failure.__context__, TimeoutError):  # it did not end early
                    raise
                if self._restarts < most:
                    await asyncio.sleep(self._restarts)
            else:
                self.restarted_at, self._given_up = time.monotonic(), None
                return
        raise BackendUnavailable(report)

    async def _counted(self, process: ChildProcess) -> None:
        """Waits for the end of a process; notes meanwhile, every second, what the kernel has ended."""
        waiting = asyncio.ensure_future(process.end())
        try:
            while not (await asyncio.wait({waiting}, timeout=_COUNT_SECONDS))[0]:
                self._count(process)
        finally:
            waiting.cancel()

    def _count(self, process: ChildProcess) -> None:
        counter, now = kill_counter(process.pid), time.monotonic()
        is_new = not self.kills or self.kills[-1][0] != counter  # it has been moved to another cgroup
        if counter is not None and (is_new or now - self._counted_at >= _COUNT_SECONDS):
            self.kills.append((counter, memory_kills(counter) or 0))
            self._counted_at = now

    def final_report(self) -> str | None:
        """The report of the ended process, unless it will be started again."""
        return None if self._kept_running and self._restarts < self._restarts_allowed() else self.exit_report()

    def _restarts_allowed(self) -> int:
        limit = _MEMORY_RESTARTS if self._memory_reason() else self._max_restarts
        return min(limit, self._max_restarts)

    def exit_report(self) -> str | None:
        """How the process has ended, and the end of its log if it did on its own; None while it runs."""
        if self._process is None:  # also if a restart was given up, as the run had ended: nothing will answer
            return self._given_up or ("the backend process was stopped" if self._port else None)
        if not self._process.ended:
            return None
        return f"the backend process {self._process.outcome()}; {self._memory_reason() or self._process.end_of_log()}"

    def _memory_reason(self) -> str:
        """A sentence if the kernel has ended the process for lack of memory, as its counters say; otherwise empty."""
        if self._reason is None and self._process is not None and self._process.ended:
            self._reason = self._find_memory_reason() if self._process.code == -signal.SIGKILL else ""
        return self._reason or ""

    def _find_memory_reason(self) -> str:
        memory, peak = machine_memory(), _peak_of_children()
        if not any((memory_kills(counter) or 0) > kills for counter, kills in self.kills):
            return ""
        held = f", when it held {readable_bytes(peak)}" if peak > self._peak else ""
        limit = ""
        if memory is not None:
            what = f"the limit of {memory.cgroup}" if memory.cgroup is not None else "the memory of this machine"
            limit = f"; {what} is {readable_bytes(memory.total)}"
        return (
            f"the kernel ended it for lack of memory{held}{limit}; it needs less with {MEMORY_KEYS} (insitu validate "
            f"lists what needs how much; log: {self._log_path})"
        )

    def _own_reason(self, process: ChildProcess) -> str | None:
        """The sentence with which a backend that cannot start ends its log; None if it ended otherwise."""
        last = (process.last_lines() or [""])[-1]
        return f": {last.removeprefix(_OWN_PREFIX)} (log: {self._log_path})" if last.startswith(_OWN_PREFIX) else None

    async def stop(self) -> None:
        """Terminates the process, and kills it after five seconds."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop(_END_SECONDS)
