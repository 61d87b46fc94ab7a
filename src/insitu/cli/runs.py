"""The command `runs`."""

import json
import sys
from collections.abc import Iterable
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
_TABLES = {
    "epochs": ("epoch", "policy_version", "avg_reward", "loss", "dropped", "job"),
    "validations": ("epoch", "policy_version", "avg_reward", "ci95", "num_examples", "error", "note"),
}
"""What is shown of the lines of two files."""


@click.group("runs")
def command() -> None:
    """List, show, fork and prune runs."""


@command.command("list", short_help="List the runs in folders.")
@click.argument("folders", nargs=-1, type=options.PATH, metavar="[FOLDER]...")
@options.as_json
def list_(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the runs in each FOLDER and up to three levels below it, the last written first.

    Without FOLDER: in runs/ and .tmp/ of the working directory. Damaged runs are listed with what is wrong.
    """
    from insitu.runs.summary import find_runs, read_summary

    searched = _searched(folders)
    summaries = [read_summary(run) for run in find_runs(searched)]
    summaries.sort(key=lambda summary: summary.written or "", reverse=True)
    if as_json:
        for summary in summaries:
            _print_json(asdict(summary))
    elif summaries:
        _print_list(summaries)
    else:
        print(f"no run in {' or '.join(map(str, searched))}")


def _searched(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """The folders to look for runs in. Raises ConfigError for one that does not exist."""
    from insitu.errors import ConfigError
    from insitu.runs.summary import DEFAULT_FOLDERS

    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"FOLDER: {folder} is not a folder")
    return folders or tuple(Path(name) for name in DEFAULT_FOLDERS)


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=str))


def _print_list(summaries: "list[RunSummary]") -> None:
    from insitu.cli.episode_view import escape

    rows = []
    for run in summaries:
        written = (run.written or "-")[: len("2026-01-01T00:00")].replace("T", " ")
        model = "/".join(Path(run.model).parts[-2:]) if run.model and Path(run.model).is_absolute() else run.model
        scores = f"{_score(run.first_score)}, best {_score(run.best_score)}" if run.first_score is not None else None
        rows.append((run.run_dir, run.run_id, run.status, _epochs(run), run.method, model, scores, written))
    _print_table(("run", "id", "status", "epoch", "method", "model", "held out", "written (UTC)"), rows)
    for run in summaries:
        for problem in run.problems:
            where = "" if problem.startswith(run.run_dir) else f"{run.run_dir}: "
            results_console().print(escape(f"{where}{problem}"), markup=False, soft_wrap=True)


def _print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Lines are folded on a terminal only."""
    from rich.table import Table
    from rich.text import Text

    from insitu.cli.episode_view import escape

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for cells in rows:
        table.add_row(*(Text("-" if cell is None else escape(str(cell))) for cell in cells))
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
    """Show the settings, events, epochs and validations of RUN_DIR, and the epoch after which --resume continues."""
    from insitu.runs.summary import read_details

    details = read_details(run_dir)
    if as_json:
        _print_json(asdict(details))
    else:
        _print_details(details)


def _print_details(details: "RunDetails") -> None:
    from insitu.config.yaml_loader import dump_yaml

    text = json.dumps(asdict(details), default=str)
    shown = json.loads(text, object_hook=lambda each: {key: each[key] for key in each if each[key] is not None})
    tables = {key: (columns, shown.pop(key)) for key, columns in _TABLES.items()}
    print(dump_yaml(shown, width=_WIDE), end="")
    for key, (columns, lines) in tables.items():
        if lines:
            print(f"{key}:")
            _print_table(columns, ([_cell(line.get(column)) for column in columns] for line in lines))


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{count} {reason}" for reason, count in value.items())
    if isinstance(value, list):
        return " to ".join(map(str, map(_cell, value))) if None not in value else None  # an interval; of one row: none
    return f"{value:.4g}" if isinstance(value, float) else value


@command.command("fork", short_help="Start a new run from an epoch of another.")
@click.argument("run_dir", type=options.PATH)
@click.argument("new_dir", type=options.PATH)
@click.option("--epoch", type=click.IntRange(min=0), required=True, help="The last epoch that the new run has.")
def fork(run_dir: Path, new_dir: Path, epoch: int) -> None:
    """Write what RUN_DIR had recorded after an epoch to NEW_DIR, a run that --resume continues from there.

    RUN_DIR does not change, and may be in progress.
    """
    from insitu.runs.fork import fork_run

    forked = fork_run(run_dir, new_dir, epoch)
    print(f"{new_dir} is run {forked.run_id}, forked from {forked.original} after epoch {epoch}")
    print(f"continue it: {forked.command}")


@command.command("prune", short_help="Delete old checkpoints of runs that have ended.")
@click.argument("folders", nargs=-1, type=options.PATH, metavar="[FOLDER]...")
@click.option("--dry_run", is_flag=True, help="Only say what would be deleted.")
def prune(folders: tuple[Path, ...], dry_run: bool) -> None:
    """Delete old checkpoints and job records of the runs in each FOLDER and up to three levels below it.

    Kept are the best and the latest checkpoint, and those that --resume, forks and runs in these folders and beside
    them continue from. Without FOLDER: in runs/ and .tmp/ of the working directory.
    """
    from insitu.disk.files import readable_bytes
    from insitu.errors import InsituError
    from insitu.runs.pruning import delete, find_surplus, freed_bytes

    surplus = find_surplus(_searched(folders))
    before, failed = freed_bytes(surplus), False
    for each in surplus:
        if each.problem is not None:
            print(f"{each.run}: nothing is deleted: {each.problem}")
        elif each.checkpoints or each.jobs:
            names = ", ".join(path.name for path in each.checkpoints) or "no checkpoint"
            try:
                if not dry_run:
                    delete(each)
            except InsituError as error:
                failed = True
                print(f"{each.run}: not everything is deleted: {error}", file=sys.stderr)
                continue
            print(f"{each.run}: {'would delete' if dry_run else 'deleted'} {names}; job records: {len(each.jobs)}")
    freed = before if dry_run else before - freed_bytes(surplus)
    print(f"{'would free' if dry_run else 'freed'} {readable_bytes(freed)}")
    if failed:
        raise InsituError("some runs could not be pruned: see above")
