"""What this process holds and has held, in bytes; of itself alone, where getrusage starts at its parent's peak."""

from pathlib import Path


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
