"""The command `validate`."""

from typing import TYPE_CHECKING

import click

from insitu.cli import options

if TYPE_CHECKING:
    from insitu.schemas.finetuning import FinetuneRunConfig


@click.command("validate")
@options.request("FinetuneRunConfig", options.dataset, *options.validation)
def command(request: "FinetuneRunConfig") -> None:
    """Check a file, its plugins and its datasets, as `finetune` does before it starts anything."""
    from insitu.training.runtime import check_run
    from insitu.workflow.event_loop import run_async

    config, memory = run_async(check_run(request))
    untrained = "" if config.finetuning.enabled else "; it does not train (finetuning.enabled is false)"
    click.echo(f"{request.config_file} is valid{untrained}")
    if memory is not None:
        click.echo("\n".join([*memory.table(), *memory.costs()]))
    elif config.finetuning.enabled:
        click.echo("memory: unknown before the backend has loaded its model")
