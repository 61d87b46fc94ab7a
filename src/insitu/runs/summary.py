"""Finds runs and tells from their small files how each is doing, whatever is damaged in them."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from insitu.disk.checkpoint_files import OPTIMIZER_FILE, saved_checkpoints
from insitu.disk.files import read_line, read_object, shorter_than_written
from insitu.disk.folder_lock import locked_by
from insitu.errors import ConfigError, InsituError
from insitu.runs.files import BACKEND_FOLDER, BEST, EVENTS, METRICS, PROGRESS, RUN, RUN_FILES, STARTED_FILE
from insitu.runs.held_out import read_validations
from insitu.runs.progress import RunProgress, journal_size, read_progress

T = TypeVar("T")

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
    problems: list[str] = field(default_factory=list)

    def attempt(self, read: Callable[[], T], default: T) -> T:
        """What a function reads; the default if it fails, which is noted as a problem."""
        try:
            return read()
        except (InsituError, OSError) as error:
            problem = str(error)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # JSON of another form
            problem = f"a file has another form than insitu writes: {type(error).__name__}: {error}"
        if problem not in self.problems:
            self.problems.append(problem)
        return default

    def read_lines(self, path: Path) -> list[dict[str, Any]]:
        """The records of a small file of lines, without those that are damaged, which are noted as one problem."""
        *lines, _torn = self.attempt(lambda: path.read_bytes() if path.is_file() else b"", b"").split(b"\n")
        records, damaged = [], []
        for number, line in enumerate(lines, 1):
            try:
                records.append(read_line(path, number, line))
            except InsituError as error:
                damaged.append(str(error))
        if damaged:
            more = f" (and {len(damaged) - 1} more damaged lines)" * (len(damaged) > 1)
            self.problems += [problem for problem in [damaged[0] + more] if problem not in self.problems]
        return [record for record in records if record.keys() != {"format"}]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RunDetails:
    """A run on a page, from `read_details`. `settings` are those that differ from the defaults, by dotted key."""

    summary: RunSummary
    resume: str
    settings: dict[str, Any]
    events: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    best: dict[str, Any] | None
    files: dict[str, int]
    """Bytes by name; a folder of checkpoints or jobs is one entry."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_runs(folders: Iterable[Path]) -> Iterator[Path]:
    """The run directories in folders that exist, and up to three levels below them, in natural order.

    A folder may be a run itself. Symbolic links below them and hidden folders are not followed.
    """
    seen: set[Path] = set()
    for folder in folders:
        for run in _runs_below(folder, _DEPTH):
            if run.resolve() not in seen:
                seen.add(run.resolve())
                yield run


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: _natural(entry.name))
    except OSError:  # not readable for this user, or deleted meanwhile
        return
    if {entry.name for entry in entries} & {*RUN_FILES, PROGRESS}:
        yield folder
    elif depth:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _runs_below(folder / entry.name, depth - 1)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts run.2 before run.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_summary(run: Path) -> RunSummary:
    """Never raises for what is in the folder."""
    summary = RunSummary(str(run))
    locked = locked_by(run)  # before and after the status is read: a process may end or begin in between
    settings: dict[str, Any] = summary.attempt(lambda: read_object(run / RUN), {})
    progress = summary.attempt(lambda: read_progress(run), None)
    summary.run_id = settings.get("run_id") or (progress.run_id if progress is not None else None)
    summary.attempt(lambda: _describe_settings(summary, settings), None)
    locked = locked or locked_by(run)
    if progress is not None:
        summary.epoch, summary.error = progress.epoch, progress.error
        summary.status = "killed" if progress.status == "running" else progress.status
        summary.problems += summary.attempt(lambda: [*_damaged_sizes(run, progress)], [])
    if locked is not None:
        summary.status, summary.error = "running", None
    elif progress is None and not (run / PROGRESS).exists():
        summary.problems.append(f"{run / PROGRESS} is missing: the run cannot continue")
    for event in summary.read_lines(run / EVENTS):
        summary.epochs = event.get("epochs", summary.epochs)
    summary.attempt(lambda: _describe_validations(summary, read_validations(run)), None)
    summary.written = summary.attempt(lambda: _last_written(run), None)
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
    scored = [(record["avg_reward"], record["epoch"]) for record in validations if "error" not in record]
    if scored:
        summary.first_score = scored[0][0]
        summary.best_score, summary.best_epoch = max(scored, key=lambda each: each[0])


