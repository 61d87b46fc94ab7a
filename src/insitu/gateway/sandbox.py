"""Runs a program with the limits of its workspace, and ends with all of its processes.

    python -I -S sandbox.py '{"control": 5, "isolated": true, ...}' PROGRAM ARGUMENT...

`workspaces` starts it by its path, and it imports only the standard library. `control` is the descriptor of a socket:
a message with the listening socket of a new network namespace, for the gateway, goes out first, and one JSON object
last: `exit` (code or negative signal), `limit` (the one exceeded) or `refused` (why nothing was run). All processes are
killed when the other end of the socket is closed, even by the death of its process.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x00020000 | 0x08000000  # user, network, pid, mount, ipc
_NOSUID, _NODEV, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_READ_ONLY = 442, -100, 0x8000, 1
_DEATH_SIGNAL, _DUMPABLE, _DROP_BOUND, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 24, 36, 38
_POLL_SECONDS = 0.1
"""Time between two looks at the processes."""
_TERM_SECONDS = 1.5
"""Time between SIGTERM and SIGKILL; less than that of `programs`, which then kills this process."""
_RESERVED_PIDS = 301
"""The least value of pid_max; so many more processes than `limits.processes` may be alive until they are counted."""
_FEWEST_BYTES = 4096
"""What a file counts for at least: empty files fill a disk too."""
_OWN_FOLDERS = ("/tmp/", "/run/", "/dev/shm/")
"""What is another folder in the sandbox; paths in them that the program needs are mounted there."""
_SYSTEM_PATHS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
"""Entries of /proc that the root user may write to without any capability."""


def _call(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [each.encode() if each is not None else None for each in (source, target, kind)]
    _call(f"mount on {target}", _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()))


def _set_read_only(target: str, read_only: bool, recursive: bool = False) -> None:
    attributes = struct.pack("QQQQ", *((_ATTR_READ_ONLY, 0) if read_only else (0, _ATTR_READ_ONLY)), 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    arguments = (_MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, attributes, ctypes.c_size_t(len(attributes)))
    _call(f"mount_setattr of {target}", _libc.syscall(*arguments))


def _bind(source: int | str, target: str, read_only: bool) -> None:
    """Mounts an open folder, or a path, elsewhere."""
    _mount(f"/proc/self/fd/{source}" if isinstance(source, int) else source, target, None, _BIND)
    _set_read_only(target, read_only)


def _enter_namespaces(port: int | None, control: socket.socket) -> None:
    """Makes namespaces of which only the loopback interface has an address; the gateway gets a socket there."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _libc.unshare(_NAMESPACES))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket() as any_socket:
        up = struct.pack("16sh22x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
    if port is not None:
        with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
            socket.send_fds(control, [b"listener"], [listener.fileno()])


def _restrict_files(settings: dict[str, Any]) -> None:
    """Makes everything read-only except the workspace and a private /tmp, and hides the files of other episodes."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    opened = {name: os.open(settings[name], os.O_PATH) for name in ("folder", "temporary")}
    visible = {path: os.open(path, os.O_PATH) for path in settings["visible"] if path.startswith(_OWN_FOLDERS)}
    _set_read_only("/", True, recursive=True)
    _bind(opened["temporary"], "/tmp", False)
    if os.path.isdir("/run"):
        _mount("none", "/run", "tmpfs", _NOSUID | _NODEV, "size=64k,mode=755")  # sockets of the machine's services
    if os.path.isdir("/dev/shm"):
        _mount("none", "/dev/shm", "tmpfs", _NOSUID | _NODEV, "size=64m,mode=1777")
    for path, descriptor in visible.items():
        os.makedirs(path, exist_ok=True)
        _bind(descriptor, path, True)
    for hidden in settings["hidden"]:
        if os.path.isdir(hidden):
            _mount("none", hidden, "tmpfs", _NOSUID | _NODEV, "size=64k,mode=755")
    os.makedirs(settings["folder"], exist_ok=True)
    _bind(opened["folder"], settings["folder"], False)
    settings["temporary"] = "/tmp"
    if os.getuid() == 0:  # who owns the devices of disks
        for entry in os.scandir("/dev"):
            if not entry.is_symlink() and stat.S_ISBLK(entry.stat().st_mode):
                _bind("/dev/null", entry.path, False)
    try:
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    except PermissionError:  # part of /proc is hidden, as in containers: it stays, read-only
        return
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 14):  # before, it is that of the whole machine
        with suppress(OSError), open("/proc/sys/kernel/pid_max", "w") as file:  # RLIMIT_NPROC does not bind root
            file.write(str(_RESERVED_PIDS + settings["limits"]["processes"]))
    for name in _SYSTEM_PATHS:
        if os.path.exists(f"/proc/{name}"):
            _bind(f"/proc/{name}", f"/proc/{name}", True)


def _drop_privileges() -> None:
    """Gives up what the namespaces' owner may do in them, such as unmounting what hides other folders."""
    capability = 0
    while _libc.prctl(_DROP_BOUND, capability, 0, 0, 0) >= 0:
        capability += 1
    if not capability:
        raise OSError(errno.EPERM, "capabilities cannot be dropped")
    _call("prctl", _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _call("capset", _libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))


def _execute(command: list[str], settings: dict[str, Any], control: socket.socket) -> None:
    """The child that becomes the program."""
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(settings["cwd"])
        kinds = {"memory": resource.RLIMIT_DATA, "file_size": resource.RLIMIT_FSIZE}
        limits = {kind: settings["limits"][name] for name, kind in kinds.items()} | {resource.RLIMIT_CORE: 0}
        if settings["isolated"]:
            limits[resource.RLIMIT_NPROC] = settings["limits"]["processes"]  # counted in the namespace alone
        for kind, value in limits.items():
            if value is not None:
                most = resource.getrlimit(kind)[1]
                value = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
                resource.setrlimit(kind, (value, value))
        if settings["isolated"]:
            _drop_privileges()
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        _send(control, refused=f"{command[0]!r} cannot be started: {error}")
    os._exit(127)


def _send(control: socket.socket, **message: Any) -> None:
    with suppress(OSError):  # nobody waits for it any more
        control.send(json.dumps(message).encode())


class _Processes:
    """The processes below this one, each found when it is new: many others may run beside them."""

    def __init__(self) -> None:
        self.own = int(os.readlink("/proc/self"))  # another number than getpid's where the old /proc has stayed
        self.members: set[int] = set()
        self._others: set[int] = set()

    def look(self) -> set[int]:
        """Returns the process ids that are alive."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self.members &= present
        self._others &= present
        parents = {pid: parent for pid in present - self.members - self._others if (parent := _parent(pid))}
        while children := {pid for pid, parent in parents.items() if parent == self.own or parent in self.members}:
            self.members |= children
            parents = {pid: parent for pid, parent in parents.items() if pid not in children}
        self._others |= parents.keys()
        return self.members

    def exceeded(self, limits: dict[str, Any]) -> str | None:
        """The limit of `processes`, `memory` or `cpu_seconds` that they exceed together."""
        tasks = pages = ticks = 0
        members = self.look()
        for pid in members:
            if (fields := _stat(pid)) is not None:
                ticks += sum(map(int, fields[11:15]))
                tasks += int(fields[17])
                pages += int(fields[21])
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = ticks / os.sysconf("SC_CLK_TCK") + ended.ru_utime + ended.ru_stime
        if tasks > limits["processes"]:
            return "processes"
        if limits["cpu_seconds"] is not None and seconds > limits["cpu_seconds"]:
            return "cpu_seconds"
        most = limits["memory"]
        if most is not None and pages * resource.getpagesize() > most and sum(map(_memory, members)) > most:
            return "memory"
        return None

    def deleted_bytes(self) -> int:
        """What files without a name take, which processes keep open."""
        total = 0
        for pid in self.members:
            with suppress(OSError):
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        status = os.stat(f"/proc/{pid}/fd/{name}")
                        total += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) and not status.st_nlink else 0
        return total


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _memory(pid: int) -> int:
    """Bytes of a process, with its share of what several use."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return 0


def _folder_bytes(folder: str, mounted: Collection[str]) -> float:
    """What the files of a folder take, without what is mounted in it; infinity if it is nested too deeply to read."""
    total, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.path in mounted:
                        continue
                    with suppress(FileNotFoundError):
                        total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _FEWEST_BYTES)
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return float("inf")
    return total


