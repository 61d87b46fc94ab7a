"""JSON on disk: a value per file, a value per line, and compressed blocks of lines.

dump_json, dump_lines     JSON of any value that a workflow may return
write_json, read_object   a file with one value, replaced as a whole
LineFile                  appends lines; a last line torn by a crash is removed first
whole_lines, read_line    reads lines; a last line that is torn is reported and left out
AppendedLines             reads what was appended since the last time, and notices when the file was cut or replaced
read_block                reads lines that were appended compressed

`write_json` and `LineFile` leave secrets out (`redaction`).
"""

import contextlib
import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from insitu.disk.files import open_received, read_received, reading, sync_descriptor, sync_path, write_file, writing
from insitu.errors import InsituError
from insitu.wire.http_format import load_json
from insitu.wire.json_values import json_form
from insitu.wire.redaction import redact_bytes

logger = logging.getLogger(__name__)

_COMPRESSION = 6
"""A level of gzip. Level 1 takes half the time for files that are 15 % larger."""
_REMEMBERED = 256
"""Bytes before the current position that are compared, to notice a file that was cut and written again."""


def to_json(value: Any, depth: int = 4) -> Any:
    """A JSON value of anything: models and dataclasses as objects, bytes as base64, unknown objects as text.

    Cyclic and unserializable values become text too; up to `depth` containers around them are kept.
    """
    try:
        return to_jsonable_python(value, fallback=json_form, bytes_mode="base64", inf_nan_mode="null")
    except ValueError:
        if depth and isinstance(value, BaseModel):
            value = dict(value)
        if depth and isinstance(value, dict):
            return {str(key): to_json(part, depth - 1) for key, part in value.items()}
        if depth and isinstance(value, list):
            return [to_json(part, depth - 1) for part in value]
        return json_form(value)


