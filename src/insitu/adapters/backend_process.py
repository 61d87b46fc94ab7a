"""An `insitu backend` process of our own: started on a free loopback port, stopped whatever happens."""

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
    """One child process. Its output goes to `log`; it ends by itself when this process is gone, even by SIGKILL."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.token = secrets.token_urlsafe()
        """What the process asks of every request: nobody else on this machine is to train or read the model."""
        self._arguments = arguments
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, patience: float) -> str:
        """Start it and give its address; BackendUnavailable, with its log's end, if not ready in `patience` seconds."""
        await asyncio.to_thread(self._log.parent.mkdir, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "insitu", "backend", *self._arguments, "--parent_pid", str(os.getpid())]
        with self._log.open("ab") as log:
            # a session of its own: Ctrl-C reaches us alone, and we stop it in order
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "INSITU_BACKEND_TOKEN": self.token},
            )
        try:
            async with asyncio.timeout(patience):
                address = await self._address()
        except TimeoutError:
            await self.stop()
            raise BackendUnavailable(f"insitu backend was not ready after {patience:g} s; {self._tail()}") from None
        except BaseException:  # the process must not outlive a failed start; raised again
            await self.stop()
            raise
        logger.info("backend process %d at %s", self._process.pid, address)
        return address

    async def _address(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            found = _READY.search(line.decode(errors="replace"))
            if found:
                return found.group(1)
        code = await self._process.wait()
        raise BackendUnavailable(f"insitu backend ended with exit code {code} before it was ready; {self._tail()}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def death_notice(self) -> str | None:
        """Why the backend cannot answer, when its process has ended by itself."""
        if self._process is None or self._process.returncode is None:
            return None
        return f"the backend process ended with exit code {self._process.returncode}; {self._tail()}"

    def _tail(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()[-8:]
        except OSError:
            lines = []
        return f"the end of its log ({self._log}):\n  " + "\n  ".join(lines or ["(empty)"])

    async def stop(self) -> None:
        """Ask it to end, and make it after five seconds."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            try:
                process.send_signal(number)
                await asyncio.wait_for(process.wait(), patience)
            except ProcessLookupError:
                return
            except TimeoutError:
                continue
            return
