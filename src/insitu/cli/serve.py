"""The command `serve`."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from insitu.cli import options
from insitu.wire.redaction import notes_console

if TYPE_CHECKING:
    from insitu.schemas.evaluation import RunRequest
    from insitu.wire.http_access import AccessPolicy


_POLICY_URL = click.option(
    "--policy_url",
    multiple=True,
    metavar="URL",
    help="A model server that trainers may name (default: those on this machine, for trainers on this machine).",
)


_PROTOCOL = click.option(
    "--as",
    "protocol",
    metavar="NAME",
    help="Serve the rows and the reward of the file to other trainers instead, as an environment of: openenv.",
)


@click.command("serve")
@options.request(
    "RunRequest", options.server("INSITU_SERVE_TOKEN", port=8000), _POLICY_URL, options.checkpoint, _PROTOCOL
)
def command(request: "RunRequest", protocol: str | None, **serve_options: Any) -> None:
    """Serve a workflow for `finetune --endpoint`, `eval --endpoint` and POST /generate."""
    from insitu.workflow.event_loop import run_async

    if protocol is None:
        run_async(_serve(request, **serve_options))
        return
    unused = [f"--{name}" for name in ("policy_url", "checkpoint") if serve_options.pop(name)]
    if unused:
        raise click.UsageError(f"{', '.join(unused)} cannot be used with --as {protocol}, which runs no workflow")
    run_async(_serve_environment(request, protocol, **serve_options))


async def _serve_environment(
    request: "RunRequest", protocol: str, host: str, port: int, access: "AccessPolicy"
) -> None:
    from insitu.config import requested_config
    from insitu.errors import ConfigError, not_found
    from insitu.registry import ENVIRONMENT_SERVER_GROUP
    from insitu.schemas.installed import entry_points

    servers = entry_points(ENVIRONMENT_SERVER_GROUP)
    if protocol not in servers.names:
        raise ConfigError(not_found("--as:", protocol, sorted(servers.names)))
    serve = servers[protocol].load()
    await until_stopped(serve(requested_config(request), access, host, port), _say_ready)


async def _serve(
    request: "RunRequest",
    host: str,
    port: int,
    access: "AccessPolicy",
    policy_url: tuple[str, ...],
    checkpoint: Path | None,
) -> None:
    from insitu.config import requested_config
    from insitu.remote.service import WorkflowService
    from insitu.training.runtime import serve_policy, starting_from

    config = starting_from(requested_config(request), checkpoint, notes_console())
    service = WorkflowService(config, serve_policy, access, policy_url)

    async def ready(url: str) -> None:
        if checkpoint is not None or not config.serves_policy:  # else a trainer says where its model is
            async with service.hosted.workflow():
                pass  # fails now if it cannot be built
        await _say_ready(url)

    await until_stopped(service.listening(host, port), ready)


async def until_stopped(server: AbstractAsyncContextManager[str], ready: Callable[[str], Awaitable[None]]) -> None:
    """Calls `ready` with the URL of a server, which then serves until the command is stopped."""
    try:
        async with server as url:
            await ready(url)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("stopped", flush=True)


async def _say_ready(url: str) -> None:
    print(f"insitu serve ready at {url}", flush=True)
