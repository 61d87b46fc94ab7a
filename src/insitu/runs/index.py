"""The index of the groups and episodes of a run, which follows its files as they grow.

It holds what lists show and sort by, and where the rest is in the files. `refresh` reads what was appended since the
last time; a run whose files were cut or replaced, as by `--resume`, is indexed anew.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
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
from insitu.runs.index_database import IndexDatabase, Values
from insitu.runs.records import StoredGroup, excerpt, format_problem, membership, natural

_BATCH = 100
"""Groups or lines that are indexed in a transaction, for which requests wait."""
_DAMAGES = (InsituError, KeyError, TypeError, ValueError, AttributeError, OverflowError)
_END = "(episodes_offset + episodes_size)"
"""Where the episodes of a group end in their file."""

_STATUS = """status(e.in_group < 1 + (e.reward IS NULL) OR a.dropped IS NOT NULL, epochs.epoch IS NOT NULL, epochs.job,
    a.trained, a.sent)"""
_QUESTION = "(SELECT question FROM groups WHERE groups.id = e.group_id)"
_TRAINED = "a.dropped, a.trained, a.sent, a.sides, a.line_offset, a.line_size, a.number"
QUERY = (
    f"SELECT e.*, {_TRAINED}, {_STATUS} AS status, {_QUESTION} AS question FROM episodes e "
    "LEFT JOIN advantages a ON a.episode = e.episode LEFT JOIN epochs ON epochs.epoch = e.epoch"
)
"""The query of episodes with their training status, which is None as long as it is not indexed."""


class Indexed(NamedTuple):
    """How many groups have their episodes in the index, of how many."""

    groups: int
    of: int


class RunIndex(IndexDatabase):
    """The index of a run. Any thread may call it; one `refresh` runs at a time."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.groups_known = threading.Event()
        """Set when all groups have been read once; their episodes are read after them."""
        self._refreshing = threading.Lock()
        self._closed = False
        self._passing: list[str] = []
        """What the last refresh could not read. The next one reads it again."""
        super().__init__(run)

    def close(self) -> None:
        """Ends a refresh that is running. What was written survives a power failure from now on."""
        self._closed = True
        self.groups_known.set()
        with self._refreshing:
            super().close()

    @property
    def indexed(self) -> Indexed:
        read = f"SELECT count(*) FILTER (WHERE is_read OR {_END} > ?) AS read, count(*) AS of FROM groups"
        [row] = self.select(read, (file_size(self.run / EPISODES),))
        # advantages come after all groups
        return Indexed(row["read"] if self.complete else max(min(row["read"], row["of"] - 1), 0), row["of"])

    @property
    def problems(self) -> list[str]:
        """What is damaged, a sentence per file."""
        return [*self._passing] + [
            row["problem"] + f" (and {row['count'] - 1} more in this file)" * (row["count"] > 1)
            for row in self.select("SELECT * FROM problems ORDER BY rowid")
        ]

    def refresh(self) -> None:
        """Indexes what the files hold by now."""
        with self._refreshing:
            self.check()
            while not self._closed:
                try:
                    self._passing = [*self._read_files()]
                except FileReplaced:
                    self.rebuild()
                except sqlite3.DatabaseError as error:
                    self.rebuild(error)
                else:
                    break
            self.groups_known.set()

    def _read_files(self) -> Iterator[str]:
        """Yields what is wrong now. An epoch that is over has its advantages, as they are read later."""
        try:
            yield from self._read_lines(METRICS, _epoch, _ADD_EPOCH)
            yield from self._read_lines(GROUPS, _group, _ADD_GROUP)
            self.groups_known.set()
            yield from self._read_episodes()
            yield from self._read_lines(ADVANTAGES, _advantages, _ADD_ADVANTAGES)
        except OSError as error:
            yield str(cannot_read(error.filename, error))
        self.complete = not self._closed

    def _read_lines(self, name: str, read: Callable[[dict[str, Any], Line], Values], statement: str) -> Iterator[str]:
        """Executes a statement with what `read` takes from each new record of a file; damaged ones are noted."""
        path = self.run / name
        while not self._closed:
            lines = AppendedLines(path, self.position(name))
            batch = [*islice(lines.read(), _BATCH)]
            if not batch:
                return
            values, damages = list[Values](), list[str]()
            for line in batch:
                try:
                    record = read_line(path, line.number, line.content)
                    if line.number > 1 or name == METRICS:
                        values.append(read(record, line))
                    elif problem := format_problem(record):
                        yield f"{path} {problem}"
                        return
                except _DAMAGES as error:
                    damages.append(_damage(f"{path}, line {line.number}", error))
            with self.changing():
                self.insert(name, statement, values)
                self.note(name, damages)
                self.move(name, lines.position)

    def _read_episodes(self) -> Iterator[str]:
        path = self.run / EPISODES
        while not self._closed:
            size = file_size(path)
            whole = f"SELECT * FROM groups WHERE is_read = 0 AND {_END} <= ? ORDER BY id LIMIT ?"
            groups = self.select(whole, (size, _BATCH))
            if not groups:
                break
            episodes, damages = list[Values](), list[str]()
            for group in groups:
                block = stored_group(group).episodes
                try:
                    line = self.line(GROUPS, group)
                    shared = (group["id"], group["row_key"])
                    episodes += [(*shared, *_episode(record, line)) for record in read_block(path, block)]
                except _DAMAGES as error:
                    damages.append(_damage(f"{path}, {block}", error))
            with self.changing():
                self.insert(GROUPS, "UPDATE groups SET is_read = 1 WHERE id = ?", [(group["id"],) for group in groups])
                self.insert(EPISODES, _ADD_EPISODE, episodes)
                self.note(EPISODES, damages)
        [row] = self.select(f"SELECT max({_END}) AS written FROM groups WHERE is_read = 0")
        if row["written"] is not None and not self._closed:  # the folder may be copied just now
            yield shorter_than_written(path, size, row["written"])

    def line(self, name: str, row: sqlite3.Row) -> dict[str, Any]:
        """The record of the line that a row of the index names. Raises InsituError if it is no longer there."""
        return read_line_at(self.run / name, row["number"], Block(row["line_offset"], row["line_size"]))


