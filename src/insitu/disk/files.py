"""Durable files: synced replacement, appended lines, tolerant reading.

write_file, new_folder    complete or absent at any time, even after a power failure
new_file                  the same for a file of lines that is written bit by bit
LineFile, whole_lines     appended lines; a last line torn by a crash is reported and dropped
read_block                lines that were appended compressed

All have ordinary permissions, those that the umask leaves; `write_file` and `LineFile` leave secrets out (`redaction`).
"""

import contextlib
import errno
import gzip
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from insitu.errors import ConfigError, InsituError
from insitu.wire.redaction import redact_bytes

logger = logging.getLogger(__name__)

NOT_SUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""Errors of file systems without fsync or locks."""
_COMPRESSION = 6
"""A level of gzip. Level 1 takes half the time for files that are 15 % larger."""


def cannot_write(path: Path, error: OSError) -> InsituError:
    return InsituError(f"{path} cannot be written: {error.strerror or error}")


def writable_folder(folder: Path, key: str) -> Path:
    """Creates `folder`, also behind a symbolic link; returns it with links resolved.

    Raises ConfigError naming its `key` if it is not writable.
    """
    try:
        resolved = folder.resolve()
        if resolved.exists() and not resolved.is_dir():
            raise ConfigError(f"{key}: {folder} is a file, not a folder")
        resolved.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=resolved):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: cannot write to {folder}: {reason}") from error
    return resolved


def write_file(path: Path, content: bytes) -> Path:
    """Replaces a file, synced: at any time it has its old or its new content. Raises InsituError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with draft.open("wb") as file:
            file.write(redact_bytes(content))
            file.flush()
            _sync(file.fileno())
        draft.replace(path)
        sync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
    return path


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields a draft that becomes `target` on success and is deleted on failure.

    Raises InsituError if `target` exists. The process must own the parent folder: the draft of an earlier process that
    was killed is deleted.
    """
    if target.exists():
        raise InsituError(f"{target} exists already; it is not overwritten")
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        _open_to_readers(draft)
        for path in [*draft.rglob("*"), draft]:
            sync_path(path)
        draft.rename(target)
        sync_path(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields the path of a draft that becomes `target` on success and is deleted on failure.

    Raises InsituError if the target cannot be written, or exists and `overwrite` is false.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # of a process that was killed
    try:
        yield draft
        if target.exists() and not overwrite:
            raise InsituError(f"{target} exists already; it is not overwritten")
        try:
            sync_path(draft)
            draft.replace(target)
            sync_path(target.parent)
        except OSError as error:
            raise cannot_write(target, error) from error
    finally:
        draft.unlink(missing_ok=True)


def delete_folder(folder: Path) -> None:
    """Deletes a folder with its files; if the process is killed meanwhile, it is complete or absent."""
    doomed = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def delete_drafts(folder: Path) -> None:
    """Deletes what `new_folder` and `delete_folder` left in `folder` when their process was killed."""
    for draft in folder.glob(".*.draft"):
        logger.warning("deleting %s, left by a process that was killed", draft)
        shutil.rmtree(draft, ignore_errors=True)


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
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:  # pipes and devices, folders on some file systems
            raise


class Block(NamedTuple):
    """Where compressed lines are in a file, in bytes."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class LineFile:
    """Appends whole lines to a file that this process owns, or compressed blocks of lines.

    Appended lines survive the end of the process; after `sync` they survive a power failure. A last line that was torn
    by a crash is removed first; in a file of blocks, what follows its first `size` bytes. Raises InsituError.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self._path = path
        self._unsynced = False
        try:
            created = not path.exists()
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._size = self._remove_torn_line() if size is None else os.fstat(self._descriptor).st_size
            if size is not None:
                self.truncate(size)
            if created:
                sync_path(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from error

    @property
    def size(self) -> int:
        """In bytes."""
        return self._size

    def truncate(self, size: int) -> None:
        """Removes what was appended after the file had `size` bytes. Raises InsituError if it is shorter."""
        if size > self._size:
            raise InsituError(shorter_than_written(self._path, self._size, size))
        if size == self._size:
            return
        try:
            os.ftruncate(self._descriptor, size)
            _sync(self._descriptor)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._size = size

    def append(self, lines: bytes) -> None:
        """Appends all of the lines, or none. Raises InsituError."""
        self._append(redact_bytes(lines))

    def append_block(self, lines: bytes) -> Block:
        """Appends all of the lines, or none, as a gzip member, so that `zcat` reads the file. Raises InsituError."""
        offset = self._size
        self._append(gzip.compress(redact_bytes(lines), _COMPRESSION, mtime=0))
        return Block(offset, self._size - offset)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        self._unsynced = True
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise cannot_write(self._path, error) from error
        self._size += len(data)

    def sync(self) -> None:
        """Raises InsituError."""
        try:
            if self._unsynced:
                _sync(self._descriptor)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._unsynced = False

    def close(self) -> None:
        """Syncs and closes. Raises InsituError."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def _remove_torn_line(self) -> int:
        """Returns the size of the file."""
        size = kept = os.fstat(self._descriptor).st_size
        while kept and os.pread(self._descriptor, 1, kept - 1) != b"\n":
            start = max(kept - 4096, 0)
            kept = start + os.pread(self._descriptor, kept - start, start).rfind(b"\n") + 1
        if kept < size:
            logger.warning("%s: removed an incomplete last line (%d bytes), torn by a crash", self._path, size - kept)
            os.ftruncate(self._descriptor, kept)
        return kept


