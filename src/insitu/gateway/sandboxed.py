"""Runs programs of workspaces: within bubblewrap or without, with the limits and the gateway of an episode."""

import asyncio
import json
import os
import re
import resource
import socket
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

from insitu.disk.memory import machine_memory
from insitu.errors import EpisodeTimeout, WorkflowError
from insitu.gateway.bubblewrap import ISOLATED, WORK, confined, confined_again
from insitu.gateway.cgroups import Cgroup
from insitu.gateway.server import Gateway
from insitu.gateway.visible import HINT, SYSTEM, is_in, searched, with_targets
from insitu.gateway.workspace_config import Limits
from insitu.wire.endings import end_tasks
from insitu.workflow.programs import Program, run_program

_SCRIPT = Path(__file__).with_name("sandbox.py")
_RUNNERS = re.sub("#.*", "", Path(__file__).with_name("runners.txt").read_text()).split()
_PYTHON = os.path.realpath("/proc/self/exe")
_MAX_OPEN_FILES = 4096
"""Of a program; also descriptors that are sent and not yet received."""
_LOOK_SECONDS = 0.2
"""Time between two looks at the limits of a program."""
_SENDING_SECONDS = 10.0
"""How long a program that was stopped may take to end, and its sandbox to send what it has left."""
_MAX_MESSAGES = 4
"""A sandbox sends two: its descriptors, and how its program has ended."""
_JOIN = """
echo 1000 > /proc/self/oom_score_adj
while [ "$1" != -- ]; do echo 0 > "$1" || exit 1; shift; done
shift
exec "$@"
"""
"""Enters control groups and becomes a command. If the machine's memory ends, an episode is killed, nothing else."""


@dataclass
class Place:
    """What all programs of a workflow have in common."""

    limits: Limits
    gateway: Gateway
    isolated: bool
    variables: Mapping[str, str]
    """Environment variables that the file sets."""
    cgroup: Cgroup | None
    """That of this process, if there may be others below."""
    apart: Sequence[Path]
    """Folders that no installation of a program has in it."""
    visible: set[Path] = field(default_factory=set)
    """What confined programs see besides the system's folders, and what they name and search."""
    hidden: set[Path] = field(default_factory=set)
    """Files and folders that confined programs do not see."""
    filter: Path = Path(os.devnull)
    """The file with `bubblewrap.system_call_filter`, if they are confined."""


