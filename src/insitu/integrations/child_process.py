"""A command that works for this process: its processes, its log, and how it ended.

`python -m insitu.integrations.child_process FD COMMAND ...` runs a command that ends with the process that started it;
FD is the descriptor of the command's standard input.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class ChildProcess:
    """A command and its descendants, which run in `folder` and write to `log`.

    `bound`: they end when this process does, even if it is killed; for commands that would not notice.
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
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._is_killed = False
        if bound:
            command = [sys.executable, "-m", "insitu.integrations.child_process", str(stdin), *command]
        with log.open("wb") as file:
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

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Waits up to `seconds` for the command to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Ends the command and its descendants."""
        if self._is_killed:  # its id may be another process's by now
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._is_killed = True

    def output(self) -> str:
        """What it has printed; nothing if its log cannot be read."""
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""

    def last_lines(self, count: int = 8) -> str:
        return "\n  ".join(self.output().strip().splitlines()[-count:] or ["(empty)"])

    def outcome(self) -> str:
        """How it ended, such as "was ended by SIGKILL"."""
        return describe_exit(self._process.returncode)


def describe_exit(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


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
