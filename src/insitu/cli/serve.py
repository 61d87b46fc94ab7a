"""The command `serve`."""

import asyncio
from functools import partial
from pathlib import Path

import click

from insitu.cli import options


@click.command("serve")
@options.config_file
@click.option("--host", default="127.0.0.1", help="The address to bind.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0 picks a free port.")
@click.option("--token", envvar="INSITU_SERVE_TOKEN", help="Bearer token required for requests.")
@options.checkpoint
@options.override
def command(config_file: Path, override: tuple[tuple[str, str], ...], **serve_options: object) -> None:
    """Serve a workflow for `finetune --endpoint`, `eval --endpoint` and POST /generate."""
    from insitu.training.event_loop import run_async

    run_async(_serve(config_file, override, **serve_options))  # type: ignore[arg-type]


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
        async with service.listening(host, port) as url:
            needs_trainer = any(config.block(LLM, name).type == "policy" for name in config.names(LLM))
            if checkpoint is not None or not needs_trainer:
                async with service.workflow():
                    pass  # fails now if it cannot be built
            print(f"insitu serve ready at {url}", flush=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("stopped", flush=True)
