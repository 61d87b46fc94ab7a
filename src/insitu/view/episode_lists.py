"""The lists of groups and episodes of a run, from its index, which a thread keeps up to date."""

import logging
import sqlite3
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from insitu.disk.json_files import read_block
from insitu.errors import InsituError, RequestRefused
from insitu.runs.files import CALLS, EPISODES
from insitu.runs.index import QUERY, RunIndex, stored_group
from insitu.runs.index_database import TrainingStatus
from insitu.view.episode_pages import EpisodePages

logger = logging.getLogger(__name__)

_MOST_LINES = 1000
"""Lines of a page."""
_LARGEST = 2**63 - 1
_SEARCH_SECONDS = 0.5
"""How long a request reads on for a text."""
_SAID = ("messages", "message")
_ORDERS = 16
"""Orders that are remembered, so that scrolling does not sort a list again."""
_MOST_RUNS = 4
"""Runs whose index is kept."""
_PATIENCE = 0.25
"""Seconds to wait for a refresh: long enough for what a run has written since the last one."""
_GROUPS_SECONDS = 10.0
"""How long to wait for the groups, of which 100,000 are read in this time: a page without them would be wrong."""


class _Lines(NamedTuple):
    """The lines of a list: where they are, by what they can be sorted, and how parameters filter them, in SQL."""

    table: str
    name: str
    """The column by which a search names them."""
    source: str
    sorts: Mapping[str, str]
    filters: Mapping[str, tuple[str, type]]


_FILTERS: dict[str, tuple[str, type]] = {"epoch": ("epoch = ?", int), "row": ("row_id = ?", str)}
_SORTS = {"recorded": "id", "epoch": "epoch", "row": "row_key"}
_UNTRAINED = (
    "SELECT json_group_array(a.dropped) FROM episodes e JOIN advantages a ON a.episode = e.episode "
    "WHERE e.group_id = groups.id AND a.dropped IS NOT NULL"
)
"""Why episodes of a group were not trained after it was collected, a reason for each."""
_GROUPS = _Lines(
    table="groups",
    name="id",
    source=f"SELECT *, ({_UNTRAINED}) AS untrained FROM groups",
    sorts={
        **_SORTS,
        **{name: name for name in ("mean", "std", "num_episodes")},
        "dropped": "num_dropped + json_array_length(untrained)",
    },
    filters=_FILTERS,
)
_EPISODES = _Lines(
    table="episodes",
    name="episode",
    source=QUERY,
    sorts={
        **_SORTS,
        **{name: name for name in ("generation", "outcome", "status", "reward", "seconds", "calls")},
        "tokens": "prompt_tokens + sampled_tokens",
        "prompt_tokens": "prompt_tokens",
        "sampled_tokens": "sampled_tokens",
    },
    filters={
        **_FILTERS,
        "outcome": ("? IN (outcome, reason, dropped, status)", str),  # as `insitu trajectories show --outcome`
        "min_reward": ("reward >= ?", float),
        "max_reward": ("reward <= ?", float),
    },
)


def number(asked: Mapping[str, str], name: str, kind: Any, default: Any = None) -> Any:
    """The value of a parameter. Raises RequestRefused (400) if it is not a number."""
    if asked.get(name, "") == "":
        return default
    with suppress(ValueError):
        value = kind(asked[name])
        if kind is not int or abs(value) <= _LARGEST:
            return value
    expected = {int: "an integer", float: "a number"}[kind]
    problem = f"{name} is {asked[name]!r:.80}; expected {expected}"
    raise RequestRefused(problem, param=name, code="invalid_value")


