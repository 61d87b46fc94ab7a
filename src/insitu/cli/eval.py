"""The command `eval`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from insitu.cli import options
from insitu.wire.redaction import notes_console, results_console

if TYPE_CHECKING:
    from insitu.schemas.evaluation import EvaluationRunConfig

_SKIP_WORKFLOW = click.option("--skip_workflow", is_flag=True, help="Score the answers in the dataset.")
_SKIP_COMPLETED = click.option("--skip_completed_entries", is_flag=True, help="Run only rows that have no answer yet.")
_REPS = click.option("--reps", type=click.IntRange(min=1), default=1, help="Episodes per row.")


@click.command("eval")
@options.request(
    "EvaluationRunConfig",
    *(options.dataset, *options.endpoint, _SKIP_WORKFLOW, _SKIP_COMPLETED, _REPS, options.checkpoint),
)
def command(request: "EvaluationRunConfig", checkpoint: Path | None) -> None:
    """Score a workflow on a dataset. Prints a table and writes the evaluation files."""
    from insitu.collect.evaluators import scores_by_row
    from insitu.collect.event_loop import run_async
    from insitu.errors import InsituError
    from insitu.training.report import evaluation_problems
    from insitu.training.runtime import evaluation_main

    output = run_async(evaluation_main(request, checkpoint, results_console(), notes_console()))
    for path in (output.workflow_output_file, *output.evaluator_output_files):
        print(path)
    for problem in evaluation_problems(output):
        print(problem)
    if not any(scores_by_row(result) for _, result in output.evaluation_results):
        raise InsituError("nothing could be scored")
