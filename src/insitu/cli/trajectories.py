"""The command `trajectories`."""

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from insitu.cli import options
from insitu.wire.redaction import results_console

if TYPE_CHECKING:
    from insitu.collect.rescoring import Rescoring

_SORT_KEYS = {"reward": "reward", "seconds": "seconds", "tokens": "sampled_tokens", "calls": "calls"}
"""What episodes can be sorted by, and its column in the index."""
_MAX_CHARACTERS = 2000
"""Longer messages are cut without --full."""
_EXPORT_FORMATS = ("preferences", "kto", "sft", "openai", "parquet")


@click.group("trajectories")
def command() -> None:
    """Inspect, export and score the recorded episodes of a run."""


@command.command("show", short_help="Print an episode: calls, conversations and training rows.")
@click.argument("run_dir", type=options.PATH)
@click.option("--epoch", type=click.IntRange(min=1), help="Only episodes of this epoch.")
@click.option("--row", "row_id", help="Only episodes of the dataset row with this id.")
@click.option("--generation", type=click.IntRange(min=0), help="Only episodes with this index in their group.")
@click.option("--episode", help="The episode with this name, as listed.")
@click.option("--outcome", help="Only episodes that are ok, failed, trained or dropped, or have this reason code.")
@click.option("--min_reward", type=options.Number(), help="Only episodes with at least this reward.")
@click.option("--sort", type=click.Choice(_SORT_KEYS), help="List the episodes with the most of it first.")
@click.option("--reverse", is_flag=True, help="List them in the reverse order.")
@click.option("--limit", type=click.IntRange(min=1), help="List only so many episodes.")
@click.option("--answers", is_flag=True, help="List the answers, too, as on a terminal.")
@click.option("--tokens", is_flag=True, help="Print the tokens of the rows, sampled ones with their logprobs.")
@click.option("--tokenizer", type=options.PATH, help="The folder of the model, if the run has none.")
@click.option("--full", is_flag=True, help=f"Print messages longer than {_MAX_CHARACTERS} characters in full.")
def show(
    run_dir: Path,
    sort: str | None,
    reverse: bool,
    limit: int | None,
    answers: bool,
    tokens: bool,
    tokenizer: Path | None,
    full: bool,
    **filters: Any,
) -> None:
    """Print an episode: calls, conversations and training rows. Lists the episodes if several match."""
    from insitu.cli.episode_view import View, print_episode, print_list
    from insitu.runs.episodes import Selection, load_decoder

    with closing(Selection(run_dir)) as selection:
        matches = selection.find(_SORT_KEYS[sort] if sort is not None else None, **filters)
        if reverse:
            matches.reverse()
        if len(matches[:limit]) > 1:
            print_list(matches[:limit], len(matches), answers=answers or sys.stdout.isatty())
            return
        recorded = selection.read(matches[0])
        folder = tokenizer or selection.files.tokenizer()
    decode = load_decoder(folder) if tokens and folder is not None else None
    print_episode(recorded, View(tokens, None if full else _MAX_CHARACTERS, decode))


@command.command("export", short_help="Write the episodes as training data for other tools.")
@click.argument("run_dir", type=options.PATH)
@click.option("--format", "format_", type=click.Choice(_EXPORT_FORMATS), required=True, help="What to write.")
@click.option("--output", type=options.PATH, required=True, metavar="FILE", help="The file to write.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--epoch", type=click.IntRange(min=1), multiple=True, help="Only this epoch; may be repeated.")
@click.option("--reward", metavar="NAME", help="The evaluator whose scores are the rewards; -NAME if less is better.")
@click.option("--min_reward", type=options.Number(), help="sft, openai: only episodes with at least this reward.")
@click.option("--best", type=click.IntRange(min=1), help="sft, openai: the best N episodes of each row.  [default: 1]")
@click.option(
    "--pairs", type=click.Choice(("candidates", "episodes")), help="preferences: between candidates, or episodes."
)
def export(
    run_dir: Path, format_: str, output: Path, force: bool, epoch: tuple[int, ...], reward: str | None, **selection: Any
) -> None:
    """Write the episodes of RUN_DIR as training data for other tools. Prints how many records were dropped, and why."""
    from insitu.release.trajectories import ExportOptions, export
    from insitu.runs.replay import StoredRun
    from insitu.training.report import counts

    run = StoredRun(run_dir, "RUN_DIR", reward, epoch or None)
    summary = export(run, format_, output, ExportOptions(**selection), force)
    dropped = {reason: count for reason, count in summary.dropped.items() if count}
    print(f"{output}: {summary.written} records" + (f"; dropped: {counts(dropped)}" if dropped else ""))
    if summary.first_error is not None:
        print(f"the first error, of episode {summary.first_error}")


@command.command("rescore", short_help="Score the episodes again, with any evaluator.")
@click.argument("run_dir", type=options.PATH)
@click.option("--evaluator", required=True, metavar="NAME", help="A key of `eval.evaluators`.")
@click.option("--config_file", type=options.PATH, help="The evaluator's file.  [default: the run's]")
@click.option("--dataset", type=options.PATH, help="The rows of the episodes.  [default: the run's]")
@options.override
def rescore(
    run_dir: Path, evaluator: str, config_file: Path | None, dataset: Path | None, override: tuple[tuple[str, str], ...]
) -> None:
    """Score the episodes of RUN_DIR again and append the scores to it; what it has recorded does not change."""
    from insitu.collect.rescoring import Rescoring
    from insitu.workflow.event_loop import run_async

    run_async(_rescore(Rescoring(run_dir, evaluator, config_file, dataset, override)))


async def _rescore(rescoring: "Rescoring") -> None:
    from insitu.algorithms.statistics import mean_ci95
    from insitu.builder import Builder
    from insitu.errors import InsituError
    from insitu.training.report import Report, counts

    report = Report(results_console())
    async with Builder(rescoring.config) as builder:
        with report.phase(f"scoring with {rescoring.evaluator}", rescoring.episodes_in_total):
            await rescoring.run(builder, report.advance)
    scored = len(rescoring.scores)
    mean = f", mean {mean_ci95(rescoring.scores).mean:.4g}" if scored else ""
    left_out = f"; failed episodes without an output: {rescoring.failed_episodes}" * bool(rescoring.failed_episodes)
    print(f"{rescoring.evaluator}: {scored} of {rescoring.episodes_in_total} episodes scored{mean}{left_out}")
    if rescoring.unscored:
        print(f"without a score: {counts(rescoring.unscored)}; the first, {rescoring.first_error}")
    if not scored:
        raise InsituError("nothing could be scored")