def _watch(child: int, processes: _Processes, settings: dict[str, Any], control: socket.socket) -> dict[str, Any]:
    """Waits until the program has ended, has exceeded a limit, or must end."""
    limits, killed_at, look_at, measure_at = settings["limits"], float("inf"), 0.0, 0.0
    while True:
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, _POLL_SECONDS)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return {"exit": os.waitstatus_to_exitcode(ended[1])}
        now = time.monotonic()
        if received is not None and received.si_signo == signal.SIGTERM:
            _kill(processes, signal.SIGTERM, settings["isolated"])
            killed_at = now + _TERM_SECONDS
        if now >= killed_at or select.select([control], [], [], 0)[0]:
            return {"exit": -signal.SIGTERM}
        if now < look_at:
            continue
        if exceeded := processes.exceeded(limits):
            return {"limit": exceeded}
        if limits["folder_size"] is not None and now >= measure_at:
            mounted = (settings["folder"], *settings["visible"], *settings["hidden"])
            total = sum(_folder_bytes(folder, mounted) for folder in (settings["folder"], settings["temporary"]))
            if total + processes.deleted_bytes() > limits["folder_size"]:
                return {"limit": "folder_size"}
            measure_at = time.monotonic() + max(_POLL_SECONDS, 10 * (time.monotonic() - now))
        look_at = time.monotonic() + _POLL_SECONDS


