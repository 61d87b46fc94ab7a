"""Durable files and folders: complete or absent at any time, even after a power failure.

write_file    replaces a file
new_folder    yields a folder that appears when it is complete
new_file      the same for a file that is written bit by bit
open_received opens a file that others may have written
LineFile      (in `json_files`) appends lines

All have ordinary permissions, those that the umask leaves; `write_file` leaves secrets out (`redaction`).
"""

import contextlib
import errno
import glob
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from insitu.disk.memory import machine_memory
from insitu.errors import ConfigError, InsituError
from insitu.wire.redaction import redact_bytes

logger = logging.getLogger(__name__)

NOT_SUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""Errors of file systems without fsync or locks."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of writing to an open file, which do not name it."""
read_rows: set[Path] = set()
"""Files of datasets that this process has read: agents that are confined do not see the answers in them."""


_DRAFT = re.compile(r"\.([^/]+)\.\d+(?:-\d+)?\.draft(?=/|$)")


def _cannot_be(done: str, path: Path | str, error: OSError) -> InsituError:
    """Names what a draft is to become."""
    named = _DRAFT.sub(r"\1", str(path))
    more = "; raise the limit of open files (ulimit -n)" * (error.errno == errno.EMFILE)
    return InsituError(f"{named} cannot be {done}: {error.strerror or error}{more}")


