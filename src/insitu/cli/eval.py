"""The command `eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from insitu.cli import options
from insitu.training import consoles

if TYPE_CHECKING:
    from insitu.schemas.evaluation import EvaluationRunConfig


@click.command("eval")
@options.config_file
@options.dataset
@options.endpoint
@click.option("--skip_workflow", is_flag=True, help="Score the answers in the dataset.")
@click.option("--skip_completed_entries", is_flag=True, help="Run only rows that have no answer yet.")
@click.option("--reps", type=click.IntRange(min=1), default=1, help="Episodes per row.")
@options.checkpoint
@options.override
def command(checkpoint: Path | None, **run_options: Any) -> None:
    """Score a workflow on a dataset. Prints a table and writes the evaluation files."""
    from insitu.schemas.evaluation import EvaluationRunConfig
    from insitu.training.event_loop import run_async

    run_async(_evaluate(EvaluationRunConfig(**run_options), checkpoint))


async def _evaluate(run_config: "EvaluationRunConfig", checkpoint: Path | None) -> None:
    from insitu.errors import InsituError
    from insitu.evaluation.evaluators import parse_score
    from insitu.training.serving import evaluation_main

    output = await evaluation_main(run_config, checkpoint, consoles.results(), consoles.notes())
    for path in (output.workflow_output_file, *output.evaluator_output_files):
        print(path)
    items = output.eval_input.eval_input_items
    errors = [item for item in items if item.error is not None]
    if errors:
        print(f"{len(errors)} of {len(items)} episodes failed; the first, of row {errors[0].id!r}: {errors[0].error}")
    scores = [item for _, result in output.evaluation_results for item in result.eval_output_items]
    missing = [(item.id, message) for item in scores if (message := parse_score(item)[2]) is not None]
    if missing:
        row_id, message = missing[0]
        print(f"{len(missing)} scores are missing; the first, of row {row_id!r}: {message}")
    if len(missing) == len(scores):
        raise InsituError("nothing could be scored")
