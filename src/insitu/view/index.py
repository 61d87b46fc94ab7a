"""An index of the groups and episodes of a run, which follows its files as they grow.

It holds what lists show and sort by, and where the rest is in the files, in a temporary database of SQLite that
vanishes with the process. `refresh` reads what was appended since the last time; a run whose files were cut or
replaced, as by `--resume`, is indexed anew.
"""

import math
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import orjson

from insitu.errors import InsituError
from insitu.files import Block, read_block, read_line, shorter_than_written
from insitu.schemas.episodes import FORMAT_VERSION
from insitu.training.inspection import TrainingStatus
from insitu.trajectories.stored import BLOCK_FILES, EPISODES_FILE, GROUPS_FILE, StoredGroup
from insitu.view.appended import AppendedLines, FileReplaced, Line

ADVANTAGES, METRICS = "advantages.jsonl", "training_metrics.jsonl"
_BATCH = 200
"""Groups or lines that are indexed before others may read the index."""
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, InsituError, OverflowError)

_TABLES = """
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, epoch INTEGER, row_id TEXT, row_key TEXT, num_episodes INTEGER, rewards TEXT, mean REAL,
    std REAL, dropped TEXT, num_dropped INTEGER, line_offset INTEGER, line_size INTEGER, number INTEGER,
    episodes_offset INTEGER, episodes_size INTEGER, calls_offset INTEGER, calls_size INTEGER, state INTEGER DEFAULT 0
);
CREATE INDEX groups_of_epoch ON groups (epoch, row_key);
CREATE INDEX groups_of_row ON groups (row_id, epoch);
CREATE INDEX groups_to_read ON groups (id) WHERE state = 0;
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, group_id INTEGER, episode TEXT, epoch INTEGER, row_id TEXT, row_key TEXT,
    generation INTEGER, attempt INTEGER, outcome TEXT, reason TEXT, reward REAL, seconds REAL, calls INTEGER,
    prompt_tokens INTEGER, sampled_tokens INTEGER, in_group INTEGER, dropped TEXT, trained INTEGER, sent INTEGER,
    line_offset INTEGER, line_size INTEGER, number INTEGER
);
CREATE INDEX episodes_of_group ON episodes (group_id);
CREATE INDEX episodes_by_name ON episodes (episode);
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, job TEXT);
"""
_STATUS = """status(e.reward IS NULL OR NOT e.in_group OR e.dropped IS NOT NULL, epochs.epoch IS NOT NULL, epochs.job,
    e.trained, e.sent)"""
EPISODES = f"SELECT e.*, {_STATUS} AS status FROM episodes e LEFT JOIN epochs ON epochs.epoch = e.epoch"
"""The query of episodes with their training status, which is None as long as it is not indexed."""

_TO_READ, _INDEXED, _SHORT, _DAMAGED = range(4)
"""States of a group: its lines are to be read, were read, are not all in the file, or cannot be read."""


class Indexed(NamedTuple):
    """How many groups have their episodes in the index, of how many."""

    groups: int
    of: int