class _Search:
    """Finds the episodes that say a text, whatever its case: in a message, a tool call, or their answer.

    Each request reads on for a while, so that the first matches are shown before all groups have been read.
    """

    def __init__(self, index: RunIndex, text: str) -> None:
        self._index, self._text = index, text
        self._lock = threading.Lock()
        self.searched = 0
        self._unread: dict[int, sqlite3.Row] = {}
        """Groups of which a part could not be read: the folder may be copied just now."""
        self._matches: dict[str, dict[Any, None]] = {"groups": {}, "episodes": {}}

    def matches(self, table: str) -> str:
        """What matches among the lines read, as JSON."""
        with self._lock:
            until = time.monotonic() + _SEARCH_SECONDS
            new = self._index.select("SELECT * FROM groups WHERE id > ? ORDER BY id", (self.searched,))
            for group in [*new, *self._unread.values()]:
                self._unread.pop(group["id"], None)
                self._read(group)
                self.searched = max(self.searched, group["id"])
                if time.monotonic() > until:
                    break
            return orjson.dumps([*self._matches[table]]).decode()

    def _read(self, group: sqlite3.Row) -> None:
        stored = stored_group(group)
        for name, block, keys in ((EPISODES, stored.episodes, ("output",)), (CALLS, stored.calls, _SAID)):
            try:
                records = read_block(self._index.run / name, block)
            except InsituError:  # which the page of the run tells
                self._unread[group["id"]] = group
                continue
            for record in records:
                if any(self._text in text.lower() for key in keys for text in _texts(record.get(key))):
                    self._matches["episodes"][record["episode"]] = self._matches["groups"][group["id"]] = None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        values = [each for key, each in value.items() if key != "role"] if isinstance(value, Mapping) else value
        for each in values:
            yield from _texts(each)


