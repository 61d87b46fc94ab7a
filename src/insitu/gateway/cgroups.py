"""Limits that the kernel holds all processes of an episode to: a control group, of version 1 or 2.

https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

import errno
import itertools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from insitu.disk.memory import numbers

_PREFIX = "insitu-"
_OWN_PROCESSES = 4
"""Processes besides the program's: a shell that becomes bubblewrap, its two, and the sandbox."""
_REMOVAL_SECONDS = 2.0
_serials = itertools.count(1)


class _Version(NamedTuple):
    """The files of a version."""

    file_system: str
    limits: dict[str, int]
    """Those of memory: 1 for what gets the limit, 0 for swap alone, of which there is none."""
    killed: str
    """It counts, as `oom_kill`, the processes that were killed for memory."""
    usage: str
    used: str
    """The processor time in that file; "" if it has nothing else."""
    ticks: float
    """How many units of it are a second."""


_LIMITED = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
_VERSIONS = (
    _Version("cgroup", dict.fromkeys(_LIMITED, 1), "memory.oom_control", "cpuacct.usage", "", 1e9),
    _Version("cgroup2", {"memory.max": 1, "memory.swap.max": 0}, "memory.events", "cpu.stat", "usage_usec", 1e6),
)


class Cgroup(NamedTuple):
    """A control group: its folder for each controller, which may be the same; `cpu` shares processors evenly."""

    version: _Version
    memory: Path
    pids: Path
    usage: Path
    cpu: Path

    @classmethod
    def own(cls, proc: Path = Path("/proc/self")) -> Self | None:
        """The control group of this process, or None if it may not create groups in it.

        Deletes the empty groups of processes that have ended.
        """
        for version in _VERSIONS:
            with suppress(OSError, LookupError):
                memory, pids, usage = (_folder(proc, version, name) for name in ("memory", "pids", version.usage))
                own = cls(version, memory, pids, usage, _shared(proc, version) or usage)
                if version.file_system == "cgroup2":
                    _enable(own.memory)
                    with suppress(OSError):  # this account may not have it
                        (own.cpu / "cgroup.subtree_control").write_text("+cpu")
                for left in (left for folder in own._folders() for left in folder.glob(f"{_PREFIX}*-*")):
                    with suppress(OSError):  # processes are in it
                        if not os.path.exists(f"/proc/{left.name.split('-')[1]}"):
                            left.rmdir()
                own.new(None, 1).remove()
                return own
        return None

    def new(self, memory: int | None, processes: int) -> Self:
        """Creates a group in this one for the processes of an episode. Raises OSError."""
        name = f"{_PREFIX}{os.getpid()}-{next(_serials)}"
        group = type(self)(self.version, *(folder / name for folder in self[1:]))
        try:
            for folder in group._folders():
                folder.mkdir()
            (group.pids / "pids.max").write_text(str(processes + _OWN_PROCESSES))
            for file, share in self.version.limits.items():
                with suppress(FileNotFoundError):  # a kernel that does not count swap
                    if memory is not None:
                        (group.memory / file).write_text(str(share * memory))
        except OSError:
            group.remove()
            raise
        return group

    def _folders(self) -> list[Path]:
        return [*dict.fromkeys(self[1:])]

    @property
    def entrances(self) -> list[str]:
        """Files to which a process writes 0 to be in the group."""
        return [str(folder / "cgroup.procs") for folder in self._folders()]

    def exceeded(self, cpu_seconds: float | None) -> str | None:
        """The limit that the processes have met."""
        if numbers(self.pids / "pids.events").get("max"):
            return "processes"
        if numbers(self.memory / self.version.killed).get("oom_kill"):
            return "memory"
        used = numbers(self.usage / self.version.usage).get(self.version.used, 0) / self.version.ticks
        return "cpu_seconds" if cpu_seconds is not None and used > cpu_seconds else None

    def remove(self) -> None:
        """Kills what it still holds, and removes it once that has ended."""
        until = time.monotonic() + _REMOVAL_SECONDS
        for folder in self._folders():
            while folder.exists() and time.monotonic() < until:
                with suppress(OSError):
                    for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                        if pid > 1:  # 0 is one of another namespace
                            os.kill(pid, signal.SIGKILL)
                try:
                    folder.rmdir()
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        break
                    time.sleep(0.005)


def _folder(proc: Path, version: _Version, file: str) -> Path:
    """The folder of this process's control group that has a file such as `cpu.stat`, by the file's controller.

    Raises LookupError if the controller is not mounted.
    """
    controller = "" if version.file_system == "cgroup2" else file.partition(".")[0]  # version 2 has one tree for all
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        (root, place), (kind, _, options) = before.split()[3:5], after.split(maxsplit=2)
        if kind != version.file_system or controller not in ("", *options.split(",")):
            continue
        for group in (proc / "cgroup").read_text().splitlines():
            _, names, path = group.split(":", 2)
            if controller in names.split(","):
                inside = os.path.relpath(path, root)
                return Path(place) if inside.startswith("..") else Path(place, inside).resolve()
    raise LookupError(controller)


def _shared(proc: Path, version: _Version) -> Path | None:
    """The folder of this process's group of the CPU controller, if it may create others in it."""
    with suppress(LookupError):
        return folder if os.access(folder := _folder(proc, version, "cpu"), os.W_OK) else None
    return None


def _enable(folder: Path) -> None:
    """Enables the controllers of memory and processes for the groups in a group of version 2.

    The kernel refuses this for a group that has processes itself; they are moved to a group in it. Raises OSError.
    """
    control, own = folder / "cgroup.subtree_control", folder / "insitu.main"
    if {"memory", "pids"} <= set(control.read_text().split()):
        return
    try:
        control.write_text("+memory +pids")
        return
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    own.mkdir(exist_ok=True)
    for pid in (folder / "cgroup.procs").read_text().split():
        (own / "cgroup.procs").write_text(pid)
    control.write_text("+memory +pids")