class RunIndex:
    """The index of a run. Any thread may call it; one `refresh` runs at a time."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.version = 0
        """Changes whenever the content does."""
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Starts with nothing indexed."""
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._database.row_factory = sqlite3.Row
        self._database.create_function("status", 5, self._status)
        self._database.executescript(_TABLES)
        self._files = {name: AppendedLines(self.run / name) for name in (GROUPS_FILE, ADVANTAGES, METRICS)}
        self._problems: dict[str, tuple[str, int]] = {}
        self._unknown_format: set[str] = set()
        self._complete = False
        self.version += 1

    def close(self) -> None:
        """Ends a refresh that is running, and forgets the index."""
        self._closed = True
        with self._refreshing, self._lock:
            self._database.close()

    @property
    def indexed(self) -> Indexed:
        [row] = self.select("SELECT count(*) FILTER (WHERE state > 0) AS read, count(*) AS of FROM groups")
        return Indexed(row["read"], row["of"])

    @property
    def complete(self) -> bool:
        """Whether all files have been read once."""
        return self._complete

    @property
    def problems(self) -> list[str]:
        """What is damaged, a sentence per file."""
        return [
            problem + f" (and {count - 1} more in this file)" * (count > 1)
            for problem, count in [*self._problems.values()]
        ]

    def select(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def refresh(self) -> None:
        """Indexes what the files hold by now."""
        with self._refreshing:
            try:
                self._read_files()
            except FileReplaced:
                with self._lock:
                    self._database.close()
                    self._begin()
                self._read_files()

    def _read_files(self) -> None:
        try:
            self._insert(GROUPS_FILE, self._add_group)
            self._insert(METRICS, self._add_epoch)
            self._retry_short_groups()
            self._read_episodes()
            self._insert(ADVANTAGES, self._add_advantages)
        except OSError as error:
            self._note(error.filename, f"{error.filename} cannot be read: {error.strerror}")
            return
        self._complete = not self._closed

    def _insert(self, name: str, add: Any) -> None:
        """Calls `add` with each new record of a file and its line; a record of another form is noted."""
        for lines in _batches(self._files[name].read()):
            if self._closed:
                return
            with self._lock, self._transaction():
                for line in lines:
                    try:
                        self._insert_line(name, line, add)
                    except _MALFORMED as error:
                        where = f"{self.run / name}, line {line.number}"
                        text = str(error) if isinstance(error, InsituError) else f"{where} has another form: {error!r}"
                        self._note(name, text)

    def _insert_line(self, name: str, line: Line, add: Any) -> None:
        if name in self._unknown_format:
            return
        record = read_line(self.run / name, line.number, line.content)
        if line.number == 1 and name != METRICS:
            if record != {"format": FORMAT_VERSION}:
                self._unknown_format.add(name)
                found = record.get("format", "unknown")
                raise InsituError(f"{self.run / name} has format {found}; supported: {FORMAT_VERSION}")
            return
        add(record, line)

    def _transaction(self) -> "_Transaction":
        self.version += 1
        return _Transaction(self._database)

    def _add_group(self, record: dict[str, Any], line: Line) -> None:
        rewards = [float(reward) for reward in record["rewards"]]
        blocks = [Block(*record["blocks"][name]) for name in BLOCK_FILES]
        row_id = str(record["row_id"])
        values = {
            "epoch": int(record["epoch"]),
            "row_id": row_id,
            "row_key": natural(row_id),
            "num_episodes": int(record["num_episodes"]),
            "rewards": orjson.dumps(rewards).decode(),
            "mean": fmean(rewards) if rewards else None,
            "std": stdev(rewards) if len(rewards) > 1 and all(map(math.isfinite, rewards)) else None,
            "dropped": orjson.dumps(record["dropped"]).decode(),
            "num_dropped": sum(record["dropped"].values()),
            "line_offset": line.offset,
            "line_size": len(line.content),
            "number": line.number,
            **dict(zip(("episodes_offset", "episodes_size"), blocks[0], strict=True)),
            **dict(zip(("calls_offset", "calls_size"), blocks[1], strict=True)),
        }
        self._database.execute(_insertion("groups", values), values)

    def _add_epoch(self, record: dict[str, Any], line: Line) -> None:
        self._database.execute("INSERT OR REPLACE INTO epochs VALUES (?, ?)", (int(record["epoch"]), record.get("job")))

    def _add_advantages(self, record: dict[str, Any], line: Line) -> None:
        advantages = record["advantages"]
        values = (record["dropped"], len(advantages), None in advantages.values())
        where = (line.offset, len(line.content), line.number)
        self._database.execute(
            "UPDATE episodes SET dropped = ?, trained = ?, sent = ?, line_offset = ?, line_size = ?, number = ? "
            "WHERE episode = ?",
            (*values, *where, record["episode"]),
        )

    def _retry_short_groups(self) -> None:
        """Groups whose lines were not all in the file, which may have been copied meanwhile."""
        size = _size(self.run / EPISODES_FILE)
        with self._lock:
            self._database.execute(
                "UPDATE groups SET state = ? WHERE state = ? AND episodes_offset + episodes_size <= ?",
                (_TO_READ, _SHORT, size),
            )

    def _read_episodes(self) -> None:
        while not self._closed:
            groups = self.select("SELECT * FROM groups WHERE state = 0 ORDER BY id LIMIT ?", (_BATCH,))
            if not groups:
                return
            read = [(group, *self._read_group(group)) for group in groups]
            with self._lock, self._transaction():
                for group, state, records in read:
                    self._database.execute("UPDATE groups SET state = ? WHERE id = ?", (state, group["id"]))
                    for record in records:
                        self._database.execute(_insertion("episodes", record), record)

    def _read_group(self, group: sqlite3.Row) -> tuple[int, list[dict[str, Any]]]:
        """The state of a group, and what the index holds of its episodes."""
        path, block = self.run / EPISODES_FILE, stored_group(group).episodes
        size = _size(path)
        if size < block.end:
            self._note(EPISODES_FILE, shorter_than_written(path, size, block.end))
            return _SHORT, []
        try:
            line = read_at(self.run / GROUPS_FILE, group)
            members = set(line["episodes"])
            return _INDEXED, [
                {"group_id": group["id"], "row_key": group["row_key"], **_episode(record, members)}
                for record in read_block(path, block)
            ]
        except _MALFORMED as error:
            text = str(error) if isinstance(error, InsituError) else f"{path} has a record of another form: {error!r}"
            self._note(EPISODES_FILE, text)
            return _DAMAGED, []

    def _note(self, name: str, problem: str) -> None:
        first, count = self._problems.get(name, (problem, 0))
        self._problems[name] = first, count + 1

    def _status(self, dropped: int, epoch_is_over: int, job: str | None, trained: int | None, sent: int) -> str | None:
        if trained is None and not self._complete and not dropped and epoch_is_over and job == "completed":
            return None
        return str(
            TrainingStatus.of(
                dropped=bool(dropped), epoch_is_over=bool(epoch_is_over), job=job, trained=trained or 0, sent=bool(sent)
            )
        )


class _Transaction:
    """Commits what the block writes, as one."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN")

    def __exit__(self, *exc_info: object) -> None:
        self._database.execute("COMMIT")


def natural(text: str) -> str:
    """A key that sorts row 2 before row 10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text)


