"""A server of the OpenEnv protocol whose sessions fail as they are told.

It runs in this process, or as `fake_openenv.py PORT [LIMIT]`. Arguments of `reset` decide: {"do": "die"} ends the
connection in a step, "exit" the process, "hang" never answers, "raise" is an error of the environment, "garble" is no
answer, "twice" answers a step twice; with "times" only in the first sessions with this `key`. "hang reset" never
answers the reset; "reset" answers it when two more sessions have been refused. "deaf": after the reset no connection is
accepted. What is asked below `/elsewhere` is redirected.
The environment counts: each step has the reward `pay`, and step number `last` ends the episode.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web
from waiting import hang, until

TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


class FakeOpenEnv:
    """`limit` is its number of sessions; `resets` are the arguments received, `most` how many sessions were open."""

    def __init__(self, limit: int = 100, fields: dict[str, str] | None = None) -> None:
        self.limit, self.open, self.most, self.refused = limit, 0, 0, 0
        self.resets: list[dict[str, Any]] = []
        self.actions: list[dict[str, Any]] = []
        self.cookies: list[dict[str, str]] = []
        self.failures = Counter[str]()
        self.unasked = 0
        """Messages that each session sends before its first request."""
        self.sent = 0
        """Those that it has sent."""
        self._refusals, self._accepts = 0, True
        self.url = ""
        kinds = {"message": "string"} if fields is None else fields
        properties = {name: {"type": kind} for name, kind in kinds.items()}
        self.schema = {"properties": properties, "required": [*kinds]}

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/ws", self._session)
        app.router.add_get("/health", self._health)
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/elsewhere/ws", self._redirect)
        app.router.add_get("/elsewhere/schema", self._redirect)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            yield self.url
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _redirect(self, request: web.Request) -> web.Response:
        raise web.HTTPFound(self.url + request.path.removeprefix("/elsewhere"))

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self.schema})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        if not self._accepts:
            await hang()
        self.cookies.append(dict(request.cookies))
        socket = web.WebSocketResponse()
        socket.set_cookie("session", "1")
        await socket.prepare(request)
        if self.open >= self.limit:
            self.refused += 1
            data = {"message": "at capacity", "code": "CAPACITY_REACHED", "max_sessions": self.limit}
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            with suppress(ConnectionError):  # the client has left
                for _ in range(self.unasked):
                    await self._answer(socket, {"text": "unasked" * 10_000}, 1.0, False)
                    self.sent += 1
            await self._play(socket, request)
        finally:
            self.open -= 1
        await socket.close()
        return socket

    async def _play(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        told: dict[str, Any] = {}
        count = 0
        async for received in socket:
            message = json.loads(received.data)
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                told, count = message["data"], 0
                self.resets.append(told)
                if told.get("do") == "hang reset":
                    await hang()
                if told.get("do") == "reset":
                    self._refusals = self._refusals or self.refused + 2
                    await until(lambda: self.refused >= self._refusals)
                self._accepts &= told.get("do") != "deaf"
                await self._answer(socket, {"text": told.get("say", "hello")}, None, False)
                continue
            action = message["data"]
            if action.get("type") == "list_tools":
                await self._answer(socket, {"tools": [TOOL]}, None, False)
                continue
            self.actions.append(action)
            if told.get("do") == "twice":
                await self._answer(socket, {"text": "nobody asked"}, 1.0, False)
            if told.get("do") in ("die", "exit", "hang", "raise", "garble") and self._fails(told):
                if told["do"] == "exit":
                    os._exit(3)
                if told["do"] == "hang":
                    await hang()
                if told["do"] == "die":
                    request.transport.abort()
                    return
                text = (
                    "no JSON"
                    if told["do"] == "garble"
                    else json.dumps({"type": "error", "data": {"message": "it is broken", "code": "EXECUTION_ERROR"}})
                )
                await socket.send_str(text)
                continue
            count += 1
            result = {"result": {"content": [{"type": "text", "text": f"seen {count}"}]}}
            observed = result if "tool_name" in action else {"text": f"{count}"}
            await self._answer(socket, observed, told.get("pay", 0.5), count == told.get("last", 1))

    def _fails(self, told: dict[str, Any]) -> bool:
        key = told.get("key") or ""
        self.failures[key] += 1
        return self.failures[key] <= (told.get("times") or 10**6)

    async def _answer(self, socket: web.WebSocketResponse, observed: Any, reward: float | None, done: bool) -> None:
        data = {"observation": observed, "reward": reward, "done": done}
        await socket.send_json({"type": "observation", "data": data})


async def main(port: int, limit: int = 100) -> None:
    async with FakeOpenEnv(limit).listening(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
