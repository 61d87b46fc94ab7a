"""An episode of a run, read from the run's directory: its calls, dialogues, rows, and what became of it."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from insitu.advantages.estimator import rows_of
from insitu.errors import ConfigError, InsituError
from insitu.evaluation.datasets import loads
from insitu.schemas.episodes import FORMAT_VERSION, ModelCall, TrainingRow
from insitu.training.store import restore_calls

_NEAR = 5
_OPTIONS = {"episode": "--episode", "epoch": "--epoch", "row_id": "--row", "generation": "--generation"}
"""By key of a record in `episodes.jsonl`, the option that chooses it, the one that says most first."""


class Fate(StrEnum):
    """What became of an episode."""

    TRAINED = "trained"
    SENT = "sent"
    """Trained by a server that makes the advantages itself."""
    LEFT_OUT = "left out"
    WAITING = "not trained yet"
    """Its epoch is still being collected or trained, or was when the run was cut off."""
    JOB_FAILED = "job failed"
    """What it was part of has not been trained."""
    UNKNOWN = "not recorded"
    """Its epoch is over, and nothing says how it was trained."""


@dataclass(frozen=True)
class ReadEpisode:
    """`record`, `weighed` and `group` are its lines of `episodes`, `advantages` and `groups.jsonl`.

    `epoch` is the line of metrics of its epoch, None before that is over, and `settings` the run's `run.json`.
    """

    record: Mapping[str, Any]
    calls: list[ModelCall] = field(default_factory=list)
    weighed: Mapping[str, Any] | None = None
    group: Mapping[str, Any] | None = None
    epoch: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def advantages(self) -> dict[int, float | None]:
        """Of its trained calls, by their index; None where the server made it."""
        return {int(index): value for index, value in (self.weighed or {}).get("advantages", {}).items()}

    @property
    def reason(self) -> str | None:
        """Why it was left out of training, or, where it was trained all the same, why it has failed."""
        dropped: str | None = (self.weighed or {}).get("dropped")
        return dropped or self.record["reason"]

    @property
    def fate(self) -> Fate:
        kept = self.group is None or self.record["episode"] in self.group["episodes"]
        if self.record["reward"] is None or not kept or (self.weighed or {}).get("dropped"):
            return Fate.LEFT_OUT
        if self.epoch is None:
            return Fate.WAITING
        if self.epoch.get("job", "completed") != "completed":  # runs of earlier releases have no such key
            return Fate.JOB_FAILED
        if not self.advantages:
            return Fate.UNKNOWN
        return Fate.SENT if None in self.advantages.values() else Fate.TRAINED

    @property
    def rows(self) -> list[TrainingRow]:
        """The rows as trained; of an episode that was not trained here, as they would be.

        That is with the calls that were sent, or else with all.
        """
        told = [c for c in self.calls if c.token_ids and c.prompt_token_ids is not None and c.logprobs is not None]
        given = self.advantages or dict.fromkeys((call.index for call in told), None)
        known = {call.index for call in told} & given.keys()
        weights = {place: given[c.index] or 0.0 for place, c in enumerate(self.calls) if c.index in known}
        return rows_of(self.calls, weights, self.record["episode"])

    def reward_of(self, place: int) -> float | None:
        """The step reward of the call at `place`; None for the 0 of one that could not be given any."""
        rewards, rewarded = self.record["step_rewards"], self.record.get("rewarded_functions")
        if not rewards or len(rewards) != len(self.calls):
            return None
        call = self.calls[place]
        of_function = rewarded is None or not set(rewarded).isdisjoint(call.functions)
        trained = call.index in self.advantages if self.advantages else call.token_ids is not None
        return rewards[place] if rewards[place] or (of_function and trained) else None


class RunFiles:
    """The records of a run, finished or still going on; ConfigError where the folder holds none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "episodes.jsonl").is_file():
            raise ConfigError(
                f"{folder} holds no run: it has no episodes.jsonl (it is written to finetuning.output_dir "
                "as the first group completes)"
            )
        self._groups = {(group["epoch"], group["row_id"]): group for group in self._records("groups.jsonl")}
        self._epochs = {metrics["epoch"]: metrics for metrics in self._lines("training_metrics.jsonl")}

    def episodes(self, **wanted: str | int | None) -> list[dict[str, Any]]:
        """The lines of `episodes.jsonl` with these values; ConfigError, naming those that are near, if none has."""
        found = list(self._records("episodes.jsonl"))
        if not found:
            raise ConfigError(f"{self.folder} has no episode yet")
        chosen: list[str] = []
        for key, option in _OPTIONS.items():
            if (value := wanted.get(key)) is None:
                continue
            there = list(dict.fromkeys(str(record[key]) for record in found))
            found = [record for record in found if record[key] == value]
            if not found:
                one = f"no episode with {' and '.join(chosen)}" if chosen else "no episode"
                raise ConfigError(f"{self.folder}: {one} has {option} {value!r}; {_near(str(value), there)}")
            chosen.append(f"{option} {value!r}")
        return found

    def read(self, record: Mapping[str, Any]) -> ReadEpisode:
        """Everything there is about an episode."""
        name = record["episode"]
        weighed = next(self._records("advantages.jsonl", name), None)
        path = self.folder / "run.json"
        settings = loads(path.read_bytes()) if path.is_file() else {}
        calls = restore_calls(self._records("calls.jsonl", name))
        return self._of(record, weighed, calls=calls, settings=settings)

    def outlines(self, records: list[dict[str, Any]]) -> Iterator[ReadEpisode]:
        """What became of many episodes, without their calls."""
        weighed = {line["episode"]: line for line in self._records("advantages.jsonl")}
        return (self._of(record, weighed.get(record["episode"])) for record in records)

    def _of(self, record: Mapping[str, Any], weighed: Mapping[str, Any] | None, **more: Any) -> ReadEpisode:
        group, epoch = self._groups.get((record["epoch"], record["row_id"])), self._epochs.get(record["epoch"])
        return ReadEpisode(record, weighed=weighed, group=group, epoch=epoch, **more)

    def _records(self, name: str, episode: str | None = None) -> Iterator[dict[str, Any]]:
        """The records of a file, of one episode if it is named."""
        lines = self._lines(name, b"" if episode is None else orjson.dumps(episode))
        head = next(lines, None)
        if head is not None and head != {"format": FORMAT_VERSION}:
            found = head.get("format", "none that is told")
            raise InsituError(f"{self.folder / name} is of format {found}; known is {FORMAT_VERSION}")
        return (record for record in lines if episode is None or record["episode"] == episode)

    def _lines(self, name: str, mark: bytes = b"") -> Iterator[dict[str, Any]]:
        """The lines of a file, the first and those with `mark` in them. One that is being written is none yet."""
        path = self.folder / name
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") or (number > 1 and mark not in line):
                    continue
                try:
                    yield loads(line)
                except json.JSONDecodeError as error:
                    raise InsituError(f"{path}, line {number} is no JSON: {error}") from None


def _near(value: str, there: list[str]) -> str:
    """Those of `there` that may have been meant, or else the first of all."""
    near = [name for name in there if value in name] or difflib.get_close_matches(value, there, _NEAR)
    if near:
        return f"near it: {', '.join(near[:_NEAR])}{' ...' * (len(near) > _NEAR)}"
    more = f" ... ({len(there)} in all)" if len(there) > _NEAR else ""
    return f"available: {', '.join(there[:_NEAR])}{more}"