class Sandboxed:
    """One run of a program in a sandbox; `wants` are settings of `sandbox`, with paths outside, and `named` what its
    command names of this machine.

    What it says, its `report`, and what it writes to the file `left` come without any guarantee.
    """

    def __init__(
        self, place: Place, command: Sequence[str], folder: Path, wants: Mapping[str, Any], named: Collection[Path] = ()
    ) -> None:
        self._place, self.command, self._folder = place, command, folder
        self.wants, self._named = wants, named
        self.report: dict[str, Any] = {}
        self._descriptors: list[int] = []
        """Of the sandbox's /proc and of its listening socket, while they are needed."""
        self.met: str | None = None
        """The limit that it has met first; `timeout`, if it took too long."""

    async def run(
        self, left: Path, stdin: bytes, env: dict[str, str], time_limit: float | None, **options: Any
    ) -> Program:
        """As `run_program`, with its `options`. Raises WorkflowError if the program exceeds a limit."""
        place, limits, name = self._place, self._place.limits, self.command[0]
        home = os.path.dirname(WORK) if place.isolated else tempfile.mkdtemp(prefix="temporary-", dir=self._folder)
        names = ("TMPDIR", "HOME") if place.isolated else ("TMPDIR",)
        env = env | {each: home for each in names if each not in place.variables}
        group = None if place.cgroup is None else place.cgroup.new(limits.memory, limits.processes)
        program = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs, left.open("wb") as output, place.filter.open("rb") as seccomp:
                descriptors = [each.fileno() for each in (theirs, output, seccomp)]
                command = self._command(group, env, *descriptors)
                async with self._watched(ours, group, time_limit):
                    options |= {"cwd": self._folder, "env": env, "pass_fds": descriptors, "name": name}
                    program = await run_program(command, stdin, time_limit=None, **options)
                self._receive(ours)
            if group is not None:
                self.met = self.met or group.exceeded(limits.cpu_seconds)
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)
            if group is not None:
                await asyncio.shield(asyncio.to_thread(group.remove))
        if self.report.get("exceeds") in ("files", "folder_size"):
            self.met = self.met or self.report["exceeds"]
            os.truncate(left, 0)  # it is a part
        if self.met == "timeout":
            raise EpisodeTimeout(f"{name} did not finish within timeout: {time_limit:g} s")
        if self.met is not None:
            raise WorkflowError(f"{name} exceeded limits.{self.met}: {getattr(limits, self.met)}")
        if "refused" in self.report:
            hint = f"\n({HINT})" if place.isolated else ""
            raise WorkflowError(f"workflow command {self.report['refused']!s:.500}{hint}")
        assert program is not None
        program.reported_exit = code if isinstance(code := self.report.get("exit"), int) else None
        if program.reported_exit is None and not program.output_too_long:
            raise WorkflowError(f"{name}: its sandbox has ended and not said how: {program.stderr_tail}")
        return program

    def _command(
        self, group: Cgroup | None, env: Mapping[str, str], control: int, output: int, seccomp: int
    ) -> list[str]:
        """A shell that enters a control group, becomes bubblewrap, and starts the sandbox, with its settings."""
        place, limits, inside = self._place, self._place.limits, self._place.isolated
        # The kernel limits the file descriptors in flight of an account by RLIMIT_NOFILE of the sending process.
        files = min(_MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2)
        rlimits: dict[str, float | None] = {"FSIZE": limits.file_size, "CORE": 1, "NOFILE": files}
        if group is None:
            rlimits |= {"DATA": limits.memory, "CPU": limits.cpu_seconds}
            rlimits["NPROC"] = limits.processes if inside else None  # which counts all of the account elsewhere
        outside = {"sandbox": _SCRIPT, **{name: path for name, path in self.wants.items() if isinstance(path, Path)}}
        seen = {name: f"/run/{name}" if inside else str(path) for name, path in outside.items()}
        judged = "left" in outside and inside
        installed = filter(os.path.isdir, self._named)
        visible = {*place.visible, *with_targets(searched(env, place.apart)), *installed}
        named = {each for each in self._named if not is_in(each, (*SYSTEM, *visible, *place.hidden))}
        size = limits.folder_size or ((memory := machine_memory()) and memory.total // 2)
        settings = {
            **self.wants,
            **seen,
            "control": control,
            "output": output,
            "isolate": [ISOLATED, *confined_again(size, visible, named)] if judged else None,
            "work": WORK if inside else str(self._folder / "work"),
            "most_bytes": size,
            "most_files": limits.files,
            "isolated": inside,
            "limits": {name: value for name, value in rlimits.items() if value is not None},
            "runners": _RUNNERS if "left" in outside else [],
        }
        confining = list[str]()
        if inside:
            placed = {seen[name]: str(path.resolve()) for name, path in outside.items()}
            confining = confined(
                size=size, visible=visible | named, hidden=place.hidden, placed=placed, seccomp=seccomp, last=not judged
            )
        joining = ["/bin/sh", "-c", _JOIN, "sh", *([] if group is None else group.entrances), "--"]
        return [*joining, *confining, _PYTHON, "-I", "-S", seen["sandbox"], json.dumps(settings), *self.command]

    def _receive(self, control: socket.socket) -> None:
        """Reads what it says now."""
        with suppress(OSError, ValueError, RecursionError):
            for _ in range(_MAX_MESSAGES):
                message, descriptors, _, _ = socket.recv_fds(control, 2**12, 2)
                self._descriptors += descriptors
                if not message or self.report:
                    break
                said = json.loads(message)
                self.report = said if isinstance(said, dict) else {}

    @asynccontextmanager
    async def _watched(
        self, control: socket.socket, group: Cgroup | None, time_limit: float | None
    ) -> AsyncIterator[None]:
        """Lets the gateway serve at the socket that the sandbox sends, and stops the program at a limit."""
        loop, limits = asyncio.get_running_loop(), self._place.limits
        deadline = float("inf") if time_limit is None else loop.time() + time_limit

        async def look() -> None:
            while self.met is None:
                await asyncio.sleep(min(_LOOK_SECONDS, max(0.0, deadline - loop.time())))
                if self._descriptors and self._count_sockets() > limits.sockets:
                    self.met = "sockets"
                else:
                    self.met = "timeout" if loop.time() >= deadline else group and group.exceeded(limits.cpu_seconds)
            with suppress(OSError):
                control.send(b"stop")
            timer.reschedule(loop.time() + (0 if self.met == "sockets" else _SENDING_SECONDS))

        def receive() -> None:
            loop.remove_reader(control)
            self._receive(control)
            if self._descriptors[1:]:
                listener = socket.socket(fileno=self._descriptors.pop())
                tasks.append(asyncio.create_task(self._serve(listener), name="serve a sandbox"))
                tasks[-1].add_done_callback(lambda _: listener.close())  # also if it is cancelled before it begins

        tasks = [asyncio.create_task(look(), name="watch the limits of a sandbox")]
        control.setblocking(False)
        if self._place.isolated:
            loop.add_reader(control, receive)
        try:
            async with asyncio.timeout(None) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
        finally:
            loop.remove_reader(control)
            await end_tasks(*tasks)

    def _count_sockets(self) -> int:
        """The number of open sockets in its network namespace, and in those of programs that a verifier runs apart.

        No control group has what their queues hold.
        """
        counts = dict[int, int]()
        for place in glob(f"/proc/self/fd/{self._descriptors[0]}/{'[0-9]*' if 'left' in self.wants else 1}"):
            with suppress(OSError):  # it has ended
                if (space := os.stat(f"{place}/ns/net").st_ino) not in counts:
                    counts[space] = int(Path(f"{place}/net/sockstat").read_text().split()[2])
        return sum(counts.values())

    async def _serve(self, listener: socket.socket) -> None:
        async with self._place.gateway.serving(listener):  # which closes it
            await asyncio.Event().wait()
