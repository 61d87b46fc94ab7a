"""The command `ask`."""

from pathlib import Path

import click

from insitu.cli import options


@click.command("ask")
@click.argument("run_dir", type=options.PATH)
@click.argument("question")
@click.option("--row", metavar="JSON", help="The row that the agent gets (default: the question alone).")
@click.option(
    "--checkpoint", metavar="NAME", help="best, latest or the number of a step (default: the best, else the latest)."
)
@click.option("--temperature", type=options.Number(min=0), help="Of all its model calls (default: that of training).")
def command(run_dir: Path, question: str, row: str | None, checkpoint: str | None, temperature: float | None) -> None:
    """Print the answer of a run's trained agent to QUESTION."""
    import json

    from insitu.api.results import Run
    from insitu.errors import ConfigError, WorkflowError, foreign_errors
    from insitu.wire.json_values import json_form

    try:
        columns = None if row is None else json.loads(row)
    except ValueError as error:
        raise ConfigError(f"--row is not JSON: {error}") from error
    if columns is not None and not isinstance(columns, dict):
        raise ConfigError(f"--row is {row}; it must be a JSON object of columns")
    if checkpoint is not None and checkpoint.isdecimal():
        checkpoint = f"step_{int(checkpoint):06d}"
    with Run(run_dir) as run, foreign_errors(WorkflowError, "the agent failed"):
        answer = run.ask(question, row=columns, checkpoint=checkpoint, temperature=temperature)
    print(answer if isinstance(answer, str) else json.dumps(answer, default=json_form))
