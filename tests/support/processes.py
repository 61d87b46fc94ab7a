"""Commands of insitu in separate processes: `start` for any, `run` for those that end, `serving` for servers.

They are forked by `fork_server.py`, which has imported everything once for all pytest workers. A test that is about
starting up (what is imported, warnings at import, the installed script) runs a fresh interpreter instead.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

TESTS = Path(__file__).resolve().parent
LOGGED_BACKEND = TESTS / "logged_backend.py"
"""A script in place of the command `backend`; its first argument is the file that gets a line per completion."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GOMP_SPINCOUNT": "0",
}
"""The models are tiny, and several processes share the cores: where a test asks for several threads, they would take
ten times as long if they waited for each other actively. The threads of OpenMP do not survive a fork."""
FORK_SERVER = "INSITU_TEST_FORK_SERVER"
"""The environment variable by which the pytest workers find the fork server of their controller."""
HANGS = 600
"""Seconds after which a command counts as hanging, on a machine however busy."""


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """A fork server for this process and all that it starts; what it has forked ends with it."""
    with tempfile.TemporaryDirectory(prefix="insitu-tests-") as folder:
        address, python = f"{folder}/socket", Path(folder) / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(__file__)} "$@"\n')
        python.chmod(0o755)
        command = [sys.executable, TESTS / "fork_server.py", address, python]
        environment = os.environ | ONE_THREAD
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment) as process:
            wait_until(lambda: os.path.exists(address) or process.poll() is not None)
            assert process.poll() is None
            os.environ[FORK_SERVER] = address
            try:
                yield
            finally:
                del os.environ[FORK_SERVER]
                process.communicate()


def forked_python() -> str:
    """A Python for scripts and for `-c CODE`, in which everything has been imported already."""
    return str(Path(os.environ[FORK_SERVER]).with_name("python"))


def install_forked_command(path: Path) -> None:
    """Writes `insitu` as a program for tests that run it from a shell; it is forked as well."""
    path.write_text(f'#!/bin/sh\nexec {forked_python()} -m insitu "$@"\n')
    path.chmod(0o755)


def wait_until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Command:
    """A program that the fork server runs: the arguments of Python, and stdin, stdout and stderr."""

    def __init__(self, arguments: list[str], folder: str, environment: dict[str, str], descriptors: list[int]) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(os.environ[FORK_SERVER])
        request = {"arguments": arguments, "folder": folder, "environment": environment}
        socket.send_fds(self._server, [json.dumps(request).encode() + b"\n"], descriptors)
        self.returncode: int | None = None
        self.pid = self._answer()

    def _answer(self) -> int:
        """The next number of the fork server: first the pid, then the exit code."""
        line = b""
        while not line.endswith(b"\n"):
            received = self._server.recv(1)
            if not received:
                raise ConnectionError("the fork server has ended")
            line += received
        return int(line)

    def wait_until(self, holds: Callable[[], Any]) -> None:
        """Waits for something that the command does; fails if it has ended instead."""
        wait_until(lambda: holds() or self.poll() is not None)
        assert holds(), f"the command has ended: {getattr(self, 'errors', '')}"

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("insitu", timeout or 0)
            self.returncode = self._answer()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it still runs."""
        self.kill()
        self.wait()
        self._server.close()


class _Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True)
        self._lines: list[str] = []
        self._stream = stream
        self.start()

    def run(self) -> None:
        self._lines.extend(self._stream)

    @property
    def text(self) -> str:
        """What has been read so far."""
        return "".join(self._lines)


class Process(Command):
    """A running command with pipes, and with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            program = [] if arguments[0].endswith(".py") else ["-m", "insitu"]
            super().__init__([*program, *arguments], folder, environment, [nothing, out_end, err_end])
        finally:
            for descriptor in (nothing, out_end, err_end):
                os.close(descriptor)
        self.stdout, self._stderr = (os.fdopen(pipe, encoding="utf-8") for pipe in (out, err))
        self._errors = _Reader(self._stderr)  # from the start: a full pipe would stop the command

    @property
    def errors(self) -> str:
        """What it has printed on stderr so far."""
        return self._errors.text

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it prints until it ends, on stdout and on stderr."""
        deadline = None if timeout is None else time.monotonic() + timeout
        readers = (_Reader(self.stdout), self._errors)
        for reader in readers:
            reader.join(None if deadline is None else max(0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("insitu", timeout or 0)
        self.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
        return readers[0].text, readers[1].text

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
        self.stdout.close()
        self._errors.join(5)
        if not self._errors.is_alive():  # a program that the command left behind may still have it open
            self._stderr.close()


def start(*arguments: Any, folder: Path | None = None, **variables: str) -> Process:
    """`insitu` with these arguments (or a script that comes first), in `folder`, with these variables besides ours."""
    return Process([*map(str, arguments)], str(folder or Path.cwd()), {**os.environ, **variables})


def run(*arguments: Any, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `insitu` with these arguments has printed when it has ended."""
    with start(*arguments, folder=folder, **variables) as process:
        out, err = process.communicate(HANGS)
        return subprocess.CompletedProcess(["insitu", *arguments], process.wait(), out, err)


def start_project(folder: Path, *arguments: Any, command: str = "finetune", file: str = "config.yml") -> Process:
    """A command on the project in `folder`, warnings being errors."""
    variables = {"PYTHONWARNINGS": "error", "COLUMNS": "200", "INSITU_BACKEND_TOKEN": "of another backend"}
    return start(command, "--config_file", file, *arguments, folder=folder, **variables)


def run_project(
    folder: Path, *arguments: Any, command: str = "finetune", file: str = "config.yml"
) -> tuple[int, str, str]:
    """Returns the exit code and what the command has printed on stdout and stderr."""
    with start_project(folder, *arguments, command=command, file=file) as process:
        out, err = process.communicate(HANGS)
        return process.wait(), out, err


@contextlib.contextmanager
def serving(*arguments: Any, folder: Path | None = None, **variables: str) -> Iterator[tuple[Process, str]]:
    """A command that serves (`backend`, `serve`), and its address."""
    with start(*arguments, folder=folder, **variables) as process:
        line = process.stdout.readline()
        assert " ready at http://" in line, (line, *process.communicate(HANGS))
        yield process, line.split()[-1]


def main(arguments: list[str]) -> None:
    """Runs a program as this process: input and output are ours, our signals and our death are its, its end is ours."""
    while arguments[0] in ("-u", "-B"):  # execnet starts the pytest workers with it
        del arguments[0]
    if arguments[0].startswith("-") and arguments[0] != "-c" and arguments[:2] != ["-m", "insitu"]:
        os.execv(sys.executable, [sys.executable, *arguments])
    command = Command(arguments, os.getcwd(), dict(os.environ), [0, 1, 2])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: command.send_signal(number))
    code = command.wait()
    command.close()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])


def commands_below(process: "psutil.Process") -> "dict[psutil.Process, list[str]]":
    """The commands of its descendants, without those that end meanwhile."""
    import psutil  # not in every environment in which processes are started

    commands = {}
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            commands[each] = each.cmdline()
    return commands
