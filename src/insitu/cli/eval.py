"""The command `eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from insitu.cli import options
from insitu.wire.redaction import notes_console, results_console

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
    from insitu.collect.event_loop import run_async
    from insitu.schemas.evaluation import EvaluationRunConfig

    run_async(_evaluate(EvaluationRunConfig(**run_options), checkpoint))


async def _evaluate(run_config: "EvaluationRunConfig", checkpoint: Path | None) -> None:
    from insitu.collect.evaluators import scores_by_row
    from insitu.errors import InsituError
    from insitu.training.report import evaluation_problems
    from insitu.training.serving import evaluation_main

    output = await evaluation_main(run_config, checkpoint, results_console(), notes_console())
    for path in (output.workflow_output_file, *output.evaluator_output_files):
        print(path)
    for problem in evaluation_problems(output):
        print(problem)
    if not any(scores_by_row(result) for _, result in output.evaluation_results):
        raise InsituError("nothing could be scored")