def dump_json(data: Any, option: int = 0) -> bytes:
    """JSON of any value a workflow may return; `option` is one of orjson."""
    try:
        return orjson.dumps(data, default=to_json, option=option | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # big integers, lone surrogates, tuple keys, cycles: slower, but nothing may be lost
        ending = "\n" if option & orjson.OPT_APPEND_NEWLINE else ""
        return (json.dumps(to_json(data)) + ending).encode()


def dump_lines(records: Iterable[Any]) -> bytes:
    """JSON of any values a workflow may return, a line each."""
    return b"".join(dump_json(record, orjson.OPT_APPEND_NEWLINE) for record in records)


def write_json(path: Path, data: Any) -> Path:
    """Replaces a file atomically and synced: a reader never sees half of it."""
    return write_file(path, dump_json(data, orjson.OPT_INDENT_2))


def read_object(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """The JSON object in a file that others may have written. Raises InsituError naming the file.

    `follow_links`: wherever they lead, as in the Hub's cache.
    """
    with reading(path):
        return _as_object(str(path), path.read_bytes() if follow_links else read_received(path))


def read_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The JSON object in a line. Raises InsituError naming the file and the line."""
    return _as_object(f"{path}, line {number}", line)


def read_line_at(path: Path, number: int, place: "Block") -> dict[str, Any]:
    """The JSON object in the line with this number, which was at this place. Raises InsituError."""
    with reading(path), open_received(path) as file:
        file.seek(place.offset)
        return read_line(path, number, file.read(place.size))


def _as_object(where: str, data: bytes) -> dict[str, Any]:
    try:
        value = load_json(data)
    except ValueError as error:
        raise InsituError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InsituError(f"{where} is not a JSON object: {value!r:.80}")
    return value


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
        with writing(path):
            created = not path.exists()
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self.size = self._remove_torn_line() if size is None else os.fstat(self._descriptor).st_size
            """In bytes."""
            if size is not None:
                self.truncate(size)
            if created:
                sync_path(path.parent)

    def truncate(self, size: int) -> None:
        """Removes what was appended after the file had `size` bytes. Raises InsituError if it is shorter."""
        if size > self.size:
            raise InsituError(shorter_than_written(self._path, self.size, size))
        if size == self.size:
            return
        with writing(self._path):
            os.ftruncate(self._descriptor, size)
            sync_descriptor(self._descriptor)
        self.size = size

    def append(self, lines: bytes, *, compressed: bool = False) -> Block:
        """Appends all of the lines, or none; compressed, as a gzip member, so that `zcat` reads the file.

        Returns where they are. Raises InsituError.
        """
        data = redact_bytes(lines)
        if compressed:
            data = gzip.compress(data, _COMPRESSION, mtime=0)
            if len(lines) > _decompressed_limit(len(data)):  # readers would take it for an attack
                data = gzip.compress(redact_bytes(lines), 0, mtime=0)
        rest, block = memoryview(data), Block(self.size, len(data))
        self._unsynced = True
        with writing(self._path):
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self.size)
                raise
        self.size = block.end
        return block

    def sync(self) -> None:
        """Raises InsituError."""
        if not self._unsynced:
            return
        self._unsynced = False  # before: a line may be appended meanwhile
        try:
            with writing(self._path):
                sync_descriptor(self._descriptor)
        except InsituError:
            self._unsynced = True
            raise

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


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of the lines of a file, without an incomplete last one, which is reported.

    A file that does not exist has none.
    """
    if not path.is_file():
        return
    with reading(path):
        file = open_received(path)
    with file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line
            else:
                logger.warning("%s: skipped an incomplete last line: it is being written, or a crash tore it", path)


def read_block(path: Path, block: Block) -> list[dict[str, Any]]:
    """The JSON objects in a block of lines. Raises InsituError naming the file and the block."""
    where = f"{path}, bytes {block.offset} to {block.end}"
    try:
        with reading(path), open_received(path) as file:
            if (size := os.fstat(file.fileno()).st_size) < block.end:
                raise InsituError(shorter_than_written(path, size, block.end))
            file.seek(block.offset)
            limit, member = _decompressed_limit(block.size), zlib.decompressobj(wbits=31)
            lines = member.decompress(file.read(block.size), limit)
            if member.unconsumed_tail:
                raise InsituError(f"{where} hold more than {limit} bytes, which insitu does not write")
            if not member.eof or member.unused_data:
                raise EOFError("they are not one gzip member")
    except (EOFError, zlib.error) as error:
        raise InsituError(f"{where} are damaged: {error}") from None
    return [_as_object(f"{where}, line {number}", line) for number, line in enumerate(lines.splitlines(), 1)]


def _decompressed_limit(size: int) -> int:
    """How many bytes of lines may be in a compressed block of `size` bytes: text is rarely compressed to a 50th."""
    return max(2**26, 50 * size)


def shorter_than_written(path: Path, size: int, written: int) -> str:
    """What to say of a file that has lost bytes at its end."""
    return f"{path} has {size} bytes, but {written} were written: the file is damaged"


class Line(NamedTuple):
    """A whole line, and where it is in its file."""

    number: int
    offset: int
    content: bytes


class FileReplaced(Exception):
    """What was read is not what the file holds now."""


class Position(NamedTuple):
    """A place in a file: its inode, the bytes and lines before it, and the last of these bytes."""

    inode: int = 0
    offset: int = 0
    number: int = 0
    last: bytes = b""


_START = Position()


class AppendedLines:
    """The lines of a file that were not read yet. A file that does not exist has none."""

    def __init__(self, path: Path, position: Position = _START) -> None:
        self._path = path
        self.position = position

    def read(self, end: int | None = None) -> Iterator[Line]:
        """Whole lines, up to the byte `end`; an incomplete last one is left for later.

        Raises FileReplaced or OSError.
        """
        try:
            file = open_received(self._path)
        except FileNotFoundError:
            if self.position.inode:
                raise FileReplaced(self._path) from None
            return
        with file:
            self._seek(file)
            for content in file:
                inode, offset, number, _ = self.position
                if not content.endswith(b"\n") or (end is not None and offset + len(content) > end):
                    return
                line = Line(number + 1, offset, content)
                self.position = Position(inode, offset + len(content), line.number, content[-_REMEMBERED:])
                yield line

    def _seek(self, file: BinaryIO) -> None:
        inode, offset, _, last = self.position
        status = os.fstat(file.fileno())
        if inode not in (0, status.st_ino) or status.st_size < offset:
            raise FileReplaced(self._path)
        file.seek(offset - len(last))
        if file.read(len(last)) != last:
            raise FileReplaced(self._path)
        self.position = self.position._replace(inode=status.st_ino)


def gzip_lines(header: dict[str, Any] | None, rows: Sequence[BaseModel]) -> bytes:
    """Rows as gzipped JSON lines, after a header if there is one. Level 1 pays off even on loopback."""
    lines = [] if header is None else [orjson.dumps(header)]
    for row in rows:
        if row.__pydantic_extra__:
            values = row.model_dump()
        else:  # much faster
            values = {key: value for key, value in row.__dict__.items() if key in row.model_fields_set}
        lines.append(orjson.dumps(values))
    return gzip.compress(b"\n".join(lines) + b"\n", compresslevel=1)
