"""Sessions of an OpenEnv server, which is reached by its URL or started here.

async with EnvironmentServer(url="http://127.0.0.1:8000").open() as server:
    async with server.session({"seed": 7}) as (session, first):
        second = await session.step({"message": "hello"})
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict

from insitu.disk.temporary import temporary_folder
from insitu.errors import BackendUnavailable, WorkflowError, first_problem
from insitu.schemas.evaluation import Number
from insitu.wire.child_process import ChildProcess
from insitu.wire.connection import is_transient, read_at_most
from insitu.wire.endings import end_tasks

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 2**27
"""The largest observation; some are screenshots."""
CLOSE_SECONDS = 2.0
"""How long a server may take to close a session."""
_SCHEMA_BYTES = 2**22
_POLL_SECONDS = 0.1
_NO_SESSION = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
"""Errors that are not the episode's: the server has no session for it."""


class Observation(BaseModel):
    """The server's answer to `reset` and `step`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    observation: dict[str, Any]
    reward: Number | None = None
    done: bool = False


class SessionRefused(BackendUnavailable):
    """The server has no session left; `limit` is its number of sessions, if it says so."""

    def __init__(self, message: str, limit: int | None) -> None:
        super().__init__(message)
        self.limit = limit


class Session:
    """An environment of one episode, which ends with its connection. It is never connected again: the new session
    would be one that was not reset."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout: float) -> None:
        self._socket, self._url, self._timeout = socket, url, timeout
        self._answers: asyncio.Queue[aiohttp.WSMessage | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(), name="read a session of OpenEnv")
        self._is_waiting = self._is_used = False
        self._is_out_of_step = False
        """Whether a message came that no request had asked for: what follows would be taken for another answer."""
        self.is_kept = False
        """Whether the server was still at work on a request when the session was closed, and keeps it."""

    async def reset(self, arguments: Mapping[str, Any]) -> Observation:
        """Raises SessionRefused if the server has no session left, and like `step`."""
        return await self._request("reset", arguments)

    async def step(self, action: Mapping[str, Any]) -> Observation:
        """Raises BackendUnavailable if the server is lost or takes too long, WorkflowError if the environment fails."""
        return await self._request("step", action)

    async def _read(self) -> None:
        """Passes the answers on until the connection ends. It also answers the server's pings while the model is at
        work: servers end sessions that do not."""
        with suppress(ConnectionError):
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.TEXT:
                # before the first request there is the refusal of a server without a session left
                may_come = self._is_waiting or not self._is_used
                self._is_out_of_step = not (may_come and self._answers.empty())
                if self._is_out_of_step:
                    return
                self._answers.put_nowait(message)
        self._answers.put_nowait(None)

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Observation:
        self._is_waiting = True
        unasked = f"{self._url}: before {kind}, a message came that nothing had asked for"
        if self._is_out_of_step:
            raise WorkflowError(unasked)
        came_before = not self._answers.empty()
        self._is_used = True
        try:
            async with asyncio.timeout(self._timeout):
                with suppress(ConnectionError):  # a server that refuses has sent the reason, and closed
                    await self._socket.send_json({"type": kind, "data": data})
                message = await self._answers.get()
        except TimeoutError:
            raise BackendUnavailable(f"{self._url}: no answer to {kind} within timeout: {self._timeout:g} s") from None
        self._is_waiting = False
        if message is None:
            raise BackendUnavailable(f"{self._url}: the connection was lost in {kind}")
        try:
            answer = message.json()
            if answer["type"] != "error":
                if came_before:
                    raise WorkflowError(unasked)
                return Observation.model_validate(answer["data"])
            details = answer["data"]
            code, text = details.get("code"), f"{self._url}: {kind}: {details.get('message')} ({details.get('code')})"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = first_problem(error)
            raise WorkflowError(f"{self._url}: the answer to {kind} is not OpenEnv's: {problem}") from error
        if code == "CAPACITY_REACHED":
            limit = details.get("max_sessions")
            raise SessionRefused(text, limit if isinstance(limit, int) and limit > 0 else None)
        if code in _NO_SESSION:
            raise BackendUnavailable(text)
        raise WorkflowError(f"{text} {details['errors']}" if details.get("errors") else text)

    async def close(self) -> None:
        """Waits until the server has given the session up, as it refuses new ones before."""
        try:
            with suppress(ConnectionError):
                await self._socket.send_json({"type": "close"})
            await asyncio.wait({self._reading}, timeout=CLOSE_SECONDS)
        finally:
            self.is_kept = self._is_waiting and not self._reading.done()
            self._reading.cancel()
            with suppress(TimeoutError):  # it reads until the server has closed it, too, which may go on sending
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._socket.close()


