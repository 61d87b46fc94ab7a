"""An episode of a run, read from the run's directory: its calls, dialogues, rows, and what became of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from insitu.algorithms.rows import rows_of
from insitu.errors import ConfigError, InsituError
from insitu.schemas.episodes import FORMAT_VERSION, ModelCall, TrainingRow
from insitu.training.store import restore_calls


@dataclass(frozen=True)
class ReadEpisode:
    """`record` is its line of `episodes.jsonl`; `advantages` go by call index, None before the epoch is weighed."""

    record: Mapping[str, Any]
    calls: list[ModelCall]
    advantages: dict[int, float] | None = None
    dropped: str | None = None

    @property
    def rows(self) -> list[TrainingRow]:
        """The rows as trained; of an episode that was not trained, as they would be with every call in training."""
        given = self.advantages
        if not given:
            given = {c.index: 0.0 for c in self.calls if c.token_ids and c.logprobs and c.prompt_token_ids is not None}
        weights = {place: given[call.index] for place, call in enumerate(self.calls) if call.index in given}
        return rows_of(self.calls, weights, self.record["episode"])

    def reward_of(self, place: int) -> float | None:
        """The step reward of the call at `place`; None where the episode has none."""
        rewards = self.record.get("step_rewards")
        return rewards[place] if rewards and len(rewards) == len(self.calls) else None


class RunFiles:
    """The records of a run, finished or still going on; ConfigError where the folder holds none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "episodes.jsonl").is_file():
            raise ConfigError(
                f"{folder} holds no run: it has no episodes.jsonl (it is written to finetuning.output_dir "
                "as the first group completes)"
            )

    def episodes(self, **wanted: str | int | None) -> list[dict[str, Any]]:
        """The lines of `episodes.jsonl` with these values; ConfigError, naming the values there are, if none has."""
        asked = {key: value for key, value in wanted.items() if value is not None}
        every = list(self._records("episodes.jsonl"))
        found = [r for r in every if all(r[key] == value for key, value in asked.items())]
        if found:
            return found
        there = {key: list(dict.fromkeys(str(record[key]) for record in every)) for key in asked}
        of_these = "; ".join(
            f"{key}: {', '.join(values[:8])}{' ...' * (len(values) > 8)}" for key, values in there.items()
        )
        sought = ", ".join(f"{key} {value}" for key, value in asked.items())
        raise ConfigError(f"{self.folder} has no episode of {sought or 'any kind'}; there is {of_these or 'none'}")

    def read(self, record: Mapping[str, Any]) -> ReadEpisode:
        name = record["episode"]
        calls = restore_calls(self._records("calls.jsonl", name))
        weighed = next(self._records("advantages.jsonl", name), None)
        if weighed is None:
            return ReadEpisode(record, calls)
        advantages = {int(index): value for index, value in weighed["advantages"].items()}
        return ReadEpisode(record, calls, advantages, weighed["dropped"])

    def _records(self, name: str, episode: str | None = None) -> Iterator[dict[str, Any]]:
        """The lines of a file, of one episode if it is named. A last line that is being written is none yet."""
        path = self.folder / name
        if not path.is_file():
            return
        mark = b"" if episode is None else orjson.dumps(episode)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") or (number > 1 and mark not in line):
                    continue
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise InsituError(f"{path}, line {number} is no JSON: {error}") from None
                if number == 1:
                    if record != {"format": FORMAT_VERSION}:
                        raise InsituError(f"{path} is of format {record.get('format')}; known is {FORMAT_VERSION}")
                elif episode is None or record["episode"] == episode:
                    yield record
