"""A command that works for this process: its processes, its log, and how it ended.

`python -m insitu.wire.child_process FD COMMAND ...` runs a command that ends with the process that started it; FD is
the descriptor of the command's standard input.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRuns
from pathlib import Path

_TAIL_BYTES, _TAIL_LINES = 2**16, 8
_LITTLE_SPACE = 2**20
"""With fewer bytes free, a full disk may be why a process has ended."""


class ChildProcess:
    """A command and its descendants, which run in `folder` and write to `log`, after what it has if `append` is set.

    Ctrl-C does not reach them. `bound`: they end when this process does, even if it is killed; for commands that would
    not notice. Raises OSError if the command or its log cannot be opened.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        bound: bool = False,
        stdin: int = subprocess.DEVNULL,
        folder: Path | None = None,
        append: bool = False,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._is_killed = False
        if bound:
            command = [sys.executable, "-m", "insitu.wire.child_process", str(stdin), *command]
        with log.open("ab" if append else "wb") as file:
            self._start = file.tell()
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE if bound else stdin,
                start_new_session=True,
                pass_fds=(stdin,) if bound and stdin >= 0 else (),
                env=dict(environment),
                cwd=folder,
            )
        self.pid = self._process.pid
        self._code = Future[int]()
        self._code.set_running_or_notify_cancel()  # so that who waits for it does not cancel it
        threading.Thread(target=self._wait, name=f"process {self.pid}", daemon=True).start()

    def _wait(self) -> None:
        self._code.set_result(self._process.wait())

    @property
    def code(self) -> int | None:
        """The exit code, or -N if signal N ended the command; None while it runs."""
        return self._code.result() if self._code.done() else None

    @property
    def ended(self) -> bool:
        return self._code.done()

    def wait(self, seconds: float) -> None:
        """Waits up to `seconds` for the command to end."""
        with contextlib.suppress(StillRuns):
            self._code.result(seconds)

    async def end(self, seconds: float | None = None) -> None:
        """Waits for the command to end, for up to `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.wrap_future(self._code)

    async def stop(self, seconds: float) -> None:
        """Asks the command to end by SIGTERM, and kills it and its descendants after `seconds`."""
        if not self.ended:
            for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process acts on SIGTERM once it continues
                self._process.send_signal(number)
        await self.end(seconds)
        await asyncio.to_thread(self.kill)

    def close_input(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Ends the command and its descendants."""
        if self._is_killed:  # its id may be another process's by now
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._code.result()
        self.close_input()
        self._is_killed = True

    def output(self) -> str:
        """What it has printed; nothing if its log cannot be read."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._start)
            return file.read().decode(errors="replace")
        return ""

    def last_lines(self) -> list[str]:
        return last_lines(self.log, self._start)

    def end_of_log(self) -> str:
        """What the message about its end says of what it has printed."""
        lines = self.last_lines() or ["(empty)"]
        with contextlib.suppress(OSError):  # its folder may be gone
            if (free := shutil.disk_usage(self.log.parent).free) < _LITTLE_SPACE:
                lines.append(f"({free} bytes are free on the disk of this log)")
        return f"the end of its log ({self.log}):\n  " + "\n  ".join(lines)

    def outcome(self) -> str:
        """How it ended, such as "was ended by SIGKILL"."""
        return describe_exit(self._code.result())


def describe_exit(code: int) -> str:
    """An exit code in words; -N if signal N ended the process."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"


def last_lines(log: Path, start: int = 0) -> list[str]:
    """The last lines of a log from a byte on; an empty list if it has none or cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    return []


def _run_bound(stdin: int, command: Sequence[str]) -> int:
    """Runs the command; kills it and its descendants when standard input ends. Returns its exit code."""
    child = subprocess.Popen(command, stdin=stdin)
    if stdin >= 0:
        os.close(stdin)

    def end_with_parent() -> None:
        while os.read(0, 1):  # not by sys.stdin: Python aborts if a thread still reads it when the command has ended
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    code = child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # what it has left behind
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(_run_bound(int(sys.argv[1]), sys.argv[2:]))
