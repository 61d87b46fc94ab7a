"""The database of a run's index: in the run's directory, or temporary where that cannot be used.

Every process may read it and write to it: the run, `insitu view`, `insitu trajectories`. It holds nothing that is not
in the other files, so it is never synced while it is written, and one that cannot be trusted is made anew:
a damaged one, one of another folder or version, one that was not closed before the machine was restarted.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from insitu.disk.files import open_received
from insitu.disk.folder_lock import locked_elsewhere
from insitu.disk.json_files import Position
from insitu.runs.files import INDEX

logger = logging.getLogger(__name__)

Values = tuple[Any, ...]
"""What a statement is executed with."""

_VERSION = 2
"""Changes with the tables, and with what is written to them."""
_WAIT = 5.0
"""Seconds to wait for a transaction of another process."""
_TABLES = """
CREATE TABLE about (folder TEXT, boot TEXT, generation INTEGER);
CREATE TABLE files (name TEXT PRIMARY KEY, inode INTEGER, offset INTEGER, number INTEGER, last BLOB);
CREATE TABLE problems (name TEXT PRIMARY KEY, problem TEXT, count INTEGER);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, epoch INTEGER, row_id TEXT, row_key TEXT, num_episodes INTEGER, rewards TEXT, mean REAL,
    std REAL, dropped TEXT, num_dropped INTEGER, line_offset INTEGER, line_size INTEGER, number INTEGER,
    episodes_offset INTEGER, episodes_size INTEGER, calls_offset INTEGER, calls_size INTEGER, question TEXT,
    expected TEXT, state INTEGER DEFAULT 0
);
CREATE INDEX groups_of_epoch ON groups (epoch, row_key);
CREATE INDEX groups_of_row ON groups (row_id, epoch);
CREATE INDEX groups_to_read ON groups (id) WHERE state = 0;
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, group_id INTEGER, episode TEXT, epoch INTEGER, row_id TEXT, row_key TEXT,
    generation INTEGER, attempt INTEGER, outcome TEXT, reason TEXT, reward REAL, seconds REAL, calls INTEGER,
    prompt_tokens INTEGER, sampled_tokens INTEGER, answer TEXT, in_group INTEGER, dropped TEXT, trained INTEGER,
    sent INTEGER, sides TEXT, line_offset INTEGER, line_size INTEGER, number INTEGER
);
CREATE INDEX episodes_of_group ON episodes (group_id);
CREATE INDEX episodes_by_name ON episodes (episode);
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
        if not epoch_is_over:
            return cls.PENDING
        if job != "completed":
            return cls.JOB_FAILED
        if not trained:
            return cls.UNKNOWN
        return cls.SENT if sent else cls.TRAINED


class Outdated(Exception):
    """Another process has changed the index meanwhile."""


