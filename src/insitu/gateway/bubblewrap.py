"""How programs are confined: bubblewrap (https://github.com/containers/bubblewrap), and a filter of system calls.

They see what `visible` names, read-only, and a folder in memory at `/tmp`; user, process, network, IPC and host name
namespaces are new, and no further user namespace can be made; a filter of system calls leaves sockets of the loopback
interface and between the program's own processes.
"""

import functools
import os
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from insitu.errors import ConfigError
from insitu.gateway.visible import SYSTEM, has_any, is_in

WORK = "/tmp/work"
"""Where a confined program finds its workspace: at the same place in each episode."""
ISOLATED = "/tmp/isolated"
"""A program that runs its arguments by `confined_again`, for verifiers."""
_OLDEST = (0, 8)
"""The first release with --disable-userns."""
_SYSTEM_PATHS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "pressure")
"""Entries of /proc that the root user may write to without any capability."""
_SMALL = str(2**16)
_SHARED_MEMORY = str(64 * 2**20)
_ACCOUNT = "1000"
"""The number of the root user's account inside: it is not root there."""
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_SOCKET_LEVEL, _RECEIVE_BUFFER = 1, 8
_SET_LEASE = 1024
"""F_SETLEASE of fcntl(2): while a process holds a lease on a file, opening it blocks others for up to 45 seconds."""


class _SystemCalls(NamedTuple):
    """Numbers of an architecture, from Linux's tables."""

    architecture: int
    socket: int
    socketpair: int
    setsockopt: int
    fcntl: int
    refused: tuple[int, ...]
    """Keys, eBPF, perf, page faults; asynchronous I/O, whose contexts are counted for the machine as a whole; and
    io_uring (425 to 427), which no filter can look into."""


_SYSTEM_CALLS = {
    "x86_64": _SystemCalls(0xC000003E, 41, 53, 54, 72, (248, 249, 250, 321, 298, 323, 206, 425, 426, 427)),
    "aarch64": _SystemCalls(0xC00000B7, 198, 199, 208, 25, (217, 218, 219, 280, 241, 282, 0, 425, 426, 427)),
}


