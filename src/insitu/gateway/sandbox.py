"""Runs a program in a folder of its own, with nothing left running, and sends what is wanted of the folder.

    python -I -S sandbox.py '{"control": 5, "work": "/tmp/work", ...}' PROGRAM ARGUMENT...

`workspaces` starts it by its path, within bubblewrap or without, and it imports only the standard library. `control` is
the descriptor of a socket: a message with a listening socket, for the gateway, goes out first, and one JSON object
last: `exit` (code or negative signal) with what `pack` returns, or `refused` (why nothing was run). The program is
killed when a message comes in, or when the other end is closed. What reads from it trusts nothing of it: the program
may have taken its place.
"""

import json
import os
import resource
import select
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, Any

_SUBREAPER = 36
_BYTES_PER_FILE = 2048
"""What the archive has for each file, besides its content."""
_DEEPEST = 200
"""Levels of folders that are sent."""
_RUNNERS = {
    *(
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "noxfile.py",
        ".coveragerc",
    ),
    *("sitecustomize.py", "usercustomize.py", "makefile", "gnumakefile", "justfile", "rakefile", "cmakelists.txt"),
    *("package.json", ".npmrc", ".mocharc", "jest.config", "vitest.config", "vite.config", "babel.config", ".babelrc"),
    *("build.gradle", "pom.xml", "cargo.toml", "build.rs", "cmakelists.txt", ".cargo", ".envrc", ".vscode", ".git"),
}
"""What decides how tests run, with any suffix after these names: judged as the project has it."""


def _sets_up_tests(name: str) -> bool:
    name = name.lower()
    parts = name.split(".")
    starts = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return bool(starts & _RUNNERS) or name == "__pycache__" or parts[-1] in ("pyc", "pyo", "pth")


def pack(work: str, paths: Sequence[str], output: IO[bytes], most_bytes: int | None, most_files: int) -> dict[str, Any]:
    """Writes files, folders and links below `work` as a tar archive, without following links.

    Returns `left_out`, the number of all other entries, and `exceeds`, the limit that has ended the archive.
    """
    files = taken = left_out = 0
    with tarfile.open(mode="w|", fileobj=output, format=tarfile.GNU_FORMAT) as archive:
        for path in _entries(work, paths):
            place, entry = os.path.join(work, path), tarfile.TarInfo(path)
            status = os.lstat(place)
            files, taken = files + 1, taken + stat.S_ISREG(status.st_mode) * status.st_size
            if files > most_files or taken > (most_bytes or taken):
                return {"exceeds": "files" if files > most_files else "folder_size"}
            entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
            if stat.S_ISREG(status.st_mode) and os.access(place, os.R_OK):
                with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                    entry.size = status.st_size
                    archive.addfile(entry, file)
            elif stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode):
                entry.type = tarfile.DIRTYPE if stat.S_ISDIR(status.st_mode) else tarfile.SYMTYPE
                entry.linkname = "" if entry.isdir() else os.readlink(place)
                archive.addfile(entry)
            else:
                left_out += 1
    return {"left_out": left_out}


def _entries(work: str, paths: Sequence[str]) -> Iterator[str]:
    """Those paths to which no link leads, and what is below them."""
    for path in paths:
        top = os.path.join(work, path)
        if not os.path.lexists(top) or not _is_inside(os.path.dirname(top), work):
            continue
        yield path
        for folder, folders, files in os.walk(top) if not os.path.islink(top) else ():
            inside = os.path.relpath(folder, work)
            yield from (os.path.join(inside, name) for name in (*folders, *files))
            if inside.count("/") > _DEEPEST:
                folders.clear()


def _is_inside(path: str, folder: str) -> bool:
    return f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(folder)}/")


def unpack(archive: IO[bytes], folder: str, *, links: bool) -> None:
    """Writes what `pack` has sent to an empty folder; links are made last, or not at all.

    Raises ValueError or tarfile.TarError for anything else.
    """
    later = []
    with tarfile.open(mode="r|", fileobj=archive) as entries:
        for entry in entries:
            path = os.path.normpath(os.path.join(folder, entry.name))
            if not f"{path}/".startswith(f"{folder}/"):
                raise ValueError(f"{entry.name!r} is not in the folder")
            os.makedirs(path if entry.isdir() else os.path.dirname(path), exist_ok=True)
            if entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and entry.sparse is None:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode & 0o777), "wb") as file:
                    shutil.copyfileobj(entries.extractfile(entry), file)  # type: ignore[arg-type]
            elif entry.issym():
                later.append((path, entry.linkname))
            elif not entry.isdir():
                raise ValueError(f"{entry.name!r} is neither a file, a folder nor a link")
    for path, target in later if links else ():
        os.symlink(target, path)


