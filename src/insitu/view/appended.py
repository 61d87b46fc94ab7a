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


class AppendedLines:
    """The lines of a file that were not read yet. A file that does not exist has none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._number = 0
        self._last = b""

    def read(self, end: int | None = None) -> Iterator[Line]:
        """Whole lines, up to the byte `end`; an incomplete last one is left for later.

        Raises FileReplaced or OSError.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            if self._inode:
                raise FileReplaced(self._path) from None
            return
        with file:
            self._seek(file)
            for content in file:
                if not content.endswith(b"\n") or (end is not None and self._offset + len(content) > end):
                    return
                line = Line(self._number + 1, self._offset, content)
                self._number, self._offset = line.number, self._offset + len(content)
                self._last = content[-_REMEMBERED:]
                yield line

    def _seek(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if self._inode not in (0, status.st_ino) or status.st_size < self._offset:
            raise FileReplaced(self._path)
        self._inode = status.st_ino
        file.seek(self._offset - len(self._last))
        if file.read(len(self._last)) != self._last:
            raise FileReplaced(self._path)
