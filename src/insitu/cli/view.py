"""The command `view`."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from insitu.cli import options
from insitu.cli.serve import until_stopped

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
    run_async(until_stopped(server.listening(host, port), partial(_print_link, access.token)))


async def _print_link(token: str | None, url: str) -> None:
    """Prints the link; on a terminal with the token, which is part of no request. Elsewhere it might be logged."""
    line = f"insitu view ready at {url}"
    if token is None or not sys.stdout.isatty():
        print(line, flush=True)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(f"{line}/#token={quote(token, safe='')}\n".encode())  # print leaves secrets out
    sys.stdout.buffer.flush()
