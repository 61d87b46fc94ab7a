"""The command `view`."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from insitu.cli import options

if TYPE_CHECKING:
    from insitu.wire.http_access import AccessPolicy


@click.command("view")
@click.argument("folder", required=False, type=options.PATH, metavar="[FOLDER]")
@options.server("INSITU_VIEW_TOKEN", port=0)
def command(folder: Path | None, host: str, port: int, access: "AccessPolicy") -> None:
    """Show the runs in FOLDER, or the run that it is, in a browser. Live while they are written; changes nothing.

    Without FOLDER: the runs in runs/ and .tmp/ of the working directory.
    """
    from insitu.view.run_pages import OpenedFolder
    from insitu.view.server import ViewServer
    from insitu.workflow.event_loop import run_async

    server = ViewServer(OpenedFolder(folder), access)

    async def serve() -> None:
        try:
            async with server.listening(host, port) as url:
                _print_link(url, access.token)
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("stopped", flush=True)

    run_async(serve())


def _print_link(url: str, token: str | None) -> None:
    """Prints the link; on a terminal with the token, which is part of no request. Elsewhere it might be logged."""
    line = f"insitu view ready at {url}"
    if token is None or not sys.stdout.isatty():
        print(line, flush=True)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(f"{line}/#token={quote(token, safe='')}\n".encode())  # print leaves secrets out
    sys.stdout.buffer.flush()
