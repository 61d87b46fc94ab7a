"""The recorded episodes of a run: found by the index, and read as far as they can be read.

A `RecordedEpisode` is what `insitu trajectories show` prints and `insitu view` shows: an episode with its calls, its
training rows and status, and the texts of its tokens.
"""

import difflib
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from insitu.advantages.estimator import rows_of
from insitu.disk.json_files import read_block
from insitu.errors import ConfigError, InsituError, RequestRefused, needing
from insitu.runs.files import ADVANTAGES, EPISODES, GROUPS
from insitu.runs.index import QUERY, RunIndex, stored_group
from insitu.runs.index_database import TrainingStatus
from insitu.runs.reader import Problems, RunReader
from insitu.runs.records import membership
from insitu.schemas.episodes import ModelCall, TrainingRow

_DECODED_TOGETHER, _CONTEXT = 24, 4
"""Tokens that are decoded with those before them, as the text of a token may depend on these."""
_NAMED = 500
"""Names among which similar ones are looked for."""
_SUGGESTIONS = 5
_FILTERS = {
    "episode": ("--episode", "episode = ?"),
    "epoch": ("--epoch", "epoch = ?"),
    "row_id": ("--row", "row_id = ?"),
    "generation": ("--generation", "generation = ?"),
    "outcome": ("--outcome", "? IN (outcome, reason, dropped, status)"),
    "min_reward": ("--min_reward", "reward >= ?"),
}
"""The options that select episodes, and their conditions in SQL, the most specific first."""


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode and what the run recorded about it.

    `record`, `training` and `group` are its lines in `episodes.jsonl.gz`, `advantages.jsonl` and `groups.jsonl`.
    `epoch` is the metrics line of its epoch, None while that is running, and `settings` the content of `run.json`.
    """

    record: Mapping[str, Any]
    calls: list[ModelCall] = field(default_factory=list)
    training: Mapping[str, Any] | None = None
    group: Mapping[str, Any] | None = None
    epoch: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    rescores: Sequence[Mapping[str, Any]] = ()
    """The latest line in `rescores.jsonl` of each evaluator."""

    @property
    def advantages(self) -> dict[int, float | None]:
        """Advantages of the trained calls by call index, None if the server computed them."""
        return {int(index): value for index, value in (self.training or {}).get("advantages", {}).items()}

    @property
    def sides(self) -> list[Mapping[str, Any]]:
        """What it is trained as where there are no advantages: `sides` of its line in `advantages.jsonl`."""
        return [*(self.training or {}).get("sides", ())]

    @property
    def sides_by_call(self) -> dict[int, set[str]]:
        """What each trained call of a run without advantages is trained as."""
        sides: dict[int, set[str]] = {}
        for side in (side for side in self.sides if side["dropped"] is None):
            for index in side["calls"]:
                sides.setdefault(index, set()).add(side["side"])
        return sides

    @property
    def reason(self) -> str | None:
        """Why it was dropped, or else why it failed."""
        dropped: str | None = (self.training or {}).get("dropped")
        return dropped or self.record["reason"]

    @property
    def status(self) -> TrainingStatus:
        in_group = 1 if self.group is None else membership(self.record["episode"], self.group)
        unusable = in_group < 1 + (self.record["reward"] is None)
        return TrainingStatus.of(
            dropped=unusable or bool((self.training or {}).get("dropped")),
            epoch_is_over=self.epoch is not None,
            job=(self.epoch or {}).get("job"),
            trained=len(self.advantages) or sum(side["dropped"] is None for side in self.sides),
            sent=None in self.advantages.values(),
        )

    @property
    def rows(self) -> list[TrainingRow]:
        """The training rows, or for an untrained episode the rows of all its calls."""
        calls = [c for c in self.calls if c.token_ids and c.prompt_token_ids is not None and c.logprobs is not None]
        with_tokens = {call.index for call in calls}
        by_token = {int(index): values for index, values in (self.training or {}).get("token_advantages", {}).items()}
        advantages = {**(self.advantages or dict.fromkeys(self.sides_by_call or with_tokens)), **by_token}
        weights = {
            position: advantages[call.index] or 0.0
            for position, call in enumerate(self.calls)
            if call.index in with_tokens & advantages.keys()
        }
        return rows_of(self.calls, weights, self.record["episode"])

    @property
    def training_summary(self) -> str:
        """The status, and with how many calls the episode was trained or why it was dropped."""
        if self.status is TrainingStatus.TRAINED and self.sides:
            kept = Counter(side["side"] for side in self.sides if side["dropped"] is None)
            as_what = ", ".join(side + f" in {n} pairs" * (n > 1) for side, n in kept.items())
            return f"trained with {len(self.sides_by_call)} of {len(self.calls)} calls as {as_what}"
        if self.status in (TrainingStatus.TRAINED, TrainingStatus.SENT):
            return f"{self.status.value} with {len(self.advantages)} of {len(self.calls)} calls"
        return f"dropped: {self.reason}" if self.status is TrainingStatus.DROPPED else self.status.value

    def step_reward(self, position: int) -> float | None:
        """The step reward of a call, None if it is a placeholder 0 of a call that cannot be rewarded."""
        rewards, rewarded = self.record["step_rewards"], self.record["rewarded_functions"]
        if not rewards or len(rewards) != len(self.calls):
            return None
        call = self.calls[position]
        function_rewarded = not set(rewarded).isdisjoint(call.functions)
        trained = call.index in self.advantages if self.advantages else call.token_ids is not None
        return rewards[position] if rewards[position] or (function_rewarded and trained) else None


class RecordedGroup(NamedTuple):
    """A group with its row of the index."""

    row: sqlite3.Row
    episodes: list[RecordedEpisode]
    settings: dict[str, Any]
    """The content of `run.json`."""
    problems: Problems
    about_row: dict[str, Any]
    """The question and the expected answer of its row, as far as they are recorded."""


class RecordedGroups:
    """The groups of a run. They are found as soon as their lines of `groups.jsonl` are indexed."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self.files = RunReader(index.run)
        self.run = index.run

    def find(self, epoch: int, row_id: str) -> sqlite3.Row:
        """Raises RequestRefused (404) with rows and epochs that exist."""
        if (match := self._find(epoch, row_id)) is not None:
            return match
        rows = self._names("groups", "row_id", "WHERE epoch = ?", epoch)
        if rows:
            problem = f"epoch {epoch} of {self.run} has no row {row_id!r:.200}; {suggest(row_id, rows)}"
        else:
            epochs = self._names("groups", "epoch")
            existing = f"available: {', '.join(epochs[:20])}{' ...' * (len(epochs) > 20)}" if epochs else "none yet"
            problem = f"{self.run} has no group of epoch {epoch}; {existing}"
        raise RequestRefused(problem, status=404, param="row" if rows else "epoch", code="unknown_group")

    def find_by_episode(self, name: str) -> sqlite3.Row:
        """The group of an episode. Raises RequestRefused (404)."""
        query = "SELECT * FROM groups WHERE id = (SELECT group_id FROM episodes WHERE episode = ? LIMIT 1)"
        for row in self.index.select(query, (name,)):
            return row
        for epoch, row_id in _parts(name):
            if (match := self._find(epoch, row_id)) is not None:
                return match
        epochs = [epoch for epoch, _ in _parts(name)]
        of_epoch = self._names("episodes", "episode", "WHERE epoch = ?", epochs[0] if epochs else 0)
        raise self.unknown_episode(name, of_epoch or self._names("episodes", "episode"))

    def unknown_episode(self, name: str, existing: list[str], damage: Sequence[str] = ()) -> RequestRefused:
        """`damage` is why there may be none."""
        similar = "; ".join(damage) or (suggest(name, existing) if existing else "it has none yet")
        problem = f"{self.run} has no episode {name!r:.200}; {similar}"
        return RequestRefused(problem, status=404, param="episode", code="unknown_episode")

    def read(self, row: sqlite3.Row) -> RecordedGroup:
        """Never raises for what is in the files."""
        problems, stored, files = Problems(), stored_group(row), self.files
        attempt = problems.attempt
        line: dict[str, Any] | None = attempt(lambda: self.index.line(GROUPS, row), None)
        part = f"/{row['epoch']}/" + ("" if (line or {}).get("rows") else f"{row['row_id']}/")
        records: list[dict[str, Any]] = attempt(lambda: [*files.episode_records([stored])], [])
        calls: dict[str, list[ModelCall]] = attempt(lambda: files.calls(stored), {})
        settings: dict[str, Any] = attempt(files.settings, {})
        rescores: dict[tuple[str, str], Any] = attempt(lambda: files.rescores(containing=part), {})
        training: dict[str, dict[str, Any]] = attempt(lambda: self._training(row, part), {})
        epochs = self.index.select("SELECT epoch, job FROM epochs WHERE epoch = ?", (stored.epoch,))
        episodes = [
            RecordedEpisode(
                record,
                calls=calls.get(record["episode"], []),
                training=training.get(record["episode"]),
                group=line,
                epoch=dict(epochs[0]) if epochs else None,
                settings=settings,
                rescores=[rescore for (episode, _), rescore in rescores.items() if episode == record["episode"]],
            )
            for record in records
            if isinstance(record.get("episode"), str)
        ]
        return RecordedGroup(row, episodes, settings, problems, (line or {}).get("row") or {})

    def members(self, row: sqlite3.Row) -> list[sqlite3.Row | dict[str, Any]]:
        """`episode` and `generation` of the episodes of a group, in the order they were recorded."""
        if row["is_read"]:
            return [*self.index.select("SELECT * FROM episodes WHERE group_id = ? ORDER BY id", (row["id"],))]
        return Problems().attempt(lambda: [*self.files.episode_records([stored_group(row)])], [])

    def neighbour(self, row: sqlite3.Row, step: int) -> sqlite3.Row | None:
        """The next (1) or previous (-1) group of the epoch, in the order of the row ids."""
        sign, order = (">", "ASC") if step > 0 else ("<", "DESC")
        rows = self.index.select(
            f"SELECT * FROM groups WHERE epoch = ? AND (row_key, id) {sign} (?, ?) "
            f"ORDER BY row_key {order}, id {order} LIMIT 1",
            (row["epoch"], row["row_key"], row["id"]),
        )
        return rows[0] if rows else None

    def _find(self, epoch: int, row_id: str) -> sqlite3.Row | None:
        """The last one, as a run has at most one group of a row in an epoch."""
        return next(reversed(self.same_row(row_id, epoch)), None)

    def same_row(self, row_id: str, epoch: int | None = None) -> list[sqlite3.Row]:
        """The groups of a row, in one epoch or in all; those that it shares with other rows if none is its own."""
        own, shared = "row_id = ?", "id IN (SELECT group_id FROM episodes WHERE row_id = ?)"
        at, values = ("", (row_id,)) if epoch is None else (" AND epoch = ?", (row_id, epoch))
        queries = (f"SELECT * FROM groups WHERE {which}{at} ORDER BY epoch, id" for which in (own, shared))
        return next((rows for query in queries if (rows := [*self.index.select(query, values)])), [])

    def _names(self, table: str, column: str, condition: str = "", *values: Any) -> list[str]:
        query = f"SELECT DISTINCT {column} FROM {table} {condition} ORDER BY id LIMIT {_NAMED}"
        return [str(row[column]) for row in self.index.select(query, values)]

    def _training(self, row: sqlite3.Row, part: str) -> dict[str, dict[str, Any]]:
        """The lines of `advantages.jsonl` of a group, by episode."""
        if self.index.complete:
            rows = self.index.select(f"{QUERY} WHERE group_id = ? AND number IS NOT NULL", (row["id"],))
            return {each["episode"]: self.index.line(ADVANTAGES, each) for each in rows}
        return {line["episode"]: line for line in self.files.records(ADVANTAGES, part)}


