"""Resident and peak memory of processes, in bytes; getrusage would start at the parent's peak."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

INTERVAL = 0.2
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

    Returns when the command has ended. A look takes a tenth of a millisecond: 20 a second of all processes on the
    machine made a run of two busy cores 5 % longer.
    """
    most = 0
    while command.poll() is None:
        most = max(most, sum(map(_pages, _tree(command.pid))) * os.sysconf("SC_PAGE_SIZE"))
        time.sleep(INTERVAL)
    return most


def _tree(process: int) -> Iterator[int]:
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in task.read_text().split():
                yield from _tree(int(child))


def _pages(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:  # it has ended
        return 0


def _status(name: str, process: int | str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