async def _refuse_redirect(_: Any, __: Any, parameters: aiohttp.TraceRequestRedirectParams) -> None:
    """The headers, and with them secrets, would go where the file does not say."""
    target = parameters.response.headers.get("Location", "nowhere")
    raise WorkflowError(f"{parameters.url} redirects to {target}, which is not followed: set it as url")


@dataclass
class EnvironmentServer:
    """A server at `url`, or one that `command` starts with `{port}`, and starts again when it has ended or hangs.

    At most `sessions` are open at once; None: as many as the server allows. `timeout` is in seconds for each answer,
    `patience` for the server to start, to be reached by an episode, and to give a session while none is open.
    """

    url: str | None = None
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    sessions: int | None = None
    timeout: float = 60.0
    patience: float = 120.0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        self._process: ChildProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._taken, self._freed = 0, asyncio.Condition()
        self._in_use, self._ended, self._last_end = 0, asyncio.Condition(), -math.inf
        """Sessions in which an episode is at work."""
        self._keeps_sessions = False
        """Whether a session was closed in which the server was still at work."""
        self._hangs = False
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_redirect)
        connector = aiohttp.TCPConnector(limit=0)
        cookies = aiohttp.DummyCookieJar()  # a session would send those of another
        http = aiohttp.ClientSession(
            headers=dict(self.headers), connector=connector, cookie_jar=cookies, trace_configs=[trace]
        )
        async with temporary_folder() if self.command else nullcontext(Path()) as self._logs, http as self._http:
            try:
                yield self
            finally:
                if self._starting is not None:
                    await end_tasks(self._starting)
                if self._process is not None:
                    await asyncio.to_thread(self._process.kill)

    async def action_schema(self) -> dict[str, Any]:
        """The JSON schema of an action. Raises BackendUnavailable if the server cannot be reached."""
        url = await self._ready()
        try:
            async with self._http.get(f"{url}/schema", timeout=aiohttp.ClientTimeout(self.timeout)) as response:
                if response.status != 200:
                    problem = f"{url}/schema is answered with {response.status}"
                    raise BackendUnavailable(f"{problem}: is it an OpenEnv server?")
                if (body := await read_at_most(response, _SCHEMA_BYTES)) is None:
                    raise BackendUnavailable(f"{url}/schema is answered with more than {_SCHEMA_BYTES} bytes")
                schema: dict[str, Any] = orjson.loads(body)["action"]
                return schema
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            problem = str(error) or f"no answer within timeout: {self.timeout:g} s"
            raise BackendUnavailable(f"{url} cannot be reached: {problem}") from error
        except (aiohttp.ClientError, ValueError, TypeError, KeyError) as error:
            raise BackendUnavailable(f"{url}/schema is not answered as by OpenEnv: {error!r}") from error

    @asynccontextmanager
    async def session(self, arguments: Mapping[str, Any]) -> AsyncIterator[tuple[Session, Observation]]:
        """A session and its first observation, when there is one left.

        Raises BackendUnavailable if the server is not there, or refuses for `patience` seconds while no other session
        is open here.
        """
        session, first = await self._begin(arguments)
        try:
            yield session, first
        finally:
            self._last_end = time.monotonic()
            await self._end(session)
            async with self._ended:
                self._ended.notify()

    async def _begin(self, arguments: Mapping[str, Any]) -> tuple[Session, Observation]:
        """Waits for a session to be free, and for the server while it refuses or cannot be reached. The session is in
        use from its reset on."""
        began, delay = time.monotonic(), _POLL_SECONDS
        while True:
            async with self._freed:
                await self._freed.wait_for(lambda: self.sessions is None or self._taken < self.sessions)
                self._taken += 1
            session = None
            try:
                session = await self._connect()
                self._in_use += 1
                return session, await session.reset(arguments)
            except (SessionRefused, ConnectionError) as error:
                await self._end(session)
                hangs = self._keeps_sessions and isinstance(error, SessionRefused) and not self._in_use
                self._hangs |= hangs
                waited = time.monotonic() - max(began, self._last_end)
                if waited > self.patience and not self._in_use and not (hangs and self.command):
                    raise BackendUnavailable(str(error)) from error
                if isinstance(error, SessionRefused) and error.limit:
                    self.sessions = min(error.limit, self.sessions or error.limit)
            except BaseException:  # raised again
                if session is not None:
                    self._last_end = time.monotonic()
                await self._end(session)
                raise
            with suppress(TimeoutError):
                async with asyncio.timeout(delay), self._ended:
                    await self._ended.wait()
            delay = min(2 * delay, CLOSE_SECONDS)

    async def _connect(self) -> Session:
        """Raises ConnectionError if the server does not accept the connection."""
        url = await self._ready()
        try:
            async with asyncio.timeout(self.timeout):
                limit = aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS / 4)  # of a server that did not close it
                socket = await self._http.ws_connect(f"{url}/ws", max_msg_size=MESSAGE_BYTES, timeout=limit)
        except TimeoutError:
            self._hangs = True
            raise ConnectionError(f"{url} does not answer within timeout: {self.timeout:g} s") from None
        except aiohttp.ClientError as error:
            if isinstance(error, aiohttp.WSServerHandshakeError) and not is_transient(error.status):
                raise WorkflowError(f"{url}/ws is not an OpenEnv server: {error}") from error
            raise ConnectionError(f"{url} cannot be reached: {error!r}") from error
        if self._is_starting or url != self.url:
            await socket.close()
            raise ConnectionError(f"{url} was ended while a session began")
        return Session(socket, url, self.timeout)

    async def _end(self, session: Session | None) -> None:
        try:
            if session is not None:
                self._in_use -= 1
                await session.close()
        finally:
            self._keeps_sessions |= session is not None and session.is_kept
            self._taken -= 1
            async with self._freed:
                self._freed.notify_all()

    @property
    def _is_starting(self) -> bool:
        return self._starting is not None and not self._starting.done()

    async def _ready(self) -> str:
        """The server's URL, with the server running if it is started here. Raises BackendUnavailable if it fails, for
        all that wait for the same start."""
        if self.command:
            ended = self._process is None or self._process.ended
            if not self._is_starting and (ended or (self._hangs and not self._in_use)):
                self._starting = asyncio.create_task(self._start(), name="start a server of OpenEnv")
                self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait
            assert self._starting is not None
            await asyncio.shield(self._starting)
        assert self.url is not None
        return self.url

    async def _start(self) -> None:
        if self._process is not None:
            problem = self._process.outcome() if self._process.ended else "hangs"
            logger.warning("the environment's server %s; it is started again", problem)
            await asyncio.to_thread(self._process.kill)
        self._hangs = self._keeps_sessions = False
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [part.replace("{port}", port) for part in self.command]
        log, environment = self._logs / "server.log", {**self.environment, "PORT": port}
        self._process = ChildProcess(command, log, environment, bound=True, folder=self.folder)
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + self.patience
        while not await self._is_healthy():
            if self._process.ended or time.monotonic() > deadline:
                ended = self._process.ended
                await asyncio.to_thread(self._process.kill)
                problem = self._process.outcome() if ended else f"does not answer {self.url}/health"
                raise BackendUnavailable(f"the environment's server {problem}; {self._process.end_of_log()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _is_healthy(self) -> bool:
        try:
            async with self._http.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(self.timeout)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
