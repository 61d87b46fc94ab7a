"""Fills a folder, runs a program in it, ends all processes of the program, and writes an archive of the results.

    python -I -S sandbox.py '{"control": 5, "work": "/tmp/work", ...}' PROGRAM ARGUMENT...

`workspaces` starts it by its path, within bubblewrap or without, and it imports only the standard library. `control` is
the descriptor of a socket: a message with descriptors of /proc and of a listening socket for the gateway, if one is
wanted, goes out first, and one JSON object last: `exit` (code or negative signal) and `exceeds` (a limit of what is
sent, or null), or `refused` (why nothing was run). The program is killed when a message comes in, or when the other
end is closed. What reads from it trusts nothing of it: the program may have taken its place.
"""

import ctypes
import json
import os
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import IO, Any

_DUMPABLE, _SUBREAPER = 4, 36
_BYTES_PER_FILE = 2048
"""What the archive has for each file, besides its content."""
_DEEPEST = 200
"""Levels of folders that are sent."""
_LONGEST = 3500
"""Bytes of a path that is sent: the kernel takes 4096, with a name that is added and the folder around."""
_RUNNERS: set[str] = set()
"""What decides how tests run, with any suffix after these names, in lower case: judged as the project has it."""
_LOADED = ("pyc", "pyo", "pth", "dist-info", "egg-info", "egg-link", "snap")
"""Suffixes of files that Python or pytest loads without an import, such as plugins of an installed package, and of
what tests compare with."""
_ISOLATED = """#!/bin/sh
[ "$(stat -L -c %d:%i -)" != {0.st_dev}:{0.st_ino} ] || exec </dev/null
unset PYTHONSAFEPATH
exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-
exec {1} --chdir "$PWD" -- "$@"
"""
"""What runs a program apart from the verifier, whose standard input has the row, and with it the answer; Python then
finds modules beside a script, as it does for the agent."""


def _sets_up_tests(name: str) -> bool:
    name = name.lower()
    starts = accumulate(name.split("."), "{}.{}".format)
    return not _RUNNERS.isdisjoint(starts) or name == "__pycache__" or name.rpartition(".")[2] in _LOADED


def pack(work: str, paths: Sequence[str], output: IO[bytes], most_bytes: int | None, most_files: int) -> None:
    """Writes readable files, folders and links below `work` as a tar archive; no link leads elsewhere.

    Raises OverflowError with the name of a limit that they exceed.
    """
    files = taken = 0

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal files, taken
        archive.inodes.clear()  # type: ignore[attr-defined] # a further name of a file is sent as another one
        files, taken = files + 1, taken + entry.size
        if files > most_files or taken > (most_bytes or taken):
            raise OverflowError("files" if files > most_files else "folder_size")
        access = os.R_OK | os.X_OK if entry.isdir() else os.R_OK
        is_readable = entry.issym() or os.access(os.path.join(work, entry.name), access)
        is_far = entry.name.count("/") > _DEEPEST or len(os.fsencode(entry.name)) > _LONGEST
        if entry.isdev() or not is_readable or is_far:
            return None
        entry.mtime = 0  # not read; a fractional time would double the archive of an empty file by a PAX header
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with tarfile.open(mode="w|", fileobj=output) as archive:
        for path in _outermost(paths):
            if os.path.lexists(top := os.path.join(work, path)) and _is_inside(os.path.dirname(top), work):
                archive.add(top, path, filter=wanted)


def _outermost(paths: Sequence[str]) -> list[str]:
    """Normal paths, each once, without those that lie in another one."""
    starts = {path: "" if path == "." else f"{path}/" for path in paths}
    return [path for path in starts if not any(path != each and path.startswith(starts[each]) for each in starts)]


def _is_inside(path: str, folder: str) -> bool:
    return f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(folder)}/")


