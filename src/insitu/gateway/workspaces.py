"""A folder per episode for `_type: command`, in which the agent works; a verifier judges what it leaves, elsewhere.

    workflow: {_type: command, command: [...], llm: student, workspace: {copy: task, result: [solution.py]},
               verify: [python, check.py], verify_files: checks}

Every program runs in a `sandbox`. The episode's result is an `Outcome`, which `_type: outcome` reads.
"""

import asyncio
import json
import os
import socket
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Self

from insitu.config import Config
from insitu.disk.temporary import remove, temporary_folder
from insitu.errors import ConfigError, EpisodeTimeout, InsituError, WorkflowError
from insitu.gateway.bubblewrap import ISOLATED, WORK, confined, confined_again, find_bubblewrap, system_call_filter
from insitu.gateway.cgroups import Cgroup, Cgroups
from insitu.gateway.sandbox import unpack
from insitu.gateway.server import Gateway
from insitu.gateway.templates import filled_text
from insitu.gateway.workspace_config import WorkspaceKeys
from insitu.gateway.workspace_files import REWARD_FILE, read_outcome, repositories, run_tool
from insitu.wire.child_process import describe_exit
from insitu.wire.endings import end_tasks
from insitu.workflow.context import current_scope
from insitu.workflow.programs import Program, run_program

_SCRIPT = Path(__file__).with_name("sandbox.py")
_PYTHON = os.path.realpath("/proc/self/exe")
_MAX_VERIFIER_OUTPUT = 2**24
_NOT_RUN = 126
"""The first exit code that shells give for a program that could not run (126, 127) or that a signal has ended."""
_LOOK_SECONDS = 0.2
"""Time between two looks at the limits of a program."""
_SENDING_SECONDS = 10.0
"""How long a program that was stopped may take to end, and its sandbox to send what it has left."""
_JUDGES = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "INSITU_ISOLATED": ISOLATED}
"""Variables of verifiers: Python imports nothing from the current folder or that of a script, unless it is told to."""
_JOIN = """
echo 1000 > /proc/self/oom_score_adj
while [ "$1" != -- ]; do echo 0 > "$1" || exit 1; shift; done
shift
exec "$@"
"""
"""Enters control groups and becomes a command. If the machine's memory ends, an episode is killed, nothing else."""


