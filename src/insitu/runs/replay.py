"""The recorded episodes of a run as input: replayed to the trainer of another run, exported, or scored again."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from insitu.builder import Builder
from insitu.collect.collector import run_limited
from insitu.collect.datasets import find_dataset, load_dataset
from insitu.collect.evaluation import held_out_config
from insitu.collect.evaluators import parse_score, score
from insitu.config import Config, Moved, load_config
from insitu.disk.json_files import read_object
from insitu.disk.model_files import model_digest
from insitu.errors import ConfigError, InsituError
from insitu.registry import EVALUATOR
from insitu.runs.files import BACKEND_FOLDER, CALLS, RESCORES, RUN, STARTED_FILE
from insitu.runs.reader import RunReader
from insitu.runs.records import StoredGroup, restore_episode
from insitu.runs.store import RunStore
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus, ModelCall
from insitu.schemas.evaluation import EvalInputItem, EvaluatorInfo
from insitu.schemas.finetuning import parse_reward, signed

_LISTED = 5
_KEY = "RUN_DIR"


class StoredEpisodesConfig(BaseModel):
    """Recorded episodes to use instead of running the workflow."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

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
        self.epochs = complete if epochs is None else epochs
        """The epochs to read, in this order."""
        if missing := [epoch for epoch in self.epochs if epoch not in complete]:
            numbers = ", ".join(map(str, complete[:_LISTED])) + " ..." * (len(complete) > _LISTED)
            raise ConfigError(f"{self.files.where} has no complete group of epoch {missing[0]}; available: {numbers}")
        self._scores: dict[str, dict[str, Any]] = {}
        if reward is not None:
            evaluator, _ = parse_reward(reward)
            self._scores = {name: record for (name, _), record in self.files.rescores(evaluator).items()}
            self._check_reward(evaluator, "-" * reward.startswith("-"))

    def _check_reward(self, reward: str, sign: str) -> None:
        episodes = self.files.episode_records(self._groups)
        recorded: dict[str, Any] = next((r["scores"] for r in episodes if r.get("scores")), {})
        if not self._scores and reward not in recorded:
            names = [sign + name for name in sorted({*recorded, *(name for _, name in self.files.rescores())})]
            raise ConfigError(
                f"{self.files.where} has no scores of {sign + reward!r}; available: {', '.join(names) or 'none'} "
                f"(`insitu trajectories rescore {self.folder} --evaluator NAME` adds scores)"
            )

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
                    reason=None if episode.reason is DropReason.NO_PAIR else episode.reason,
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
        episode.rewarded_functions = []
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


def held_out_record(config: Config, moved: Moved | None = None) -> dict[str, Any] | None:
    """The dataset that validation scores, if any."""
    if (validation := config.finetuning.validation) is None:
        return None
    return find_dataset(held_out_config(config, moved), validation.dataset, moved).record()


def _starting_model(folder: Path) -> dict[str, str | None] | None:
    """The model that the run's own backend started from, if it has one; without a digest if it is one of the Hub."""
    if not (record := folder / BACKEND_FOLDER / STARTED_FILE).is_file():
        return None
    model = Path(read_object(record)["model"])
    return {"file": str(model), "sha256": model_digest(model) if model.exists() else None}


def provenance(builder: Builder, stored: StoredRun | None, folder: Path) -> dict[str, Any]:
    """What later uses of the run in `folder` need to know: rows and model, which calls it trains, and where from."""
    config, finetuning = builder.config, builder.config.finetuning
    if stored is not None:
        dataset = stored.files.settings().get("dataset")
    else:
        path = builder.request.dataset if builder.request is not None else None
        has_rows = path is not None or config.eval.dataset is not None  # a plugin's builder may need none
        dataset = find_dataset(config, path, builder.moved).record() if has_rows else None
    llms, model = sorted(config.trained_llms()), finetuning.target_model
    return {
        "dataset": dataset,
        "held_out": held_out_record(config, builder.moved),
        "starting_model": _starting_model(folder),
        "targets": {"functions": finetuning.target_functions, "model": model, "llms": llms},
        "episodes_from": stored and {"run": str(stored.folder), "epochs": [*stored.epochs], "reward": stored.reward},
    }


