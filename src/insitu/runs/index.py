"""The index of the groups and episodes of a run, which follows its files as they grow.

It holds what lists show and sort by, and where the rest is in the files. `refresh` reads what was appended since the
last time, by this process or another; a run whose files were cut or replaced, as by `--resume`, is indexed anew.
"""

import math
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from insitu.disk.json_files import AppendedLines, Block, FileReplaced, Line, read_block, read_line, shorter_than_written
from insitu.errors import InsituError
from insitu.runs.files import ADVANTAGES, BLOCKS, CALLS, EPISODES, GROUPS, METRICS
from insitu.runs.index_database import IndexDatabase, Outdated, Values
from insitu.runs.inspection import TrainingStatus
from insitu.runs.reader import RunReader, StoredGroup
from insitu.schemas.episodes import FORMAT_VERSION

_BATCH = 100
"""Groups or lines that are indexed before others may read the index."""
_PAUSE = 0.05
"""Seconds that a group or a batch of lines waits for requests to be answered."""
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_NOT_STORABLE = (sqlite3.Error, OverflowError, UnicodeEncodeError)

_STATUS = """status(e.reward IS NULL OR NOT e.in_group OR e.dropped IS NOT NULL, epochs.epoch IS NOT NULL, epochs.job,
    e.trained, e.sent)"""
QUERY = f"SELECT e.*, {_STATUS} AS status FROM episodes e LEFT JOIN epochs ON epochs.epoch = e.epoch"
"""The query of episodes with their training status, which is None as long as it is not indexed."""

_MISSING, _UNREADABLE = "missing", "unreadable"
"""Keys of problems that may go away. Those of others are the names of files."""
_TO_READ, _INDEXED, _SHORT, _DAMAGED = range(4)
"""States of a group: its lines are to be read, were read, are not all in the file, or cannot be read."""


class Indexed(NamedTuple):
    """How many groups have their episodes in the index, of how many."""

    groups: int
    of: int


