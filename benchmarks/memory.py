"""Resident and peak memory of processes, in bytes; getrusage would start at the parent's peak."""

import contextlib
import subprocess
import time
from pathlib import Path

INTERVAL = 0.05
"""Seconds between two looks at all processes."""


def resident(process: int | str = "self") -> int:
    return _status("VmRSS", process)


def peak(process: int | str = "self") -> int:
    return _status("VmHWM", process)


def reset_peak(process: int) -> None:
    """The peak is that from now on."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def peak_of_all(command: "subprocess.Popen[str]") -> int:
    """The most that a command and its descendants held at one time, pages that they share counted for each of them.

    Returns when the command has ended.
    """
    import psutil

    most, root = 0, psutil.Process(command.pid)
    while command.poll() is None:
        total = 0
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        most = max(most, total)
        time.sleep(INTERVAL)
    return most


def _status(name: str, process: int | str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
