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

from insitu.disk.files import cannot_read, file_size
from insitu.disk.json_files import (
    AppendedLines,
    Block,
    FileReplaced,
    Line,
    read_block,
    read_line,
    read_line_at,
    shorter_than_written,
)
from insitu.errors import InsituError
from insitu.runs.files import ADVANTAGES, BLOCKS, CALLS, EPISODES, GROUPS, METRICS
from insitu.runs.index_database import IndexDatabase, Outdated, Values
from insitu.runs.records import StoredGroup, excerpt, format_problem, membership

_BATCH = 100
"""Groups or lines that are indexed before others may read the index."""
_PAUSE = 0.05
"""Seconds that a group or a batch of lines waits for requests to be answered."""
_DAMAGES = (InsituError, KeyError, TypeError, ValueError, AttributeError, OverflowError)
_NOT_STORABLE = (sqlite3.Error, OverflowError, UnicodeEncodeError)

_STATUS = """status(e.in_group < 1 + (e.reward IS NULL) OR e.dropped IS NOT NULL, epochs.epoch IS NOT NULL, epochs.job,
    e.trained, e.sent)"""
_QUESTION = "(SELECT question FROM groups WHERE groups.id = e.group_id)"
QUERY = (
    f"SELECT e.*, {_STATUS} AS status, {_QUESTION} AS question FROM episodes e "
    "LEFT JOIN epochs ON epochs.epoch = e.epoch"
)
"""The query of episodes with their training status, which is None as long as it is not indexed."""

_MISSING, _UNREADABLE = "missing", "unreadable"
"""Keys of problems that may go away. Those of others are the names of files."""
_TO_READ, _INDEXED, _SHORT, _DAMAGED = range(4)
"""States of a group: its lines are to be read, were read, are not all in the file, or cannot be read."""


class Indexed(NamedTuple):
    """How many groups have their episodes in the index, of how many."""

    groups: int
    of: int