class RunIndex:
    """The index of a run. Any thread may call it; one `refresh` runs at a time.

    With `temporary` false, raises sqlite3.Error or OSError if there can be none in the run's directory.
    """

    def __init__(self, run: Path, *, temporary: bool = True) -> None:
        self.files = RunReader(run)
        self.groups_known = threading.Event()
        """Set when all groups have been read once; their episodes are read after them."""
        self._requests = 0
        self._no_requests = threading.Event()
        self._no_requests.set()
        self._refreshing = threading.Lock()
        self._closed = False
        self._complete = False
        self._notes: list[tuple[str, str]] = []
        """Problems that are not in the database yet."""
        self._database = IndexDatabase(run, self._status, temporary=temporary)

    def close(self) -> None:
        """Ends a refresh that is running."""
        self._closed = True
        self.groups_known.set()
        with self._refreshing:
            self._database.close()

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever the content does."""
        return self._database.version

    @property
    def indexed(self) -> Indexed:
        [row] = self.select("SELECT count(*) FILTER (WHERE state > 0) AS read, count(*) AS of FROM groups")
        read = row["read"] if self._complete else min(row["read"], row["of"] - 1)  # advantages come after all groups
        return Indexed(max(read, 0), row["of"])

    @property
    def complete(self) -> bool:
        """Whether all files have been read once."""
        return self._complete

    @property
    def problems(self) -> list[str]:
        """What is damaged, a sentence per file."""
        return [
            row["problem"] + f" (and {row['count'] - 1} more in this file)" * (row["count"] > 1)
            for row in self.select("SELECT * FROM problems ORDER BY rowid")
        ]

    @contextmanager
    def first(self) -> Iterator[None]:
        """Lets a request be answered before indexing continues, which would compete for the interpreter."""
        self._requests += 1
        self._no_requests.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._no_requests.set()

    def select(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        return self._database.select(query, values)

    def refresh(self) -> None:
        """Indexes what the files hold by now."""
        with self._refreshing:
            replaced = False
            while not self._closed:
                self._notes.clear()
                try:
                    if replaced:
                        self.reset()
                    if not self._database.check():
                        self._complete = False
                    replaced = False
                    self._read_files()
                except Outdated:  # by a process that does the same
                    continue
                except FileReplaced:
                    replaced = True
                except sqlite3.DatabaseError as error:
                    self._database.replace(error)
                else:
                    return

    def reset(self) -> None:
        """Forgets what the files held, as they were cut or replaced."""
        self._database.reset()

    def _read_files(self) -> None:
        """Reads the files in the reverse order of their writing, so that what a line refers to is read as well."""
        try:
            self._insert(METRICS, _epoch, _ADD_EPOCH)
            advantages = self.files.size(ADVANTAGES)  # those after it may be of groups that are not read this time
            self._insert(GROUPS, _group, _ADD_GROUP)
            self.groups_known.set()
            self._retry_short_groups()
            self._read_episodes()
            self._insert(ADVANTAGES, _advantages, _ADD_ADVANTAGES, advantages)
            self._forget(_UNREADABLE)
        except OSError as error:
            self._forget(_UNREADABLE)
            self._note(_UNREADABLE, f"{error.filename} cannot be read: {error.strerror}")
            self._write_notes()
            self.groups_known.set()
        self._complete = not self._closed

    def _insert(
        self, name: str, read: Callable[[dict[str, Any], Line], Values], statement: str, end: int | None = None
    ) -> None:
        """Executes a statement with what `read` takes from each new record of a file; damaged ones are noted."""
        while not self._closed:
            before = self._database.position(name)
            lines = AppendedLines(self.files.folder / name, before)
            batch = [*islice(lines.read(end), _BATCH)]
            if not batch:
                return
            self._no_requests.wait(_PAUSE)
            if batch[0].number == 1 and name != METRICS and not self._has_format(name, batch.pop(0)):
                return
            values = [found for line in batch if (found := self._read_line(name, line, read)) is not None]
            with self._database.changing():
                self._database.move(name, before, lines.position)
                self._execute(name, statement, values)
                self._write_notes()

    def _has_format(self, name: str, first: Line) -> bool:
        """Whether the file of this first line can be read; a damaged line is noted."""
        path = self.files.folder / name
        try:
            header = read_line(path, first.number, first.content)
        except InsituError as error:
            self._note(name, str(error))
            return True
        if header != {"format": FORMAT_VERSION}:
            problem = f"{path} has format {header.get('format', 'unknown')}; supported: {FORMAT_VERSION}"
            self._database.execute("INSERT OR IGNORE INTO problems VALUES (?, ?, 1)", (name, problem))
            return False
        return True

    def _read_line(self, name: str, line: Line, read: Callable[[dict[str, Any], Line], Values]) -> Values | None:
        path = self.files.folder / name
        try:
            return read(read_line(path, line.number, line.content), line)
        except InsituError as error:
            self._note(name, str(error))
        except _MALFORMED as error:
            self._note(name, f"{path}, line {line.number} has another form: {error!r}")
        return None

    def _execute(self, name: str, statement: str, values: list[Values]) -> None:
        """Values that a database cannot hold are noted and left out."""
        self._database.execute("SAVEPOINT all_values")
        try:
            self._database.executemany(statement, values)
        except _NOT_STORABLE as error:
            if len(values) == 1:
                self._note(name, f"{self.files.folder / name} has a record of another form: {error}")
                return
            self._database.execute("ROLLBACK TO all_values")
            for each in values:
                self._execute(name, statement, [each])

    def _retry_short_groups(self) -> None:
        """Groups whose lines were not all in the file, which may have been copied meanwhile."""
        if not self.select("SELECT 1 FROM groups WHERE state = ? LIMIT 1", (_SHORT,)):
            self._forget(_MISSING)
            return
        enough = "state = ? AND episodes_offset + episodes_size <= ?"
        size = self.files.size(EPISODES)
        if self.select(f"SELECT 1 FROM groups WHERE {enough} LIMIT 1", (_SHORT, size)):
            with self._database.changing():
                self._database.execute(f"UPDATE groups SET state = ? WHERE {enough}", (_TO_READ, _SHORT, size))
                # the advantages of their episodes have been read already
                self._database.execute("DELETE FROM files WHERE name = ?", (ADVANTAGES,))

    def _read_episodes(self) -> None:
        while not self._closed:
            groups = self.select("SELECT * FROM groups WHERE state = 0 ORDER BY id LIMIT ?", (_BATCH,))
            if not groups:
                return
            read = [(group, *self._read_group(group)) for group in groups]
            with self._database.changing():
                states = [(state, group["id"]) for group, state, _ in read]
                changed = self._database.executemany("UPDATE groups SET state = ? WHERE id = ? AND state = 0", states)
                if changed.rowcount != len(states):
                    raise Outdated
                episodes = [values for _, _, found in read for values in found]
                self._execute(EPISODES, _ADD_EPISODE, episodes)
                self._write_notes()

    def _read_group(self, group: sqlite3.Row) -> tuple[int, list[Values]]:
        """The state of a group, and what the index holds of its episodes."""
        self._no_requests.wait(_PAUSE)
        path, block = self.files.folder / EPISODES, stored_group(group).episodes
        if (size := self.files.size(EPISODES)) < block.end:
            self._note(_MISSING, shorter_than_written(path, size, block.end))
            return _SHORT, []
        try:
            members = set(self.line(GROUPS, group)["episodes"])
            records = read_block(path, block)
            return _INDEXED, [(group["id"], group["row_key"], *_episode(record, members)) for record in records]
        except InsituError as error:
            self._note(EPISODES, str(error))
        except _MALFORMED as error:
            self._note(EPISODES, f"{path}, {block} has another form: {error!r}")
        return _DAMAGED, []

    def line(self, name: str, row: sqlite3.Row) -> dict[str, Any]:
        """The record of the line that a row of the index names. Raises InsituError if it is no longer there."""
        return self.files.line_at(name, row["line_offset"], row["line_size"], row["number"])

    def _note(self, name: str, problem: str) -> None:
        self._notes.append((name, problem))

    def _write_notes(self) -> None:
        statement = "INSERT INTO problems VALUES (?, ?, 1) ON CONFLICT (name) DO UPDATE SET count = count + 1"
        self._database.executemany(statement, self._notes)
        self._notes.clear()

    def _forget(self, name: str) -> None:
        if self.select("SELECT 1 FROM problems WHERE name = ?", (name,)):
            self._database.execute("DELETE FROM problems WHERE name = ?", (name,))

    def _status(self, dropped: int, epoch_is_over: int, job: str | None, trained: int | None, sent: int) -> str | None:
        if trained is None and not self._complete and not dropped and epoch_is_over and job == "completed":
            return None
        return str(
            TrainingStatus.of(
                dropped=bool(dropped), epoch_is_over=bool(epoch_is_over), job=job, trained=trained or 0, sent=bool(sent)
            )
        )


def _group(record: dict[str, Any], line: Line) -> Values:
    rewards = [float(reward) for reward in record["rewards"]]
    row_id = str(record["row_id"])
    blocks = {name: Block(*record["blocks"][name]) for name in BLOCKS}
    if any(number < 0 for block in blocks.values() for number in block):
        raise ValueError(f"blocks are {record['blocks']}")
    return (
        *(int(record["epoch"]), row_id, natural(row_id), int(record["num_episodes"]), orjson.dumps(rewards).decode()),
        *_mean_and_deviation(rewards),
        *(orjson.dumps(record["dropped"]).decode(), sum(record["dropped"].values())),
        *(line.offset, len(line.content), line.number),
        *(*blocks[EPISODES], *blocks[CALLS]),
    )


def _mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The standard deviation is that of a sample, as in `training_metrics.jsonl`."""
    n = len(values)
    if not n:
        return None, None
    mean = math.fsum(values) / n
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else None