def file_of_run(folder: Path, how: str) -> Path:
    """The YAML file of a run. Raises ConfigError, saying `how` to give another, if it does not exist any more."""
    file = Path(str(RunReader(folder).settings().get("source", "")))
    if not file.is_file():
        raise ConfigError(f"{folder / RUN}: the file of the run, {str(file)!r}, does not exist here; give one {how}")
    return file


class Rescoring:
    """Scores the recorded episodes of a run again, and appends the scores to the run's files.

    Without `config_file` the evaluator is one of the run's own file; without `dataset` the rows are those of the run.
    Raises ConfigError if one of them is missing or has changed, before an evaluator is built.
    """

    def __init__(
        self,
        folder: Path,
        evaluator: str,
        config_file: Path | None = None,
        dataset: Path | None = None,
        override: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._run = StoredRun(folder, _KEY)
        settings = self._run.files.settings()
        if config_file is None:
            config_file = file_of_run(folder, "with --config_file")
        self.config, self.evaluator = load_config(config_file, override), evaluator
        block = self.config.block(EVALUATOR, evaluator)
        digest = hashlib.sha256(f"{block.type} {block.model_dump_json()}".encode()).hexdigest()
        self._about = {"evaluator": evaluator, "config_file": self.config.source, "config_hash": digest[:16]}
        if dataset is None and (recorded := settings.get("dataset")):  # None: a builder of a plugin
            dataset = _unchanged_dataset(self.config, recorded, folder)
        self._rows = {str(row.id): row for row in load_dataset(self.config, dataset)}
        missing = {group.row_id for group in self._run.selected} - self._rows.keys()
        if missing:
            raise ConfigError(
                f"{len(missing)} of the rows of {folder} are not in the dataset, such as {min(missing)!r}: "
                "give their file with --dataset"
            )
        self.episodes_in_total = sum(group.size for group in self._run.selected)
        self.scores: list[float] = []
        self.unscored: Counter[str] = Counter()
        """The number of episodes without a score, by reason."""
        self.first_error: str | None = None
        """The error of the first episode without a score."""
        self.failed_episodes = 0
        """Not scored, as they have no output."""

    async def run(self, builder: Builder, on_scored: Callable[[], None] = lambda: None) -> None:
        """Scores every episode that has an output, and appends a line per score as soon as it is known."""
        info = await builder.get_evaluator(self.evaluator)

        def played() -> Iterator[Episode]:
            for episode in (episode for group in self._run.selected for episode in self._run.load(group)):
                if episode.outcome is EpisodeStatus.OK:
                    yield episode
                else:
                    self.failed_episodes += 1
                    on_scored()

        async def scored(episode: Episode) -> dict[str, Any]:
            return await self._score(episode, self._rows[episode.key.row_id], info)

        with closing(RunStore(self._run.folder, _KEY)) as store:
            async with aclosing(run_limited(played(), scored, self.config.max_concurrency)) as records:
                async for record in records:
                    await asyncio.to_thread(store.append, RESCORES, [record])
                    if record["score"] is not None:
                        self.scores.append(record["score"])
                    else:
                        self.unscored[str(record["reason"])] += 1
                        self.first_error = self.first_error or f"{record['episode']}: {record['error']}"
                    on_scored()

    async def _score(self, episode: Episode, row: EvalInputItem, info: EvaluatorInfo) -> dict[str, Any]:
        item = row.model_copy(update={"output_obj": episode.output})
        output = await score(info, self.evaluator, [item], self.config.eval.scoring_limit(1))
        [result] = output.eval_output_items
        value, reason, error = parse_score(result)
        return {
            "episode": episode.key.text(),
            **self._about,
            "score": value,
            "step_scores": result.step_scores if value is not None else None,
            "reasoning": result.reasoning,
            "reason": reason,
            "error": error,
            "timestamp": datetime.now(UTC).isoformat(),
        }


def _unchanged_dataset(config: Config, recorded: Mapping[str, Any], folder: Path) -> Path | None:
    """The file of the run's rows; None: those of the configuration. Raises ConfigError if they have changed."""
    dataset = find_dataset(config, file if (file := recorded.get("file")) and Path(file).is_file() else None)
    if dataset.record()["sha256"] != recorded["sha256"]:
        raise ConfigError(
            f"the dataset {dataset} has changed since {folder} was collected, so its row ids may name other rows; give "
            "the original file with --dataset, or this one if its rows are the same"
        )
    return dataset.file