def _kill(processes: _Processes, number: int, isolated: bool) -> None:
    if isolated:
        with suppress(ProcessLookupError):
            os.kill(-1, number)  # all of the namespace but this one
        return
    for pid in processes.look():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _run(command: list[str], settings: dict[str, Any], control: socket.socket) -> None:
    """Runs the program as the first process of its namespace, or as the one that inherits all orphans."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    child = os.fork()
    if not child:
        _execute(command, settings, control)
    for stream in (0, 1):  # the program's alone: its input and output end with it
        os.close(stream)
    processes = _Processes()
    report = _watch(child, processes, settings, control)
    with suppress(ChildProcessError):
        while True:  # also processes that were started meanwhile
            _kill(processes, signal.SIGSTOP, settings["isolated"])
            _kill(processes, signal.SIGKILL, settings["isolated"])
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)
    _send(control, **report)
    os._exit(0)


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    control = socket.socket(fileno=settings["control"])
    control.set_inheritable(False)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine's memory ends, an episode is killed, and nothing else
    if not settings["isolated"]:
        _call("prctl", _libc.prctl(_SUBREAPER, 1, 0, 0, 0))
        _run(command, settings, control)
    try:
        _enter_namespaces(settings["port"], control)
    except OSError as error:
        _send(control, refused=str(error), kernel=True)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if first := os.fork():
        os.close(0)
        os.close(1)
        os.waitpid(first, 0)
        return
    try:
        _call("prctl", _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
        _restrict_files(settings)
        _call("prctl", _libc.prctl(_DUMPABLE, 0, 0, 0, 0))  # the program may not trace this process
    except OSError as error:
        _send(control, refused=str(error), kernel=True)
        os._exit(1)
    _run(command, settings, control)


if __name__ == "__main__":
    main()
