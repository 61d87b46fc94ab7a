"""The command `finetune`."""

from pathlib import Path
from typing import Any

import click

from insitu.cli import options
from insitu.wire.redaction import results_console


@click.command("finetune")
@options.config_file
@options.dataset
@options.endpoint
@options.validation
@options.override
@click.option(
    "--resume",
    is_flag=False,
    flag_value=Path(),
    type=click.Path(path_type=Path),
    metavar="[RUN_DIR]",
    help="Continue the run in finetuning.output_dir, or in RUN_DIR, where its process ended.",
)
@click.option("--force", is_flag=True, help="With --resume: although settings have changed that matter.")
def command(override: tuple[tuple[str, str], ...], resume: Path | None, **run_options: Any) -> None:
    """Train the model behind a workflow, as configured in the `finetuning` section."""
    from insitu.schemas.finetuning import FinetuneRunConfig, TrainingStatusEnum
    from insitu.training.runtime import run_finetuning_sync

    if run_options["force"] and resume is None:
        raise click.UsageError("--force is for --resume")
    set_options = {name: value for name, value in run_options.items() if value is not None}
    if resume is not None:
        set_options["resume"] = True if resume == Path() else resume
    statuses = run_finetuning_sync(FinetuneRunConfig(override=override, **set_options), results_console())
    completed = [status.status for status in statuses].count(TrainingStatusEnum.COMPLETED)
    going_on = len(statuses) - completed
    print(
        f"{completed} training job{'s' if completed != 1 else ''} completed"
        + (f", {going_on} submitted and not ended" if going_on else "")
    )


finetune_command = command
