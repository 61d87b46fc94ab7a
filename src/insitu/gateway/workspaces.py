"""A folder per episode for `_type: command`, in which the agent works and a verifier judges what it leaves.

    workflow: {_type: command, command: [...], llm: student, workspace: {copy: task}, verify: [pytest, -q]}

Every program runs in a `sandbox`. The episode's result is an `Outcome`, which `_type: outcome` reads.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Self

from insitu.config import Config
from insitu.disk.temporary import remove, temporary_folder
from insitu.errors import ConfigError, InsituError, WorkflowError
from insitu.gateway.server import Gateway
from insitu.gateway.templates import filled_text
from insitu.gateway.workspace_config import WorkspaceKeys
from insitu.gateway.workspace_files import REWARD_FILE, copy_over, read_outcome, run_tool
from insitu.wire.child_process import describe_exit
from insitu.wire.endings import end_tasks
from insitu.workflow.context import current_scope
from insitu.workflow.programs import Program, run_program

_SANDBOX = Path(__file__).with_name("sandbox.py")
_MAX_VERIFIER_OUTPUT = 2**24
_NOT_RUN = 126
"""The first exit code that shells give for a program that could not run (126, 127) or that a signal has ended."""


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
        self._config = config
        self.run_dir = run_dir.absolute()
        self.root: Path
        self.hidden: list[Path] = []
        """Folders that agents do not see: other episodes', the run's, and those with files of the verifier."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Raises ConfigError if workspaces cannot be made, or programs not confined."""
        if sys.platform != "linux":
            raise ConfigError("workflow.workspace needs Linux")
        async with temporary_folder(self.settings.folder, "workflow.workspace.folder") as self.root:
            self.hidden = [self.root.parent, *self._private_folders()]
            await asyncio.to_thread(self._prepare)
            yield self

    def _private_folders(self) -> Iterator[Path]:
        """The verifier's files, for all rows, and the run's directory, unless the agent's own files are inside.

        Raises ConfigError for files of the verifier that cannot be hidden.
        """
        own, template, key = self._config.folder.resolve(), self.keys.verify_files, "workflow.verify_files"
        if not own.is_relative_to(run_dir := self.run_dir.resolve()):
            yield run_dir
        if template is not None:
            fixed = template.partition("{")[0]
            fixed = fixed if fixed == template else os.path.dirname(fixed)
            folder = self._folder(fixed or ".", key).resolve()
            if self.isolated and (not fixed or own.is_relative_to(folder)):
                raise ConfigError(
                    f"{key} is {template!r}: agents would see these files; put them in a folder below {own}"
                )
            yield folder

    def _prepare(self) -> None:
        if self.settings.source is not None and "{" not in self.settings.source:
            self._folder(self.settings.source, "workflow.workspace.copy")
        if self.settings.git is not None:
            self._fetch(self.settings.git)
        probe = self.root / "probe"
        for name in ("work", "temporary"):
            (probe / name).mkdir(parents=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            command = self.sandboxed(["true"], probe, probe / "temporary", theirs, probe / "work")
            subprocess.run(command, pass_fds=[theirs.fileno()], check=False, timeout=60, stdin=subprocess.DEVNULL)
            theirs.close()
            report = _reports(ours)
        if report.get("exit") != 0:
            raise ConfigError(
                f"workflow.network is model, but this system does not let programs be confined "
                f"({report['refused']}): set network: host, or allow user namespaces (in a container, "
                "its security profile forbids them; on Ubuntu, kernel.apparmor_restrict_unprivileged_userns)"
                if report.get("kernel")
                else f"workflow.workspace: `true` cannot be run within workflow.limits: {report or 'no answer'}"
            )

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
        folder = Path(
            tempfile.mkdtemp(prefix="".join(c if c.isalnum() else "-" for c in name)[-60:] + "-", dir=self.root)
        )
        keep, workspace = self.settings.keep, None
        try:
            workspace = Workspace(self, folder, values)
            await asyncio.to_thread(self._fill, workspace.work, values)
            yield workspace
        except InsituError as error:
            keep = "none" if workspace is None or workspace.is_too_large else keep
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

        def part(value: str) -> str:
            if PurePath(value).is_absolute() or ".." in PurePath(value).parts or "\0" in value:
                raise WorkflowError(f"{key}: row {values['row_id']!r}: {value!r:.100} would lead to another folder")
            return value

        return self._folder(filled_text(template, values, key, part), key)

    def _folder(self, place: str, key: str) -> Path:
        """Raises ConfigError if there is none."""
        folder = self._config.find_path(place, key)
        if not folder.is_dir():
            raise ConfigError(f"{key}: {folder} is not a folder")
        return folder

    def _fill(self, work: Path, values: dict[str, Any]) -> None:
        source = self.root / "repository"
        if self.settings.source is not None:
            source = self.path(self.settings.source, values, "workflow.workspace.copy")
        run_tool("cp", "-a", f"{source}/.", str(work))  # by references to the same blocks where the disk has them

    def _keep(self, folder: Path) -> Path | None:
        """Moves the workspace of an ended episode to the run's directory; None if that has enough."""
        copies = self.run_dir / "workspaces"
        copies.mkdir(parents=True, exist_ok=True)
        if len([*copies.iterdir()]) >= self.settings.max_kept:
            return None
        return Path(shutil.move(folder / "work", copies / folder.name))

    @cached_property
    def _visible(self) -> list[str]:
        """The YAML's folder, and the Python environments of insitu and of its programs; outer folders first."""
        paths = {self._config.folder.resolve(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
        return sorted(map(str, paths))

    def sandboxed(
        self,
        command: Sequence[str],
        folder: Path,
        temporary: Path,
        control: socket.socket,
        cwd: Path,
        port: int | None = None,
    ) -> list[str]:
        """The command that runs another one in a sandbox."""
        settings = {
            "control": control.fileno(),
            "isolated": self.isolated,
            "port": port,
            "folder": str(folder / "work"),
            "temporary": str(temporary),
            "visible": self._visible,
            "hidden": [*map(str, self.hidden)],
            "cwd": str(cwd),
            "limits": self.keys.limits.model_dump(),
        }
        return [sys.executable, "-I", "-S", str(_SANDBOX), json.dumps(settings), *command]


class Workspace:
    """The folder of one episode."""

    def __init__(self, workspaces: Workspaces, folder: Path, values: dict[str, Any]) -> None:
        self._all, self._folder, self._values = workspaces, folder, values
        self.work = folder / "work"
        self.work.mkdir()
        self.is_too_large = False
        """Whether it has exceeded its limit; it is not kept then."""

    @property
    def address(self) -> str | None:
        """Where the agent finds the gateway, if not at its own address."""
        return f"http://127.0.0.1:{self._all.gateway.port}" if self._all.isolated else None

    async def run(
        self,
        command: Sequence[str],
        stdin: bytes,
        *,
        cwd: Path,
        env: dict[str, str],
        port: int | None = None,
        **options: Any,
    ) -> Program:
        """As `run_program`, with its `options`, in a sandbox. Raises WorkflowError if it exceeds a limit.

        `port` is that of the gateway in the sandbox; none: it is not there.
        """
        temporary = Path(tempfile.mkdtemp(prefix="temporary-", dir=self._folder))
        place = "/tmp" if self._all.isolated else str(temporary)
        names = ("TMPDIR", "HOME") if self._all.isolated else ("TMPDIR",)
        env = env | {name: place for name in names if name not in self._all.variables}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            async with self._serving(ours) as early:
                program = await run_program(
                    self._all.sandboxed(command, self._folder, temporary, theirs, cwd, port),
                    stdin,
                    cwd=self._folder,
                    env=env,
                    **options,
                    pass_fds=[theirs.fileno()],
                    name=command[0],
                )
            theirs.close()
            report = early | _reports(ours)
        self.is_too_large = report.get("limit") == "folder_size"
        if "limit" in report:
            limit = getattr(self._all.keys.limits, report["limit"])
            raise WorkflowError(f"{command[0]} exceeded limits.{report['limit']}: {limit}")
        if "refused" in report:
            raise WorkflowError(f"workflow command {report['refused']}")
        if "exit" not in report and not program.output_too_long:
            raise WorkflowError(f"{command[0]}: its sandbox has ended and not said how: {program.stderr_tail}")
        program.reported_exit = report.get("exit")
        return program

    @asynccontextmanager
    async def _serving(self, control: socket.socket) -> AsyncIterator[dict[str, Any]]:
        """Lets the gateway serve at the socket that the sandbox sends; yields what it says instead."""
        control.setblocking(False)
        loop, reports = asyncio.get_running_loop(), dict[str, Any]()
        serving: list[asyncio.Task[None]] = []

        async def serve(listener: socket.socket) -> None:
            async with self._all.gateway.serving(listener):  # which closes it
                await asyncio.Event().wait()

        def receive() -> None:
            loop.remove_reader(control)
            message, descriptors, _, _ = socket.recv_fds(control, 2**16, 1)
            if descriptors:
                listener = socket.socket(fileno=descriptors[0])
                serving.append(asyncio.create_task(serve(listener), name="serve a sandbox"))
            elif message:
                reports.update(json.loads(message))

        loop.add_reader(control, receive)
        try:
            yield reports
        finally:
            loop.remove_reader(control)
            await end_tasks(*serving)

    async def run_agent(self, command: Sequence[str], stdin: bytes, **options: Any) -> Program:
        """As `run`, with the model's endpoint."""
        return await self.run(command, stdin, port=self._all.gateway.port, **options)

    async def judge(
        self, verify: Sequence[str], answer: Any, row: bytes, env: dict[str, str], time_limit: float | None
    ) -> dict[str, Any]:
        """The outcome of the episode, by the verifier, which runs over the files of `verify_files`."""
        reward_file, template = self.work / REWARD_FILE, self._all.keys.verify_files
        await asyncio.to_thread(remove, reward_file)
        if template is not None:
            files = self._all.path(template, self._values, "workflow.verify_files")
            await asyncio.to_thread(copy_over, files, self.work)
        limits: dict[str, Any] = {"time_limit": time_limit, "max_output": _MAX_VERIFIER_OUTPUT}
        done = await self.run(verify, row, cwd=self.work, env=env, on_exit=lambda: None, **limits)
        code = done.exit_code
        if code < 0 or code >= _NOT_RUN or done.output_too_long:
            problem = f"printed more than {_MAX_VERIFIER_OUTPUT} bytes" if done.output_too_long else describe_exit(code)
            raise WorkflowError(f"workflow.verify: {verify[0]} {problem}: {done.stderr_tail}")
        return read_outcome(reward_file, answer, float(code == 0)).model_dump()


def _reports(control: socket.socket) -> dict[str, Any]:
    """What a sandbox that has ended has said, besides the socket that it may have sent."""
    reports: dict[str, Any] = {}
    control.setblocking(False)
    with suppress(BlockingIOError):
        while message := socket.recv_fds(control, 2**16, 0)[0]:
            reports = (json.loads(message) if message.startswith(b"{") else {}) | reports
    return reports
