"""Finds groups and episodes by the index, and reads them from the run's files as far as they can be read."""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from insitu.errors import RequestRefused
from insitu.runs.files import ADVANTAGES, GROUPS, RESCORES
from insitu.runs.inspection import RecordedEpisode, suggest
from insitu.runs.stored import RunFolder
from insitu.runs.summary import RunSummary
from insitu.schemas.episodes import ModelCall
from insitu.view.index import QUERY, RunIndex, read_at, stored_group

_CHUNK = 1 << 20
_NAMED = 500
"""Names among which similar ones are looked for."""


class RecordedGroup(NamedTuple):
    """A group with its row of the index."""

    row: sqlite3.Row
    episodes: list[RecordedEpisode]
    settings: dict[str, Any]
    """The content of `run.json`."""
    notes: RunSummary
    """Notes what is damaged."""


class RecordedGroups:
    """The groups of a run. They are found as soon as their lines of `groups.jsonl` are indexed."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self.run = index.run

    def find(self, epoch: int, row_id: str) -> sqlite3.Row:
        """Raises RequestRefused (404) with rows and epochs that exist."""
        if (found := self._find(epoch, row_id)) is not None:
            return found
        rows = [row["row_id"] for row in self._select_names("row_id", "epoch = ?", epoch)]
        if rows:
            problem = f"epoch {epoch} of {self.run} has no row {row_id!r:.200}; {suggest(row_id, rows)}"
        else:
            epochs = [str(row["epoch"]) for row in self._select_names("epoch", "TRUE")]
            existing = f"available: {', '.join(epochs[:20])}{' ...' * (len(epochs) > 20)}" if epochs else "none yet"
            problem = f"{self.run} has no group of epoch {epoch}; {existing}"
        raise RequestRefused(problem, status=404, param="row" if rows else "epoch", code="unknown_group")

    def find_by_episode(self, name: str) -> sqlite3.Row:
        """The group of an episode. Raises RequestRefused (404)."""
        for row in self.index.select("SELECT group_id FROM episodes WHERE episode = ?", (name,)):
            return self.index.select("SELECT * FROM groups WHERE id = ?", (row["group_id"],))[0]
        for epoch, row_id in _parts(name):
            if (found := self._find(epoch, row_id)) is not None:
                return found
        raise self.unknown_episode(name, [row["episode"] for row in self._names(name)])

    def unknown_episode(self, name: str, existing: list[str], damage: Sequence[str] = ()) -> RequestRefused:
        """`damage` is why there may be none."""
        similar = "; ".join(damage) or (suggest(name, existing) if existing else "it has none yet")
        problem = f"{self.run} has no episode {name!r:.200}; {similar}"
        return RequestRefused(problem, status=404, param="episode", code="unknown_episode")

    def read(self, row: sqlite3.Row) -> RecordedGroup:
        """Never raises for what is in the files."""
        notes = RunSummary(str(self.run))
        stored = stored_group(row)
        files = notes.attempt(lambda: RunFolder(self.run), None)
        line: dict[str, Any] | None = notes.attempt(lambda: read_at(self.run / GROUPS, row), None)
        records: list[dict[str, Any]] = []
        calls: dict[str, list[ModelCall]] = {}
        settings: dict[str, Any] = {}
        if files is not None:
            records = notes.attempt(lambda: [*files.episode_records([stored])], [])
            calls = notes.attempt(lambda: files.calls(stored), {})
            settings = notes.attempt(files.settings, {})
        lines: list[dict[str, Any]] = notes.attempt(lambda: self._lines(RESCORES, row), [])
        rescores: dict[tuple[str, str], Any] = notes.attempt(
            lambda: {(line["episode"], line["evaluator"]): line for line in lines}, {}
        )
        training: dict[str, dict[str, Any]] = notes.attempt(lambda: self._training(row), {})
        epochs = self.index.select("SELECT epoch, job FROM epochs WHERE epoch = ?", (stored.epoch,))
        episodes = [
            RecordedEpisode(
                record,
                calls=calls.get(record["episode"], []),
                training=training.get(record["episode"]),
                group=line,
                epoch=dict(epochs[0]) if epochs else None,
                settings=settings,
                rescores=[found for (episode, _), found in rescores.items() if episode == record["episode"]],
            )
            for record in records
            if isinstance(record.get("episode"), str)
        ]
        return RecordedGroup(row, episodes, settings, notes)

    def members(self, row: sqlite3.Row) -> list[sqlite3.Row | dict[str, Any]]:
        """`episode` and `generation` of the episodes of a group, in the order they were recorded."""
        if row["state"]:
            return [*self.index.select("SELECT * FROM episodes WHERE group_id = ? ORDER BY id", (row["id"],))]
        notes = RunSummary(str(self.run))
        return notes.attempt(lambda: [*RunFolder(self.run).episode_records([stored_group(row)])], [])

    def neighbour(self, row: sqlite3.Row, step: int) -> sqlite3.Row | None:
        """The next (1) or previous (-1) group of the epoch, in the order of the row ids."""
        sign, order = (">", "ASC") if step > 0 else ("<", "DESC")
        found = self.index.select(
            f"SELECT * FROM groups WHERE epoch = ? AND (row_key, id) {sign} (?, ?) "
            f"ORDER BY row_key {order}, id {order} LIMIT 1",
            (row["epoch"], row["row_key"], row["id"]),
        )
        return found[0] if found else None

    def same_row(self, row_id: str) -> list[sqlite3.Row]:
        """The groups of a row in all epochs."""
        return self.index.select("SELECT * FROM groups WHERE row_id = ? ORDER BY epoch, id", (row_id,))

    def _find(self, epoch: int, row_id: str) -> sqlite3.Row | None:
        """The last one, as a run has at most one group of a row in an epoch."""
        query = "SELECT * FROM groups WHERE row_id = ? AND epoch = ? ORDER BY id DESC LIMIT 1"
        return next(iter(self.index.select(query, (row_id, epoch))), None)

    def _select_names(self, column: str, condition: str, *values: Any) -> list[sqlite3.Row]:
        query = f"SELECT DISTINCT {column} FROM groups WHERE {condition} ORDER BY id LIMIT {_NAMED}"
        return self.index.select(query, values)

    def _names(self, name: str) -> list[sqlite3.Row]:
        epochs = [epoch for epoch, _ in _parts(name)]
        of_epoch = self.index.select(f"SELECT episode FROM episodes WHERE epoch = ? LIMIT {_NAMED}", epochs[:1] or [0])
        return of_epoch or self.index.select(f"SELECT episode FROM episodes LIMIT {_NAMED}")

    def _training(self, row: sqlite3.Row) -> dict[str, dict[str, Any]]:
        """The lines of `advantages.jsonl` of a group, by episode."""
        path = self.run / ADVANTAGES
        if self.index.complete:
            found = self.index.select(f"{QUERY} WHERE group_id = ? AND number IS NOT NULL", (row["id"],))
            return {each["episode"]: read_at(path, each) for each in found}
        return {line["episode"]: line for line in self._lines(ADVANTAGES, row)}

    def _lines(self, name: str, row: sqlite3.Row) -> list[dict[str, Any]]:
        """The records of a file that name an episode of a group."""
        path = self.run / name
        part = orjson.dumps(f"/{row['epoch']}/{row['row_id']}/")[1:-1]
        return [*map(orjson.loads, lines_with(path, part))] if path.is_file() else []


def lines_with(path: Path, part: bytes) -> Iterator[bytes]:
    """The whole lines of a file that contain a text, found without looking at each line."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            chunk += file.readline()
            found = chunk.find(part)
            while found >= 0:
                start, end = chunk.rfind(b"\n", 0, found) + 1, chunk.find(b"\n", found) + 1
                if not end:
                    return
                yield chunk[start:end]
                found = chunk.find(part, end)


def _parts(name: str) -> Iterator[tuple[int, str]]:
    """What may be the epoch and the row in the name of an episode, run/epoch/row/generation/attempt."""
    body = re.sub(r"/\d+/\d+$", "", name)
    for found in re.finditer(r"/(?=(\d+)/)", body):
        yield int(found[1]), body[found.end(1) + 1 :]