class Lists:
    """The lists of a run. Methods raise RequestRefused (400) for a parameter with a value it cannot have."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._sorted = lru_cache(_ORDERS)(self._read_sorted)
        self._searches = lru_cache(_MOST_RUNS)(lambda text, rebuilds: _Search(self._index, text))

    def groups(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """The answer of `/api/groups`."""
        total, rows = self._page(_GROUPS, asked)
        return {**self._about(total, asked), "groups": [*map(_group_line, rows)]}

    def episodes(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """The answer of `/api/episodes`."""
        total, rows = self._page(_EPISODES, asked)
        return {**self._about(total, asked), "episodes": [*map(episode_line, rows)]}

    def _search(self, text: str) -> _Search:
        return self._searches(text.lower(), self._index.rebuilds)

    def _about(self, total: int, asked: Mapping[str, str]) -> dict[str, Any]:
        """`collected` is how many episodes the newest epoch has by now, `searched` how many groups were searched."""
        newest = "SELECT epoch, sum(num_episodes) AS episodes FROM groups WHERE epoch = (SELECT max(epoch) FROM groups)"
        indexed, [collected] = self._index.indexed, self._index.select(newest)
        searched = self._search(text).searched if (text := asked.get("text", "")) else indexed.of
        about = {"total": total, "indexed": indexed._asdict(), "collected": dict(collected)}
        return about | {"searched": {"groups": searched, "of": indexed.of}}

    def _page(self, lines: _Lines, asked: Mapping[str, str]) -> tuple[int, list[Any]]:
        """The number of lines that meet the conditions, and those of the page."""
        sort = asked.get("sort") or "recorded"
        if sort not in lines.sorts:
            problem = f"sort is {sort!r:.80}; one of {', '.join(lines.sorts)}"
            raise RequestRefused(problem, param="sort", code="invalid_value")
        column, direction = lines.sorts[sort], "DESC" if asked.get("descending", "0") in ("1", "true") else "ASC"
        order = f"id {direction}" if column == "id" else f"{column} IS NULL, {column} {direction}, id"
        offset = max(number(asked, "offset", int, 0), 0)
        limit = min(max(number(asked, "limit", int, 100), 0), _MOST_LINES)
        filters = {name: each for name, each in lines.filters.items() if asked.get(name, "") != ""}
        values = tuple(number(asked, name, kind) for name, (_, kind) in filters.items())
        conditions = [condition for condition, _ in filters.values()]
        if text := asked.get("text", ""):
            conditions.append(f"{lines.name} IN (SELECT value FROM json_each(?))")
            values = (*values, self._search(text).matches(lines.table))
        select = self._index.select
        if column == "id" and not conditions:  # lists that grow are not sorted again and again
            [counted] = select(f"SELECT count(*) AS lines FROM {lines.table}")
            part = f"SELECT id FROM {lines.table} ORDER BY {order} LIMIT ? OFFSET ?"
            total, shown = counted["lines"], [row["id"] for row in select(part, (limit, offset))]
        else:
            query = f"SELECT id FROM ({lines.source}) WHERE {' AND '.join(conditions) or 'TRUE'} ORDER BY {order}"
            ids = self._sorted(self._index.version, query, values)
            total, shown = len(ids), [*ids[offset : offset + limit]]
        places = ", ".join("?" * len(shown))
        rows = {row["id"]: row for row in select(f"SELECT * FROM ({lines.source}) WHERE id IN ({places})", shown)}
        return total, [rows[one] for one in shown if one in rows]

    def _read_sorted(self, version: tuple[int, ...], query: str, values: tuple[Any, ...]) -> Sequence[int]:
        """The ids that a query selects from this version of the index."""
        return array("q", (row["id"] for row in self._index.select(query, values)))


_EPISODE_KEYS = (
    *("episode", "epoch", "row_id", "generation", "attempt", "outcome", "reason", "dropped", "status", "reward"),
    *("seconds", "calls", "prompt_tokens", "sampled_tokens", "sides", "question", "answer"),
)
_GROUP_KEYS = ("epoch", "row_id", "num_episodes", "mean", "std", "question", "expected")


def _group_line(row: sqlite3.Row) -> dict[str, Any]:
    """A group in a list; `dropped` counts the reasons for which its episodes were left out."""
    dropped = Counter(orjson.loads(row["dropped"])) + Counter(orjson.loads(row["untrained"]))
    line = {key: row[key] for key in _GROUP_KEYS}
    return line | {"rewards": orjson.loads(row["rewards"]), "dropped": dropped, "num_dropped": dropped.total()}


def episode_line(row: sqlite3.Row) -> dict[str, Any]:
    """An episode in a list; `dropped` is why it was left out of training, also for want of a reward."""
    line = {key: row[key] for key in _EPISODE_KEYS}
    if line["status"] == TrainingStatus.DROPPED and line["dropped"] is None:
        line["dropped"] = line["reason"]
    return line


class IndexedRun:
    """The index of a run, and what is read with it."""

    def __init__(self, path: Path) -> None:
        self.index = RunIndex(path)
        self.lists = Lists(self.index)
        self.pages = EpisodePages(self.index)
        self._lock = threading.Lock()
        self._refresh: threading.Thread | None = None
        self._again = False
        """Whether files may have changed since the refresh that is running has read them."""

    def refresh(self) -> None:
        """Reads what was appended. A refresh that takes longer continues in its thread, one at a time."""
        with self._lock:
            running, self._again = self._refresh, self._refresh is not None
            if running is None:
                self._refresh = threading.Thread(target=self._run, name="index a run", daemon=True)
                self._refresh.start()
            thread = self._refresh
        self.index.groups_known.wait(_GROUPS_SECONDS)
        if thread is not None and (running is None or self.index.complete):
            thread.join(_PATIENCE)

    def _run(self) -> None:
        while True:
            try:
                self.index.refresh()
            except Exception:  # a page shows what is indexed, and the next request tries again
                logger.exception("%s cannot be indexed", self.index.run)
            with self._lock:
                if not self._again:
                    self._refresh = None
                    return
                self._again = False


class Indexes:
    """The runs that were looked at last. An index that requests use is closed after them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[Path, IndexedRun] = {}
        self._users: Counter[IndexedRun] = Counter()

    def open(self, run: Path) -> IndexedRun:
        """The index of a run, refreshed, until `release`."""
        with self._lock:
            indexed = self._runs.pop(run, None) or IndexedRun(run)
            self._runs[run] = indexed
            self._users[indexed] += 1
            oldest = [self._runs.pop(path) for path in [*self._runs][:-_MOST_RUNS]]
            unused = [each for each in oldest if not self._users[each]]
        for each in unused:
            each.index.close()
        indexed.refresh()
        return indexed

    def release(self, indexed: IndexedRun) -> None:
        with self._lock:
            self._users[indexed] -= 1
            in_use = self._users[indexed] or indexed in self._runs.values()
            self._users = +self._users  # without those that nobody uses
        if not in_use:
            indexed.index.close()

    def problems(self, run: Path) -> list[str]:
        """What is damaged in a run, as far as it was indexed."""
        with self._lock:
            indexed = self._runs.get(run)
        return [] if indexed is None else indexed.index.problems

    def close(self) -> None:
        with self._lock:
            runs = {*self._runs.values(), *self._users}
            self._runs.clear()
        for run in runs:
            run.index.close()
