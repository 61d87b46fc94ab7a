"""What a process holds and has held, in bytes; of itself alone, where getrusage starts at its parent's peak."""

from pathlib import Path


def resident() -> int:
    return _status("VmRSS")


def peak(process: int | str = "self") -> int:
    return _status("VmHWM", process)


def _status(name: str, process: int | str = "self") -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
