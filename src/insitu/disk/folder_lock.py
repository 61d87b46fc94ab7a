"""Exclusive use of a folder: one process at a time, on one machine or on several that share it."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from insitu.disk.files import NOT_SUPPORTED, is_alive, open_received, read_received, writing_for
from insitu.errors import ConfigError
from insitu.wire.http_format import load_json

LOCK_FILE = ".lock"
_OWNER_SECONDS = 1.0
"""Time for a process that has just locked a folder to write who it is."""


class _Owner(NamedTuple):
    """The process that wrote a lock file."""

    pid: int
    host: str
    since: str

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def ended(self) -> bool:
        """Known for processes of this machine only."""
        return self.here and not is_alive(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """Exclusive use of a folder, until `release` or the end of the process.

    The lock is the kernel's (flock) on a file in the folder that names process and host, so it also holds between
    machines that share a network file system with locks. On a file system without locks the file alone counts: a
    process of another machine that was killed must be cleared by hand, and the message says so. Raises ConfigError
    naming `key` if another process, or this one, has the folder for longer than `wait` seconds; to find out which one
    may take another second, unless `names_owner` is false.
    """

    def __init__(self, folder: Path, key: str, wait: float = 0.0, *, names_owner: bool = True) -> None:
        self._path = folder.resolve() / LOCK_FILE
        self._key = key
        deadline = time.monotonic() + wait
        while (descriptor := self._try()) is None:
            if time.monotonic() >= deadline:
                owner = (self._read_owner() if names_owner else None) or "another process"
                raise ConfigError(
                    f"{key}: {folder} is in use by {owner}; wait until it has ended or use another folder"
                )
            time.sleep(0.05)
        self._descriptor: int | None = descriptor
        owner = _Owner(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner._asdict()).encode() + b"\n", 0)
        except OSError as error:
            self.release()
            raise ConfigError(f"{key}: cannot write to {self._path}: {error.strerror}") from error

    def release(self) -> None:
        """The folder may have been renamed since, and its path may be another process's by now."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):  # the kernel unlocks it anyway
            os.ftruncate(descriptor, 0)
            if _is_open_at(descriptor, self._path):
                self._path.unlink()
        os.close(descriptor)

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _try(self) -> int | None:
        """The descriptor of the locked file; None if another process has it."""
        with writing_for(self._key, self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        locked = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = _is_open_at(descriptor, self._path)  # its last owner may have deleted it meanwhile
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise ConfigError(f"{self._key}: cannot lock {self._path}: {error.strerror}") from error
            locked = self._take_without_lock()
        finally:
            if not locked:
                os.close(descriptor)
        return descriptor if locked else None

    def _take_without_lock(self) -> bool:
        """Whether the folder is free, according to the file."""
        owner = _parse_owner(self._path)
        if owner is None or owner.ended:
            return True
        if not owner.here:
            raise ConfigError(
                f"{self._key}: {self._path.parent} is in use by {owner}, and its file system has no locks that "
                f"would show whether that process still runs; if it does not, delete {self._path}"
            )
        return False

    def _read_owner(self) -> _Owner | None:
        """Waits for a process that has just locked the folder: until then the file may name the one before."""
        deadline = time.monotonic() + _OWNER_SECONDS
        while ((owner := _parse_owner(self._path)) is None or owner.ended) and time.monotonic() < deadline:
            time.sleep(0.01)
        return owner


def locked_by(folder: Path) -> str | None:
    """The process that has locked a folder; None if it is free. Does not disturb a process that is locking it."""
    path = folder.resolve() / LOCK_FILE
    owner = _parse_owner(path)
    try:
        if owner is None:
            return "another process" if abs(time.time() - path.stat().st_mtime) < _OWNER_SECONDS else None
        if owner.ended:
            return None
        with open_received(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # succeeds if the process has left the file behind
    except FileNotFoundError:
        return None
    except OSError:  # locked, or not readable, or the file system has no locks
        return str(owner)
    return None


def end_owner(folder: Path) -> None:
    """Kills the process of this machine that has locked a folder, and those of its group."""
    owner = _parse_owner(folder.resolve() / LOCK_FILE)
    if owner is not None and owner.here and locked_by(folder) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)


def locked_elsewhere(folder: Path) -> bool:
    """Whether a process of another machine has locked a folder."""
    owner = _parse_owner(folder.resolve() / LOCK_FILE)
    return owner is not None and not owner.here and locked_by(folder) is not None


def _parse_owner(path: Path) -> _Owner | None:
    try:
        owner = _Owner(**load_json(read_received(path)))
    except (OSError, ValueError, TypeError):
        return None
    return owner if isinstance(owner.pid, int) and 0 < owner.pid < 2**31 else None


def _is_open_at(descriptor: int, path: Path) -> bool:
    """Whether a descriptor is of the file that is at this path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
