"""A folder per episode for `_type: command`, in which the agent works; a verifier judges what it leaves, elsewhere.

    workflow: {_type: command, command: [...], llm: student, workspace: {copy: task, result: [solution.py]},
               verify: [python, check.py], verify_files: checks}

Every program runs in a `sandbox`. The episode's result is an `Outcome`, which `_type: outcome` reads.
"""

import asyncio
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from glob import escape
from itertools import product
from pathlib import Path, PurePath
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from insitu.config import Config
from insitu.disk.files import read_rows
from insitu.disk.temporary import remove, temporary_folder
from insitu.errors import ConfigError, InsituError, WorkflowError
from insitu.gateway.bubblewrap import ISOLATED, find_bubblewrap, system_call_filter
from insitu.gateway.cgroups import Cgroup
from insitu.gateway.sandbox import unpack
from insitu.gateway.sandboxed import Place, Sandboxed
from insitu.gateway.server import Gateway
from insitu.gateway.templates import filled_text
from insitu.gateway.visible import (
    PRIVATE,
    REPOSITORIES,
    VERIFIER_HINT,
    has_any,
    is_in,
    misses_file,
    named,
    own_python,
    repositories,
    searched,
    with_targets,
)
from insitu.gateway.workspace_config import WorkspaceKeys, find_folder
from insitu.gateway.workspace_files import REWARD_FILE, read_outcome
from insitu.wire.child_process import describe_exit
from insitu.workflow.context import current_scope
from insitu.workflow.programs import Program

logger = logging.getLogger(__name__)

_MAX_VERIFIER_OUTPUT = 2**24
_NOT_RUN = 126
"""The first exit code that shells give for a program that could not run (126, 127) or that a signal has ended."""
_JUDGES = {
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.bareRepository",
    "GIT_CONFIG_VALUE_0": "explicit",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": os.devnull,
}
"""Environment variables of verifiers. Python does not add the current folder or the script's folder to `sys.path`, and
Git ignores bare repositories and hooks."""
_ISOLATED_VARIABLE = "INSITU_ISOLATED"
_KEPT = "workspaces"
"""The folder of a run with the workspaces that are kept."""
_KEEPING = threading.Lock()
"""For the limit on their number: episodes may fail at once."""
_SEARCHED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


