"""Scores the recorded episodes of a run again, by an evaluator of its file or of another one."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from insitu.builder import Builder
from insitu.collect.collector import run_limited
from insitu.collect.datasets import find_dataset, load_dataset
from insitu.collect.evaluators import parse_score, score
from insitu.config import Config, load_config
from insitu.config.resolved import block_digest
from insitu.errors import ConfigError
from insitu.runs.files import RESCORES
from insitu.runs.replay import StoredRun, config_of_run
from insitu.runs.store import RunStore
from insitu.schemas.episodes import Episode, EpisodeStatus
from insitu.schemas.evaluation import EvalInputItem, EvaluatorInfo
from insitu.schemas.kinds import EVALUATOR

_KEY = "RUN_DIR"


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
            self.config = config_of_run(folder, "with --config_file", override)
        else:
            self.config = load_config(config_file, override)
        self.evaluator = evaluator
        digest = block_digest(self.config, EVALUATOR.section, evaluator)
        if dataset is None and (recorded := settings.get("dataset")):  # None: a builder of a plugin
            dataset = _unchanged_dataset(self.config, recorded, folder)
        self._rows = {str(row.id): row for row in load_dataset(self.config, dataset)}
        self._about = {
            "evaluator": evaluator,
            "config_file": self.config.source,
            "config_hash": digest,
            "dataset": find_dataset(self.config, dataset).record()["sha256"],
        }
        missing = {row for group in self._run.selected for row in group.rows} - self._rows.keys()
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
