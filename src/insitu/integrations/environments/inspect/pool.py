"""The worker processes of a task: each runs one evaluation of inspect, to which samples are sent as episodes begin."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from insitu.errors import BackendUnavailable, ConfigError
from insitu.wire.child_process import ChildProcess

_PROGRAM = Path(__file__).with_name("worker.py")
_GRACE_SECONDS = 20.0
"""How long a sample may go on after its episode has been cancelled, before its worker is killed."""
_CLOSE_SECONDS = 15.0
"""How long workers may take to finish their logs."""
_SAMPLES = 2000
"""A worker whose log is not kept is replaced after as many samples, of each of which inspect holds some 45 KB."""
_LINE_BYTES = 2**26


def command(python: Path | None, mode: str, settings: Mapping[str, Any]) -> list[str]:
    return [str(python or sys.executable), str(_PROGRAM), mode, json.dumps(settings)]


def describe(python: Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rows, scores and epochs of a task, from a process that loads it. Raises ConfigError if it cannot."""
    try:
        done = subprocess.run(command(python, "rows", settings), capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"workflow.python: {python} cannot be run: {error}") from error
    if done.returncode != 0:
        message = done.stderr.strip()[-2000:] or f"{python or sys.executable} ended with exit code {done.returncode}"
        raise ConfigError(f"task {settings['task']!r} cannot be read: {message}")
    description: dict[str, Any] = json.loads(done.stdout)
    if "problem" in description:
        raise ConfigError(description["problem"])
    return description


class Worker:
    """A process with a copy of the task. `in_flight` has a future for each sample that it evaluates."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = ChildProcess(arguments, log, os.environ, stdin=theirs.fileno())
        except OSError:
            ours.close()
            raise
        self._writer: asyncio.StreamWriter | None = None
        self._first_answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._first_answer.add_done_callback(asyncio.Future.exception)  # nobody may wait for it
        self.in_flight = {0: self._first_answer}
        self.samples = 0
        self.has_loaded = False
        self.lost: str | None = None
        """How it has ended."""
        self.reading = asyncio.create_task(self._read(ours), name="read an inspect worker")

    async def wait_until_loaded(self) -> None:
        """Raises ConfigError if the task cannot be loaded, BackendUnavailable if the process ends before."""
        if (problem := (await asyncio.shield(self._first_answer)).get("problem")) is not None:
            self._process.kill()
            raise ConfigError(problem)
        if self.lost is not None:
            raise BackendUnavailable(self.lost)
        self.has_loaded = True

    async def _read(self, connection: socket.socket) -> None:
        """Passes results on until the process closes its end of the socket, which is when it ends."""
        problem = None
        try:
            lines, self._writer = await asyncio.open_unix_connection(sock=connection, limit=_LINE_BYTES)
            while line := await lines.readline():
                result = json.loads(line)
                future = self.in_flight.pop(result["number"])
                if not future.done():
                    future.set_result(result)
        except ConnectionError:
            pass
        except Exception as error:  # a line above _LINE_BYTES, or anything that the task has written to the socket
            problem = f"has sent a result that cannot be read: {error!r}"
        finally:
            self._note_lost(problem)

    def _note_lost(self, problem: str | None = None) -> None:
        """Ends the process; `problem` is why, unless it has ended itself."""
        self._process.kill()
        if self._writer is not None:
            self._writer.close()
        self.lost = f"a worker of inspect {problem or self._process.outcome()}; {self._process.end_of_log()}"
        for future in self.in_flight.values():
            if not future.done():
                future.set_exception(BackendUnavailable(self.lost))
        self.in_flight.clear()

    async def evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of a sample. Raises BackendUnavailable if the process is lost."""
        number, loop = request["number"], asyncio.get_running_loop()
        future = self.in_flight[number] = loop.create_future()
        self.samples += 1
        self._send(request)
        try:
            return await future
        except asyncio.CancelledError:
            loop.call_later(_GRACE_SECONDS, self._kill_if_busy_with, number)
            raise

    def _kill_if_busy_with(self, number: int) -> None:
        """The model calls of a cancelled episode are refused, so that its sample ends, unless it hangs."""
        if number in self.in_flight:
            self._process.kill()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(request, default=str).encode() + b"\n")

    def retire(self) -> None:
        """Lets it end once its samples have."""
        self._send({"last": True})

    async def finish(self) -> None:
        """Lets it finish its log."""
        if self.has_loaded and self.lost is None:
            assert self._writer is not None
            self._writer.write_eof()
            await asyncio.wait({self.reading}, timeout=_CLOSE_SECONDS)

    def end(self) -> None:
        """Programs that it has started may keep its connection: that ends too."""
        self._process.kill()
        self.reading.cancel()


class WorkerPool:
    """Workers, which are started again when a sample needs one that is lost."""

    def __init__(self, arguments: list[str], size: int, folder: Path, most_samples: float = _SAMPLES) -> None:
        self._arguments = arguments
        self._folder = folder
        self._most_samples = most_samples
        self._workers: list[Worker | None] = [None] * size
        self._retired: list[Worker] = []
        self._episodes = [0] * size
        """Episodes that each place has, or that wait until its worker has started."""
        self._numbers = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        try:
            await asyncio.gather(*(self._worker(place).wait_until_loaded() for place in range(len(self._workers))))
            yield self
        finally:
            workers = [each for each in (*self._workers, *self._retired) if each is not None]
            try:
                await asyncio.gather(*(worker.finish() for worker in workers))
            finally:
                for worker in workers:
                    worker.end()
                await asyncio.gather(*(worker.reading for worker in workers), return_exceptions=True)

    def _worker(self, place: int) -> Worker:
        worker = self._workers[place]
        if worker is not None and worker.samples >= self._most_samples and worker.lost is None:
            worker.retire()
            self._retired = [worker, *(each for each in self._retired if each.lost is None)]
            worker = None
        if worker is None or worker.lost is not None:
            self._numbers += 1
            worker = self._workers[place] = Worker(self._arguments, self._folder / f"worker-{self._numbers}.log")
        return worker

    async def evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of a sample, from the worker with the fewest. Raises like Worker."""
        place = min(range(len(self._workers)), key=lambda each: self._episodes[each])
        self._episodes[place] += 1
        self._numbers += 1
        request["number"] = self._numbers
        try:
            while not (worker := self._worker(place)).has_loaded:
                await worker.wait_until_loaded()
            return await worker.evaluate(request)
        finally:
            self._episodes[place] -= 1
