"""The recorded episodes of a run as input: of which epochs, and with whose scores as rewards."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from insitu.builder import Builder
from insitu.collect.datasets import dataset_file
from insitu.errors import ConfigError, InsituError
from insitu.runs.files import CALLS
from insitu.runs.reader import RunReader
from insitu.runs.records import StoredGroup, restore_episode
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, ModelCall, Outcome

_LISTED = 5


class StoredEpisodesConfig(BaseModel):
    """Recorded episodes to use instead of running the workflow."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

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


class StoredRun:
    """The complete groups of a finished, running or interrupted run, to be read group by group.

    Only where they are is held in memory. `reward` names the evaluator that gives the rewards; None:
    the recorded ones.
    """

    def __init__(
        self, folder: Path, key: str = "", reward: str | None = None, epochs: Sequence[int] | None = None
    ) -> None:
        self.files = RunReader(folder, key).check_episodes()
        self.folder = folder
        self.reward = reward
        self._groups = [*self.files.groups()]
        complete = sorted({group.epoch for group in self._groups})
        if not complete:
            raise ConfigError(f"{self.files.where} has no complete group yet")
        self.epochs = complete if epochs is None else epochs
        """Those to read, in this order."""
        if missing := [epoch for epoch in self.epochs if epoch not in complete]:
            known = ", ".join(map(str, complete[:_LISTED])) + " ..." * (len(complete) > _LISTED)
            raise ConfigError(f"{self.files.where} has no complete group of epoch {missing[0]}; available: {known}")
        self._scores: dict[str, dict[str, Any]] = {}
        if reward is not None:
            self._scores = {name: record for (name, _), record in self.files.rescores(reward).items()}
            self._check_reward(reward)

    def _check_reward(self, reward: str) -> None:
        episodes = self.files.episode_records(self._groups)
        recorded: dict[str, Any] = next((r["scores"] for r in episodes if r.get("scores")), {})
        if not self._scores and reward not in recorded:
            known = sorted({*recorded, *(name for _, name in self.files.rescores())})
            raise ConfigError(
                f"{self.files.where} has no scores of {reward!r}; available: {', '.join(known) or 'none'} "
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
        calls = self.files.calls(group)
        return [
            self._episode(record, calls.get(record["episode"], [])) for record in self.files.episode_records([group])
        ]

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


def open_stored(builder: Builder, block: str, stored: StoredEpisodesConfig) -> StoredRun:
    """The run that a trajectory builder reads. Raises ConfigError naming the key in its `block`."""
    key = f"{block}.episodes_from"
    return StoredRun(builder.config.find_path(stored.run, key, builder.moved), key, stored.reward, stored.epochs)


def dataset_record(file: Path) -> dict[str, str]:
    """A dataset as `run.json` names it."""
    with file.open("rb") as opened:
        return {"file": str(file), "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def provenance(builder: Builder, stored: StoredRun | None) -> dict[str, Any]:
    """What later uses of the episodes of a run need to know: its rows, which calls it trains, and where from."""
    config, finetuning = builder.config, builder.config.finetuning
    if stored is not None:
        dataset = stored.files.settings().get("dataset")
    else:
        path = builder.request.dataset if builder.request is not None else None
        has_rows = path is not None or config.eval.dataset is not None  # a plugin's builder may need none
        dataset = dataset_record(dataset_file(config, path, builder.moved)[0]) if has_rows else None
    llms, model = sorted(config.trained_llms()), finetuning.target_model
    return {
        "dataset": dataset,
        "targets": {"functions": finetuning.target_functions, "model": model, "llms": llms},
        "episodes_from": stored and {"run": str(stored.folder), "epochs": [*stored.epochs], "reward": stored.reward},
    }
