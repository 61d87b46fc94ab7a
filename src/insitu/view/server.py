"""The server of `insitu view`: the page's files, and what it shows as JSON.

    GET /  /runs  /run  /group  /episode   the page
    GET /static/...                        its modules, styles and images
    GET /api/...                           JSON; needs the token if there is one
    GET /api/events                        server-sent events: which files change

Nothing is written, and there is no other method.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from insitu.evaluation.run import dump_json
from insitu.gateway.listener import guard, server_runner
from insitu.http_access import AccessPolicy
from insitu.http_format import format_event, http_url
from insitu.redaction import redact_bytes
from insitu.view.opened import OpenedFolder
from insitu.view.overview import Overview, one_run
from insitu.view.watcher import Watcher

STATIC = Path(__file__).parent / "static"
PAGES = ("/", "/runs", "/run", "/group", "/episode")
HEARTBEAT_SECONDS = 10.0
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class ViewServer:
    """Serves the runs of a folder to a browser."""

    def __init__(self, opened: OpenedFolder, access: AccessPolicy | None = None) -> None:
        self._opened = opened
        self._access = access or AccessPolicy()
        self._overview = Overview(opened)
        self._watcher = Watcher(opened)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serves on this address (port 0: a free one) while the context is open; yields the URL."""
        app = web.Application(middlewares=[guard(self._access, lambda request: not _is_api(request.path))])
        app.on_response_prepare.append(_add_headers)
        for page in PAGES:
            app.router.add_get(page, _page)
        app.router.add_static("/static", STATIC)
        app.router.add_get("/api/runs", self._runs)
        app.router.add_get("/api/run", self._run)
        app.router.add_get("/api/events", self._events)
        runner = server_runner(app, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield http_url(host, runner.addresses[0][1])
        finally:
            await runner.cleanup()

    async def _runs(self, request: web.Request) -> web.Response:
        return await _json(self._overview.all_runs)

    async def _run(self, request: web.Request) -> web.Response:
        run = request.query.get("run", ".")
        return await _json(lambda: one_run(run, self._opened.path(run)))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Streams changes until the client disconnects."""
        runs = request.query.getall("run", [])
        for run in runs:
            await asyncio.to_thread(self._opened.path, run)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self._watcher.watching(runs) as changes:
            with suppress(ConnectionResetError):
                await response.prepare(request)
                await response.write(b": watching\n\n")
                while True:
                    data = b": still here\n\n"
                    with suppress(TimeoutError):
                        async with asyncio.timeout(HEARTBEAT_SECONDS):
                            change = await changes.get()
                        data = format_event(orjson.dumps(change.as_json()), "changed")
                    await response.write(data)
        return response


def _is_api(path: str) -> bool:
    return path.startswith("/api/")


async def _page(request: web.Request) -> web.FileResponse:
    return web.FileResponse(STATIC / "index.html")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


async def _json(read: Callable[[], Any]) -> web.Response:
    """What a function that reads files returns."""

    def body() -> bytes:
        return redact_bytes(dump_json(read()))

    return web.Response(body=await asyncio.to_thread(body), content_type="application/json")