def _damage(where: str, error: Exception) -> str:
    return str(error) if isinstance(error, InsituError) else f"{where} has another form: {error!r}"


def _group(record: dict[str, Any], line: Line) -> Values:
    rewards = [float(reward) for reward in record["rewards"]]
    row_id = str(record["row_id"])
    blocks = {name: Block(*record["blocks"][name]) for name in BLOCKS}
    if any(number < 0 for block in blocks.values() for number in block):
        raise ValueError(f"blocks are {record['blocks']}")
    return (
        *(int(record["epoch"]), row_id, natural(row_id), int(record["num_episodes"]), orjson.dumps(rewards).decode()),
        *(fmean(rewards) if rewards else None, stdev(rewards) if len(rewards) > 1 else None),
        *(orjson.dumps(record["dropped"]).decode(), sum(record["dropped"].values())),
        *(line.offset, len(line.content), line.number),
        *(*blocks[EPISODES], *blocks[CALLS]),
        *map(excerpt, ((record.get("row") or {}).get(name) for name in ("question", "expected"))),
    )


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
_ADD_ADVANTAGES = _insertion(
    *("advantages", "dropped", "trained", "sent", "sides", "line_offset", "line_size", "number", "episode")
)


def stored_group(group: sqlite3.Row) -> StoredGroup:
    episodes = Block(group["episodes_offset"], group["episodes_size"])
    calls = Block(group["calls_offset"], group["calls_size"])
    return StoredGroup(group["epoch"], group["row_id"], group["num_episodes"], episodes, calls)
