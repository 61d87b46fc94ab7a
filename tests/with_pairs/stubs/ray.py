"""What insitu uses of Ray, on this machine alone: an actor is an object in a process of its own."""

import asyncio
import importlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, BinaryIO


class RayError(Exception):
    """An actor has ended."""


class RayTaskError(RayError):
    """A method of an actor has raised."""


exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")


def is_initialized() -> bool:
    return False


def init(**_: Any) -> None:
    """Connects to nothing."""


def shutdown() -> None:
    """Disconnects from nothing."""


def nodes() -> list[dict[str, Any]]:
    return [{"Alive": True, "Resources": {"CPU": 8.0}}]


class remote:
    """A class whose objects are actors."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def options(self, **_: Any) -> "remote":
        return self

    def remote(self) -> "Actor":
        return Actor(self._cls)


class Actor:
    """The handle of an actor: `await actor.method.remote(argument)`."""

    def __init__(self, cls: type) -> None:
        command = [sys.executable, __file__, cls.__module__, cls.__qualname__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self._read, daemon=True).start()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *arguments: Any) -> "asyncio.Future[Any]":
        number, answer = next(self._numbers), Future[Any]()
        self._answers[number] = answer
        try:
            pickle.dump((number, method, arguments), self.process.stdin)
            self.process.stdin.flush()
        except OSError:
            answer.set_exception(RayError("the actor has ended"))
        return asyncio.wrap_future(answer)

    def _read(self) -> None:
        with self.process.stdout as results:
            try:
                while True:
                    number, result, error = pickle.load(results)
                    answer = self._answers.pop(number)
                    answer.set_exception(RayTaskError(error)) if error else answer.set_result(result)
            except EOFError:
                for answer in self._answers.values():
                    answer.set_exception(RayError("the actor has ended"))


def kill(actor: Actor) -> None:
    actor.process.kill()
    actor.process.wait()
    actor.process.stdin.close()


async def _serve(actor: Any, calls: BinaryIO, results: BinaryIO) -> None:
    async def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        result, error = None, None
        try:
            result = await getattr(actor, method)(*arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        pickle.dump((number, result, error), results)
        results.flush()

    tasks = set()
    while True:
        try:
            tasks.add(asyncio.create_task(answer(*await asyncio.to_thread(pickle.load, calls))))
        except EOFError:  # the driver has ended
            return


if __name__ == "__main__":
    module, name = sys.argv[1:]
    written = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the actor prints
    sys.path.insert(0, os.getcwd())
    asyncio.run(_serve(getattr(importlib.import_module(module), name)(), sys.stdin.buffer, written))