@functools.cache
def find_bubblewrap() -> str:
    """The path of `bwrap`. Raises ConfigError, with a remedy, if it cannot confine programs on this system."""
    what = "workflow.network is model, which needs bubblewrap 0.8 or later"
    advice = "install it (Debian and Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
    if platform.machine() not in _SYSTEM_CALLS:
        raise ConfigError(f"{what}, on {' or '.join(_SYSTEM_CALLS)}; this is {platform.machine()}: set network: host")
    path = shutil.which("bwrap")
    if path is None:
        raise ConfigError(f"{what}, and there is no bwrap on PATH: {advice}, or set network: host")
    said = subprocess.run([path, "--version"], check=False, capture_output=True, text=True).stdout
    version = tuple(map(int, re.findall(r"\d+", said)[:2]))
    if version < _OLDEST:
        raise ConfigError(f"{what}, and {path} is {said.strip() or 'another program'}: {advice}, or set network: host")
    done = subprocess.run([path, *_namespaces(), "--ro-bind", "/", "/", "true"], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(
            "workflow.network is model, but this system does not let programs be confined "
            f"({done.stderr.strip().removeprefix('bwrap: ')}): allow user namespaces (in a container, its security "
            "profile forbids them; on Ubuntu, kernel.apparmor_restrict_unprivileged_userns), or set network: host"
        )
    return path


def _namespaces(*, last: bool = True) -> list[str]:
    """`last`: no program in it can make further user namespaces."""
    names = ("user", "pid", "net", "ipc", "uts")
    account = ["--uid", _ACCOUNT, "--gid", _ACCOUNT] if os.getuid() == 0 else []
    options = ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    return [*(f"--unshare-{name}" for name in names), *account, *options, *(["--disable-userns"] if last else [])]


def _devices() -> list[str]:
    return ["--dev", "/dev", "--size", _SHARED_MEMORY, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]


def _private_folders(size: int | None) -> list[str]:
    limit = ["--size", str(size)] if size is not None else []
    return ["--size", _SMALL, "--tmpfs", "/run", *limit, "--tmpfs", "/tmp"]


def _shown(paths: Iterable[Path], shown: set[Path]) -> list[str]:
    """Shows files and folders that are not yet `shown`, and adds them to these."""
    arguments = list[str]()
    for path in sorted(paths):  # outer ones, which would cover the others, first
        if not is_in(path, ("/dev", "/proc", *shown)):
            shown.add(path)
            real = os.path.realpath(path)  # what is hidden there would be seen by a second mount
            arguments += ["--ro-bind" if real == str(path) else "--symlink", real, str(path)]
    return arguments


def confined(
    *, size: int | None, visible: set[Path], hidden: set[Path], placed: Mapping[str, str], seccomp: int, last: bool
) -> list[str]:
    """The command that confines the command after it.

    `size` limits what is written to `/tmp`, in bytes. Programs see what is `visible` besides the system's folders, but
    empty folders in place of `hidden` ones in these, and no hidden files. `placed` are files and folders by their
    places in `/run`. `seccomp` is a descriptor of `system_call_filter`. `last`: it runs no `confined_again`.
    """
    arguments = [find_bubblewrap(), *_namespaces(last=last), "--as-pid-1"]  # bubblewrap's own could be traced
    for place in filter(os.path.lexists, SYSTEM):
        arguments += ["--symlink", os.readlink(place), place] if os.path.islink(place) else ["--ro-bind", place, place]
    arguments += [*_devices(), "--proc", "/proc"]
    for entry in filter(os.path.exists, (f"/proc/{name}" for name in _SYSTEM_PATHS)):
        arguments += ["--ro-bind", entry, entry]
    arguments += ["--bind", "/proc/sys/user", "/proc/sys/user"]  # each namespace has its own; bubblewrap writes there
    if last:  # else bubblewrap writes there once more
        arguments += ["--remount-ro", "/proc"]
    arguments += _private_folders(size)
    for place, source in placed.items():
        arguments += ["--ro-bind", source, place]
    shown = {*map(Path, SYSTEM)}
    arguments += _shown(visible, shown)
    covered = set[Path]()
    for path in sorted(hidden):
        if os.path.exists(path) and is_in(path, shown) and not is_in(path, covered) and not has_any(path, visible):
            covered.add(path)
            folder = ["--size", _SMALL, "--tmpfs", str(path), "--remount-ro", str(path)]
            arguments += folder if path.is_dir() else ["--ro-bind", os.devnull, str(path)]
    return [*arguments, "--remount-ro", "/", "--seccomp", str(seccomp), "--"]


def confined_again(size: int | None, visible: Iterable[Path], files: Iterable[Path]) -> list[str]:
    """The bwrap command by which a confined verifier with these `files` runs a program of the agent, which follows.

    These see no other processes and none of the verifier's files, and can write only to their own `/tmp`.
    """
    arguments = [find_bubblewrap(), *_namespaces(), "--ro-bind", "/", "/", *_devices()]
    arguments += ["--tmpfs", "/proc", "--remount-ro", "/proc", *_private_folders(size)]
    private = ("/tmp", "/run")
    arguments += _shown({path for path in visible if is_in(path, private)}, set())
    for path in sorted(files):
        arguments += [] if is_in(path, private) or path.is_symlink() else ["--ro-bind", os.devnull, str(path)]
    return [*arguments, "--ro-bind", f"{ISOLATED}.work", WORK]


def system_call_filter() -> bytes:
    """A program of the kernel's packet filter: `struct sock_filter`s, see seccomp(2).

    What is refused fails with EPERM; system calls of another architecture, with ENOSYS. Buffers of sockets, which no
    control group counts, stay as they are.
    """
    calls = _SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, deny, ignore, missing = ((give, 0, 0, value) for value in (0x7FFF0000, 0x00050001, 0x00050000, 0x00050026))
    # Code, how many to skip if true, if false, value.
    rows = [(load, 0, 0, 4), (equal, 1, 0, calls.architecture), missing]
    rows += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), missing]  # the numbers of x32
    for number in calls.refused:
        rows += [(equal, 0, 1, number), deny]
    rows += [(equal, 0, 4, calls.fcntl), (load, 0, 0, 24), (equal, 0, 1, _SET_LEASE), deny, allow]
    rows += [(equal, 0, 6, calls.setsockopt), (load, 0, 0, 24), (equal, 0, 3, _SOCKET_LEVEL)]
    rows += [(load, 0, 0, 32), (equal, 0, 1, _RECEIVE_BUFFER), ignore, allow]
    rows += [(equal, 0, 4, calls.socketpair), (load, 0, 0, 16), (equal, 0, 1, _UNIX), allow, deny]
    rows += [(equal, 0, 9, calls.socket), (load, 0, 0, 16)]
    rows += [(equal, 5, 0, _UNIX), (equal, 4, 0, _INET), (equal, 3, 0, _INET6), (equal, 0, 3, _NETLINK)]
    rows += [(load, 0, 0, 32), (equal, 0, 1, 0), allow, deny]  # protocol 0 lists interfaces
    return b"".join(struct.pack("HBBI", *row) for row in [*rows, allow])