def _epoch(record: dict[str, Any], line: Line) -> Values:
    return int(record["epoch"]), record.get("job")


def _advantages(record: dict[str, Any], line: Line) -> Values:
    advantages = record["advantages"]
    trained = (record["dropped"], len(advantages), None in advantages.values())
    return (*trained, line.offset, len(line.content), line.number, record["episode"])


_EPISODE_KEYS = (
    *("epoch", "generation", "attempt", "outcome", "reason", "reward", "seconds", "calls", "prompt_tokens"),
    "sampled_tokens",
)
_episode_values = itemgetter(*_EPISODE_KEYS)


def _episode(record: Mapping[str, Any], members: set[str]) -> Values:
    name = str(record["episode"])
    return (*_episode_values(record), name, str(record["row_id"]), name in members)


def _insertion(table: str, *columns: str) -> str:
    return f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


_ADD_GROUP = _insertion(
    "groups",
    *("epoch", "row_id", "row_key", "num_episodes", "rewards", "mean", "std", "dropped", "num_dropped", "line_offset"),
    *("line_size", "number", "episodes_offset", "episodes_size", "calls_offset", "calls_size"),
)
_ADD_EPISODE = _insertion("episodes", "group_id", "row_key", *_EPISODE_KEYS, "episode", "row_id", "in_group")
_ADD_EPOCH = _insertion("epochs", "epoch", "job")
_ADD_ADVANTAGES = (
    "UPDATE episodes SET dropped = ?, trained = ?, sent = ?, line_offset = ?, line_size = ?, number = ? "
    "WHERE episode = ?"
)


def natural(text: str) -> str:
    """A key that sorts row 2 before row 10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text)


def stored_group(group: sqlite3.Row) -> StoredGroup:
    episodes = Block(group["episodes_offset"], group["episodes_size"])
    calls = Block(group["calls_offset"], group["calls_size"])
    return StoredGroup(group["epoch"], group["row_id"], group["num_episodes"], episodes, calls)
