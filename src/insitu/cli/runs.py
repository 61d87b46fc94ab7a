"""The command `runs`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from insitu.cli import options
from insitu.wire.redaction import results_console

if TYPE_CHECKING:
    from insitu.runs.summary import RunDetails, RunSummary

_WIDE = 1000
"""Characters that a line of a table may have in a pipe or file."""


@click.group("runs")
def command() -> None:
    """List, show and fork runs."""


@command.command("list", short_help="List the runs in folders.")
@click.argument("folders", nargs=-1, type=options.PATH, metavar="[FOLDER]...")
@options.as_json
def list_(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the runs in each FOLDER and up to three levels below it, the last written first.

    Without FOLDER: in runs/ and .tmp/ of the working directory. Damaged runs are listed with what is wrong.
    """
    from insitu.errors import ConfigError
    from insitu.runs.summary import DEFAULT_FOLDERS, find_runs, read_summary

    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"FOLDER: {folder} is not a folder")
    searched = folders or tuple(Path(name) for name in DEFAULT_FOLDERS)
    found = [read_summary(run) for run in find_runs(searched)]
    found.sort(key=lambda summary: summary.written or "", reverse=True)
    if as_json:
        for summary in found:
            _print_json(asdict(summary))
    elif found:
        _print_list(found)
    else:
        print(f"no run in {' or '.join(map(str, searched))}")


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=str))


def _print_list(found: "list[RunSummary]") -> None:
    rows = []
    for run in found:
        written = (run.written or "-")[: len("2026-01-01T00:00")].replace("T", " ")
        model = "/".join(Path(run.model).parts[-2:]) if run.model and Path(run.model).is_absolute() else run.model
        scores = f"{_score(run.first_score)}, best {_score(run.best_score)}" if run.first_score is not None else None
        rows.append((run.run_dir, run.run_id, run.status, _epochs(run), run.method, model, scores, written))
    _print_table(("run", "id", "status", "epoch", "method", "model", "held out", "written (UTC)"), rows)
    for run in found:
        for problem in run.problems:
            where = "" if problem.startswith(run.run_dir) else f"{run.run_dir}: "
            results_console().print(f"{where}{problem}", markup=False, soft_wrap=True)


def _print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Lines are folded on a terminal only."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for cells in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in cells))
    console = results_console()
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table)


def _epochs(run: "RunSummary") -> str:
    return f"{'?' if run.epoch is None else run.epoch} of {'?' if run.epochs is None else run.epochs}"


def _score(value: Any) -> str | None:
    return f"{value:.3f}" if isinstance(value, int | float) else None


@command.command("show", short_help="Show the state of a run.")
@click.argument("run_dir", type=options.PATH)
@options.as_json
def show(run_dir: Path, as_json: bool) -> None:
    """Show the settings, events, epochs, validations and files of RUN_DIR, and what --resume would do."""
    from insitu.runs.summary import read_details

    details = read_details(run_dir)
    if as_json:
        _print_json(asdict(details))
    else:
        _print_details(details)


def _print_details(details: "RunDetails") -> None:
    console, run = results_console(), details.summary

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"run {run.run_id or '?'} in {run.run_dir}: {run.status}, epoch {_epochs(run)}")
    if run.error:
        say(f"  {run.error}")
    for problem in run.problems:
        say(f"  damaged: {problem}")
    say(f"--resume: {details.resume}")
    say("\nsettings that differ from the defaults:")
    for key, value in details.settings.items():
        say(f"  {key}: {json.dumps(value)}")
    say("\nevents:")
    for event in details.events:
        others = (f"{key} {_text(event[key])}" for key in event if key not in ("time", "event") and event[key])
        say(f"  {str(event.get('time')).partition('.')[0]}  {event.get('event')}  {', '.join(others)}".rstrip())
    if details.epochs:
        say("\nepochs:")
        columns = "epoch", "version", "reward", "loss", "dropped", "seconds", "job"
        _print_table(columns, map(_epoch_cells, details.epochs))
    if details.validations:
        say("\nvalidations:")
        _print_table(("epoch", "version", "score", "95 % CI", "n"), map(_validation_cells, details.validations))
    if details.best is not None:
        where = details.best.get("checkpoint") or "the initial weights"
        say(f"best: {_score(details.best.get('avg_reward'))} at epoch {details.best.get('epoch')}, {where}")
    say("\nfiles:")
    for name, size in details.files.items():
        say(f"  {_bytes(size):>9}  {name}")


def _text(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _epoch_cells(line: Mapping[str, Any]) -> tuple[Any, ...]:
    dropped = ", ".join(f"{count} {reason}" for reason, count in (line.get("dropped") or {}).items())
    seconds = sum((line.get("seconds") or {}).values())
    reward, loss = (None if line.get(key) is None else f"{line[key]:.4g}" for key in ("avg_reward", "loss"))
    version, job = line.get("policy_version"), line.get("job")
    return line.get("epoch"), version, reward, loss, dropped or "none", f"{seconds:.1f}", job


def _validation_cells(record: Mapping[str, Any]) -> tuple[Any, ...]:
    low, high = record.get("ci95") or (None, None)
    interval = f"{_score(low)} to {_score(high)}" if low is not None and high is not None else None
    score = f"FAILED: {record['error']}" if "error" in record else _score(record.get("avg_reward"))
    return record.get("epoch"), record.get("policy_version"), score, interval, record.get("num_examples")


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@command.command("fork", short_help="Start a new run from an epoch of another.")
@click.argument("run_dir", type=options.PATH)
@click.argument("new_dir", type=options.PATH)
@click.option("--epoch", type=click.IntRange(min=0), required=True, help="The last epoch that the new run has.")
@click.option("--new_optimizer", is_flag=True, help="Leave the optimizer state out: AdamW starts with new moments.")
def fork(run_dir: Path, new_dir: Path, epoch: int, new_optimizer: bool) -> None:
    """Write what RUN_DIR had recorded after an epoch to NEW_DIR, a run that --resume continues from there.

    RUN_DIR does not change, and may be in progress.
    """
    from insitu.runs.fork import fork_run

    forked = fork_run(run_dir, new_dir, epoch, new_optimizer=new_optimizer)
    print(f"{new_dir} is run {forked.run_id}, forked from {forked.original} after epoch {epoch}")
    print(f"continue it: insitu finetune --config_file {forked.source} --resume {new_dir}")