def _damaged_sizes(run: Path, progress: RunProgress) -> Iterator[str]:
    for name, size in progress.sizes.items():
        path = run / name
        found = path.stat().st_size if path.is_file() else 0
        if found < size:
            yield shorter_than_written(path, found, size)


def _last_written(run: Path) -> str:
    times = [entry.stat().st_mtime for entry in os.scandir(run) if entry.is_file()]
    return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds")


def read_details(run: Path) -> RunDetails:
    """Reads no file of episodes. Raises ConfigError if the folder holds no run."""
    if not any((run / name).exists() for name in (*RUN_FILES, PROGRESS)):
        raise ConfigError(f"RUN_DIR: {run} holds no run of insitu finetune")
    summary = read_summary(run)
    best = run / BEST
    return RunDetails(
        summary=summary,
        resume=summary.attempt(lambda: _what_resume_does(run, summary), "cannot continue"),
        settings=summary.attempt(lambda: _changed_settings(run), {}),
        events=summary.read_lines(run / EVENTS),
        epochs=summary.read_lines(run / METRICS),
        validations=summary.attempt(lambda: read_validations(run), []),
        best=summary.attempt(lambda: read_object(best) if best.is_file() else None, None),
        files=summary.attempt(lambda: _sizes(run), {}),
    )


def _changed_settings(run: Path) -> dict[str, Any]:
    from insitu.config.defaults import changed_settings  # imports the components

    return changed_settings(read_object(run / RUN).get("config") or {})


def _what_resume_does(run: Path, summary: RunSummary) -> str:
    """What `insitu finetune --resume` would do, in a sentence."""
    if (owner := locked_by(run)) is not None:
        return f"cannot continue now: {owner} is running it"
    progress = read_progress(run)
    if progress is None:
        return f"cannot continue: it has no {PROGRESS}"
    if damaged := [*_damaged_sizes(run, progress)]:
        return f"cannot continue: {damaged[0]}"
    if progress.phase is not None:
        return "has trained its pairs" if progress.jobs else f"continues with its pairs, which are {progress.phase}"
    size = journal_size(run)
    finished = f" with {size.episodes} finished episodes of epoch {size.epoch}" if size is not None else ""
    if size is None or size.epoch != progress.epoch + 1:
        finished = ""
    after = f"continues after epoch {progress.epoch}{finished}"
    if summary.epochs is not None and progress.epoch >= summary.epochs:
        after = f"has completed all {summary.epochs} epochs; continues after epoch {progress.epoch} if given more"
    version, backend = progress.policy_version, run / BACKEND_FOLDER
    if not (backend / STARTED_FILE).is_file():
        return f"{after}, if its backend continues runs and still serves version {version}"
    saved = {record.version: folder for folder, record in saved_checkpoints(backend / "checkpoints")}
    if version and version not in saved:
        return f"cannot continue: the checkpoint of version {version} is missing in {backend / 'checkpoints'}"
    if version and not (saved[version] / OPTIMIZER_FILE).exists():
        return f"{after}, with a new optimizer state"
    return after


def _sizes(run: Path) -> dict[str, int]:
    """Bytes of the files, those of each folder of checkpoints or jobs together."""
    sizes: dict[str, int] = {}
    for parent, _, names in os.walk(run):
        for name in names:
            path = Path(parent) / name
            inside = path.relative_to(run)
            entry = f"{inside.parent}/" if len(inside.parts) > 2 else str(inside)
            try:
                sizes[entry] = sizes.get(entry, 0) + path.stat().st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
    return dict(sorted(sizes.items(), key=lambda item: ("/" in item[0], _natural(item[0]))))
