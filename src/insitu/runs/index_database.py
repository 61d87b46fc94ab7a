"""The database of a run's index: in the run's directory, or a temporary one where that cannot be used.

The process that opens it first locks it until `close`; others have a temporary one meanwhile. It holds nothing that is
not in the other files, so one that is odd in any way is deleted and built again: one that is damaged, of another
version, or was not closed.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from insitu.disk.folder_lock import locked_elsewhere
from insitu.disk.json_files import Position
from insitu.runs.files import INDEX

logger = logging.getLogger(__name__)

Values = tuple[Any, ...]
"""What a statement is executed with."""

_VERSION = 3
"""Changes with the tables, and with what is written to them."""
_OPEN = -1
"""The version of a database that was not closed."""
_NOT_STORABLE = (sqlite3.InterfaceError, sqlite3.ProgrammingError, OverflowError, UnicodeEncodeError)
_TABLES = """
CREATE TABLE files (name TEXT PRIMARY KEY, inode INTEGER, offset INTEGER, number INTEGER, last BLOB);
CREATE TABLE problems (name TEXT PRIMARY KEY, problem TEXT, count INTEGER DEFAULT 1);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, epoch INTEGER, row_id TEXT, row_key TEXT, num_episodes INTEGER, rewards TEXT, mean REAL,
    std REAL, dropped TEXT, num_dropped INTEGER, line_offset INTEGER, line_size INTEGER, number INTEGER,
    episodes_offset INTEGER, episodes_size INTEGER, calls_offset INTEGER, calls_size INTEGER, question TEXT,
    expected TEXT, is_read INTEGER DEFAULT 0
);
CREATE INDEX groups_of_epoch ON groups (epoch, row_key);
CREATE INDEX groups_of_row ON groups (row_id, epoch);
CREATE INDEX groups_to_read ON groups (id) WHERE is_read = 0;
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, group_id INTEGER, episode TEXT, epoch INTEGER, row_id TEXT, row_key TEXT,
    generation INTEGER, attempt INTEGER, outcome TEXT, reason TEXT, reward REAL, seconds REAL, calls INTEGER,
    prompt_tokens INTEGER, sampled_tokens INTEGER, answer TEXT, in_group INTEGER
);
CREATE INDEX episodes_of_group ON episodes (group_id);
CREATE INDEX episodes_by_name ON episodes (episode);
CREATE TABLE advantages (
    episode TEXT PRIMARY KEY, dropped TEXT, trained INTEGER, sent INTEGER, sides TEXT, line_offset INTEGER,
    line_size INTEGER, number INTEGER
) WITHOUT ROWID;
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, job TEXT);
"""


class TrainingStatus(StrEnum):
    """Whether an episode was trained."""

    TRAINED = "trained"
    SENT = "sent"
    """Trained on a server that computes the advantages itself."""
    DROPPED = "dropped"
    PENDING = "not trained yet"
    """The epoch is still running, or was when the run was interrupted."""
    JOB_FAILED = "job failed"
    UNKNOWN = "not recorded"
    """The epoch is complete, but the run has no record of the advantages."""

    @classmethod
    def of(cls, *, dropped: bool, epoch_is_over: bool, job: str | None, trained: int, sent: bool) -> "TrainingStatus":
        """The status of an episode from the `job` of its epoch and the number of its `trained` calls.

        `sent`: without advantages.
        """
        if dropped:
            return cls.DROPPED
        if not epoch_is_over or job is None:
            return cls.PENDING
        if job != "completed":
            return cls.JOB_FAILED
        if not trained:
            return cls.UNKNOWN
        return cls.SENT if sent else cls.TRAINED


class _Outdated(sqlite3.DatabaseError):
    """The database is that of another version, or was not closed."""


class IndexDatabase:
    """The tables of an index. Any thread may use it."""

    def __init__(self, run: Path) -> None:
        self._path = run.resolve() / INDEX
        self.complete = False
        """Whether all files have been read once."""
        self._lock = threading.RLock()
        self._changes = 0
        self.rebuilds = 0
        """Changes whenever ids may name other rows."""
        self._inode = 0
        """The inode of the file, 0 if the database is temporary."""
        self._database = self._open()

    @property
    def version(self) -> tuple[int, bool]:
        """Changes whenever the answer of a query may."""
        return self._changes, self.complete

    def close(self) -> None:
        """What was written survives a power failure from now on."""
        with self._lock:
            with suppress(sqlite3.Error):
                self._database.execute("PRAGMA synchronous = FULL")
                for version in (_OPEN, _VERSION):  # first all that was written
                    self._database.execute(f"PRAGMA user_version = {version}")
            self._database.close()

    def select(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            try:
                return self._database.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                self.rebuild(error)
                return self._database.execute(query, values).fetchall()

    def position(self, name: str) -> Position:
        """Up to where a file was read."""
        rows = self.select("SELECT inode, offset, number, last FROM files WHERE name = ?", (name,))
        return Position(*rows[0]) if rows else Position()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """One transaction."""
        with self._lock, self._database:
            self._database.execute("BEGIN")
            self._changes += 1
            yield

    def insert(self, name: str, statement: str, values: Sequence[Values]) -> None:
        """Executes a statement with each of these, taken from a file; what a database cannot hold is noted."""
        for each in values:
            try:
                self._database.execute(statement, each)
            except _NOT_STORABLE as error:
                self.note(name, [f"{self._path.with_name(name)} has a record of another form: {error}"])

    def note(self, name: str, problems: Sequence[str]) -> None:
        """Records problems of a file."""
        statement = "INSERT INTO problems (name, problem) VALUES (?, ?) ON CONFLICT DO UPDATE SET count = count + 1"
        self._database.executemany(statement, [(name, problem) for problem in problems])

    def move(self, name: str, position: Position) -> None:
        """Records up to where a file was read."""
        self._database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", (name, *position))

    def check(self) -> None:
        """Starts with nothing if the file was deleted."""
        if self._inode and _inode(self._path) != self._inode:
            self.rebuild()

    def rebuild(self, error: sqlite3.Error | None = None) -> None:
        """Starts with nothing: in a new file, or without one if there can be none.

        Raises the error if the file is not its cause.
        """
        if error is not None and (not self._inode or isinstance(error, sqlite3.ProgrammingError)):
            raise error
        with self._lock:
            self._database.close()
            self.complete = False
            self._changes += 1
            self.rebuilds += 1
            if self._inode and self._inode == _inode(self._path):
                self._delete(error)
            in_file = not isinstance(error, sqlite3.OperationalError)  # no space, or no longer writable
            self._database = self._open() if in_file else self._connect("")

    def _open(self) -> sqlite3.Connection:
        try:
            if locked_elsewhere(self._path.parent):
                raise OSError("the run is in progress on another machine, which may not see the locks of this one")
            if self._path.is_symlink() or (self._path.exists() and not self._path.is_file()):
                raise OSError("it is not a file")
            for journal in self._path.parent.glob(f"{INDEX}-*"):  # SQLite would follow its links
                journal.unlink()
            try:
                return self._connect(str(self._path))
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                self._delete(error)
                return self._connect(str(self._path))
        except (sqlite3.Error, OSError) as error:
            logger.debug("%s cannot be used: %s", self._path, error)
            return self._connect("")

    def _delete(self, error: sqlite3.Error | None) -> None:
        if error is not None:
            level = logging.DEBUG if isinstance(error, _Outdated) else logging.WARNING
            logger.log(level, "%s is built again: %s", self._path, error)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _connect(self, path: str) -> sqlite3.Connection:
        """The database in a file, or a temporary one if `path` is empty, with the tables of this version.

        Raises OperationalError if another process uses it, DatabaseError if it is to be built again.
        """
        database = sqlite3.connect(path, timeout=0, check_same_thread=False, isolation_level=None)
        try:
            database.row_factory = sqlite3.Row
            database.create_function("status", 5, self._status)
            for setting in ("locking_mode = EXCLUSIVE", "journal_mode = MEMORY", "synchronous = OFF"):
                database.execute(f"PRAGMA {setting}")
            database.execute("BEGIN EXCLUSIVE")
            [version] = database.execute("PRAGMA user_version").fetchone()
            if not database.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _TABLES.split(";"):
                    database.execute(statement)
            elif version != _VERSION:
                raise _Outdated("it was not closed" if version == _OPEN else f"it has version {version}")
            database.execute(f"PRAGMA user_version = {_OPEN}")
            database.execute("COMMIT")
        except sqlite3.Error:
            database.close()
            raise
        self._inode = _inode(self._path) if path else 0
        return database

    def _status(self, dropped: int, is_over: int, job: str | None, trained: int | None, sent: int) -> str | None:
        """The function `status` of queries."""
        if trained is None and not self.complete and not dropped and is_over and job == "completed":
            return None
        return TrainingStatus.of(
            dropped=bool(dropped), epoch_is_over=bool(is_over), job=job, trained=trained or 0, sent=bool(sent)
        ).value


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