class IndexDatabase:
    """The tables of an index. Any thread may use it.

    With `temporary` false, raises sqlite3.Error or OSError if there can be none in the run's directory.
    """

    def __init__(self, run: Path, *, temporary: bool = True) -> None:
        self._path = run.resolve() / INDEX
        self._journal = self._path.with_name(f"{self._path.name}-journal")
        self._temporary = temporary
        self.complete = False
        """Whether all files have been read once."""
        self._inode = 0
        """The inode of the file, 0 if the database is temporary."""
        self._lock = threading.RLock()
        self._changes = 0
        self._opened = 0
        """How many databases were opened."""
        self._checked = (0, 0)
        self._database = self._open()

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever the content does, also by another process."""
        with self._lock:
            [row] = self._database.execute("PRAGMA data_version").fetchone()
            return self._opened, self._changes, int(row)

    def _status(self, dropped: int, is_over: int, job: str | None, trained: int | None, sent: int) -> str | None:
        """The function `status` of queries."""
        if trained is None and not self.complete and not dropped and is_over and job == "completed":
            return None
        return TrainingStatus.of(
            dropped=bool(dropped), epoch_is_over=bool(is_over), job=job, trained=trained or 0, sent=bool(sent)
        ).value

    def close(self) -> None:
        """What was written survives a power failure from now on."""
        with self._lock:
            with suppress(sqlite3.Error):
                if self._inode and self._changes:
                    self._database.execute("PRAGMA synchronous = FULL")
                    self._database.execute("UPDATE about SET boot = NULL")
            self._database.close()

    def select(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            try:
                return self._database.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                if self._database.in_transaction or not self._inode:
                    raise
                self.replace(error)
                return self._database.execute(query, values).fetchall()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """One transaction, during which nobody else writes. Raises Outdated if the index was made anew."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                mark = (_boot(), self._generation)
                if not self._database.execute("UPDATE about SET boot = ? WHERE generation = ?", mark).rowcount:
                    raise Outdated(self._path)
                yield
                self._database.execute("COMMIT")
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")

    def execute(self, statement: str, values: Values = ()) -> None:
        with self._lock:
            self._changes += 1
            self._database.execute(statement, values)

    def executemany(self, statement: str, values: Sequence[Values]) -> sqlite3.Cursor:
        with self._lock:
            self._changes += 1
            return self._database.executemany(statement, values)

    def position(self, name: str) -> Position:
        """Up to where a file was read."""
        rows = self.select("SELECT inode, offset, number, last FROM files WHERE name = ?", (name,))
        return Position(*rows[0]) if rows else Position()

    def move(self, name: str, before: Position, after: Position) -> None:
        """Records up to where a file was read. Raises Outdated if another process has read it meanwhile."""
        if self.position(name) != before:
            raise Outdated(name)
        self.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", (name, *after))

    def check(self) -> bool:
        """Whether the content is still that of the last time; if the file was deleted, starts with nothing."""
        with self._lock:
            if self._inode and _inode(self._path) != self._inode:
                self._database.close()
                self._database = self._open()
            [self._generation] = self._database.execute("SELECT generation FROM about").fetchone()
            before, self._checked = self._checked, (self._opened, self._generation)
            return before == self._checked

    def reset(self) -> None:
        """Forgets what the files held, as they were cut or replaced; other processes notice it."""
        with self._lock:
            self._clear(self._database)
            self._changes += 1

    def replace(self, error: sqlite3.Error) -> None:
        """Starts with nothing: in a new file if this one is damaged, without a file if it cannot be used.

        Raises the error if it must be a file, or is not one.
        """
        with self._lock:
            if not self._inode or (isinstance(error, sqlite3.OperationalError) and not self._temporary):
                raise error
            self._database.close()
            if isinstance(error, sqlite3.OperationalError):  # no locks, no space, not writable
                self._database = self._open_temporary(error)
            else:
                self._delete(error)
                self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        self._opened += 1
        path = str(self._path)
        try:
            if locked_elsewhere(self._path.parent):
                raise OSError("the run is in progress on another machine, which may not see the locks of this one")
            for each in (self._path, self._journal):
                if each.is_symlink() or (each.exists() and not each.is_dir()):
                    open_received(each).close()
            try:
                return self._connect(path)
            except sqlite3.OperationalError:  # no locks, no space, not writable
                raise
            except sqlite3.DatabaseError as error:
                self._delete(error)
                return self._connect(path)
        except (sqlite3.Error, OSError) as error:
            if not self._temporary:
                raise
            return self._open_temporary(error)

    def _open_temporary(self, error: Exception) -> sqlite3.Connection:
        logger.debug("%s cannot be used: %s", self._path, error)
        self._opened += 1
        return self._connect("")

    def _delete(self, error: sqlite3.Error) -> None:
        """Deletes a damaged database, with the journal of a transaction that did not end."""
        logger.warning("%s is damaged (%s): it is made anew", self._path, error)
        for each in (self._path, self._journal):
            each.unlink(missing_ok=True)

    def _connect(self, path: str) -> sqlite3.Connection:
        """The database in a file, or a temporary one if `path` is empty, with the tables of this version."""
        database = sqlite3.connect(path, _WAIT, check_same_thread=False, isolation_level=None)
        database.row_factory = sqlite3.Row
        database.create_function("status", 5, self._status)
        try:
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA cache_spill = OFF")  # others may read until the end of a transaction
            if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION or self._is_stale(database):
                self._clear(database)
            [self._generation] = database.execute("SELECT generation FROM about").fetchone()
        except sqlite3.Error:
            database.close()
            raise
        self._inode = _inode(self._path) if path else 0
        return database

    def _is_stale(self, database: sqlite3.Connection) -> bool:
        folder, boot, _ = database.execute("SELECT * FROM about").fetchone()
        return folder != str(self._path.parent) or boot not in (None, _boot())

    def _clear(self, database: sqlite3.Connection) -> None:
        database.execute("BEGIN IMMEDIATE")
        try:
            tables = [name for [name] in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            last = database.execute("SELECT generation FROM about").fetchone()[0] if "about" in tables else 0
            for name in tables:
                database.execute(f"DROP TABLE {name}")
            for statement in _TABLES.split(";"):
                database.execute(statement)
            about = (str(self._path.parent), _boot(), last + 1)
            database.execute("INSERT INTO about VALUES (?, ?, ?)", about)
            database.execute(f"PRAGMA user_version = {_VERSION}")
            database.execute("COMMIT")
        finally:
            if database.in_transaction:
                database.execute("ROLLBACK")


def _boot() -> str:
    """Changes when the machine is restarted, and differs between machines; empty where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
