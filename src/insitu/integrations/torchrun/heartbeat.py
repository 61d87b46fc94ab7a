"""Signs of life of ranks, on any machine: each touches a file, whose changes the backend sees."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

INTERVAL_SECONDS = 1.0
LIMIT_SECONDS = 60.0
"""How long a rank may be silent. A rank that works touches its file from another thread, whatever it works on."""
_SET_PARENT_DEATH_SIGNAL = 1


def start_beating(folder: Path, rank: int) -> None:
    """Touches the rank's file until this process ends or is stopped."""
    path, process = folder / f"rank-{rank}.alive", f"process {os.getpid()} on {socket.gethostname()}"

    def beat() -> None:
        while True:
            with contextlib.suppress(OSError):
                if path.exists():
                    os.utime(path)
                else:
                    path.write_text(process)
            time.sleep(INTERVAL_SECONDS)

    threading.Thread(target=beat, daemon=True).start()


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends: torchrun starts each rank in its own session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL.value)


class Heartbeats:
    """The files of ranks that are about to start in `folder`; those of earlier ones are deleted.

    Silence counts only while this process runs: after all processes were stopped together, nobody has been silent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: dict[Path, tuple[int, float]] = {}  # the time of the latest change, and the seconds of silence
        self._checked = time.monotonic()
        for path in folder.glob("rank-*.alive"):
            path.unlink(missing_ok=True)

    def silent_rank(self) -> tuple[str, str] | None:
        """The first rank that has been silent for `LIMIT_SECONDS`, and its process."""
        elapsed = time.monotonic() - self._checked
        if elapsed < INTERVAL_SECONDS:
            return None
        self._checked += elapsed
        for path in sorted(self._folder.glob("rank-*.alive")):
            with path.open() as file:  # opened, because network file systems cache what `stat` returns
                changed, process = os.fstat(file.fileno()).st_mtime_ns, file.read()
            before, silence = self._last.get(path, (None, 0.0))
            silence = silence + min(elapsed, 2 * INTERVAL_SECONDS) if changed == before else 0.0
            self._last[path] = changed, silence
            if silence >= LIMIT_SECONDS:
                return path.stem.removeprefix("rank-"), process
        return None
