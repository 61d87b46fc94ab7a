"""An `insitu backend` as a child process on a free loopback port."""

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
                url = await self._ready_url()
        except TimeoutError:
            await self.stop()
            raise BackendUnavailable(
                f"insitu backend was not ready after {startup_timeout:g} s; {self._log_tail()}"
            ) from None
        except BaseException:  # the process must not outlive a failed start
            await self.stop()
            raise
        logger.info("backend process %d at %s", self._process.pid, url)
        return url

    async def _ready_url(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if match := _READY.search(line.decode(errors="replace")):
                return match.group(1)
        code = await self._process.wait()
        raise BackendUnavailable(f"insitu backend exited with code {code} before it was ready; {self._log_tail()}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def exit_report(self) -> str | None:
        """The exit code and the end of the log if the process has exited on its own."""
        if self._process is None or self._process.returncode is None:
            return None
        return f"the backend process exited with code {self._process.returncode}; {self._log_tail()}"

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
                await asyncio.wait_for(process.wait(), timeout=5.0)
            except ProcessLookupError:
                return
            except TimeoutError:
                continue
            return
