"""The command `run`."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from insitu.cli import options
from insitu.wire.redaction import notes_console

if TYPE_CHECKING:
    from insitu.schemas.evaluation import RunRequest

logger = logging.getLogger(__name__)


_INPUT = click.option("--input", "text", required=True, help="The input, as JSON if the workflow takes an object.")


@click.command("run")
@options.request("RunRequest", _INPUT, options.checkpoint)
def command(request: "RunRequest", text: str, checkpoint: Path | None) -> None:
    """Run a workflow on one input and print its answer."""
    from insitu.workflow.event_loop import run_async

    print(run_async(_run(request, text, checkpoint)))


async def _run(request: "RunRequest", text: str, checkpoint: Path | None) -> str:
    from insitu.builder import Builder
    from insitu.config import requested_config
    from insitu.errors import InsituError, WorkflowError, describe_error
    from insitu.schemas.episodes import EpisodeKey
    from insitu.training.runtime import serve_policy, starting_from
    from insitu.workflow.context import EpisodeScope

    config = starting_from(requested_config(request), checkpoint, notes_console())
    async with Builder(config) as builder, serve_policy(builder):
        workflow = await builder.get_workflow()
        seed = EpisodeKey("run", 0, "input", 0).seed(config.general.seed)
        with EpisodeScope(seed=seed, input_message=text):
            try:
                return str(await workflow.ainvoke(text, to_type=str))
            except InsituError:
                raise
            except (Exception, SystemExit) as error:  # user code may raise anything; -vv shows the traceback
                logger.debug("the workflow failed", exc_info=error)
                raise WorkflowError(f"the workflow raised {describe_error(error)}") from error
