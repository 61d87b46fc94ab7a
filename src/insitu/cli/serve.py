"""The command `serve`."""

import asyncio
from functools import partial
from pathlib import Path

import click

from insitu.cli import options
from insitu.wire.redaction import notes_console


@click.command("serve")
@options.config_file
@click.option("--host", default="127.0.0.1", help="The address to bind.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0 picks a free port.")
@options.access("INSITU_SERVE_TOKEN")
@click.option(
    "--policy_url",
    multiple=True,
    metavar="URL",
    help="A model server that trainers may name (default: those on this machine, for trainers on this machine).",
)
@options.checkpoint
@options.override
def command(config_file: Path, override: tuple[tuple[str, str], ...], **serve_options: object) -> None:
    """Serve a workflow for `finetune --endpoint`, `eval --endpoint` and POST /generate."""
    from insitu.collect.event_loop import run_async

    run_async(_serve(config_file, override, **serve_options))  # type: ignore[arg-type]


async def _serve(
    config_file: Path,
    override: tuple[tuple[str, str], ...],
    host: str,
    port: int,
    token: str | None,
    insecure_no_auth: bool,
    allowed_host: tuple[str, ...],
    policy_url: tuple[str, ...],
    checkpoint: Path | None,
) -> None:
    from insitu.config import load_config
    from insitu.registry import LLM
    from insitu.remote.client import TOKEN_VARIABLE
    from insitu.remote.service import WorkflowService
    from insitu.training.serving import serve_policy
    from insitu.wire.http_access import AccessPolicy

    config = load_config(config_file, override)
    access = AccessPolicy.of(
        host, token, variable=TOKEN_VARIABLE, allow_anyone=insecure_no_auth, allowed_hosts=allowed_host
    )
    served = partial(serve_policy, config, checkpoint=checkpoint, notes=notes_console())
    service = WorkflowService(config, served, access, policy_url)
    try:
        async with service.listening(host, port) as url:
            needs_trainer = any(config.block(LLM, name).type == "policy" for name in config.names(LLM))
            if checkpoint is not None or not needs_trainer:
                async with service.hosted.workflow():
                    pass  # fails now if it cannot be built
            print(f"insitu serve ready at {url}", flush=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("stopped", flush=True)