def lay(left: str, work: str, paths: Sequence[str]) -> None:
    """Makes paths of `work` as they are in `left`, but not what decides how tests run, unless a path names it."""
    for path in paths:
        target = os.path.join(work, path)
        if not _is_inside(os.path.dirname(target), work):
            raise ValueError(f"a link of the project leads out of it: {path}")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _replace(os.path.join(left, path), target)


def _replace(source: str, target: str) -> None:
    if os.path.islink(source):
        if not os.path.islink(target) or os.readlink(source) != os.readlink(target):
            _remove(target)
    elif os.path.isdir(source):
        if os.path.islink(target) or not os.path.isdir(target):
            _remove(target)
            os.mkdir(target)
        for name in {*os.listdir(source), *os.listdir(target)}:
            if not _sets_up_tests(name):
                _replace(os.path.join(source, name), os.path.join(target, name))
    else:
        _remove(target)
        if os.path.exists(source):
            os.rename(source, target)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _copy(source: str, target: str, *options: str) -> None:
    command = ["cp", "-R", "-P", "--preserve=mode,timestamps,links", *options, "--", source, target]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1])


def _fill(settings: dict[str, Any]) -> None:
    """Makes the folder of the program: a copy, and to be judged, what the agent has left and the verifier's files."""
    work, left, source, files = (settings[name] for name in ("work", "left", "source", "verify_files"))
    os.makedirs(work, exist_ok=True)
    if source is not None:
        _copy(f"{source}/.", work)
    if left is None:
        return
    unpacked = f"{work}.left"
    os.mkdir(unpacked)
    with open(left, "rb") as archive:
        unpack(archive, unpacked, links=True)
    lay(unpacked, work, settings["paths"])
    for name in settings["leaves"]:  # the verifier makes it
        _remove(os.path.join(work, name))
    if settings["isolate"] is not None:
        path, *command = settings["isolate"]
        _copy(f"{work}/.", f"{path}.work", "--link")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "w") as file:
            file.write(f'#!/bin/sh\nexec {shlex.join(command)} --chdir "$PWD" -- "$@"\n')
    for name in os.listdir(files) if files is not None else ():
        _remove(os.path.join(work, name))
        _copy(os.path.join(files, name), work)


def _execute(command: list[str], settings: dict[str, Any], control: socket.socket) -> None:
    """The child that becomes the program."""
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(os.path.join(settings["work"], settings.get("cwd", "")))
        for name, value in settings["limits"].items():
            kind = getattr(resource, f"RLIMIT_{name}")
            most = resource.getrlimit(kind)[1]
            value = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
            resource.setrlimit(kind, (value, value))
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        _send(control, refused=f"{command[0]!r} cannot be started: {error}")
    os._exit(127)


def _send(control: socket.socket, **message: Any) -> None:
    with suppress(OSError):  # nobody waits for it any more
        control.send(json.dumps(message).encode())


def _wait(child: int, control: socket.socket) -> int | None:
    """The exit code of the program, which is killed by a message; None if nobody waits for it."""
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        if control.fileno() in [descriptor for descriptor, _ in poll.poll(1000)]:
            if not control.recv(16):
                return None
            os.kill(child, signal.SIGKILL)
            poll.unregister(control)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # also orphans
                if ended[0] == child:
                    return os.waitstatus_to_exitcode(ended[1])


def _kill_all(isolated: bool) -> None:
    """Kills all other processes of the namespace, or all below this one, and those that they start meanwhile."""
    while others := _others(isolated):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in others:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _others(isolated: bool) -> list[int]:
    own, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, own):
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z" and (isolated or int(parent) == own):
                    found.append(int(name))
    return found


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    control = socket.socket(fileno=settings["control"])
    for descriptor in (control.fileno(), settings["output"]):
        os.set_inheritable(descriptor, False)
    if (port := settings.get("port")) is not None:
        with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
            socket.send_fds(control, [b"listener"], [listener.fileno()])
    if not settings["isolated"]:
        import ctypes

        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    if settings["most_bytes"] is not None:  # also of what is sent
        most = settings["most_bytes"] + _BYTES_PER_FILE * settings["most_files"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        _fill(settings)
    except (OSError, ValueError, tarfile.TarError) as error:
        _send(control, refused=f"its folder cannot be filled: {error}")
        return
    child = os.fork()
    if not child:
        _execute(command, settings, control)
    for stream in (0, 1):  # the program's alone: its input and output end with it
        os.close(stream)
    code = _wait(child, control)
    _kill_all(settings["isolated"])
    if code is None:
        return
    with open(settings["output"], "wb") as output, suppress(BrokenPipeError):
        paths = settings["leaves" if code == 0 else "fails"]
        sent = pack(settings["work"], paths, output, settings["most_bytes"], settings["most_files"])
        output.flush()
        _send(control, exit=code, **sent)


if __name__ == "__main__":
    main()
