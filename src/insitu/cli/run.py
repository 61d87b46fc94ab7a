"""The command `run`."""

import logging
from pathlib import Path

import click

from insitu.cli import options
from insitu.wire.redaction import notes_console

logger = logging.getLogger(__name__)


@click.command("run")
@options.config_file
@click.option("--input", "text", required=True, help="The input, as JSON if the workflow takes an object.")
@options.checkpoint
@options.override
def command(config_file: Path, text: str, checkpoint: Path | None, override: tuple[tuple[str, str], ...]) -> None:
    """Run a workflow on one input and print its answer."""
    from insitu.collect.event_loop import run_async

    print(run_async(_run(config_file, text, checkpoint, override)))


async def _run(config_file: Path, text: str, checkpoint: Path | None, override: tuple[tuple[str, str], ...]) -> str:
    from insitu.builder import Builder
    from insitu.config import load_config
    from insitu.errors import InsituError, WorkflowError, describe_error
    from insitu.schemas.episodes import EpisodeKey
    from insitu.training.serving import serve_policy
    from insitu.workflow.context import EpisodeScope

    config = load_config(config_file, override)
    async with Builder(config) as builder, serve_policy(config, builder, checkpoint, notes_console()):
        workflow = await builder.get_workflow()
        seed = EpisodeKey("run", 0, "input", 0).seed(config.general.seed)
        with EpisodeScope(seed=seed, input_message=text).activate():
            try:
                return await workflow.ainvoke(text, to_type=str)
            except InsituError:
                raise
            except (Exception, SystemExit) as error:  # user code may raise anything; -vv shows the traceback
                logger.debug("the workflow failed", exc_info=error)
                raise WorkflowError(f"the workflow raised {describe_error(error)}") from error
