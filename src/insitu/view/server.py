"""The server of `insitu view`: the page's files, and what it shows as JSON.

    GET /  /runs  /run  /group  /episode   the page; any other path, with status 404, says that it is none
    GET /static/...                        its modules, styles and images
    GET /health, /metrics                  for monitoring; the metrics of the runs need the token if there is one
    GET /api/...                           JSON; needs the token if there is one
    GET /api/events                        server-sent events: which files change

Nothing is written but the index of a run, and there is no other method.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from insitu.disk.json_files import dump_json
from insitu.errors import RequestRefused
from insitu.runs.monitor import Monitor
from insitu.view.episode_lists import IndexedRun, Indexes, number
from insitu.view.long_values import part, shortened
from insitu.view.run_pages import OpenedFolder, Watcher, one_run
from insitu.wire.addresses import http_url
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_format import format_event
from insitu.wire.http_server import error_response, guard, listening
from insitu.wire.redaction import redact_bytes

logger = logging.getLogger(__name__)

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
        self._watcher = Watcher(opened)
        self._indexes = Indexes()
        self._monitor = Monitor(opened.runs)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serves on this address (port 0: a free one) while the context is open; yields the URL."""
        app = web.Application(middlewares=[guard(self._access, _is_public)])
        app.on_response_prepare.append(_add_headers)
        for page in PAGES:
            app.router.add_get(page, _page)
        self._monitor.add_routes(app)
        app.router.add_static("/static", STATIC)
        lists, pages = (self._runs, self._run, self._groups, self._episodes), (self._group, self._episode)
        for answer in (*lists, *pages, self._part, self._request, self._events):
            app.router.add_get(f"/api/{answer.__name__.removeprefix('_')}", answer)
        app.router.add_get("/{path:(?!api/|static/).*}", partial(_page, status=404))
        try:
            async with listening(app, (host, port)) as (_, port):
                yield http_url(host, port)
        finally:
            await asyncio.to_thread(self._indexes.close)

    async def _runs(self, request: web.Request) -> web.Response:
        return await _json(self._opened.all_runs)

    async def _run(self, request: web.Request) -> web.Response:
        run = request.query.get("run", ".")

        def read() -> dict[str, Any]:
            path = self._opened.path(run)
            answer = one_run(run, path)
            answer["problems"] += self._indexes.problems(path)
            return answer

        return await _json(read)

    async def _groups(self, request: web.Request) -> web.Response:
        return await self._from_index(request, lambda run: run.lists.groups(request.query))

    async def _episodes(self, request: web.Request) -> web.Response:
        return await self._from_index(request, lambda run: run.lists.episodes(request.query))

    async def _group(self, request: web.Request) -> web.Response:
        epoch, row = number(request.query, "epoch", int), request.query.get("row")
        if epoch is None or row is None:
            missing = "epoch" if epoch is None else "row"
            raise RequestRefused(f"{missing} is missing", param=missing, code="missing_value")
        return await self._from_index(request, lambda run: shortened(run.pages.group(epoch, row)))

    async def _episode(self, request: web.Request) -> web.Response:
        if (name := request.query.get("episode")) is None:
            raise RequestRefused("episode is missing", param="episode", code="missing_value")
        return await self._from_index(request, lambda run: shortened(run.pages.episode(name)))

    async def _part(self, request: web.Request) -> web.Response:
        """The rest of a long value, of the answer about an episode, or else about a group."""
        path, offset = request.query.get("path", ""), max(number(request.query, "offset", int, 0), 0)
        if (name := request.query.get("episode")) is not None:
            return await self._from_index(request, lambda run: part(run.pages.episode(name), path, offset))
        epoch, row = number(request.query, "epoch", int, 0), request.query.get("row", "")
        return await self._from_index(request, lambda run: part(run.pages.group(epoch, row), path, offset))

    async def _request(self, request: web.Request) -> web.Response:
        """What a call asked its model, as a request to an OpenAI API."""
        name, index = request.query.get("episode", ""), number(request.query, "call", int, 0)
        return await self._from_index(request, lambda run: run.pages.request(name, index))

    async def _from_index(self, request: web.Request, read: Callable[[IndexedRun], Any]) -> web.Response:
        """What `read` returns of the index of the request's run, brought up to date first if that takes no time."""
        path = await asyncio.to_thread(self._opened.path, request.query.get("run", "."))
        indexed = await asyncio.to_thread(self._indexes.open, path)
        try:
            return await _json(lambda: read(indexed))
        finally:
            await asyncio.to_thread(self._indexes.release, indexed)

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
                        data = format_event(dump_json(change._asdict()), "changed")
                    await response.write(data)
        return response


def _is_public(path: str) -> bool:
    return not path.startswith("/api/") and path != "/metrics"


async def _page(request: web.Request, status: int = 200) -> web.FileResponse:
    return web.FileResponse(STATIC / "index.html", status=status)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


async def _json(read: Callable[[], Any]) -> web.Response:
    """What a function that reads files returns."""

    def body() -> bytes:
        return redact_bytes(dump_json(read()))

    try:
        return web.Response(body=await asyncio.to_thread(body), content_type="application/json")
    except RequestRefused:
        raise
    except Exception as error:  # a file may hold anything, and the other pages must not suffer
        logger.exception("a page could not be made")
        return error_response(f"the files cannot be shown: {type(error).__name__}: {error}", 500)
