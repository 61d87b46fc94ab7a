"""Reads the episodes of a run directory, group by group, without loading the whole run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from insitu.collect.datasets import WORKFLOW_OUTPUT
from insitu.config import Config
from insitu.disk.files import Block, read_block, read_line, read_object, shorter_than_written, whole_lines
from insitu.errors import ConfigError, InsituError
from insitu.runs.files import BLOCKS, CALLS, EPISODES, GROUPS, RESCORES, RUN
from insitu.runs.records import restore_calls, restore_episode
from insitu.schemas.episodes import FORMAT_VERSION, DropReason, Episode, EpisodeKey, ModelCall, Outcome

_LISTED = 5

logger = logging.getLogger(__name__)


class StoredEpisodesConfig(BaseModel):
    """Recorded episodes to use instead of running the workflow."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    run: Path
    """A run directory. Epoch 1 gets the groups of its first epoch, and so on; after the last one it starts over."""
    epochs: list[int] | None = Field(default=None, min_length=1)
    """Only groups of these epochs, in this order; none: all epochs."""
    reward: str | None = None
    """Evaluator whose score is the reward: one of `insitu trajectories rescore`, or one whose scores the run has
    recorded; none: the recorded reward."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"run": value} if isinstance(value, str | Path) else value


class StoredGroup(NamedTuple):
    """A group of a run, and where its lines are."""

    epoch: int
    row_id: str
    size: int
    """The number of its episodes, with those that were dropped."""
    episodes: Block
    calls: Block


class RunFolder:
    """The files of lines in a run directory; `key` is the option or key that names the directory."""

    def __init__(self, folder: Path, key: str = "") -> None:
        self.folder = folder
        self._where = f"{key}: {folder}" if key else str(folder)
        if (folder / EPISODES).is_file():
            return
        if (folder / WORKFLOW_OUTPUT).is_file():
            raise ConfigError(
                f"{self._where} is the directory of an evaluation, which records answers but no model calls; "
                "give the directory of a finetuning run"
            )
        if (folder / EPISODES).with_suffix("").is_file():
            raise ConfigError(
                f"{self._where} was recorded by an earlier release in format 1; supported: {FORMAT_VERSION}"
            )
        raise ConfigError(
            f"{self._where} is not a run directory: {EPISODES} is missing (it is written to "
            "finetuning.output_dir when the first group completes)"
        )

    def settings(self) -> dict[str, Any]:
        """The content of `run.json`."""
        path = self.folder / RUN
        return read_object(path) if path.is_file() else {}

    def records(self, name: str, episode: str | None = None) -> Iterator[dict[str, Any]]:
        """The records of a file, or only those of one episode."""
        lines = self.lines(name, b"" if episode is None else orjson.dumps(episode))
        header = next(lines, None)
        if header is not None:
            self._check_format(name, header)
        return (record for record in lines if episode is None or record["episode"] == episode)

    def lines(self, name: str, substring: bytes = b"") -> Iterator[dict[str, Any]]:
        """The first line of a file and those that contain `substring`."""
        path = self.folder / name
        for number, line in whole_lines(path) if path.is_file() else ():
            if number == 1 or substring in line:
                yield read_line(path, number, line)

    def group_records(self) -> Iterator[tuple[StoredGroup, dict[str, Any]]]:
        """The groups in the order they were written, with their lines of `groups.jsonl`.

        Those at the end whose other lines were lost in a crash are left out and reported.
        """
        sizes = {name: (self.folder / name).stat().st_size for name in BLOCKS}
        for record in self.records(GROUPS):
            blocks = {name: Block(*record["blocks"][name]) for name in BLOCKS}
            for name, block in blocks.items():
                if block.end > sizes[name]:
                    missing = shorter_than_written(self.folder / name, sizes[name], block.end)
                    row_id, epoch = record["row_id"], record["epoch"]
                    logger.warning("%s; skipped the groups from row %r of epoch %d on", missing, row_id, epoch)
                    return
            group = StoredGroup(record["epoch"], record["row_id"], record["num_episodes"], *blocks.values())
            yield group, record

    def episode_records(self, groups: Iterable[StoredGroup]) -> Iterator[dict[str, Any]]:
        """The lines of `episodes.jsonl.gz` of groups."""
        for group in groups:
            yield from read_block(self.folder / EPISODES, group.episodes)

    def calls(self, group: StoredGroup) -> dict[str, list[ModelCall]]:
        """The calls of a group's episodes that have any, by episode."""
        records = read_block(self.folder / CALLS, group.calls)
        of_episode = groupby(records, lambda record: str(record["episode"]))
        return {episode: restore_calls(lines) for episode, lines in of_episode}

    def _check_format(self, name: str, header: Mapping[str, Any]) -> None:
        if header != {"format": FORMAT_VERSION}:
            version = header.get("format", "unknown")
            raise ConfigError(f"{self._where}/{name} has format {version}; supported: {FORMAT_VERSION}")

    def rescores(self, evaluator: str | None = None, episode: str | None = None) -> dict[tuple[str, str], Any]:
        """The latest scores of `insitu trajectories rescore`, by episode and evaluator."""
        records = self.records(RESCORES, episode)
        return {(r["episode"], r["evaluator"]): r for r in records if evaluator in (None, r["evaluator"])}


