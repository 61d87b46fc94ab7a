"""Runs external agents as subprocesses, each in its own process group, which is killed when the run ends."""

import asyncio
import functools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from insitu.errors import EpisodeTimeout, WorkflowError
from insitu.wire.redaction import is_ordinary_variable

GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL, and then for the remaining output."""
_KEPT_STDERR_BYTES = 2000
"""How much of the end of a program's standard error is kept."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would act on, but line breaks and tabs."""
_READ_BYTES = 2**16
_running_groups: set[int] = set()
"""The process groups of running programs."""


def inherited_environment(passed: Iterable[str] = ()) -> dict[str, str]:
    """This process's variables for a program that is not trusted: those that every program needs, and `passed`.

    Proxies are among them, with their passwords, because programs cannot reach the network without them.
    """
    names = frozenset(passed)
    return {name: value for name, value in os.environ.items() if name in names or is_ordinary_variable(name)}


class Program:
    """A running program, with pipes to the event loop.

    `done` is set once it has exited or written more than `max_output` bytes to stdout. The pipes are read and closed
    here: as transports, uvloop closes their descriptors twice, and the second time may hit a file of another thread.
    """

    def __init__(self, process: subprocess.Popen[bytes], max_output: int) -> None:
        self.done = asyncio.Event()
        self.stdout = bytearray()
        self.reported_exit: int | None = None
        """Exit status of the program that this one has run, if that is what counts."""
        self._process = process
        self._errors = b""
        self._max_output = max_output
        self._outputs: dict[IO[bytes], Callable[[bytes], None]] = {}
        self._silent = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def communicate(self, stdin: bytes) -> None:
        """Passes it its input, and collects its output until it is `done`."""
        process = self._process
        exited = functools.partial(self._loop.call_soon_threadsafe, self.done.set)
        threading.Thread(target=_wait, args=(process, exited), name="insitu-program", daemon=True).start()
        streams = process.stdin, process.stdout, process.stderr
        source, output, errors = (cast(IO[bytes], stream) for stream in streams)
        self._outputs = {output: self._receive, errors: self._receive_errors}
        for stream in (source, output, errors):
            os.set_blocking(stream.fileno(), False)
        for stream in self._outputs:
            self._loop.add_reader(stream.fileno(), self._read, stream)
        self._loop.add_writer(source.fileno(), self._write, source, memoryview(stdin))
        await self.done.wait()

    async def close(self) -> None:
        """Waits a while for the rest of its output."""
        if self._outputs:
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._silent.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            self._close(stream)  # type: ignore[arg-type]

    def _read(self, stream: IO[bytes]) -> None:
        with suppress(BlockingIOError):
            if data := os.read(stream.fileno(), _READ_BYTES):
                self._outputs[stream](data)
            else:
                self._close(stream)

    def _write(self, stream: IO[bytes], data: memoryview) -> None:
        self._loop.remove_writer(stream.fileno())
        try:
            data = data[os.write(stream.fileno(), data) :]
        except BlockingIOError:
            pass
        except OSError:  # it has closed its input
            data = data[:0]
        if data:
            self._loop.add_writer(stream.fileno(), self._write, stream, data)
        else:
            stream.close()

    def _close(self, stream: IO[bytes]) -> None:
        if not stream.closed:
            self._loop.remove_reader(stream.fileno())
            self._loop.remove_writer(stream.fileno())
            stream.close()
        self._outputs.pop(stream, None)
        if not self._outputs:
            self._silent.set()

    def _receive(self, data: bytes) -> None:
        self.stdout += data[: self._max_output + 1 - len(self.stdout)]
        if self.output_too_long:
            self.done.set()

    def _receive_errors(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-_KEPT_STDERR_BYTES:]

    @property
    def exit_code(self) -> int:
        """Exit status; -N if signal N killed it."""
        if self.reported_exit is not None:
            return self.reported_exit
        return self._process.returncode or 0  # None only if it is still dying after too much output

    @property
    def output_too_long(self) -> bool:
        return len(self.stdout) > self._max_output

    @property
    def stderr_tail(self) -> str:
        """The end of its standard error, or a note that it is empty, for error messages."""
        text = self._errors.decode(errors="replace").strip()
        return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) or "its standard error is empty"


def _wait(process: subprocess.Popen[bytes], exited: Callable[[], object]) -> None:
    process.wait()
    with suppress(RuntimeError):  # the event loop is closed
        exited()


async def run_program(
    command: Sequence[str],
    stdin: bytes,
    *,
    cwd: Path,
    env: dict[str, str],
    time_limit: float | None,
    max_output: int,
    on_exit: Callable[[], object] = lambda: None,
    pass_fds: Collection[int] = (),
    name: str | None = None,
) -> Program:
    """Runs a program until it exits or writes more than `max_output` bytes to stdout.

    `name` is that in error messages; none: the first word of the command. Once the program has started, `on_exit` is
    always called, and then the rest of its process group is terminated.
    Raises WorkflowError if it cannot be started, EpisodeTimeout after `time_limit` seconds.
    """
    try:
        # Not by the event loop: uvloop copies this process for each program, which takes longer the larger it is.
        process = subprocess.Popen(  # noqa: ASYNC220
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=cwd,
            env=env,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument, for example
        raise WorkflowError(f"workflow command {name or command[0]!r} cannot be started: {error}") from error
    _running_groups.add(process.pid)
    program = Program(process, max_output)
    try:
        async with asyncio.timeout(time_limit) as timer:
            await program.communicate(stdin)
    except TimeoutError:
        if not timer.expired():
            raise
        raise EpisodeTimeout(f"{name or command[0]} did not finish within timeout: {time_limit:g} s") from None
    finally:
        on_exit()
        await _end_group(process.pid)
        await program.close()
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
