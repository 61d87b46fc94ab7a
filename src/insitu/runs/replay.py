"""The recorded episodes of a run as input: replayed to the trainer of another run, exported, or scored again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from insitu.builder import Builder
from insitu.config import Config, load_config
from insitu.errors import ConfigError, InsituError
from insitu.runs.files import CALLS, RUN
from insitu.runs.reader import RunReader
from insitu.runs.records import StoredGroup, restore_episode
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus, ModelCall
from insitu.schemas.finetuning import parse_reward, signed

_LISTED = 5
_BY_TRAINING = (DropReason.NO_PAIR, DropReason.NO_TARGET_CALLS, DropReason.NO_CANDIDATES)
"""Why a run did not train an episode that another one, with other targets or another method, may train."""
_UNDECIDED: dict[str, Any] = {"reason": None, "error": None}


class StoredEpisodesConfig(BaseModel):
    """Recorded episodes to use instead of running the workflow."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: Path
    """A run directory. Epoch 1 gets the groups of its first epoch, and so on; after the last one it starts over."""
    epochs: list[int] | None = Field(default=None, min_length=1)
    """Only groups of these epochs, in this order; none: all epochs."""
    reward: str | None = None
    """Evaluator whose score is the reward: one of `insitu trajectories rescore`, or one whose scores the run has
    recorded; `-NAME` if less is better; none: the recorded reward."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"run": value} if isinstance(value, str | Path) else value


class StoredRun:
    """The complete groups of a finished, running or interrupted run, to be read group by group.

    Only where they are is held in memory. `reward` names the evaluator that gives the rewards, `-NAME` one of
    which less is better; None: the recorded ones.
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
        self.epochs = complete if epochs is None else [*dict.fromkeys(epochs)]
        """The epochs to read, in this order."""
        if missing := [epoch for epoch in self.epochs if epoch not in complete]:
            numbers = ", ".join(map(str, complete[:_LISTED])) + " ..." * (len(complete) > _LISTED)
            raise ConfigError(f"{self.files.where} has no complete group of epoch {missing[0]}; available: {numbers}")
        self._scores: dict[str, dict[str, Any]] = {}
        if reward is not None:
            evaluator, _ = parse_reward(reward)
            self._scores = {name: record for (name, _), record in self.files.rescores(evaluator).items()}
            self._check_reward(evaluator, "-" * reward.startswith("-"))
            self._check_rescored(evaluator)

    def _check_reward(self, reward: str, sign: str) -> None:
        episodes = self.files.episode_records(self._groups)
        recorded: dict[str, Any] = next((r["scores"] for r in episodes if r.get("scores")), {})
        if not self._scores and reward not in recorded:
            names = [sign + name for name in sorted({*recorded, *(name for _, name in self.files.rescores())})]
            raise ConfigError(
                f"{self.files.where} has no scores of {sign + reward!r}; available: {', '.join(names) or 'none'} "
                f"(`insitu trajectories rescore {self.folder} --evaluator NAME` adds scores)"
            )

    def _check_rescored(self, evaluator: str) -> None:
        """Raises ConfigError if recorded scores and new ones would be mixed, or new ones of different evaluators."""
        records = self.files.episode_records(self.selected) if self._scores else ()
        played = [str(record["episode"]) for record in records if record["outcome"] == EpisodeStatus.OK]
        rescored = [self._scores[name] for name in played if name in self._scores]
        again = f"`insitu trajectories rescore {self.folder} --evaluator {evaluator}` scores all of them"
        if 0 < len(rescored) < len(played):
            problem = f"{len(rescored)} of {len(played)} episodes were scored again by {evaluator!r}, others were not"
            raise ConfigError(f"{self.files.where}: {problem}: {again}")
        if len({(record.get("config_hash"), record.get("dataset")) for record in rescored}) > 1:
            problem = f"some episodes were scored again by {evaluator!r} with other settings, code or rows than others"
            raise ConfigError(f"{self.files.where}: {problem}: {again}")

    def groups(self, epoch: int) -> list[StoredGroup]:
        """The groups of an epoch in the order they were written."""
        return [group for group in self._groups if group.epoch == epoch]

    @property
    def selected(self) -> list[StoredGroup]:
        """The groups of all epochs to read."""
        return [group for epoch in self.epochs for group in self.groups(epoch)]

    async def replay(self, run_id: str, epoch: int) -> AsyncIterator[list[Episode]]:
        """The groups that an epoch of another run gets, as groups of that run; `source` keeps their names."""
        recorded = self.epochs[(epoch - 1) % len(self.epochs)]
        for group in await asyncio.to_thread(self.groups, recorded):
            yield [
                replace(
                    episode,
                    key=EpisodeKey(run_id, epoch, *episode.key[2:]),
                    source=episode.key.text(),
                    **(_UNDECIDED if episode.reason in _BY_TRAINING else {}),
                )
                for episode in await asyncio.to_thread(self.load, group)
            ]

    def load(self, group: StoredGroup) -> list[Episode]:
        """The episodes of a group, with the rewards of `reward`."""
        calls, episodes = self.files.calls(group), []
        for record in self.files.episode_records([group]):
            name = record["episode"]
            own: list[ModelCall] = calls.get(name, [])
            if len(own) != record["calls"]:
                counts = f"{len(own)} of the {record['calls']}"
                raise InsituError(f"{self.folder / CALLS} has {counts} calls of episode {name}")
            episodes.append(restore_episode(record, own))
            if self.reward is not None:
                self._replace_reward(episodes[-1], *parse_reward(self.reward))
        return episodes

    def _replace_reward(self, episode: Episode, evaluator: str, sign: int) -> None:
        """Step rewards belong to the recorded reward; only those of the same evaluator are kept."""
        rescore = self._scores.get(episode.key.text(), {})
        score, steps = rescore["score"] if rescore else episode.scores.get(evaluator), rescore.get("step_scores")
        episode.reward = None if score is None else signed(score, sign)
        episode.step_rewards = None if steps is None else [signed(each, sign) for each in steps]
        functions = {name for call in episode.calls for name in call.functions or (WORKFLOW,)}
        episode.rewarded_functions = [] if steps is None else sorted(functions)
        episode.reasoning = rescore.get("reasoning")
        if rescore:
            episode.scores = episode.scores | {evaluator: score}
        if score is not None and episode.outcome is EpisodeStatus.OK:
            episode.reason = episode.error = None
        elif episode.reason is None:
            episode.reason = DropReason(rescore.get("reason") or DropReason.NO_SCORE)
            episode.error = rescore.get("error") or f"{evaluator} has not scored this episode"


def open_stored(builder: Builder, block: str, stored: StoredEpisodesConfig) -> StoredRun:
    """The run that a trajectory builder reads. Raises ConfigError naming the key in its `block`."""
    key = f"{block}.episodes_from"
    return StoredRun(builder.config.find_path(stored.run, key, builder.moved), key, stored.reward, stored.epochs)


def config_of_run(folder: Path, how: str, override: Sequence[tuple[str, str]] = ()) -> Config:
    """The YAML file of a run with the run's own options, and with these.

    Raises ConfigError, saying `how` to give another, if it does not exist any more.
    """
    reader = RunReader(folder)
    file = Path(str(reader.settings(required=True).get("source", "")))
    if not file.is_file():
        raise ConfigError(f"{folder / RUN}: the file of the run, {str(file)!r}, does not exist here; give one {how}")
    return load_config(file, [*reader.overrides(), *override])
