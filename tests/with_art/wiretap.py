"""A proxy that writes down what passes to an ART server, and can cut a connection: `with Wiretap(address) as tap`."""

import asyncio
import json
import threading
from typing import Any, Self

import aiohttp
from aiohttp import web
from waiting import until


class Wiretap:
    """`bodies` of the posts by path, in order. `lose` names a path whose next answer never reaches the client.

    `refuse` is a path and how many posts to it are refused, as by a proxy whose server is overloaded.

    `outage` is a path and a number of health checks: after the fifth post to that path every connection is closed
    without a response, until that many health checks have failed.

    `hold` is a path, the number of a post to it, and what never arrives: its `request` at the server, or its `response`
    at the client; `held` once that has happened. `lists_jobs` is false of servers other than `insitu backend`.

    `then` is a path and another server, which is asked from the third post to that path on.
    `plain` makes the server behind it one of ART's own kind for that model: it is served as NAME@STEP alone, answers
    name no version of the weights, and the sampled ids stand in the logprobs only.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.bodies: list[tuple[str, dict[str, str], Any]] = []
        self.lose: str | None = None
        self.refuse = ("", 0)
        self.outage: tuple[str, int] | None = None
        self.hold: tuple[str, int, str] | None = None
        self.held = False
        self.lists_jobs = True
        self.then: tuple[str, str] | None = None
        self.plain: str | None = None
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def of(self, path: str) -> list[Any]:
        return [body for at, _, body in self.bodies if at == path]

    def headers_of(self, path: str) -> list[dict[str, str]]:
        return [headers for at, headers, _ in self.bodies if at == path]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._session.close())
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._session = aiohttp.ClientSession(auto_decompress=False)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "POST" and body:
            self.bodies.append((request.path, dict(request.headers), json.loads(body)))
            if self.then and len(self.of(self.then[0])) == 3:
                self.target = self.then[1]
        if self.outage and len(self.of(self.outage[0])) > 5:
            path, checks = self.outage
            self.outage = (path, checks - (request.path == "/healthcheck"))
            if self.outage[1] < 0:
                self.outage = None
            else:
                request.transport.close()
                return web.Response()
        if request.path == "/art/jobs" and not self.lists_jobs:
            return web.Response(status=404)
        holds = self.hold and (request.path, len(self.of(request.path))) == self.hold[:2] and not self.held
        if holds and self.hold[2] == "request":
            return await self._wait_for_the_client_to_die(request)
        path, times = self.refuse
        if request.path == path and times:
            self.refuse = path, times - 1
            return web.Response(status=503)
        headers = {k: v for k, v in request.headers.items() if k.lower() != "content-length"}
        if self.plain:
            headers["Accept"] = "application/json"  # it does not know insitu's compact form
        url = self.target + request.path_qs
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            if request.path == self.lose:
                self.lose = None
                await answer.read()  # the server has done what it was asked
                request.transport.close()
                return web.Response()
            if holds:
                await answer.read()
                return await self._wait_for_the_client_to_die(request)
            if self.plain and request.path.startswith("/v1/"):
                return _made_plain(self.plain, body, await answer.json(), answer.status)
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "content-length")}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    async def _wait_for_the_client_to_die(self, request: web.Request) -> web.Response:
        self.held = True
        await until(lambda: request.transport is None or request.transport.is_closing())
        return web.Response()


def _made_plain(name: str, asked: bytes, answer: Any, status: int) -> web.Response:
    if asked and json.loads(asked)["model"] == name:
        return web.json_response({"detail": f"there is no model {name!r}"}, status=404)
    if "data" in answer:
        answer["data"] = [model for model in answer["data"] if model["id"] != name]
    for part in (answer, *answer.get("choices", ())):
        for key in ("token_ids", "prompt_token_ids", "policy_version"):
            part.pop(key, None)
    return web.json_response(answer, status=status)
