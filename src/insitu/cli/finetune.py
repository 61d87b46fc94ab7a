"""The command `finetune`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from insitu.cli import options
from insitu.wire.redaction import results_console

if TYPE_CHECKING:
    from insitu.schemas.finetuning import FinetuneRunConfig


_RESUME = click.option(
    "--resume",
    is_flag=False,
    flag_value=Path(),
    type=options.PATH,
    callback=lambda context, parameter, value: True if value == Path() else value,
    metavar="[RUN_DIR]",
    help="Continue the run in finetuning.output_dir, or in RUN_DIR, where its process ended.",
)
_FORCE = click.option("--force", is_flag=True, help="With --resume: although settings have changed that matter.")


@click.command("finetune")
@options.request("FinetuneRunConfig", options.dataset, *options.endpoint, *options.validation, _RESUME, _FORCE)
def command(request: "FinetuneRunConfig") -> None:
    """Train the model behind a workflow, as configured in the `finetuning` section."""
    from insitu.schemas.finetuning import TrainingStatusEnum
    from insitu.training.runtime import run_finetuning_sync
    from insitu.wire.log_lines import ProgressLog

    if request.force and not request.resume:
        raise click.UsageError("--force is for --resume")
    logs = click.get_current_context().find_root().params["log_format"] is not None
    statuses = run_finetuning_sync(request, results_console(file=ProgressLog() if logs else None))
    if not statuses:  # the run was complete before
        return
    completed = [status.status for status in statuses].count(TrainingStatusEnum.COMPLETED)
    going_on = len(statuses) - completed
    others = f", {going_on} submitted and not ended" if going_on else ""
    print(f"{completed} training job{'s' if completed != 1 else ''} completed{others}")


finetune_command = command
