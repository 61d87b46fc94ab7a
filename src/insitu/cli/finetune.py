"""The command `finetune`."""

from pathlib import Path
from typing import Any

import click

from insitu.cli import options


@click.command("finetune")
@options.config_file
@options.dataset
@options.who_answers
@click.option("--validation_dataset", help="A held-out dataset, in place of the file's own.")
@click.option("--validation_interval", type=click.IntRange(min=1), help="Epochs between two validations.")
@click.option(
    "--validation_config_file",
    type=click.Path(path_type=Path),
    help="A file with validation's workflow and evaluators.",
)
@options.override
def command(override: tuple[tuple[str, str], ...], **given: Any) -> None:
    """Train the model behind a workflow, as the file's section `finetuning` says."""
    from insitu.schemas.finetuning import FinetuneRunConfig
    from insitu.training.runtime import run_finetuning_sync

    asked = {name: value for name, value in given.items() if value is not None}
    statuses = run_finetuning_sync(FinetuneRunConfig(override=override, **asked))
    print(f"{len(statuses)} training job{'s' if len(statuses) != 1 else ''} completed")