def unpack(archive: IO[bytes], folder: str, most_bytes: int | None, most_files: int, *, links: bool) -> None:
    """Writes what `pack` has sent to an empty folder; links are made last, or not at all.

    The archive may have been forged. Raises OSError, ValueError for anything that `pack` does not send, or
    tarfile.TarError.
    """
    later, made, taken, earlier = [], {folder}, 0, time.time() - 1
    with tarfile.open(mode="r|", fileobj=archive) as entries:
        for entry in entries:
            path = os.path.normpath(os.path.join(folder, entry.name))
            is_inside = f"{path}/".startswith(f"{folder}/") and entry.name.count("/") <= _DEEPEST
            if not is_inside or entries.pax_headers or entry.size < 0:
                raise ValueError(f"{entry.name!r:.80} is not in the folder")
            place, taken = path, taken + entry.size
            while place not in made:
                made.add(place)
                place = os.path.dirname(place)
            entries.members.clear()  # type: ignore[attr-defined] # which it would keep
            if len(made) > most_files + _DEEPEST or taken > (most_bytes or taken):
                raise ValueError("it is larger than what is sent")
            if entry.isdir():
                os.makedirs(path, exist_ok=True)
            elif entry.issym():
                later.append((path, entry.linkname))
            elif entry.isfile() and entry.sparse is None:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode & 0o777), "wb") as file:
                    shutil.copyfileobj(entries.extractfile(entry), file)  # type: ignore[arg-type]
                os.utime(path, (earlier, earlier))  # than files that are copied next
            else:
                raise ValueError(f"{entry.name!r:.80} is neither a file, a folder nor a link")
    for path, target in later if links else ():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)


def lay(left: str, work: str, paths: Sequence[str]) -> None:
    """Makes paths of `work` as they are in `left`, but not what decides how tests run, unless a path names it."""
    for path in sorted(paths, key=lambda path: (path != ".", path)):  # folders first: the project may have links there
        source, target = os.path.join(left, path), os.path.join(work, path)
        if not _is_inside(os.path.dirname(source), left) or not _is_inside(os.path.dirname(target), work):
            raise ValueError(f"a link leads elsewhere: {path}")
        if os.path.lexists(source):  # not if the agent has left a file in place of its folder
            os.makedirs(os.path.dirname(target), exist_ok=True)
        _make_alike(source, target, path == ".")


def _make_alike(source: str, target: str, is_root: bool = False) -> None:
    """`is_root`: with an `__init__.py` there, the verifier's tests would be part of a package of the agent."""
    if os.path.islink(source):
        if not os.path.islink(target) or os.readlink(source) != os.readlink(target):
            _remove(target)
    elif os.path.isdir(source):
        if os.path.islink(target) or not os.path.isdir(target):
            _remove(target)
            os.mkdir(target)
        for name in {*os.listdir(source), *os.listdir(target)}:
            if not _sets_up_tests(name) and not (is_root and name == "__init__.py"):
                _make_alike(os.path.join(source, name), os.path.join(target, name))
    else:
        _remove(target)
        if os.path.exists(source):
            os.link(source, target)  # further paths may name it, too


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _copy(source: str, target: str, *options: str) -> None:
    command = ["cp", "-R", "-P", "--preserve=mode,links", *options, "--", source, target]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1])


def _fill(settings: dict[str, Any]) -> None:
    """Makes the folder of the program: a copy, and to be judged, what the agent has left and the verifier's files."""
    work: str = settings["work"]
    left, source, files = map(settings.get, ("left", "source", "verify_files"))
    os.makedirs(work, exist_ok=True)
    if source is not None:
        _copy(f"{source}/.", work, "--preserve=timestamps")
    if left is None:
        return
    unpacked = f"{work}.left"
    os.mkdir(unpacked)
    with open(left, "rb") as archive:
        unpack(archive, unpacked, settings["most_bytes"], settings["most_files"], links=True)
    lay(unpacked, work, settings["paths"])
    for name in settings["leaves"]:  # the verifier makes it
        _remove(os.path.join(work, name))
    if settings["isolate"] is not None:
        path, *command = settings["isolate"]
        _copy(f"{work}/.", f"{path}.work", "--link")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "w") as file:
            file.write(_ISOLATED.format(os.fstat(0), shlex.join(command)))
    if files is not None:
        _lay_files(files, work, source or "")


