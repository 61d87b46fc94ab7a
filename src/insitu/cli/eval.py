"""The command `eval`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from insitu.cli import options


@click.command("eval")
@options.config_file
@options.dataset
@options.who_answers
@click.option("--skip_workflow", is_flag=True, help="Score the answers that stand in the dataset.")
@click.option("--skip_completed_entries", is_flag=True, help="Run only the rows that have no answer yet.")
@click.option("--reps", type=click.IntRange(min=1), default=1, help="Episodes for each row.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A folder of weights for llms of _type policy.")
@options.override
def command(checkpoint: Path | None, **given: Any) -> None:
    """Score a workflow on a dataset: a table on the console, and the documented files."""
    from insitu.errors import InsituError
    from insitu.schemas.evaluation import EvaluationRunConfig
    from insitu.training.runtime import run_async

    asked = EvaluationRunConfig(**given)
    failed = run_async(_evaluate(asked, checkpoint))
    if failed:
        raise InsituError(failed)


async def _evaluate(asked: "EvaluationRunConfig", checkpoint: Path | None) -> str | None:  # type: ignore[name-defined]  # noqa: F821
    """Run it and print the table; gives a sentence about what went wrong, if something did."""
    from rich.console import Console

    from insitu.builder import Builder
    from insitu.config import load_config
    from insitu.errors import ConfigError
    from insitu.evaluation.datasets import load_dataset
    from insitu.evaluation.evaluators import number
    from insitu.evaluation.run import EvaluationRun
    from insitu.training.report import Report, evaluation_table
    from insitu.training.runtime import serve_policy

    config = load_config(asked.config_file, asked.override)
    report = Report()
    answered = asked.skip_workflow or asked.skip_completed_entries
    rows = load_dataset(config, asked.dataset, answered)
    total = sum(row.output_obj is None for row in rows) * asked.reps
    if asked.skip_workflow and checkpoint is not None:
        raise ConfigError("--skip_workflow runs nothing: --checkpoint has no meaning with it")
    async with Builder(config) as builder:
        run_config = asked.model_copy(update={"config_file": config, "override": ()})
        run = EvaluationRun(run_config, builder, on_episode=lambda _: report.advance())
        async with nullcontext() if asked.skip_workflow else serve_policy(config, builder, checkpoint):
            report.begin("evaluating", total)
            try:
                output = await run.run_and_evaluate()
            finally:
                report.end()
    Console(highlight=False).print(evaluation_table(output))
    for path in (output.workflow_output_file, *output.evaluator_output_files):
        print(path)
    items = output.eval_input.eval_input_items
    errors = [item for item in items if item.error is not None]
    if errors:
        print(f"{len(errors)} of {len(items)} episodes failed; the first, of row {errors[0].id!r}: {errors[0].error}")
    given = [o for _, result in output.evaluation_results for o in result.eval_output_items]
    unscored = [(o.id, message) for o in given if (message := number(o)[2]) is not None]
    if unscored:
        row_id, message = unscored[0]
        print(f"{len(unscored)} scores are missing; the first, of row {row_id!r}: {message}")
    return None if len(given) > len(unscored) else "nothing could be scored"