class RunIndex(IndexDatabase):
    """The index of a run. Any thread may call it; one `refresh` runs at a time.

    With `temporary` false, raises sqlite3.Error or OSError if there can be none in the run's directory.
    """

    def __init__(self, run: Path, *, temporary: bool = True) -> None:
        self.run = run
        self.groups_known = threading.Event()
        """Set when all groups have been read once; their episodes are read after them."""
        self._requests = 0
        self._no_requests = threading.Event()
        self._no_requests.set()
        self._refreshing = threading.Lock()
        self._closed = False
        self._notes: list[tuple[str, str]] = []
        """Problems that are not in the database yet."""
        super().__init__(run, temporary=temporary)

    def close(self) -> None:
        """Ends a refresh that is running. What was written survives a power failure from now on."""
        self._closed = True
        self.groups_known.set()
        with self._refreshing:
            super().close()

    @property
    def indexed(self) -> Indexed:
        [row] = self.select("SELECT count(*) FILTER (WHERE state > 0) AS read, count(*) AS of FROM groups")
        read = row["read"] if self.complete else min(row["read"], row["of"] - 1)  # advantages come after all groups
        return Indexed(max(read, 0), row["of"])

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

    def refresh(self) -> None:
        """Indexes what the files hold by now."""
        with self._refreshing:
            replaced = False
            while not self._closed:
                self._notes.clear()
                try:
                    if replaced:
                        self.reset()
                    self.complete = self.check() and self.complete
                    replaced = False
                    self._read_files()
                except Outdated:  # by a process that does the same
                    continue
                except FileReplaced:
                    replaced = True
                except sqlite3.DatabaseError as error:
                    self.replace(error)
                else:
                    return

    def _read_files(self) -> None:
        """Reads the files in the reverse order of their writing, so that what a line refers to is read as well."""
        try:
            self._insert(METRICS, _epoch, _ADD_EPOCH)
            advantages = file_size(self.run / ADVANTAGES)  # those after it may be of groups that are not read this time
            self._insert(GROUPS, _group, _ADD_GROUP)
            self.groups_known.set()
            self._retry_short_groups()
            self._read_episodes()
            self._insert(ADVANTAGES, _advantages, _ADD_ADVANTAGES, advantages)
            self._forget(_UNREADABLE)
        except OSError as error:
            self._forget(_UNREADABLE)
            self._note(_UNREADABLE, str(cannot_read(error.filename, error)))
            self._write_notes()
            self.groups_known.set()
        self.complete = not self._closed

    def _insert(
        self, name: str, read: Callable[[dict[str, Any], Line], Values], statement: str, end: int | None = None
    ) -> None:
        """Executes a statement with what `read` takes from each new record of a file; damaged ones are noted."""
        path = self.run / name
        while not self._closed:
            before = self.position(name)
            lines = AppendedLines(path, before)
            batch = [*islice(lines.read(end), _BATCH)]
            if not batch:
                return
            self._no_requests.wait(_PAUSE)
            values: list[Values] = []
            for line in batch:
                try:
                    record = read_line(path, line.number, line.content)
                    if line.number > 1 or name == METRICS:
                        values.append(read(record, line))
                    elif problem := format_problem(record):
                        self.execute("INSERT OR IGNORE INTO problems VALUES (?, ?, 1)", (name, f"{path} {problem}"))
                        return
                except _DAMAGES as error:
                    self._note_damage(name, f"line {line.number}", error)
            with self.changing():
                self.move(name, before, lines.position)
                self._execute(name, statement, values)
                self._write_notes()

    def _execute(self, name: str, statement: str, values: list[Values]) -> None:
        """Values that a database cannot hold are noted and left out."""
        self.execute("SAVEPOINT all_values")
        try:
            self.executemany(statement, values)
        except _NOT_STORABLE as error:
            if len(values) == 1:
                self._note(name, f"{self.run / name} has a record of another form: {error}")
                return
            self.execute("ROLLBACK TO all_values")
            for each in values:
                self._execute(name, statement, [each])

    def _retry_short_groups(self) -> None:
        """Groups whose lines were not all in the file, which may have been copied meanwhile."""
        if not self.select("SELECT 1 FROM groups WHERE state = ? LIMIT 1", (_SHORT,)):
            self._forget(_MISSING)
            return
        enough = "state = ? AND episodes_offset + episodes_size <= ?"
        size = file_size(self.run / EPISODES)
        if self.select(f"SELECT 1 FROM groups WHERE {enough} LIMIT 1", (_SHORT, size)):
            with self.changing():
                self.execute(f"UPDATE groups SET state = ? WHERE {enough}", (_TO_READ, _SHORT, size))
                # the advantages of their episodes have been read already
                self.execute("DELETE FROM files WHERE name = ?", (ADVANTAGES,))

    def _read_episodes(self) -> None:
        while not self._closed:
            groups = self.select("SELECT * FROM groups WHERE state = 0 ORDER BY id LIMIT ?", (_BATCH,))
            if not groups:
                return
            read = [(group, *self._read_group(group)) for group in groups]
            with self.changing():
                states = [(state, group["id"]) for group, state, _ in read]
                changed = self.executemany("UPDATE groups SET state = ? WHERE id = ? AND state = 0", states)
                if changed.rowcount != len(states):
                    raise Outdated
                episodes = [values for _, _, rows in read for values in rows]
                self._execute(EPISODES, _ADD_EPISODE, episodes)
                self._write_notes()

    def _read_group(self, group: sqlite3.Row) -> tuple[int, list[Values]]:
        """The state of a group, and what the index holds of its episodes."""
        self._no_requests.wait(_PAUSE)
        path, block = self.run / EPISODES, stored_group(group).episodes
        if (size := file_size(self.run / EPISODES)) < block.end:
            self._note(_MISSING, shorter_than_written(path, size, block.end))
            return _SHORT, []
        try:
            line = self.line(GROUPS, group)
            records = read_block(path, block)
            return _INDEXED, [(group["id"], group["row_key"], *_episode(record, line)) for record in records]
        except _DAMAGES as error:
            self._note_damage(EPISODES, str(block), error)
        return _DAMAGED, []

    def line(self, name: str, row: sqlite3.Row) -> dict[str, Any]:
        """The record of the line that a row of the index names. Raises InsituError if it is no longer there."""
        return read_line_at(self.run / name, row["number"], Block(row["line_offset"], row["line_size"]))

    def _note_damage(self, name: str, where: str, error: Exception) -> None:
        unknown = f"{self.run / name}, {where} has another form: {error!r}"
        self._note(name, str(error) if isinstance(error, InsituError) else unknown)

    def _note(self, name: str, problem: str) -> None:
        self._notes.append((name, problem))

    def _write_notes(self) -> None:
        statement = "INSERT INTO problems VALUES (?, ?, 1) ON CONFLICT (name) DO UPDATE SET count = count + 1"
        self.executemany(statement, self._notes)
        self._notes.clear()

    def _forget(self, name: str) -> None:
        if self.select("SELECT 1 FROM problems WHERE name = ?", (name,)):
            self.execute("DELETE FROM problems WHERE name = ?", (name,))


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
        *map(excerpt, ((record.get("row") or {}).get(name) for name in ("question", "expected"))),
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
    sides = [side["side"] for side in record.get("sides", ()) if side["dropped"] is None]
    trained = (record["dropped"], len(advantages) or len(sides), None in advantages.values())
    named = ", ".join(dict.fromkeys(sorted(sides))) or None
    return (*trained, named, line.offset, len(line.content), line.number, record["episode"])


_EPISODE_KEYS = (
    *("epoch", "generation", "attempt", "outcome", "reason", "reward", "seconds", "calls", "prompt_tokens"),
    "sampled_tokens",
)
_episode_values = itemgetter(*_EPISODE_KEYS)


def _episode(record: Mapping[str, Any], group: Mapping[str, Any]) -> Values:
    name = str(record["episode"])
    return (*_episode_values(record), excerpt(record["output"]), name, str(record["row_id"]), membership(name, group))


def _insertion(table: str, *columns: str) -> str:
    return f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


_ADD_GROUP = _insertion(
    "groups",
    *("epoch", "row_id", "row_key", "num_episodes", "rewards", "mean", "std", "dropped", "num_dropped", "line_offset"),
    *("line_size", "number", "episodes_offset", "episodes_size", "calls_offset", "calls_size", "question", "expected"),
)
_ADD_EPISODE = _insertion("episodes", "group_id", "row_key", *_EPISODE_KEYS, "answer", "episode", "row_id", "in_group")
_ADD_EPOCH = _insertion("epochs", "epoch", "job")
_ADD_ADVANTAGES = (
    "UPDATE episodes SET dropped = ?, trained = ?, sent = ?, sides = ?, line_offset = ?, line_size = ?, number = ? "
    "WHERE episode = ?"
)


def natural(text: str) -> str:
    """A key that sorts row 2 before row 10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text)


def stored_group(group: sqlite3.Row) -> StoredGroup:
    episodes = Block(group["episodes_offset"], group["episodes_size"])
    calls = Block(group["calls_offset"], group["calls_size"])
    return StoredGroup(group["epoch"], group["row_id"], group["num_episodes"], episodes, calls)
