"""The `insitu backend` that a run starts for itself, as a child process."""

import asyncio
import logging
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from insitu.disk.files import readable_bytes
from insitu.disk.memory import machine_memory, memory_kills
from insitu.errors import BackendUnavailable
from insitu.wire.redaction import remember_secret

logger = logging.getLogger(__name__)

_READY_LINE = re.compile(rb"insitu backend ready at (http://\S+)\s")

_OWN_PREFIX = "insitu backend: "

_MEMORY_RESTARTS = 1
"""How often a process is started again that the kernel has ended for lack of memory: what it did would be repeated."""

MEMORY_KEYS = "training.lora, dtype, quantization, max_length, kv_memory, eval.general.max_concurrency"
"""Keys of a file with which a run takes less memory."""


def _peak_of_children() -> int:
    """Bytes that the largest of this process's children held which have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


class _Output(asyncio.SubprocessProtocol):
    """Finds the URL in the process's standard output, and notices the end of the process."""

    def __init__(self) -> None:
        self.url: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """None if the process exits before it is ready."""
        self.exited = asyncio.Event()
        self._start = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if not self.url.done():
            self._start += data
            if match := _READY_LINE.search(self._start):
                self.url.set_result(match[1].decode())

    def process_exited(self) -> None:
        self.exited.set()
        if not self.url.done():
            self.url.set_result(None)


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
        self._started: tuple[asyncio.SubprocessTransport, _Output] | None = None
        self._kills: int | None = None
        """Processes that the kernel had ended for lack of memory when this one was started."""
        self._peak = 0
        """Bytes of the largest child process that had ended by then."""

    async def start(self, startup_timeout: float) -> str:
        """Returns the URL once the backend is ready. Raises BackendUnavailable with the end of its log otherwise.

        A process that has ended can be started again, at the same URL.
        """
        await asyncio.to_thread(self._log_path.parent.mkdir, parents=True, exist_ok=True)
        if self._started is not None:
            self._started[0].close()
        command = [sys.executable, "-m", "insitu", "backend", *self._arguments, "--port", str(self._port)]
        command += ["--parent_pid", str(os.getpid())]
        self._kills, self._peak = memory_kills(), _peak_of_children()
        with self._log_path.open("ab") as log:
            # a new session, so that Ctrl-C reaches only this process, which then stops the child
            self._started = await asyncio.get_running_loop().subprocess_exec(
                _Output,
                *command,
                stdin=None,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._secret_variables, "INSITU_BACKEND_TOKEN": self.token},
            )
        transport, output = self._started
        try:
            async with asyncio.timeout(startup_timeout):
                url = await output.url
            if url is None:
                code = transport.get_returncode()
                problem = f"insitu backend exited with code {code} before it was ready"
                reason = self._own_reason() or f"; {self._memory_reason() or self._log_tail()}"
                raise BackendUnavailable(f"{problem}{reason}")
        except TimeoutError:
            await self.stop()
            problem = f"insitu backend was not ready after {startup_timeout:g} s; {self._log_tail()}"
            raise BackendUnavailable(problem) from None
        except BaseException:  # the process must not outlive a failed start
            await self.stop()
            raise
        logger.info("backend process %d at %s", transport.get_pid(), url)
        self._port, self._startup_timeout = int(url.rpartition(":")[2]), startup_timeout
        self.ready.set()
        return url

    @property
    def pid(self) -> int | None:
        """None if it is not started."""
        return self._started[0].get_pid() if self._started is not None else None

    async def keep_running(self) -> None:
        """Starts the process again whenever it has ended, to continue from its last checkpoint.

        Raises BackendUnavailable with the end of its log once it has been restarted `max_restarts` times.
        """
        self._kept_running = True
        try:
            while self._started is not None:
                await self._started[1].exited.wait()
                self.ready.clear()
                report = str(self.exit_report())
                if self._restarts >= (most := self._restarts_allowed()):
                    raise BackendUnavailable(report)
                self._restarts += 1
                logger.warning("%s\nstarting it again (%d of %d)", report, self._restarts, most)
                await self.start(self._startup_timeout)
                self.restarted_at = time.monotonic()
        finally:
            self._kept_running = False

    def final_report(self) -> str | None:
        """The report of the ended process, unless it will be started again."""
        return None if self._kept_running and self._restarts < self._restarts_allowed() else self.exit_report()

    def _restarts_allowed(self) -> int:
        limit = _MEMORY_RESTARTS if self._memory_reason() is not None else self._max_restarts
        return min(limit, self._max_restarts)

    def exit_report(self) -> str | None:
        """The exit code and the end of the log if the process has exited on its own."""
        if self._started is None or (code := self._started[0].get_returncode()) is None:
            return None
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return f"the backend process exited with code {code}{name}; {self._memory_reason() or self._log_tail()}"

    def _memory_reason(self) -> str | None:
        """A sentence if the kernel has ended the process for lack of memory, as its counters say."""
        if self._started is None or self._started[0].get_returncode() != -signal.SIGKILL:
            return None
        kills, memory, peak = memory_kills(), machine_memory(), _peak_of_children()
        if kills is None or kills <= (self._kills or 0):
            return None
        held = f", when it held {readable_bytes(peak)}" if peak > self._peak else ""
        limit = ""
        if memory is not None:
            what = f"the limit of {memory.cgroup}" if memory.cgroup is not None else "the memory of this machine"
            limit = f"; {what} is {readable_bytes(memory.total)}"
        return (
            f"the kernel ended it for lack of memory{held}{limit}; it needs less with {MEMORY_KEYS} (insitu validate "
            f"lists what needs how much; log: {self._log_path})"
        )

    def _own_reason(self) -> str | None:
        """The sentence with which a backend that cannot start ends its log; None if it ended otherwise."""
        last = next(reversed(self._log_lines()), "")
        return f": {last.removeprefix(_OWN_PREFIX)} (log: {self._log_path})" if last.startswith(_OWN_PREFIX) else None

    def _log_lines(self) -> list[str]:
        try:
            return self._log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return []

    def _log_tail(self) -> str:
        lines = self._log_lines()[-8:]
        return f"the end of its log ({self._log_path}):\n  " + "\n  ".join(lines or ["(empty)"])

    async def stop(self) -> None:
        """Terminates the process, and kills it after five seconds."""
        if self._started is None:
            return
        (transport, output), self._started = self._started, None
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if output.exited.is_set():
                break
            try:
                transport.send_signal(signal_number)
                transport.send_signal(signal.SIGCONT)  # a stopped process acts on SIGTERM only once it continues
                await asyncio.wait_for(output.exited.wait(), timeout=5.0)
            except (ProcessLookupError, TimeoutError):
                continue
        transport.close()
