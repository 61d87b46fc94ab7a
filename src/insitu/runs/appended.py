"""Reads what is appended to a file of lines, and notices when the file was cut or replaced."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

_REMEMBERED = 256
"""Bytes before the current position that are compared, to notice a file that was cut and written again."""


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
            file = self._path.open("rb")
        except FileNotFoundError:
            if self.position.inode:
                raise FileReplaced(self._path) from None
            return
        with file:
            inode = self._seek(file)
            for content in file:
                _, offset, number, _ = self.position
                if not content.endswith(b"\n") or (end is not None and offset + len(content) > end):
                    return
                line = Line(number + 1, offset, content)
                self.position = Position(inode, offset + len(content), line.number, content[-_REMEMBERED:])
                yield line

    def _seek(self, file: BinaryIO) -> int:
        inode, offset, _, last = self.position
        status = os.fstat(file.fileno())
        if inode not in (0, status.st_ino) or status.st_size < offset:
            raise FileReplaced(self._path)
        file.seek(offset - len(last))
        if file.read(len(last)) != last:
            raise FileReplaced(self._path)
        self.position = self.position._replace(inode=status.st_ino)
        return status.st_ino