@contextlib.contextmanager
def _naming_file(done: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_be(done, path, error) from error


cannot_write, cannot_read = partial(_cannot_be, "written"), partial(_cannot_be, "read")
writing, reading = partial(_naming_file, "written"), partial(_naming_file, "read")
"""Contexts that raise InsituError naming the file, or folder, if it cannot be written, or read."""


def file_size(path: Path) -> int:
    """In bytes; 0 if there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def readable_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def readable_seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def nearest_folder(path: Path) -> Path:
    """The path itself, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def available_memory() -> int | None:
    """Bytes that a process of this machine, and of this process's cgroups, can take; None if that is unknown."""
    memory = machine_memory()
    return memory.available if memory is not None else None


def open_received(path: Path) -> BinaryIO:
    """Opens a file of a folder that others may have written.

    Raises OSError unless it is a regular file, which a link in the folder may name: not for a FIFO, on which opening
    would wait, nor for a link that leaves the folder, and may name any file of this machine.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
        raise OSError(errno.EPERM, "it is a link that leaves its folder", str(path))
    return open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def read_received(path: Path) -> bytes:
    """The content of a file that `open_received` opens. Raises OSError."""
    with open_received(path) as file:
        return file.read()


def writable_folder(folder: Path, key: str) -> Path:
    """Creates `folder`, also behind a symbolic link; returns it with links resolved.

    Raises ConfigError naming its `key` if it is not writable.
    """
    check_writable(folder, key)
    with writing_for(key, folder):
        resolved = folder.resolve()
        resolved.mkdir(parents=True, exist_ok=True)
        check_writable(resolved, key)
        return resolved


def check_writable(folder: Path, key: str) -> None:
    """Raises ConfigError naming `key` unless files can be created in a folder, or in the parent where it is to be."""
    with writing_for(key, folder):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{key}: {folder} is a file, not a folder")
        with tempfile.TemporaryFile(dir=nearest_folder(folder.resolve())):
            pass


@contextlib.contextmanager
def writing_for(key: str, folder: Path) -> Iterator[None]:
    """Raises ConfigError naming `key` if a folder, or file, cannot be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{key}: cannot write to {folder}: {reason}") from error


def write_file(path: Path, content: bytes) -> Path:
    """Replaces a file, synced: at any time it has its old or its new content. Raises InsituError."""
    with writing(path), new_file(path, overwrite=True) as draft:
        draft.write_bytes(redact_bytes(content))
    return path


def check_free(target: Path, key: str) -> None:
    """Raises ConfigError naming `key` unless `target` is free: it does not exist, or is an empty folder, which
    `new_folder` replaces."""
    if target.exists() and target.samefile("."):
        raise ConfigError(f"{key}: {target} is the working directory, which cannot be replaced; name a folder in it")
    if target.is_mount():
        raise ConfigError(f"{key}: {target} is a mount point, which cannot be replaced; name a folder in it")
    if not _is_free(target):
        raise ConfigError(f"{key}: {target} exists already and is not an empty folder; give another name")


def _is_free(target: Path) -> bool:
    if target.is_dir() and not target.is_symlink():
        return not any(target.iterdir())
    return not target.exists() and not target.is_symlink()


def is_alive(pid: int) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(pid, 0)
    except OSError as error:  # a process of another user may not be asked
        return not isinstance(error, ProcessLookupError)
    return True


@contextlib.contextmanager
def _writing_draft(draft: Path) -> Iterator[None]:
    """Raises InsituError naming what the draft is to become if that, or a file in it, cannot be written."""
    try:
        yield
    except OSError as error:
        named = [str(name) for name in (error.filename2, error.filename) if name is not None]
        written = next((name for name in named if name.startswith(str(draft))), None)
        if written is None and (named or error.errno not in _FULL):
            raise
        raise cannot_write(written or draft, error) from error


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields a draft that becomes `target` on success and is deleted on failure.

    Raises InsituError if `target` exists and is not an empty folder, before or after. Drafts of processes that were
    killed are deleted.
    """
    _check_absent(target)
    draft = new_draft(target)
    with writing(target):
        draft.mkdir(parents=True)
    try:
        with _writing_draft(draft):
            yield draft
            _open_to_readers(draft)
            for path in [*draft.rglob("*"), draft]:
                sync_path(path)
            _check_absent(target)
            if target.exists():
                draft.chmod(stat.S_IMODE(target.stat().st_mode))
            draft.rename(target)
            sync_path(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def new_draft(target: Path) -> Path:
    """Where this process makes a folder; drafts of processes that were killed are deleted."""
    owner = f"{os.getpid()}-{threading.get_native_id()}"  # two processes may want the same folder
    draft = target.with_name(f".{target.name}.{owner}.draft")
    for left in target.parent.glob(f".{glob.escape(target.name)}.*-*.draft"):
        pid = left.name.removeprefix(f".{target.name}.").partition("-")[0]
        if left == draft or (pid.isdecimal() and not is_alive(int(pid))):
            shutil.rmtree(left, ignore_errors=True)
    return draft


def _check_absent(target: Path) -> None:
    if not _is_free(target):
        raise InsituError(f"{target} exists already; it is not overwritten")


@contextlib.contextmanager
def new_file(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields the path of a draft that becomes `target` on success and is deleted on failure.

    Raises InsituError if the target cannot be written, or exists and `overwrite` is false.
    """
    draft = target.with_name(f".{target.name}.{threading.get_native_id()}.draft")
    with writing(draft):
        draft.unlink(missing_ok=True)  # of a thread whose process was killed
    try:
        with _writing_draft(draft):
            yield draft
        if target.exists() and not overwrite:
            raise InsituError(f"{target} exists already; it is not overwritten")
        with writing(target):
            sync_path(draft)
            draft.replace(target)
            sync_path(target.parent)
    finally:
        draft.unlink(missing_ok=True)


def delete_folder(folder: Path) -> None:
    """Deletes a folder with its files; if the process is killed meanwhile, it is complete or absent."""
    doomed = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def delete_drafts(folder: Path) -> None:
    """Deletes what writing or deleting left in `folder` when its process was killed."""
    for draft in folder.glob(".*.draft"):
        if draft.is_dir():
            logger.warning("deleting %s, left by a process that was killed", draft)
            shutil.rmtree(draft, ignore_errors=True)
        else:  # of a file, which is as it was before
            draft.unlink(missing_ok=True)


def _open_to_readers(folder: Path) -> None:
    """Gives all files of a new folder ordinary permissions; libraries write some of them for their owner only."""
    probe = folder / ".permissions"
    probe.touch()
    permissions = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != permissions:
            path.chmod(permissions)


def sync_path(path: Path) -> None:
    """Makes a file, or the entries of a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:  # pipes and devices, folders on some file systems
            raise