class Workspaces:
    """Makes a folder per episode below one root, which is deleted at the end of the run, or by the next run if this
    process is killed."""

    def __init__(
        self,
        keys: WorkspaceKeys,
        command: Sequence[str],
        gateway: Gateway,
        config: Config,
        run_dir: Path,
        variables: Mapping[str, str],
    ) -> None:
        assert keys.workspace is not None
        self.keys, self.settings, self._config, self.command = keys, keys.workspace, config, command
        self.run_dir, self.root, self.has_missed_file = Path(os.path.abspath(run_dir)), Path(), False
        evaluations, runs = config.working_dir / config.eval.folder, config.working_dir / config.finetuning.output_dir
        self._ours = {run_dir.resolve(): "output_dir", evaluations.resolve(): "eval.general.output_dir"}
        self._ours[runs.resolve()] = "finetuning.output_dir"
        apart = [*map(Path, (os.path.realpath(os.path.expanduser("~")), *PRIVATE)), config.folder.resolve()]
        apart += [config.working_dir.resolve(), *self._ours]
        self.place = Place(keys.limits, gateway, keys.network != "host", variables, Cgroup.own(), apart)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Raises ConfigError if workspaces cannot be made, or programs not confined."""
        if sys.platform != "linux":
            raise ConfigError("workflow.workspace needs Linux")
        async with AsyncExitStack() as stack:
            folder = temporary_folder(self.settings.folder, "workflow.workspace.folder")
            self.root = await stack.enter_async_context(folder)
            await asyncio.to_thread(self._prepare)
            await self._probe(["true"], {})
            if self.place.isolated and self.keys.verify is not None:
                await self._probe([ISOLATED, "true"], {"left": self.root / "probe", "paths": [], "verify_files": None})
            yield self

    async def _probe(self, command: list[str], wants: dict[str, Any]) -> None:
        """Raises ConfigError if a program cannot be run, or one of the agent by a verifier."""
        problem = f"workflow.workspace: `{' '.join(command)}` cannot be run within workflow.limits"
        folder = Path(tempfile.mkdtemp(dir=self.root))
        try:
            sandbox = Sandboxed(self.place, command, folder, {"source": None, "leaves": [], **wants})
            done = await sandbox.run(folder / "left", b"", {**os.environ}, 60, max_output=0)
        except InsituError as error:
            raise ConfigError(f"{problem}: {error}") from None
        if done.exit_code:
            raise ConfigError(f"{problem}: {done.stderr_tail.strip() or describe_exit(done.exit_code)}")
        (folder / "left").replace(self.root / "probe")

    def _hidden(self) -> Iterator[Path]:
        """What agents must not see: rows, results, the verifier's files, and repositories that may have them.

        Raises ConfigError for folders that cannot be hidden.
        """
        own, template = self._config.folder.resolve(), self.keys.verify_files
        private, needed = [own, *(path.parent for path in read_rows)], self._needed()
        if template is not None:
            key, fixed = "workflow.verify_files", template.partition("{")[0]
            fixed = fixed if fixed == template else os.path.dirname(fixed)
            private.append(checks := find_folder(self._config.find_path, fixed or ".", key).resolve())
            if self.place.isolated and has_any(checks, [own, *needed]):
                raise ConfigError(
                    f"{key} is {template!r}: agents would see these files; put them in a folder below {own}"
                )
            yield checks
        for folder, key in self._ours.items():
            if self.place.isolated and (inside := sorted(path for path in needed if path.is_relative_to(folder))):
                raise ConfigError(
                    f"{key}: agents would see results in {folder}, which has {inside[0]}; choose another folder"
                )
            yield from (folder, folder / _KEPT, *folder.parent.glob(f"{escape(folder.name)}.*"))
        for place in self.local_repositories() if self.settings.git is not None else ():
            private.append(place)
            yield from [place] if (place / "objects").is_dir() else []
        yield from (path for folder in private for path in repositories(folder))
        yield from (*read_rows, self.root.parent)

    def _needed(self) -> set[Path]:
        """What agents see besides the system's folders."""
        variables = {**os.environ, **self.place.variables}
        return {*self.place.visible, *with_targets(searched(variables, self.place.apart)), *self.named(self.command)}

    def named(self, command: Sequence[str]) -> set[Path]:
        """What a command of the file names; see `visible.named`."""
        search = self.place.variables.get("PATH", os.environ.get("PATH"))
        return with_targets(named(command, self._config.folder, search, self.place.apart))

    def _prepare(self) -> None:
        self.keys.check_files("workflow", self._config.find_path)
        if self.settings.git is not None:
            self._fetch()
        place = self.place
        readable = [self._config.find_path(path, "workflow.workspace.readable") for path in self.settings.readable]
        place.visible = with_targets([*own_python(place.apart), *readable])
        if place.isolated and self.settings.keep != "none" and is_in(self.run_dir.resolve(), self._needed()):
            with suppress(OSError):  # then nothing is kept there, either
                self.run_dir.mkdir(parents=True, exist_ok=True)  # later, it would not be hidden from agents that run
        place.hidden = {Path(os.path.realpath(path)) for path in self._hidden()}
        if place.isolated:
            find_bubblewrap()
            self.place.filter = self.root / "filter"
            self.place.filter.write_bytes(system_call_filter())

    def _repository(self) -> tuple[str, str]:
        """The URL or path of the repository, and the revision."""
        place, slash, name = str(self.settings.git).rpartition("/")
        name, _, revision = name.partition("@")
        local = self._config.folder / (url := place + slash + name)
        return str(local.resolve()) if local.exists() else url, revision or "HEAD"

    def local_repositories(self) -> list[Path]:
        """Where Git finds the repository if it is on this machine."""
        url = self._repository()[0]
        path = unquote(urlsplit(url).path) if url.startswith("file://") else url
        return [place for name in (path, f"{path}.git") if (place := (self._config.folder / name).resolve()).exists()]

    def _fetch(self) -> None:
        url, revision = self._repository()
        key, target = f"workflow.workspace.git: {self.settings.git}", self.root / "repository"
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        for arguments in (
            ["init", "--quiet", str(target)],
            ["-C", str(target), "fetch", "--quiet", "--depth", "1", "--", url, revision],
            ["-C", str(target), "checkout", "--quiet", "--detach", "FETCH_HEAD"],
        ):
            command = ["git", "-c", "init.defaultBranch=main", *arguments]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            except OSError as error:
                raise ConfigError(f"{key}: git cannot be started: {error.strerror}") from error
            except subprocess.CalledProcessError as error:
                raise ConfigError(f"{key}: git: {error.stderr.strip()}") from None
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
            template = self.settings.source
            source = self.folder(template, values, "workspace.copy") if template else None
            yield Workspace(self, folder, values, source)
        except InsituError as error:
            if keep != "none" and (copy := await asyncio.to_thread(self._keep, folder)) is not None:
                error.args = (f"{error} (its workspace is {copy})", *error.args[1:])
            raise
        else:
            if keep == "all":
                await asyncio.to_thread(self._keep, folder)
        finally:
            await asyncio.shield(asyncio.to_thread(remove, folder))  # also if it is cancelled once more

    def path(self, template: str, values: dict[str, Any], key: str) -> str:
        """A path of the file with the values of a row. Raises WorkflowError if one is empty or leads elsewhere."""

        def part(value: str) -> str:
            if not value or PurePath(value).is_absolute() or ".." in PurePath(value).parts or "\0" in value:
                allowed = "allowed: relative paths without .."
                raise WorkflowError(f"{key}: row {values['row_id']!r} has {value!r:.100}; {allowed}")
            return value

        return filled_text(template, values, f"workflow.{key}", part)

    def folder(self, template: str, values: dict[str, Any], key: str) -> Path:
        """As `path`, a folder. Raises ConfigError if it does not exist."""
        place = self.path(template, values, key)
        return find_folder(self._config.find_path, place, f"workflow.{key}").resolve()

    def _keep(self, folder: Path) -> Path | None:
        """Unpacks what an agent has left to the run's directory; None if there is nothing, or enough is there."""
        copy, left, limits = self.run_dir / _KEPT / folder.name, folder / "left", self.keys.limits
        try:
            if not left.exists() or not left.stat().st_size:
                return None
            copy.parent.mkdir(parents=True, exist_ok=True)
            with _KEEPING:
                if sum(each.is_dir() for each in copy.parent.iterdir()) >= self.settings.max_kept:
                    return None
                copy.mkdir()
            with left.open("rb") as archive:
                unpack(archive, str(copy), limits.folder_size, limits.files, links=False)
            # The configuration of a repository names programs, and it is the agent's. Git needs HEAD to find one.
            for path in [path for name in ("HEAD", *REPOSITORIES) for path in copy.rglob(name)]:
                remove(path)
            (copy.parent / "conftest.py").write_text('collect_ignore_glob = ["*"]  # what agents have left\n')
        except (OSError, ValueError, RecursionError, tarfile.TarError) as error:
            logger.warning("the workspace %s cannot be kept: %s", folder.name, error)
            if copy.exists():
                remove(copy)
            return None
        return copy


