"""Whether OpenMP threads spin or sleep while they wait for one another: they sleep if other processes use their cores.

Spinning on two idle cores, two LoRA epochs of SmolLM2-135M take 21 s instead of 27 s; beside busy processes, spinning
takes several times longer, as threads wait for one that has no core. libgomp stops spinning while it has more threads
than cores (`do_spin` in its config/linux/wait.h), so an idle team of threads switches it off. It changes no result.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SECONDS = 0.25
"""Time between two looks at what other programs do."""
CROWDED = 0.5
"""Cores that others use, from which on threads do not wait actively."""
CALM_LOOKS = 4
"""Looks at which others must use fewer before threads wait actively again."""
_OPERATION = 2**20
"""Elements of an operation that all threads take part in."""


@contextmanager
def active_waiting(stat: Path = Path("/proc/stat")) -> Iterator[None]:
    """Within the block, a thread watches the cores; only where Linux says, in `stat`, what they do."""
    if not stat.exists():
        yield
        return
    ended = threading.Event()
    watching = threading.Thread(target=_watch, args=(stat, ended), name="insitu-waiting", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _watch(stat: Path, ended: threading.Event) -> None:
    released = threading.Event()
    released.set()
    calm, before = 0, _usage(stat)
    try:
        while not ended.wait(SECONDS):
            now = _usage(stat)
            others = (now[1] - before[1] - (now[2] - before[2])) / (now[0] - before[0])
            calm, before = 0 if others > CROWDED else calm + 1, now
            if not calm and released.is_set():
                released = threading.Event()
                threading.Thread(target=_hold_team, args=(released,), name="insitu-team", daemon=True).start()
            elif calm >= CALM_LOOKS:
                released.set()
    finally:
        released.set()


def _hold_team(released: threading.Event) -> None:
    """Has a team of libgomp, which ends with this thread."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.ones(_OPERATION).mul_(2)
    released.wait()


def _usage(stat: Path) -> tuple[float, float, float]:
    """Seconds: the time, what all programs have used of this process's cores, and what this process has used."""
    return time.monotonic(), busy_seconds(stat.read_text(), os.sched_getaffinity(0)), time.process_time()


def busy_seconds(stat: str, cores: set[int]) -> float:
    """How long some cores were busy, by the text of /proc/stat (see proc(5)): all but idle, or waiting for disks."""
    rows = (line.split() for line in stat.splitlines())
    names = {f"cpu{core}" for core in cores}
    ticks = sum(sum(map(int, row[1:9])) - int(row[4]) - int(row[5]) for row in rows if row[0] in names)
    return ticks / os.sysconf("SC_CLK_TCK")