def stored_group(group: sqlite3.Row) -> StoredGroup:
    episodes = Block(group["episodes_offset"], group["episodes_size"])
    calls = Block(group["calls_offset"], group["calls_size"])
    return StoredGroup(group["epoch"], group["row_id"], group["num_episodes"], episodes, calls)


def read_at(path: Path, row: sqlite3.Row) -> dict[str, Any]:
    """The record of the line that a row of the index names. Raises InsituError if it is no longer there."""
    try:
        with path.open("rb") as file:
            file.seek(row["line_offset"])
            return read_line(path, row["number"], file.read(row["line_size"]))
    except OSError as error:
        raise InsituError(f"{path} cannot be read: {error.strerror}") from error


def _episode(record: Mapping[str, Any], members: set[str]) -> dict[str, Any]:
    """What the index holds of an episode."""
    keys = ("epoch", "generation", "attempt", "outcome", "reason", "reward", "seconds", "calls")
    return {
        **{key: record[key] for key in (*keys, "prompt_tokens", "sampled_tokens")},
        "episode": str(record["episode"]),
        "row_id": str(record["row_id"]),
        "in_group": record["episode"] in members,
    }


def _insertion(table: str, values: Mapping[str, Any]) -> str:
    return f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(f':{key}' for key in values)})"


def _batches(lines: Iterator[Line]) -> Iterator[list[Line]]:
    batch: list[Line] = []
    for line in lines:
        batch.append(line)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
