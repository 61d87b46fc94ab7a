"""Temporary folders that a killed process does not leave behind for ever."""

import asyncio
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from insitu.disk.folder_lock import FolderLock
from insitu.errors import ConfigError

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 10.0
_PREFIX = "run-"


@asynccontextmanager
async def temporary_folder(place: Path | None = None, key: str = "TMPDIR") -> AsyncIterator[Path]:
    """A folder of this process, which is deleted at the end, or by the next process if this one is killed.

    It is in a folder of the user's below `place`; none: the system's folder for temporary files. Raises ConfigError
    naming `key` if it cannot be made there.
    """
    with ExitStack() as locks:
        folder, leftovers = _new_folder(place, key, locks)
        try:
            for leftover in leftovers:
                await asyncio.to_thread(remove, leftover)
            yield folder
        finally:
            await asyncio.to_thread(remove, folder)


def _new_folder(place: Path | None, key: str, locks: ExitStack) -> tuple[Path, list[Path]]:
    """The new folder, and those of killed processes; `locks` holds all of them."""
    base = _base(place, key)
    with FolderLock(base, key, wait=_LOCK_SECONDS):
        leftovers = []
        for path in base.glob(f"{_PREFIX}*"):
            with suppress(ConfigError):  # its process runs
                locks.enter_context(FolderLock(path, key, names_owner=False))
                leftovers.append(path)
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            raise ConfigError(f"{key}: no folder can be made in {base}: {error.strerror}") from error
        locks.enter_context(FolderLock(folder, key))
    return folder, leftovers


def _base(place: Path | None, key: str) -> Path:
    """The user's own folder, never one that a link leads to: what looks left over in it is deleted."""
    base = Path(f"insitu-{os.getuid()}")
    try:
        base = (place or Path(tempfile.gettempdir())) / base
        base.parent.mkdir(parents=True, exist_ok=True)
        base = base.parent.resolve(strict=True) / base.name
        with suppress(FileExistsError):
            base.mkdir(mode=0o700)
        owner = base.lstat().st_uid
    except OSError as error:
        raise ConfigError(f"{key}: {base} cannot be made: {error.strerror}") from error
    if base.is_symlink() or not base.is_dir():
        raise ConfigError(f"{key}: {base} is a link or a file, not a folder")
    if owner != os.getuid():
        raise ConfigError(f"{key}: {base} belongs to another user")
    return base


def remove(path: Path) -> None:
    """Deletes a file or folder, whatever a program has made of it; a warning says what remains."""
    for pause in (0.0, 0.1, 0.5):  # programs that were just killed may still write
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        time.sleep(pause)
        if subprocess.run(["rm", "-rf", "--", path], check=False, capture_output=True).returncode:
            subprocess.run(["chmod", "-R", "u+rwx", "--", path], check=False, capture_output=True)
    if path.exists():
        logger.warning("%s cannot be deleted", path)
