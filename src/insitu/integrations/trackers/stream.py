"""What trackers are given of a run, from its files: the metrics of each epoch, the same names for all trackers."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from insitu.config.resolved import leaves
from insitu.errors import InsituError
from insitu.runs.files import METRICS, PROGRESS, TRACKERS, VALIDATION_SCORES
from insitu.runs.reader import RunReader
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import message_text
from insitu.training.trackers import Step, Table, TrackedRun

SAMPLED_GROUPS, SAMPLED_EPISODES = 2, 4
"""Groups of an epoch, and episodes of each, whose texts are logged."""
MAX_ROWS = 1000
"""Held-out rows whose scores are logged."""
_MAX_TEXT = 4000
_TRAIN = {
    "avg_reward": "reward",
    "min_reward": "reward_min",
    "max_reward": "reward_max",
    "num_trajectories": "episodes",
    "num_groups": "groups",
    "filtered_trajectories": "episodes_trained",
    "filtered_groups": "groups_trained",
    "completions_mean_length": "completion_length",
    "completions_clipped_ratio": "completion_clipped_ratio",
    "scores": "score",
    "credit_by_function": "credit",
}
_SECTIONS = {"dropped": "dropped", "seconds": "time"}
_VALIDATION = {
    "avg_reward": "validation/score",
    "min_reward": "validation/score_min",
    "max_reward": "validation/score_max",
    "num_examples": "validation/episodes",
    "dropped": "validation/dropped",
    "policy_version": "validation/policy_version",
    "seconds": "time/validate",
}
_NOT_METRICS = {"epoch", "timestamp", "run_id", "job", "curriculum_state"}


def training_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line of `training_metrics.jsonl`."""
    metrics: dict[str, float] = {}
    for key, value in line.items():
        if key not in _NOT_METRICS:
            own = f"job/{key}" if key in _TRAIN.values() else key
            metrics |= _numbers(_SECTIONS.get(key) or f"train/{_TRAIN.get(key, own)}", value)
    return metrics


def validation_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a record of `validation_history.json`; none of a failed validation."""
    if "error" in record:
        return {}
    numbers: dict[str, float] = {}
    for key, name in _VALIDATION.items():
        numbers |= _numbers(name, record.get(key))
    for name, bound in zip(("low", "high"), record.get("ci95") or (), strict=False):
        numbers |= _numbers(f"validation/score_{name}", bound)
    return numbers


def _numbers(name: str, value: Any) -> dict[str, float]:
    """The finite numbers of a value, under its name, or under names within it."""
    if isinstance(value, Mapping):
        return {inner: n for key, v in value.items() for inner, n in _numbers(f"{name}/{key}", v).items()}
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return {name: float(value)}
    return {}


class TrackedFiles:
    """What trackers are given of the files of a run, which may be in progress."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = RunReader(folder)

    @cached_property
    def run(self) -> TrackedRun:
        about = self._files.settings()
        settings = {key: _scalar(value) for key, value in leaves(about.get("config") or {})}
        return TrackedRun(self.folder.name, about["run_id"], self.folder / TRACKERS, settings)

    @property
    def progress(self) -> dict[str, Any]:
        """The point from which the run can continue: its epochs up to there do not change any more."""
        return self._files.object(PROGRESS) or {}

    @property
    def status(self) -> str:
        """How the run has ended."""
        try:
            return str(self.progress.get("status", "running"))
        except InsituError:
            return "running"

    def steps(self, after: int) -> Iterator[Step]:
        """The epochs after this one that do not change any more."""
        progress = self.progress
        last = progress.get("epoch", -1)
        if last <= after and after >= 0:
            return
        lines = {record["epoch"]: record for record in self._files.records(METRICS)}
        validations = {record["epoch"]: record for record in self._files.validations()}
        last -= last > 0 and progress.get("due_validation") == last and last not in validations  # it is in progress
        for epoch in range(after + 1, last + 1):
            if last == 0 and epoch not in validations:
                return
            metrics = training_metrics(lines.get(epoch, {})) | validation_metrics(validations.get(epoch, {}))
            if metrics:
                yield Step(epoch, metrics, dict(self._tables(epoch)))

    def _tables(self, epoch: int) -> Iterator[tuple[str, Table]]:
        for record in self._files.records(VALIDATION_SCORES):
            if record.get("epoch") == epoch:
                rows = [(row, sum(scores) / len(scores)) for row, scores in record["scores"].items() if scores]
                yield "validation/scores", Table(("row", "score"), rows[:MAX_ROWS])
        if epoch > 0 and (rows := [*self._episodes(epoch)]):
            columns = ("row", "generation", "outcome", "reward", "prompt", "answer", "output")
            yield "train/transcripts", Table(columns, rows)  # a name that no metric has

    def _episodes(self, epoch: int) -> Iterator[tuple[Any, ...]]:
        """The first episodes of the first groups of an epoch."""
        groups = [group for group in self._files.groups() if group.epoch == epoch][:SAMPLED_GROUPS]
        for group in groups:
            calls = self._files.calls(group)
            for record in [*self._files.episode_records([group])][:SAMPLED_EPISODES]:
                prompt, answer = _texts(calls.get(record["episode"], []))
                values = (record["row_id"], record["generation"], record["outcome"], record["reward"])
                yield *values, prompt, answer, _short(str(record["output"]))


def _texts(calls: list[ModelCall]) -> tuple[str, str]:
    """The last prompt of an episode, and its answer."""
    if not calls:
        return "", ""
    last = calls[-1]
    prompt = "\n".join(f"{message.get('role')}: {message_text(message)}" for message in last.messages)
    return _short(prompt), _short(message_text(last.message or {}))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text)} characters)"


def _scalar(value: Any) -> str | float | bool | None:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
