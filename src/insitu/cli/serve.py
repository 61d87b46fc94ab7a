"""`insitu serve`: the workflow as a service, until asked to stop."""

import asyncio
from functools import partial
from pathlib import Path

import click

from insitu.cli import options


@click.command("serve")
@options.config_file
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--token", envvar="INSITU_SERVE_TOKEN", help="Asked of every request as a bearer token.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A folder of weights for llms of _type policy.")
@options.override
def command(config_file: Path, override: tuple[tuple[str, str], ...], **given: object) -> None:
    """Serve a workflow: to `finetune --endpoint` and `eval --endpoint`, and POST /generate to everybody else."""
    from insitu.training.runtime import run_async

    run_async(_serve(config_file, override, **given))  # type: ignore[arg-type]


async def _serve(
    config_file: Path,
    override: tuple[tuple[str, str], ...],
    host: str,
    port: int,
    token: str | None,
    checkpoint: Path | None,
) -> None:
    from insitu.config import load_config
    from insitu.evaluation.service import WorkflowService
    from insitu.registry import LLM
    from insitu.training.runtime import serve_policy

    config = load_config(config_file, override)
    service = WorkflowService(config, partial(serve_policy, config, checkpoint=checkpoint), token)
    try:
        async with service.listening(host, port) as address:
            waits_for_trainer = any(config.block(LLM, name).type == "policy" for name in config.names(LLM))
            if checkpoint is not None or not waits_for_trainer:
                async with service.workflow():
                    pass  # what cannot be built is told now
            print(f"insitu serve ready at {address}", flush=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("stopped", flush=True)
