"""Finds runs and tells from their small files how each is doing, whatever is damaged in them."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from insitu.config.resolved import leaves
from insitu.disk.files import file_size
from insitu.disk.folder_lock import locked_by
from insitu.disk.json_files import shorter_than_written
from insitu.errors import ConfigError
from insitu.runs.files import BEST, EVENTS, METRICS, PROGRESS, RUN_FILES, holds_run
from insitu.runs.reader import Problems, RunReader
from insitu.runs.records import RunProgress, best_validation, comparable_validations, natural

DEFAULT_FOLDERS = ("runs", ".tmp")
"""Where to look for runs, in the working directory: that of the examples, and that of the default `output_dir`."""
_DEPTH = 3
"""Levels of folders below those that are searched."""


@dataclass
class RunSummary:
    """A run in a line. `status` is that of its process: `killed` if it ended without recording why.

    `first_score` and `best_score` are those of its validations, `written` is when a file in its folder was last
    written, in UTC, and `problems` what is missing or damaged.
    """

    run_dir: str
    run_id: str | None = None
    status: str = "unknown"
    error: str | None = None
    epoch: int | None = None
    epochs: int | None = None
    method: str | None = None
    model: str | None = None
    first_score: float | None = None
    best_score: float | None = None
    best_epoch: int | None = None
    written: str | None = None
    problems: Problems = field(default_factory=Problems)


@dataclass
class RunDetails:
    """A run on a page, from `read_details`.

    `settings` are those that its file gives, by dotted key.
    """

    summary: RunSummary
    resume: str
    settings: dict[str, Any]
    events: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    best: dict[str, Any] | None


def find_runs(folders: Iterable[Path], *, links: bool = False) -> Iterator[Path]:
    """The run directories in folders that exist, and up to three levels below them, in natural order.

    A folder may be a run itself. Hidden folders are not followed, and symbolic links below them with `links` alone.
    """
    seen: set[Path] = set()
    for folder in folders:
        for run in _runs_below(folder, _DEPTH, links):
            if run.resolve() not in seen:
                seen.add(run.resolve())
                yield run


def _runs_below(folder: Path, depth: int, links: bool) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: natural(entry.name))
    except OSError:  # not readable for this user, or deleted meanwhile
        return
    if {entry.name for entry in entries} & {*RUN_FILES, PROGRESS}:
        yield folder
    elif depth:
        for entry in entries:
            if entry.is_dir(follow_symlinks=links) and not entry.name.startswith("."):
                yield from _runs_below(folder / entry.name, depth - 1, links)


def read_summary(run: Path) -> RunSummary:
    """Never raises for what is in the folder."""
    summary = RunSummary(str(run))
    files, problems = RunReader(run), summary.problems
    locked = locked_by(run)  # before and after the status is read: a process may end or begin in between
    settings: dict[str, Any] = problems.attempt(lambda: files.settings(required=True), {})
    progress = problems.attempt(files.progress, None)
    summary.run_id = settings.get("run_id") or (progress.run_id if progress is not None else None)
    problems.attempt(lambda: _describe_settings(summary, settings), None)
    locked = locked or locked_by(run)
    if progress is not None:
        summary.epoch, summary.error = progress.epoch, progress.error
        summary.status = "killed" if progress.status == "running" else progress.status
        problems += problems.attempt(lambda: [*_damaged_sizes(files, progress)], [])
    if locked is not None:
        summary.status, summary.error = "running", None
    elif progress is None and not (run / PROGRESS).exists():
        problems.note(f"{run / PROGRESS} is missing: the run cannot continue")
    for event in files.readable(EVENTS, problems):
        summary.epochs = event.get("epochs", summary.epochs)
    problems.attempt(lambda: _describe_validations(summary, files.validations()), None)
    summary.written = problems.attempt(lambda: _last_written(run), None)
    return summary


def _describe_settings(summary: RunSummary, settings: Mapping[str, Any]) -> None:
    summary.epochs = settings.get("epochs")
    config = settings.get("config") or {}
    finetuning = config.get("finetuning") or {}
    adapter = (config.get("trainer_adapters") or {}).get(finetuning.get("trainer_adapter")) or {}
    trainer = (config.get("trainers") or {}).get(finetuning.get("trainer")) or {}
    summary.method = (settings.get("training") or {}).get("method") or trainer.get("_type")
    summary.model = adapter.get("model") or adapter.get("url")


def _describe_validations(summary: RunSummary, validations: list[dict[str, Any]]) -> None:
    summary.first_score = next((record["avg_reward"] for record in comparable_validations(validations)), None)
    if (best := best_validation(validations)) is not None:
        summary.best_score, summary.best_epoch = best["avg_reward"], best["epoch"]


def _damaged_sizes(files: RunReader, progress: RunProgress) -> Iterator[str]:
    for name, size in progress.sizes.items():
        if (length := file_size(files.folder / name)) < size:
            yield shorter_than_written(files.folder / name, length, size)


def _last_written(run: Path) -> str:
    """Without hidden files: the index is not the run's, and drafts may vanish meanwhile."""
    times = [entry.stat().st_mtime for entry in os.scandir(run) if entry.is_file() and not entry.name.startswith(".")]
    return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds")


def read_details(run: Path) -> RunDetails:
    """Reads no file of episodes. Raises ConfigError if the folder holds no run."""
    files = RunReader(run)
    if not holds_run(run) and not (run / PROGRESS).exists():
        raise ConfigError(f"RUN_DIR: {run} holds no run of insitu finetune")
    summary = read_summary(run)
    attempt, problems = summary.problems.attempt, summary.problems
    return RunDetails(
        summary=summary,
        resume=attempt(lambda: _where_it_continues(files), "cannot continue"),
        settings=attempt(lambda: dict(leaves(files.settings(required=True).get("given", {}))), {}),
        events=files.readable(EVENTS, problems),
        epochs=files.readable(METRICS, problems),
        validations=attempt(lambda: [*_noted(files.validations())], []),
        best=attempt(lambda: files.object(BEST), None),
    )


def _noted(validations: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adds a `note` to validations on other rows, or by another evaluator, than the latest."""
    comparable = {id(each) for each in comparable_validations(validations)}
    for each in validations:
        is_other = "error" not in each and id(each) not in comparable
        yield {**each, "note": "not comparable: other rows or evaluator than the latest"} if is_other else each


def _where_it_continues(files: RunReader) -> str:
    progress = files.progress()
    if progress is None or [*_damaged_sizes(files, progress)]:
        return "cannot continue"
    return f"continues after epoch {progress.epoch}"
