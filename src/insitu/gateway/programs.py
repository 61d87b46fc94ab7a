"""Runs external agents as subprocesses, each in its own process group, which is killed when the run ends.

Separate from `agents`, so that `kill_programs` can be imported without the gateway.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from insitu.errors import EpisodeTimeout, WorkflowError
from insitu.redaction import is_secret_variable

GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL, and then for the remaining output."""
_KEPT_STDERR_BYTES = 2000
"""How much of the end of a program's standard error is kept."""
_running_groups: set[int] = set()
"""The process groups of running programs."""


def inherited_environment(passed: Iterable[str] = ()) -> dict[str, str]:
    """This process's variables for a program that is not trusted: without secrets, except those in `passed`.

    A variable is a secret by its name (`INSITU_BACKEND_TOKEN`, `HF_TOKEN`, `AWS_SECRET_ACCESS_KEY`), or if its value is
    a URL with a password. Proxies are passed, because programs cannot reach the network without them.
    """
    passed = frozenset(passed)
    return {name: value for name, value in os.environ.items() if name in passed or not _is_secret(name, value)}


def _is_secret(name: str, value: str) -> bool:
    return is_secret_variable(name, "" if name.lower().endswith("_proxy") else value)


class Program(asyncio.SubprocessProtocol):
    """A started program.

    `done` is set once it has exited or written more than `max_output` bytes to stdout, `closed` once its pipes are
    closed.
    """

    def __init__(self, max_output: int) -> None:
        self.done = asyncio.Event()
        self.closed = asyncio.Event()
        self.exit_code = 0
        """Exit status; -N if signal N killed it."""
        self.stdout = bytearray()
        self._errors = b""
        self._max_output = max_output

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._errors = (self._errors + data)[-_KEPT_STDERR_BYTES:]
            return
        self.stdout += data[: self._max_output + 1 - len(self.stdout)]
        if self.output_too_long:
            self.done.set()

    def process_exited(self) -> None:
        self.done.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

    @property
    def output_too_long(self) -> bool:
        return len(self.stdout) > self._max_output

    @property
    def stderr_tail(self) -> str:
        """The end of its standard error, or a note that it is empty, for error messages."""
        return self._errors.decode(errors="replace").strip() or "its standard error is empty"


async def run_program(
    command: Sequence[str],
    stdin: bytes,
    *,
    cwd: Path,
    env: dict[str, str],
    time_limit: float | None,
    max_output: int,
    on_exit: Callable[[], None],
) -> Program:
    """Runs a program until it exits or writes more than `max_output` bytes to stdout.

    Once the program has started, `on_exit` is always called, and then the rest of its process group is terminated.
    Raises WorkflowError if it cannot be started, EpisodeTimeout after `time_limit` seconds.
    """
    loop = asyncio.get_running_loop()
    try:
        transport, program = await loop.subprocess_exec(
            lambda: Program(max_output), *command, cwd=cwd, env=env, start_new_session=True
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument, for example
        raise WorkflowError(f"workflow command {command[0]!r} cannot be started: {error}") from error
    group = transport.get_pid()
    _running_groups.add(group)
    try:
        pipe: Any = transport.get_pipe_transport(0)
        if not pipe.is_closing():  # as it is if the program has ended already
            pipe.write(stdin)
            pipe.close()
        async with asyncio.timeout(time_limit) as timer:
            await program.done.wait()
    except TimeoutError:
        if not timer.expired():
            raise
        raise EpisodeTimeout(f"{command[0]} did not finish within timeout: {time_limit:g} s") from None
    finally:
        on_exit()
        await _end_group(group)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                await program.closed.wait()  # for the rest of the output
        transport.close()
    program.exit_code = transport.get_returncode() or 0  # None only if it is still dying after too much output
    return program


async def _end_group(group: int) -> None:
    """Terminates the remaining processes of a group: SIGTERM, then SIGKILL after GRACE_SECONDS."""
    try:
        os.killpg(group, signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + GRACE_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
            os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        pass  # no process left; macOS raises PermissionError if only zombies remain
    finally:
        _kill(group)
        _running_groups.discard(group)


def kill_programs() -> None:
    """Kills all running programs, for a process that is about to exit without cleanup."""
    for group in _running_groups:
        _kill(group)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
