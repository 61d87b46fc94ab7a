"""The `insitu backend` that a run starts for itself, as a child process."""

import asyncio
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from insitu.errors import BackendUnavailable

logger = logging.getLogger(__name__)

_READY = re.compile(r"insitu backend ready at (http://\S+)")


class BackendProcess:
    """A child process that logs to `log` and exits when this process does, even after SIGKILL."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.token = secrets.token_urlsafe()
        """Required with every request, to keep other users of this machine out."""
        self._arguments = arguments
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, startup_timeout: float) -> str:
        """Returns the URL once the backend is ready. Raises BackendUnavailable with the end of its log otherwise."""
        await asyncio.to_thread(self._log.parent.mkdir, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "insitu", "backend", *self._arguments, "--parent_pid", str(os.getpid())]
        with self._log.open("ab") as log:
            # a new session, so that Ctrl-C reaches only this process, which then stops the child
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "INSITU_BACKEND_TOKEN": self.token},
            )
        try:
            async with asyncio.timeout(startup_timeout):
                url = await self._ready_url(self._process)
        except TimeoutError:
            await self.stop()
            problem = f"insitu backend was not ready after {startup_timeout:g} s; {self._log_tail()}"
            raise BackendUnavailable(problem) from None
        except BaseException:  # the process must not outlive a failed start
            await self.stop()
            raise
        logger.info("backend process %d at %s", self._process.pid, url)
        return url

    async def _ready_url(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if match := _READY.search(line.decode(errors="replace")):
                return match.group(1)
        code = await process.wait()
        raise BackendUnavailable(f"insitu backend exited with code {code} before it was ready; {self._log_tail()}")

    async def exited(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the process to exit on its own."""
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def exit_report(self) -> str | None:
        """The exit code and the end of the log if the process has exited on its own."""
        if self._process is None or self._process.returncode is None:
            return None
        code = self._process.returncode
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return f"the backend process exited with code {code}{name}; {self._log_tail()}"

    def _log_tail(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()[-8:]
        except OSError:
            lines = []
        return f"the end of its log ({self._log}):\n  " + "\n  ".join(lines or ["(empty)"])

    async def stop(self) -> None:
        """Terminates the process, and kills it after five seconds."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                process.send_signal(signal_number)
                process.send_signal(signal.SIGCONT)  # a stopped process acts on SIGTERM only once it continues
                await asyncio.wait_for(process.wait(), timeout=5.0)
            except ProcessLookupError:
                return
            except TimeoutError:
                continue
            return