class Workspaces:
    """Makes a folder per episode below one root, which is deleted at the end of the run, or by the next run if this
    process is killed."""

    def __init__(
        self, keys: WorkspaceKeys, gateway: Gateway, config: Config, run_dir: Path, variables: Collection[str]
    ) -> None:
        assert keys.workspace is not None
        self.keys, self.settings = keys, keys.workspace
        self.isolated = keys.network != "host"
        self.gateway = gateway
        self.variables = variables
        """Environment variables that the file sets."""
        self.cgroups = Cgroups.find()
        self._config = config
        self.run_dir = run_dir.absolute()
        self.root: Path
        self.hidden: list[Path] = []
        """Folders that confined programs do not see: other episodes', runs', repositories, the verifier's files."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Raises ConfigError if workspaces cannot be made, or programs not confined."""
        if sys.platform != "linux":
            raise ConfigError("workflow.workspace needs Linux")
        async with AsyncExitStack() as stack:
            folder = temporary_folder(self.settings.folder, "workflow.workspace.folder")
            self.root = await stack.enter_async_context(folder)
            if self.isolated:
                stack.enter_context(_existing(self.run_dir))  # it could not be hidden when it is made later
            self.hidden = [self.root.parent, *self._private_folders()]
            await asyncio.to_thread(self._prepare)
            try:
                probe = self.root / "probe"
                probe.mkdir()
                options: dict[str, Any] = {"max_output": 0, "on_exit": lambda: None}
                await _Sandbox(self, ["true"], probe, {}).run(probe / "left", b"", {**os.environ}, 60, **options)
            except InsituError as error:
                raise ConfigError(f"workflow.workspace: `true` cannot be run within workflow.limits: {error}") from None
            yield self

    def _private_folders(self) -> Iterator[Path]:
        """Raises ConfigError for files of the verifier that cannot be hidden."""
        own, template, key = self._config.folder.resolve(), self.keys.verify_files, "workflow.verify_files"
        rows = [block.rows_file for block in [self._config.eval.dataset] if block is not None]
        if (validation := self._config.finetuning.validation) is not None:
            rows.append(validation.dataset)
        yield from ((own / path).resolve() for path in rows if path is not None)
        runs = [path.parent for path in self.run_dir.resolve().parent.glob("*/run.json")]
        earlier = self.run_dir.resolve().parent.glob(f"{self.run_dir.name}.*")
        places = [own]
        for folder in (self.run_dir.resolve(), *runs, *earlier):
            if not own.is_relative_to(folder):
                yield folder
        if template is not None:
            fixed = template.partition("{")[0]
            fixed = fixed if fixed == template else os.path.dirname(fixed)
            folder = self._folder(fixed or ".", key).resolve()
            if self.isolated and (not fixed or own.is_relative_to(folder)):
                raise ConfigError(
                    f"{key} is {template!r}: agents would see these files; put them in a folder below {own}"
                )
            places.append(folder)
            yield folder
        if self.settings.git is not None and (own / self.settings.git.rpartition("@")[0]).is_dir():
            places.append(own / self.settings.git.rpartition("@")[0])
        for place in places:
            yield from repositories(place)

    def _prepare(self) -> None:
        if self.settings.source is not None and "{" not in self.settings.source:
            self._folder(self.settings.source, "workflow.workspace.copy")
        if self.settings.git is not None:
            self._fetch(self.settings.git)
        if self.isolated:
            find_bubblewrap()
            (self.root / "filter").write_bytes(system_call_filter())

    def _fetch(self, repository: str) -> None:
        place, _, name = repository.rpartition("/")
        name, _, revision = name.partition("@")
        url = f"{place}/{name}" if place else name
        if (self._config.folder / url).exists():
            url = str((self._config.folder / url).resolve())
        target = self.root / "repository"
        for arguments in (
            ["init", "--quiet", str(target)],
            ["-C", str(target), "fetch", "--quiet", "--depth", "1", "--", url, revision or "HEAD"],
            ["-C", str(target), "checkout", "--quiet", "--detach", "FETCH_HEAD"],
        ):
            try:
                run_tool("git", "-c", "init.defaultBranch=main", *arguments)
            except InsituError as error:
                raise ConfigError(f"workflow.workspace.git: {repository}: {error}") from None
        (target / ".git/FETCH_HEAD").unlink()  # it has the URL, and with it credentials

    @asynccontextmanager
    async def episode(self, values: dict[str, Any]) -> AsyncIterator["Workspace"]:
        """The workspace of the current episode, with the values of its row. It is deleted, or kept, at the end."""
        scope = current_scope()
        name = "run" if scope is None or scope.key is None else scope.key.text()
        prefix = "".join(c if c.isalnum() else "-" for c in name)[-60:] + "-"
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self.root))
        keep = self.settings.keep
        try:
            workspace = Workspace(self, folder, values)
            yield workspace
        except InsituError as error:
            if keep != "none" and (copy := await asyncio.to_thread(self._keep, folder)) is not None:
                error.args = (f"{error} (its workspace is {copy})", *error.args[1:])
            raise
        else:
            if keep == "all":
                await asyncio.to_thread(self._keep, folder)
        finally:
            await asyncio.to_thread(remove, folder)

    def path(self, template: str, values: dict[str, Any], key: str) -> Path:
        """A folder of the file, which values of a row do not lead out of. Raises ConfigError if it does not exist."""
        return self._folder(filled_text(template, values, key, _part_of(key, values)), key)

    def result(self, values: dict[str, Any]) -> list[str]:
        """The paths that are judged. Raises WorkflowError for those to which a value of a row leads out."""
        key = "workflow.workspace.result"
        return [
            os.path.normpath(filled_text(path, values, key, _part_of(key, values)))
            for path in self.settings.result or ()
        ]

    def _folder(self, place: str, key: str) -> Path:
        """Raises ConfigError if there is none."""
        folder = self._config.find_path(place, key)
        if not folder.is_dir():
            raise ConfigError(f"{key}: {folder} is not a folder")
        return folder

    def source(self, values: dict[str, Any]) -> Path:
        """The folder in whose copy the program runs."""
        if self.settings.source is not None:
            return self.path(self.settings.source, values, "workflow.workspace.copy")
        return self.root / "repository"

    def _keep(self, folder: Path) -> Path | None:
        """Unpacks what an agent has left to the run's directory; None if there is nothing, or enough is there."""
        copies, left = self.run_dir / "workspaces", folder / "left"
        if not left.exists() or not left.stat().st_size:
            return None
        copies.mkdir(parents=True, exist_ok=True)
        if len([*copies.iterdir()]) >= self.settings.max_kept:
            return None
        copy = copies / folder.name
        try:
            copy.mkdir()
            with left.open("rb") as archive:
                unpack(archive, str(copy), links=False)
        except (OSError, ValueError, tarfile.TarError):
            remove(copy)
            return None
        return copy

    @cached_property
    def visible(self) -> list[str]:
        """The YAML's folder, and the Python environments of insitu and of its programs; outer folders first."""
        paths = {self._config.folder.resolve(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
        return sorted(map(str, paths))


def _part_of(key: str, values: Mapping[str, Any]) -> Any:
    def part(value: str) -> str:
        if PurePath(value).is_absolute() or ".." in PurePath(value).parts or "\0" in value:
            raise WorkflowError(f"{key}: row {values['row_id']!r}: {value!r:.100} would lead to another folder")
        return value

    return part


@contextmanager
def _existing(folder: Path) -> Iterator[None]:
    """A folder that exists meanwhile; if it did not, and is empty at the end, it is removed."""
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    yield
    if not existed:
        with suppress(OSError):
            folder.rmdir()


class _Sandbox:
    """One run of a program in a sandbox; `wants` are settings of `sandbox`, with paths outside.

    What it says, its `report`, and what it writes to the file `left` come without any guarantee.
    """

    def __init__(self, workspaces: Workspaces, command: Sequence[str], folder: Path, wants: Mapping[str, Any]) -> None:
        self._all, self.command, self._folder = workspaces, command, folder
        self.wants = {
            "source": None,
            "left": None,
            "verify_files": None,
            "paths": [],
            "leaves": [],
            "fails": [],
            **wants,
        }
        self.report: dict[str, Any] = {}
        self.met: list[str] = []
        """The limits that it has met; `timeout`, if it took too long."""

    async def run(
        self, left: Path, stdin: bytes, env: dict[str, str], time_limit: float | None, **options: Any
    ) -> Program:
        """As `run_program`, with its `options`. Raises WorkflowError if the program exceeds a limit."""
        keys, cgroups, isolated, name = self._all.keys, self._all.cgroups, self._all.isolated, self.command[0]
        home = os.path.dirname(WORK) if isolated else tempfile.mkdtemp(prefix="temporary-", dir=self._folder)
        names = ("TMPDIR", "HOME") if isolated else ("TMPDIR",)
        env = env | {each: home for each in names if each not in self._all.variables}
        group = None if cgroups is None else cgroups.new(keys.limits.memory, keys.limits.processes)
        program = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs, left.open("wb") as output, ExitStack() as stack:
                descriptors = [theirs.fileno(), output.fileno()]
                if isolated:
                    descriptors.append(os.open(self._all.root / "filter", os.O_RDONLY))
                    stack.callback(os.close, descriptors[-1])
                async with self._serving(ours), self._limits(ours, group, time_limit):
                    program = await run_program(
                        self._command(group, *descriptors),
                        stdin,
                        cwd=self._folder,
                        env=env,
                        pass_fds=descriptors,
                        name=name,
                        time_limit=None,
                        **options,
                    )
                self._receive(ours)
            if group is not None and not self.met:
                self.met += filter(None, [group.exceeded(keys.limits.cpu_seconds)])
        finally:
            if group is not None:
                await asyncio.to_thread(group.remove)
        if self.report.get("exceeds") in ("files", "folder_size"):
            self.met.append(self.report["exceeds"])
            os.truncate(left, 0)  # it is a part
        if self.met[:1] == ["timeout"]:
            raise EpisodeTimeout(f"{name} did not finish within timeout: {time_limit:g} s")
        if self.met:
            raise WorkflowError(f"{name} exceeded limits.{self.met[0]}: {getattr(keys.limits, self.met[0])}")
        if "refused" in self.report:
            raise WorkflowError(f"workflow command {self.report['refused']}")
        assert program is not None
        program.reported_exit = code if isinstance(code := self.report.get("exit"), int) else None
        if program.reported_exit is None and not program.output_too_long:
            raise WorkflowError(f"{name}: its sandbox has ended and not said how: {program.stderr_tail}")
        return program

    def _command(self, group: Cgroup | None, control: int, output: int, seccomp: int = -1) -> list[str]:
        """A shell that enters a control group, becomes bubblewrap, and starts the sandbox, with its settings."""
        everywhere, limits, inside = self._all, self._all.keys.limits, self._all.isolated
        rlimits: dict[str, float | None] = {"FSIZE": limits.file_size, "CORE": 0}
        if group is None:
            rlimits |= {"DATA": limits.memory, "CPU": limits.cpu_seconds}
            rlimits["NPROC"] = limits.processes if inside else None  # which counts all of the account elsewhere
        outside = {
            name: self.wants[name] for name in ("source", "left", "verify_files") if self.wants[name] is not None
        }
        placed = {f"/run/{name}": str(path.resolve()) for name, path in {"sandbox": _SCRIPT, **outside}.items()}
        judged = "left" in outside and inside
        settings = {
            **self.wants,
            **{name: f"/run/{name}" if inside else str(path) for name, path in outside.items()},
            "control": control,
            "output": output,
            "isolated": inside,
            "isolate": [ISOLATED, *confined_again(limits.folder_size, everywhere.visible)] if judged else None,
            "work": WORK if inside else str(self._folder / "work"),
            "most_bytes": limits.folder_size,
            "most_files": limits.files,
            "limits": {name: value for name, value in rlimits.items() if value is not None},
        }
        confining = (
            []
            if not inside
            else confined(
                size=limits.folder_size,
                visible=everywhere.visible,
                hidden=everywhere.hidden,
                placed=placed,
                seccomp=seccomp,
                last=not judged,
            )
        )
        script = "/run/sandbox" if inside else str(_SCRIPT)
        joining = ["/bin/sh", "-c", _JOIN, "sh", *([] if group is None else group.entrances), "--"]
        return [*joining, *confining, _PYTHON, "-I", "-S", script, json.dumps(settings), *self.command]

    def _receive(self, control: socket.socket) -> socket.socket | None:
        """Reads what it says now; gives the listening socket, if it sends it."""
        with suppress(BlockingIOError, ConnectionError, ValueError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(control, 2**16, 1)
                if descriptors:
                    return socket.socket(fileno=descriptors[0])
                if not message or self.report:
                    break
                said = json.loads(message)
                self.report = said if isinstance(said, dict) else {}
        return None

    @asynccontextmanager
    async def _limits(
        self, control: socket.socket, group: Cgroup | None, time_limit: float | None
    ) -> AsyncIterator[None]:
        """Stops the program when it meets a limit."""
        loop, cpu_seconds = asyncio.get_running_loop(), self._all.keys.limits.cpu_seconds
        deadline = float("inf") if time_limit is None else loop.time() + time_limit

        async def look() -> None:
            while not self.met:
                await asyncio.sleep(min(_LOOK_SECONDS, max(0.0, deadline - loop.time())))
                limit = "timeout" if loop.time() >= deadline else group and group.exceeded(cpu_seconds)
                self.met += [limit] if limit else []
            with suppress(OSError):
                control.send(b"stop")
            timer.reschedule(loop.time() + _SENDING_SECONDS)

        watching = asyncio.create_task(look(), name="watch the limits of a sandbox")
        try:
            async with asyncio.timeout(None) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
        finally:
            await end_tasks(watching)

    @asynccontextmanager
    async def _serving(self, control: socket.socket) -> AsyncIterator[None]:
        """Lets the gateway serve at the first socket that the sandbox sends."""
        loop, serving = asyncio.get_running_loop(), list[asyncio.Task[None]]()

        async def serve(listener: socket.socket) -> None:
            async with self._all.gateway.serving(listener):  # which closes it
                await asyncio.Event().wait()

        def receive() -> None:
            loop.remove_reader(control)
            if (listener := self._receive(control)) is not None:
                serving.append(asyncio.create_task(serve(listener), name="serve a sandbox"))

        control.setblocking(False)
        loop.add_reader(control, receive)
        try:
            yield
        finally:
            loop.remove_reader(control)
            await end_tasks(*serving)


class Workspace:
    """The folder of one episode."""

    def __init__(self, workspaces: Workspaces, folder: Path, values: dict[str, Any]) -> None:
        self._all, self._folder, self._values = workspaces, folder, values
        self._left = folder / "left"
        self._source = workspaces.source(values)
        self._result = workspaces.result(values)

    @property
    def address(self) -> str | None:
        """Where the agent finds the gateway, if not at its own address."""
        return f"http://127.0.0.1:{self._all.gateway.port}" if self._all.isolated else None

    async def run_agent(
        self, command: Sequence[str], stdin: bytes, *, cwd: Path, env: dict[str, str], **options: Any
    ) -> Program:
        """As `run_program`, in a sandbox with the model's endpoint."""
        keep = self._all.settings.keep
        wants = {
            "cwd": str(cwd),
            "source": self._source,
            "leaves": ["."] if keep == "all" else self._result,
            "fails": ["."] if keep != "none" else [],
            "port": self._all.gateway.port if self._all.isolated else None,
        }
        return await _Sandbox(self._all, command, self._folder, wants).run(self._left, stdin, env, **options)

    def verifier_files(self) -> dict[str, Any]:
        """The value of `{verify_files}`, where there are such files."""
        if self._all.keys.verify_files is None:
            return {}
        return {"verify_files": "/run/verify_files" if self._all.isolated else str(self._files())}

    def _files(self) -> Path | None:
        template = self._all.keys.verify_files
        return None if template is None else self._all.path(template, self._values, "workflow.verify_files").resolve()

    async def judge(
        self, verify: Sequence[str], answer: Any, row: bytes, env: dict[str, str], time_limit: float | None
    ) -> dict[str, Any]:
        """The outcome of the episode, by the verifier, in a new copy with the result and `verify_files` over it."""
        judged, written = self._folder / "judged", self._folder / "written"
        judged.mkdir()
        wants = {
            "source": self._source,
            "left": self._left,
            "paths": self._result,
            "verify_files": self._files(),
            "leaves": [REWARD_FILE],
            "fails": [REWARD_FILE],
        }
        variables = {name: value for name, value in _JUDGES.items() if name not in self._all.variables}
        options: dict[str, Any] = {"max_output": _MAX_VERIFIER_OUTPUT, "on_exit": lambda: None}
        sandbox = _Sandbox(self._all, verify, judged, wants)
        done = await sandbox.run(written, row, env | variables, time_limit, **options)
        code = done.exit_code
        if code < 0 or code >= _NOT_RUN or done.output_too_long:
            problem = f"printed more than {_MAX_VERIFIER_OUTPUT} bytes" if done.output_too_long else describe_exit(code)
            raise WorkflowError(f"workflow.verify: {verify[0]} {problem}: {done.stderr_tail}")
        return read_outcome(written, answer, float(code == 0)).model_dump()
