"""Pages of the lists of groups and episodes of a run, from its index."""

import sqlite3
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from insitu.errors import RequestRefused
from insitu.runs.index import QUERY, RunIndex
from insitu.runs.inspection import TrainingStatus

_MOST = 1000
"""Lines of a page."""
_LARGEST = 2**63 - 1
_ORDERS = 16
"""Orders that are remembered, so that scrolling does not sort a list again."""

GROUP_SORTS = {
    "recorded": "id",
    "epoch": "epoch",
    "row": "row_key",
    "mean": "mean",
    "std": "std",
    "num_episodes": "num_episodes",
    "dropped": "num_dropped",
}
EPISODE_SORTS = {
    "recorded": "id",
    "epoch": "epoch",
    "row": "row_key",
    "generation": "generation",
    "outcome": "outcome",
    "status": "status",
    "reward": "reward",
    "seconds": "seconds",
    "calls": "calls",
    "tokens": "prompt_tokens + sampled_tokens",
    "prompt_tokens": "prompt_tokens",
    "sampled_tokens": "sampled_tokens",
}


@dataclass(frozen=True)
class ListQuery:
    """A part of a list. `order` and `conditions` are SQL; `values` are what the conditions compare with."""

    order: str
    offset: int
    limit: int
    conditions: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()


def group_query(asked: Mapping[str, str]) -> ListQuery:
    """Raises RequestRefused (400) for a parameter with a value it cannot have."""
    return _query(asked, GROUP_SORTS, {"epoch": ("epoch = ?", int), "row": ("row_id = ?", str)})


def episode_query(asked: Mapping[str, str]) -> ListQuery:
    """`outcome` is what `insitu trajectories show --outcome` takes. Raises RequestRefused (400)."""
    filters = {
        "epoch": ("epoch = ?", int),
        "row": ("row_id = ?", str),
        "outcome": ("? IN (outcome, reason, dropped, status)", str),
        "min_reward": ("reward >= ?", float),
        "max_reward": ("reward <= ?", float),
    }
    return _query(asked, EPISODE_SORTS, filters)


def _query(asked: Mapping[str, str], sorts: Mapping[str, str], filters: Mapping[str, tuple[str, Any]]) -> ListQuery:
    sort = asked.get("sort") or "recorded"
    if sort not in sorts:
        raise RequestRefused(f"sort is {sort!r:.80}; one of {', '.join(sorts)}", param="sort", code="invalid_value")
    column = sorts[sort]
    direction = "DESC" if asked.get("descending", "0") in ("1", "true") else "ASC"
    given = {name: filters[name] for name in filters if asked.get(name, "") != ""}
    return ListQuery(
        f"id {direction}" if column == "id" else f"{column} IS NULL, {column} {direction}, id",
        max(number(asked, "offset", int, 0), 0),
        min(max(number(asked, "limit", int, 100), 0), _MOST),
        tuple(condition for condition, _ in given.values()),
        tuple(number(asked, name, kind) for name, (_, kind) in given.items()),
    )


def number(asked: Mapping[str, str], name: str, kind: Any, default: Any = None) -> Any:
    """The value of a parameter. Raises RequestRefused (400) if it is not a number."""
    if asked.get(name, "") == "":
        return default
    try:
        value = kind(asked[name])
    except ValueError:
        value = None
    if value is None or (kind is int and abs(value) > _LARGEST):
        expected = {int: "an integer", float: "a number"}[kind]
        problem = f"{name} is {asked[name]!r:.80}; expected {expected}"
        raise RequestRefused(problem, param=name, code="invalid_value")
    return value


@dataclass
class Lists:
    """The lists of a run."""

    index: RunIndex
    _orders: dict[tuple[Any, ...], tuple[tuple[int, ...], Sequence[int]]] = field(default_factory=dict)

    def groups(self, query: ListQuery) -> dict[str, Any]:
        """The answer of `/api/groups`."""
        total, rows = self._page("groups", "SELECT * FROM groups", query)
        groups = [
            {
                **{key: row[key] for key in ("epoch", "row_id", "num_episodes", "mean", "std", "num_dropped")},
                "rewards": orjson.loads(row["rewards"]),
                "dropped": orjson.loads(row["dropped"]),
            }
            for row in rows
        ]
        return {"total": total, "indexed": self.index.indexed._asdict(), "groups": groups}

    def episodes(self, query: ListQuery) -> dict[str, Any]:
        """The answer of `/api/episodes`."""
        total, rows = self._page("episodes", QUERY, query)
        return {
            "total": total,
            "indexed": self.index.indexed._asdict(),
            "episodes": [episode_line(row) for row in rows],
        }

    def _page(self, table: str, source: str, query: ListQuery) -> tuple[int, list[Any]]:
        """The number of lines that meet the conditions, and those of the page."""
        if query.order.startswith("id ") and not query.conditions:  # lists that grow are not sorted again and again
            [counted] = self.index.select(f"SELECT count(*) AS lines FROM {table}")
            total = counted["lines"]
            part = f"SELECT id FROM {table} ORDER BY {query.order} LIMIT ? OFFSET ?"
            shown: Sequence[int] = [row["id"] for row in self.index.select(part, (query.limit, query.offset))]
        else:
            ids = self._order(source, query)
            total, shown = len(ids), ids[query.offset : query.offset + query.limit]
        places = ", ".join("?" * len(shown))
        found = {row["id"]: row for row in self.index.select(f"SELECT * FROM ({source}) WHERE id IN ({places})", shown)}
        return total, [found[one] for one in shown if one in found]

    def _order(self, source: str, query: ListQuery) -> Sequence[int]:
        key = (source, query.order, query.conditions, query.values)
        version = self.index.version
        known = self._orders.pop(key, None)
        if known is None or known[0] != version:
            where = " AND ".join(query.conditions) or "TRUE"
            rows = self.index.select(f"SELECT id FROM ({source}) WHERE {where} ORDER BY {query.order}", query.values)
            known = version, array("q", (row["id"] for row in rows))
        self._orders[key] = known
        while len(self._orders) > _ORDERS:
            del self._orders[next(iter(self._orders))]
        return known[1]


_EPISODE_KEYS = (
    *("episode", "epoch", "row_id", "generation", "attempt", "outcome", "reason", "dropped", "status", "reward"),
    *("seconds", "calls", "prompt_tokens", "sampled_tokens"),
)


def episode_line(row: sqlite3.Row) -> dict[str, Any]:
    """An episode in a list; `dropped` is why it was left out of training, also for want of a reward."""
    line = {key: row[key] for key in _EPISODE_KEYS}
    if line["status"] == TrainingStatus.DROPPED and line["dropped"] is None:
        line["dropped"] = line["reason"]
    return line