class Workspace:
    """The folder of one episode."""

    def __init__(self, workspaces: Workspaces, folder: Path, values: dict[str, Any], source: Path | None) -> None:
        self._all, self._folder = workspaces, folder
        self._left = folder / "left"
        self._source, result = source or workspaces.root / "repository", workspaces.settings.result or []
        hidden = [*workspaces.place.hidden] if workspaces.place.isolated else []
        self._result = [os.path.normpath(workspaces.path(path, values, "workspace.result")) for path in result]
        verify = workspaces.keys.verify_files
        self._verify_files = None if verify is None else workspaces.folder(verify, values, "verify_files")
        key, places = ("copy", [source]) if source else ("git", workspaces.local_repositories())
        history = () if source else [path for place in places for path in (place, place / ".git")]
        for place, path in product(places, {*hidden, *filter(None, [self._verify_files])}.difference(history)):
            if path.is_relative_to(place) and (self._source / path.relative_to(place)).exists():
                raise ConfigError(f"workflow.workspace.{key}: {place} has {path}, which agents must not see")
        if not workspaces.place.isolated:
            self._check_verifier(workspaces.keys.verify or [])
        files = self._verify_files
        for name in self._result:
            if files is not None and name != "." and (replaced := files / PurePath(name).parts[0]).exists():
                problem = f"workflow.workspace.result has {name!r}, but workflow.verify_files has {replaced}"
                raise ConfigError(f"{problem}, which replaces it")

    def _check_verifier(self, verify: Sequence[str]) -> None:
        """Raises ConfigError if a script that `verify` names runs programs apart, which only a sandbox can."""
        folders = (self._source, self._verify_files or self._source)
        names = [each.replace("{verify_files}", str(folders[1])) for each in verify]
        for path in {folder / name for folder in folders for name in names}:
            with suppress(OSError):  # it may be another text
                if path.is_file() and _ISOLATED_VARIABLE.encode() in path.read_bytes():
                    raise ConfigError(f"workflow.verify: {path} uses {_ISOLATED_VARIABLE}, which needs network: model")

    @property
    def address(self) -> str | None:
        """Where the agent finds the gateway, if not at its own address."""
        return f"http://127.0.0.1:{self._all.place.gateway.port}" if self._all.place.isolated else None

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
            "port": self._all.place.gateway.port if self._all.place.isolated else None,
        }
        named = self._all.named(self._all.command)
        sandbox = Sandboxed(self._all.place, command, self._folder, wants, named)
        return await sandbox.run(self._left, stdin, env, **options)

    def verifier_files(self) -> dict[str, Any]:
        """The value of `{verify_files}`, where there are such files."""
        place = "/run/verify_files" if self._all.place.isolated else self._verify_files
        return {} if self._verify_files is None else {"verify_files": str(place)}

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
            "verify_files": self._verify_files,
            "leaves": [REWARD_FILE],
            "fails": [REWARD_FILE],
        }
        judges = _JUDGES | ({_ISOLATED_VARIABLE: ISOLATED} if self._all.place.isolated else {})
        variables = {name: value for name, value in judges.items() if name not in self._all.place.variables}
        for name in _SEARCHED:  # relative folders are in the agent's hands
            if name in env:
                variables[name] = os.pathsep.join(filter(os.path.isabs, env[name].split(os.pathsep)))
        named = self._all.named(self._all.keys.verify or [])
        sandbox = Sandboxed(self._all.place, verify, judged, wants, named)
        done = await sandbox.run(written, row, env | variables, time_limit, max_output=_MAX_VERIFIER_OUTPUT)
        code = done.exit_code
        if code < 0 or code >= _NOT_RUN or done.output_too_long:
            problem = f"printed more than {_MAX_VERIFIER_OUTPUT} bytes" if done.output_too_long else describe_exit(code)
            raise WorkflowError(f"workflow.verify: {verify[0]} {problem}: {done.stderr_tail}")
        if code and self._all.place.isolated and misses_file(done.stderr_tail) and not self._all.has_missed_file:
            self._all.has_missed_file = True  # said once
            said = verify[0], describe_exit(code), done.stderr_tail, VERIFIER_HINT
            logger.warning("workflow.verify: %s %s: %s (%s)", *said)
        outcome = await asyncio.to_thread(read_outcome, written, answer, float(code == 0))
        return outcome.model_dump()
