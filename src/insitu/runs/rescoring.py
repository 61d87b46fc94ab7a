"""Scores the recorded episodes of a run again, with any evaluator, and appends the scores to the run's files."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from insitu.builder import Builder
from insitu.collect.collector import run_limited
from insitu.collect.datasets import dataset_file, load_dataset
from insitu.collect.evaluators import parse_score, score
from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu.registry import EVALUATOR
from insitu.runs.files import RESCORES, RUN
from insitu.runs.store import RunStore
from insitu.runs.stored import StoredRun, dataset_record
from insitu.schemas.episodes import Episode, Outcome
from insitu.schemas.evaluation import EvalInputItem, EvaluatorInfo

logger = logging.getLogger(__name__)

_KEY = "RUN_DIR"


@dataclass
class RescoreSummary:
    """What a rescoring did; `first_error` is that of the first episode without a score."""

    scores: list[float] = field(default_factory=list)
    unscored: Counter[str] = field(default_factory=Counter)
    first_error: str | None = None
    failed_episodes: int = 0
    """Not scored, as they have no output."""


@dataclass(frozen=True)
class Rescoring:
    """A run, the rows its episodes were played on, and the evaluator's file."""

    run: StoredRun
    config: Config
    rows: Mapping[str, EvalInputItem]
    evaluator: str

    @property
    def episodes_in_total(self) -> int:
        return sum(group.size for epoch in self.run.epochs for group in self.run.groups(epoch))

    def episodes(self) -> Iterator[Episode]:
        for epoch in self.run.epochs:
            for group in self.run.groups(epoch):
                yield from self.run.load(group)


def open_rescoring(
    folder: Path,
    evaluator: str,
    config_file: Path | None = None,
    dataset: Path | None = None,
    override: Sequence[tuple[str, str]] = (),
) -> Rescoring:
    """Checks everything that can be checked before an evaluator is built.

    Without `config_file` the evaluator is one of the run's own file; without `dataset` the rows are those of the run.
    Raises ConfigError if one of them is missing or has changed.
    """
    run = StoredRun(folder, _KEY)
    settings = run.files.settings()
    if config_file is None:
        config_file = Path(str(settings.get("source", "")))
        if not config_file.is_file():
            raise ConfigError(
                f"{folder / RUN}: the file of the run, {str(config_file)!r}, does not exist here; "
                "give one with --config_file"
            )
    config = load_config(config_file, override)
    config.block(EVALUATOR, evaluator)
    recorded = settings.get("dataset") or {}
    rows = load_dataset(config, _dataset(config, recorded, folder) if dataset is None else dataset)
    by_id = {str(row.id): row for row in rows}
    missing = {group.row_id for epoch in run.epochs for group in run.groups(epoch)} - by_id.keys()
    if missing:
        raise ConfigError(
            f"{len(missing)} of the rows of {folder} are not in the dataset, such as {min(missing)!r}: "
            "give their file with --dataset"
        )
    return Rescoring(run, config, by_id, evaluator)


def _dataset(config: Config, recorded: Mapping[str, Any], folder: Path) -> Path | None:
    """The file of the run's rows, if the run has recorded it; raises ConfigError if it has changed."""
    if not recorded:  # an earlier release
        return None
    file = Path(recorded["file"])
    if not file.is_file():
        file, _ = dataset_file(config)
    if dataset_record(file)["sha256"] != recorded["sha256"]:
        raise ConfigError(
            f"the dataset {file} has changed since {folder} was collected, so its row ids may name other rows; give "
            "the original file with --dataset, or this one if its rows are the same"
        )
    return file


async def rescore(
    rescoring: Rescoring, builder: Builder, on_scored: Callable[[], None] = lambda: None
) -> RescoreSummary:
    """Scores every episode that has an output, and appends a line per score as soon as it is known."""
    config, summary = rescoring.config, RescoreSummary()
    info = await builder.get_evaluator(rescoring.evaluator)
    about = {
        "evaluator": rescoring.evaluator,
        "config_file": config.source,
        "config_hash": config_hash(config, rescoring.evaluator),
    }

    def played() -> Iterator[Episode]:
        for episode in rescoring.episodes():
            if episode.outcome is Outcome.OK:
                yield episode
            else:
                summary.failed_episodes += 1
                on_scored()

    async def scored(episode: Episode) -> dict[str, Any]:
        record = await _score(episode, rescoring.rows[episode.key.row_id], info, rescoring)
        return {"episode": episode.key.text(), **about, **record}

    store = RunStore(rescoring.run.folder, _KEY)
    try:
        async with aclosing(run_limited(played(), scored, config.max_concurrency)) as records:
            async for record in records:
                await asyncio.to_thread(store.append, RESCORES, [record])
                _count(summary, record)
                on_scored()
    finally:
        store.close()
    return summary


async def _score(episode: Episode, row: EvalInputItem, info: EvaluatorInfo, rescoring: Rescoring) -> dict[str, Any]:
    item = row.model_copy(update={"output_obj": episode.output})
    output = await score(info, rescoring.evaluator, [item], rescoring.config.eval.scoring_limit(1))
    [given] = output.eval_output_items
    value, reason, error = parse_score(given)
    return {
        "score": value,
        "step_scores": given.step_scores if value is not None else None,
        "reasoning": given.reasoning,
        "reason": reason,
        "error": error,
        "timestamp": datetime.now(UTC).isoformat(),
    }


def _count(summary: RescoreSummary, record: Mapping[str, Any]) -> None:
    if record["score"] is not None:
        summary.scores.append(record["score"])
        return
    summary.unscored[str(record["reason"])] += 1
    summary.first_error = summary.first_error or f"{record['episode']}: {record['error']}"


def config_hash(config: Config, evaluator: str) -> str:
    """Identifies the settings of an evaluator: the first digits of the SHA-256 of its block."""
    block = config.block(EVALUATOR, evaluator)
    text = f"{block.type} {block.model_dump_json()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
