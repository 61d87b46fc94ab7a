"""The command `serve`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from insitu.cli import options
from insitu.wire.redaction import notes_console

if TYPE_CHECKING:
    from insitu.schemas.evaluation import RunRequest


_OPTIONS = (
    click.option("--host", default="127.0.0.1", help="The address to bind."),
    click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0 picks a free port."),
    options.access("INSITU_SERVE_TOKEN"),
    click.option(
        "--policy_url",
        multiple=True,
        metavar="URL",
        help="A model server that trainers may name (default: those on this machine, for trainers on this machine).",
    ),
    options.checkpoint,
)


@click.command("serve")
@options.request("RunRequest", *_OPTIONS)
def command(request: "RunRequest", **serve_options: Any) -> None:
    """Serve a workflow for `finetune --endpoint`, `eval --endpoint` and POST /generate."""
    from insitu.collect.event_loop import run_async

    run_async(_serve(request, **serve_options))


async def _serve(
    request: "RunRequest",
    host: str,
    port: int,
    token: str | None,
    insecure_no_auth: bool,
    allowed_host: tuple[str, ...],
    policy_url: tuple[str, ...],
    checkpoint: Path | None,
) -> None:
    from insitu.config import requested_config
    from insitu.registry import LLM
    from insitu.remote.client import TOKEN_VARIABLE
    from insitu.remote.service import WorkflowService
    from insitu.training.serving import serve_policy, starting_from
    from insitu.wire.http_access import AccessPolicy

    config = requested_config(request)
    access = AccessPolicy.of(
        host, token, variable=TOKEN_VARIABLE, allow_anyone=insecure_no_auth, allowed_hosts=allowed_host
    )
    config = starting_from(config, checkpoint, notes_console())
    service = WorkflowService(config, serve_policy, access, policy_url)
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