def _is_module(folder: str, name: str) -> bool:
    path = os.path.join(folder, name)
    is_package = os.path.isdir(path) and any(each.startswith("__init__.") for each in os.listdir(path))
    return is_package or name.endswith((".py", ".pyc", ".so"))


def _lay_files(files: str, work: str, source: str) -> None:
    """Copies the verifier's files. Nothing that is not in `source` is imported in place of a module among them."""
    names = os.listdir(files)
    modules = {name.removesuffix(".py") for name in names}
    others = [name for name in os.listdir(work) if name.partition(".")[0] in modules and name not in names]
    added = [name for name in others if not os.path.lexists(os.path.join(source, name)) and _is_module(work, name)]
    for name in [*names, *added]:
        _remove(os.path.join(work, name))
    for name in names:
        _copy(os.path.join(files, name), work)  # newer than all else: `make` takes nothing for built from them


def _limit(limits: dict[str, float]) -> None:
    """Limits this process, as far as it may raise its limits."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        value = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
        resource.setrlimit(kind, (value, value))


def _send(control: socket.socket, **message: Any) -> None:
    with suppress(OSError):  # nobody waits for it any more
        control.send(json.dumps(message).encode())


def _wait(child: int, control: socket.socket) -> int | None:
    """The exit code of the program, which is killed by a message; None if nobody waits for it."""
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        if control.fileno() in [descriptor for descriptor, _ in poll.poll(200)]:
            if not control.recv(16):
                return None
            os.kill(child, signal.SIGKILL)
            poll.unregister(control)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # also orphans
                if ended[0] == child:
                    return os.waitstatus_to_exitcode(ended[1])


def _kill_all() -> None:
    """Kills all processes below this one, and those that they start meanwhile."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            return
        for pid in ["-1"] if os.getpid() == 1 else children:  # -1: all others of the namespace
            os.kill(int(pid), signal.SIGKILL)  # all are ours until they are waited for
        for _ in children:
            os.waitpid(-1, 0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which, as all signals, a program cannot send out of its namespace
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    _RUNNERS.update(settings.get("runners", ()))
    control = socket.socket(fileno=settings["control"])
    if settings["isolated"]:
        sent = [os.open("/proc", os.O_RDONLY)]
        if (port := settings.get("port")) is not None:
            sent.append(socket.create_server(("127.0.0.1", port), backlog=1024).detach())
        socket.send_fds(control, [b"{}"], sent)
        for descriptor in sent:
            os.close(descriptor)
    for option, value in ((_DUMPABLE, 0), (_SUBREAPER, 1)):  # no program that it runs may trace it
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    if settings["most_bytes"] is not None:  # also of what is sent
        most = settings["most_bytes"] + _BYTES_PER_FILE * settings["most_files"]
        _limit({"FSIZE": most})
    problem = "its folder cannot be filled"
    try:
        _fill(settings)
        problem = f"{command[0]!r} cannot be started"
        folder, limit = os.path.join(settings["work"], settings.get("cwd", "")), partial(_limit, settings["limits"])
        program = subprocess.Popen(command, cwd=folder, preexec_fn=limit)  # which inherits none of our descriptors
    except (OSError, ValueError, tarfile.TarError, subprocess.SubprocessError) as error:
        _send(control, refused=f"{problem}: {error}")
        return
    for stream in (0, 1):  # the program's alone: its input and output end with it
        os.close(stream)
    code, exceeds = _wait(program.pid, control), None
    _kill_all()
    try:
        with open(settings["output"], "wb") as output:
            paths = settings.get("leaves" if code == 0 else "fails", ())
            pack(settings["work"], paths, output, settings["most_bytes"], settings["most_files"])
    except OverflowError as error:
        exceeds = str(error)
    if code is not None:
        _send(control, exit=code, exceeds=exceeds)


if __name__ == "__main__":
    main()
