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
_REPS = click.option("--reps", type=click.IntRange(min=1), help="Episodes per row (default: 1, or as the task says).")
_ON_TASK = (
    click.option("--task", metavar="TASK", help="Evaluate on this task of inspect_ai: FILE.py@TASK, PACKAGE/TASK."),
    click.option(
        "--task_arg", "task_args", type=(str, str), multiple=True, metavar="KEY VALUE", help="An argument of the task."
    ),
    click.option("--llm", metavar="NAME", help="The model of the file that --task evaluates (default: its policy)."),
)


@click.command("eval")
@options.request(
    "EvaluationRunConfig",
    *(options.dataset, *options.endpoint, _SKIP_WORKFLOW, _SKIP_COMPLETED, _REPS, options.checkpoint, *_ON_TASK),
)
def command(
    request: "EvaluationRunConfig",
    checkpoint: Path | None,
    task: str | None,
    task_args: tuple[tuple[str, str], ...],
    llm: str | None,
) -> None:
    """Score a workflow on a dataset, or a model on a task. Prints a table and writes the evaluation files."""
    from insitu.collect.evaluation import evaluation_of_task
    from insitu.collect.evaluators import scores_by_row
    from insitu.errors import InsituError
    from insitu.training.report import evaluation_problems
    from insitu.training.runtime import evaluation_main
    from insitu.workflow.event_loop import run_async

    logs: Path | None = None
    if task is not None:
        request, logs = evaluation_of_task(request, task, task_args, llm)
    elif task_args or llm is not None:
        raise click.UsageError("--task_arg and --llm need --task")
    earlier = set(_files(logs))
    output = run_async(evaluation_main(request, checkpoint, results_console(), notes_console()))
    new_logs = [path for path in _files(logs) if path not in earlier]
    for path in (output.workflow_output_file, *output.evaluator_output_files, *new_logs):
        print(path)
    for problem in evaluation_problems(output):
        print(problem)
    if not any(scores_by_row(result) for _, result in output.evaluation_results):
        raise InsituError("nothing could be scored")


def _files(folder: Path | None) -> list[Path]:
    return sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
