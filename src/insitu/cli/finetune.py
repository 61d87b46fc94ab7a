"""The command `finetune`."""

from typing import Any

import click

from insitu.cli import consoles, options


@click.command("finetune")
@options.config_file
@options.dataset
@options.endpoint
@options.validation
@options.override
def command(override: tuple[tuple[str, str], ...], **run_options: Any) -> None:
    """Train the model behind a workflow, as configured in the `finetuning` section."""
    from insitu.schemas.finetuning import FinetuneRunConfig, TrainingStatusEnum
    from insitu.training.runtime import run_finetuning_sync

    set_options = {name: value for name, value in run_options.items() if value is not None}
    statuses = run_finetuning_sync(FinetuneRunConfig(override=override, **set_options), consoles.results())
    completed = sum(status.status is TrainingStatusEnum.COMPLETED for status in statuses)
    going_on = len(statuses) - completed
    print(
        f"{completed} training job{'s' if completed != 1 else ''} completed"
        + (f", {going_on} submitted and not ended" if going_on else "")
    )


finetune_command = command