class Selection:
    """The episodes that `insitu trajectories show` selects. Raises ConfigError if the folder has no episodes.

    To be closed, so that the next one finds the index.
    """

    def __init__(self, run: Path) -> None:
        self.files = RunReader(run).check_episodes()
        self._groups = [*self.files.groups()]
        self._index = RunIndex(run)
        self.close = self._index.close

    def find(self, order: str | None = None, **filters: str | float | None) -> list[sqlite3.Row]:
        """The episodes that meet these filters, those with the most of the column `order` first.

        Raises ConfigError if there are none.
        """
        conditions = {key: filters[key] for key in _FILTERS if filters.get(key) is not None}
        self._index.refresh()
        self._check(conditions)
        rows = self._select(conditions, order)
        if not rows:
            raise self._none_found(conditions)
        return rows

    def _select(self, filters: Mapping[str, Any], order: str | None = None) -> list[sqlite3.Row]:
        conditions = ["group_id <= ?", *(_FILTERS[key][1] for key in filters)]  # groups after them are not complete
        sort = "id" if order is None else f"{order} DESC, id"
        query = f"SELECT * FROM ({QUERY}) WHERE {' AND '.join(conditions)} ORDER BY {sort}"
        return self._index.select(query, (len(self._groups), *filters.values()))

    def read(self, row: sqlite3.Row) -> RecordedEpisode:
        """The complete episode. Raises InsituError if a part of it cannot be read."""
        groups = RecordedGroups(self._index)
        group = groups.read(groups.find_by_episode(row["episode"]))
        if group.problems:
            raise InsituError(group.problems[0])
        return next(episode for episode in group.episodes if episode.record["episode"] == row["episode"])

    def _check(self, conditions: Mapping[str, Any]) -> None:
        """Raises InsituError if an episode with these values may be in a damaged group."""
        damaged = "SELECT epoch, row_id, episodes_offset FROM groups g WHERE id <= ? AND NOT EXISTS "
        unread = f"{damaged} (SELECT 1 FROM episodes e WHERE e.group_id = g.id)"
        for row in self._index.select(unread, (len(self._groups),)):
            if all(conditions.get(key, row[key]) == row[key] for key in ("epoch", "row_id")):
                group = next(each for each in self._groups if each.episodes.offset == row["episodes_offset"])
                read_block(self.files.folder / EPISODES, group.episodes)

    def _none_found(self, conditions: Mapping[str, Any]) -> ConfigError:
        """With the values of the first option without which there are episodes, or else of the first."""
        every = self._select({})
        if not conditions or not every:
            return ConfigError(f"{self.files.folder} has no episode yet")
        without = {one: self._select({k: v for k, v in conditions.items() if k != one}) for one in conditions}
        key = next((one for one, rows in without.items() if rows), next(iter(conditions)))
        others = without[key] or every
        existing = suggest(str(conditions[key]), [*dict.fromkeys(str(v) for row in others for v in _values(key, row))])
        if key == "min_reward":
            rewards = [row["reward"] for row in others if row["reward"] is not None]
            existing = f"the highest is {max(rewards, default=None)}"
        options = " and ".join(f"{_FILTERS[one][0]} {value!r}" for one, value in conditions.items())
        rest = [f"{_FILTERS[one][0]} {value!r}" for one, value in conditions.items() if one != key]
        beside = f" beside {' and '.join(rest)}" if rest and without[key] else ""
        return ConfigError(f"{self.files.folder}: no episode has {options}; of {_FILTERS[key][0]}{beside}, {existing}")