class StoredRun(RunFolder):
    """The complete groups of a finished, running or interrupted run.

    Only where they are is held in memory. `reward` names the evaluator that gives the rewards; None:
    the recorded ones.
    """

    def __init__(
        self, folder: Path, key: str = "", reward: str | None = None, epochs: Sequence[int] | None = None
    ) -> None:
        super().__init__(folder, key)
        self.reward = reward
        self._groups = [group for group, _ in self.group_records()]
        complete = sorted({group.epoch for group in self._groups})
        if not complete:
            raise ConfigError(f"{self._where} has no complete group yet")
        self.epochs = complete if epochs is None else epochs
        """Those to read, in this order."""
        if missing := [epoch for epoch in self.epochs if epoch not in complete]:
            known = ", ".join(map(str, complete[:_LISTED])) + " ..." * (len(complete) > _LISTED)
            raise ConfigError(f"{self._where} has no complete group of epoch {missing[0]}; available: {known}")
        self._scores: dict[str, dict[str, Any]] = {}
        if reward is not None:
            self._scores = {name: record for (name, _), record in self.rescores(reward).items()}
            self._check_reward(reward)

    def _check_reward(self, reward: str) -> None:
        episodes = self.episode_records(self._groups)
        recorded: dict[str, Any] = next((r["scores"] for r in episodes if r.get("scores")), {})
        if not self._scores and reward not in recorded:
            known = sorted({*recorded, *(name for _, name in self.rescores())})
            raise ConfigError(
                f"{self._where} has no scores of {reward!r}; available: {', '.join(known) or 'none'} "
                f"(`insitu trajectories rescore {self.folder} --evaluator NAME` adds scores)"
            )

    def groups(self, epoch: int) -> list[StoredGroup]:
        """The groups of an epoch in the order they were written."""
        return [group for group in self._groups if group.epoch == epoch]

    async def replay(self, run_id: str, epoch: int) -> AsyncIterator[list[Episode]]:
        """The groups that an epoch of another run gets, as groups of that run."""
        recorded = self.epochs[(epoch - 1) % len(self.epochs)]
        for group in await asyncio.to_thread(self.groups, recorded):
            episodes = await asyncio.to_thread(self.load, group)
            yield [_renamed(episode, run_id, epoch) for episode in episodes]

    def load(self, group: StoredGroup) -> list[Episode]:
        """The episodes of a group, with the rewards of `reward`."""
        calls = self.calls(group)
        return [self._episode(record, calls.get(record["episode"], [])) for record in self.episode_records([group])]

    def _episode(self, record: Mapping[str, Any], calls: list[ModelCall]) -> Episode:
        if len(calls) != record["calls"]:
            name, found = record["episode"], f"{len(calls)} of the {record['calls']}"
            raise InsituError(f"{self.folder / CALLS} has {found} calls of episode {name}")
        episode = restore_episode(record, calls)
        if self.reward is not None:
            self._replace_reward(episode, self.reward)
        return episode

    def _replace_reward(self, episode: Episode, evaluator: str) -> None:
        """Step rewards belong to the recorded reward; only those of the same evaluator are kept."""
        given = self._scores.get(episode.key.text())
        score = given["score"] if given is not None else episode.scores.get(evaluator)
        episode.reward, episode.step_rewards, episode.rewarded_functions = score, None, []
        episode.reasoning = given["reasoning"] if given is not None else None
        if given is not None:
            episode.step_rewards = given.get("step_scores")
            episode.scores = episode.scores | {evaluator: score}
        if score is not None and episode.outcome is Outcome.OK:
            episode.reason = episode.error = None
        elif episode.reason is None:
            episode.reason = DropReason((given or {}).get("reason") or DropReason.NO_SCORE)
            episode.error = (given or {}).get("error") or f"{evaluator} has not scored this episode"


def _renamed(episode: Episode, run_id: str, epoch: int) -> Episode:
    """The episode as one of another run; `source` keeps its name."""
    own = EpisodeKey(run_id, epoch, *episode.key[2:])
    return replace(episode, key=own, source=episode.key.text())


def open_stored(config: Config, block: str, stored: StoredEpisodesConfig) -> StoredRun:
    """The run that a trajectory builder reads. Raises ConfigError naming the key in its `block`."""
    key = f"{block}.episodes_from"
    return StoredRun(config.find_path(stored.run, key), key, stored.reward, stored.epochs)