def whole_lines(path: Path, offset: int = 0, first: int = 1) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of the lines of a file, without an incomplete last one, which is reported.

    Starts at a byte `offset`, where the line with number `first` begins.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for number, line in enumerate(file, first):
            if line.endswith(b"\n"):
                yield number, line
            else:
                logger.warning("%s: skipped an incomplete last line: it is being written, or a crash tore it", path)


def numbered_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a file of lines with their line numbers, without the first line, which names the format.

    Empty if the file does not exist. Raises InsituError naming the file and the line.
    """
    for number, line in whole_lines(path) if path.is_file() else ():
        record = read_line(path, number, line)
        if record.keys() != {"format"}:
            yield number, record


def read_block(path: Path, block: Block) -> list[dict[str, Any]]:
    """The JSON objects in a block of lines. Raises InsituError naming the file and the block."""
    where = f"{path}, bytes {block.offset} to {block.end}"
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) < block.end:
                raise InsituError(shorter_than_written(path, size, block.end))
            file.seek(block.offset)
            lines = gzip.decompress(file.read(block.size))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InsituError(f"{where} are damaged: {error}") from None
    except OSError as error:
        raise InsituError(f"{path} cannot be read: {error.strerror}") from error
    return [_as_object(f"{where}, line {number}", line) for number, line in enumerate(lines.splitlines(), 1)]


def shorter_than_written(path: Path, found: int, written: int) -> str:
    """What to say of a file that has lost bytes at its end."""
    return f"{path} has {found} bytes, but {written} were written: the file is damaged"


def read_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The JSON object in a line. Raises InsituError naming the file and the line."""
    return _as_object(f"{path}, line {number}", line)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InsituError naming the file."""
    try:
        return _as_object(str(path), path.read_bytes())
    except OSError as error:
        raise InsituError(f"{path} cannot be read: {error.strerror}") from error


def _as_object(where: str, data: bytes) -> dict[str, Any]:
    try:
        value = load_json(data)
    except (ValueError, RecursionError) as error:
        raise InsituError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InsituError(f"{where} is not a JSON object: {value!r:.80}")
    return value


def load_json(data: bytes) -> Any:
    """Parses JSON, also with a byte order mark, lone surrogates or NaN. Raises ValueError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)