def _values(key: str, row: sqlite3.Row) -> Iterator[Any]:
    """What an episode has of a filter."""
    columns = {"outcome": ("outcome", "dropped", "reason", "status"), "min_reward": ()}.get(key, (key,))
    return (row[column] for column in columns if row[column] is not None)


def suggest(value: str, existing: list[str]) -> str:
    """Similar values, or else the first ones."""
    similar = [name for name in existing if value in name] or difflib.get_close_matches(value, existing, _SUGGESTIONS)
    if similar:
        return f"similar: {', '.join(similar[:_SUGGESTIONS])}{' ...' * (len(similar) > _SUGGESTIONS)}"
    more = f" ... ({len(existing)} in total)" if len(existing) > _SUGGESTIONS else ""
    return f"available: {', '.join(existing[:_SUGGESTIONS])}{more}"


def _parts(name: str) -> Iterator[tuple[int, str]]:
    """What may be the epoch and the row in the name of an episode, run/epoch/row/generation/attempt."""
    body = re.sub(r"/\d+/\d+$", "", name)
    for match in re.finditer(r"/(?=(\d+)/)", body):
        yield int(match[1]), body[match.end(1) + 1 :]


def load_decoder(folder: Path) -> Callable[[Sequence[int]], str]:
    """Token ids to text, special tokens included, by the `tokenizer.json` in a folder; raises ConfigError."""
    with needing("local", "the text of tokens"):
        from tokenizers import Tokenizer
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--tokenizer: {path} does not exist; give the folder of the run's model")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of each token, which together are the text of all.

    The bytes of a character may be spread over several tokens: the last of them gets it, the others are empty.
    """
    texts: list[str] = []
    window: list[int] = []
    before = ""
    for number, token in enumerate(ids, 1):
        window.append(token)
        text = decode(window) if number == len(ids) else _complete(decode(window))
        texts.append(text[len(before) :] if text.startswith(before) else decode([token]))
        before = text
        if len(window) >= _DECODED_TOGETHER:
            window = window[-_CONTEXT:]
            before = _complete(decode(window))
    return texts


def _complete(text: str) -> str:
    """Without a last character whose further bytes may follow."""
    return text.removesuffix("\ufffd")
