"""The memory of this machine: how much a process can take, and what the kernel has ended for lack of it.

A process can be in a memory cgroup with a limit, as in a container; so can each of the groups around it. Version 1 has
`memory.limit_in_bytes`, `memory.usage_in_bytes` and `memory.oom_control`; version 2 has `memory.max`, `memory.current`
and `memory.events.local`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_NUMBER = re.compile(r"^(\S+[ \t]+)?(\d+)(?: kB)?$", re.MULTILINE)


class MachineMemory(NamedTuple):
    """In bytes. `total` is the smallest limit that holds, which is that of a `cgroup` or else the machine's RAM."""

    total: int
    available: int
    cgroup: Path | None = None


def machine_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> MachineMemory | None:
    """The memory that this process and its children can take; None where the system does not say."""
    values = numbers(proc / "meminfo")
    if "MemTotal" not in values or "MemAvailable" not in values:
        return None
    memory = MachineMemory(values["MemTotal"] * 1024, values["MemAvailable"] * 1024)
    for folder in own_cgroups("memory", proc, cgroups):
        limit = _number(folder, "memory.limit_in_bytes", "memory.max")
        used = _number(folder, "memory.usage_in_bytes", "memory.current")
        if limit is None or used is None:
            continue
        stat = numbers(folder / "memory.stat")
        cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))  # the kernel drops it when it must
        room = max(0, limit - max(0, used - cached))
        total, cgroup = (limit, folder) if limit < memory.total else (memory.total, memory.cgroup)
        memory = MachineMemory(total, min(memory.available, room), cgroup)
    return memory


def kill_counter(process: int | str = "self", proc: Path = PROC, cgroups: Path = CGROUPS) -> Path | None:
    """The file whose `oom_kill` says how many processes the kernel has ended for lack of memory in a process's cgroup.

    That of the machine if the cgroup has none; None where the system does not say, or if the process has ended.
    """
    group = next(own_cgroups("memory", proc, cgroups, process), None)
    local = [] if group is None else [group / name for name in ("memory.oom_control", "memory.events.local")]
    files = (file for file in (*local, proc / "vmstat") if memory_kills(file) is not None)
    return next(files, None) if (proc / str(process)).exists() else None


def memory_kills(counter: Path) -> int | None:
    return numbers(counter).get("oom_kill")


def own_cgroups(
    controller: str, proc: Path = PROC, cgroups: Path = CGROUPS, process: int | str = "self"
) -> Iterator[Path]:
    """The folders of the cgroups with a controller that a process is in, the innermost first.

    In a container they may be mounted as the root, whatever their paths are outside.
    """
    try:
        lines = (proc / str(process) / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = cgroups / controller if controller in controllers.split(",") else cgroups
        if controllers and root == cgroups:
            continue
        folder = root / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root) and each.is_dir())


def _number(folder: Path, *names: str) -> int | None:
    """The number in the first of the files that has one; None if there is none."""
    return next((found[""] for name in names if (found := numbers(folder / name))), None)


def numbers(path: Path) -> dict[str, int]:
    """The numbers of lines such as `oom_kill 3` and `MemTotal: 24684096 kB`, and with the name "" that of a file with
    nothing else; none if there is no such file."""
    try:
        return {name.rstrip(": \t"): int(value) for name, value in _NUMBER.findall(path.read_text())}
    except OSError:
        return {}
