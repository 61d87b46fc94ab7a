"""Temporary folders that a killed process does not leave behind for ever."""

import asyncio
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from insitu.disk.folder_lock import FolderLock, locked_by
from insitu.errors import ConfigError

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 30.0


@asynccontextmanager
async def temporary_folder(place: Path | None = None, key: str = "TMPDIR") -> AsyncIterator[Path]:
    """A folder of this process, which is deleted at the end, or by the next process if this one is killed.

    It is in a folder of the user's below `place`; none: the system's folder for temporary files. Raises ConfigError
    naming `key` if it cannot be made there.
    """
    folder, lock = await asyncio.to_thread(_new_folder, place or Path(tempfile.gettempdir()), key)
    try:
        yield folder
    finally:
        lock.release()
        await asyncio.to_thread(remove, folder)


def _new_folder(place: Path, key: str) -> tuple[Path, FolderLock]:
    base = place / f"insitu-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            base.mkdir(mode=0o700, parents=True)
        base = base.resolve(strict=True)
    except OSError as error:
        raise ConfigError(f"{key}: {base} cannot be made: {error.strerror}") from error
    if not base.is_dir():
        raise ConfigError(f"{key}: {base} is not a folder")
    if base.stat().st_uid != os.getuid():
        raise ConfigError(f"{key}: {base} belongs to another user")
    with FolderLock(base, key, wait=_LOCK_SECONDS):
        for leftover in base.iterdir():  # those of killed processes
            if leftover.is_dir() and locked_by(leftover) is None:
                remove(leftover)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
        return folder, FolderLock(folder, key)


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
