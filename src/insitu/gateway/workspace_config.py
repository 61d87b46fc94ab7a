"""The settings of workspaces: keys of `_type: command`."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from insitu.errors import ConfigError
from insitu.gateway.templates import check_placeholders, template_texts
from insitu.gateway.visible import PRIVATE, has_any
from insitu.schemas.components import Block

_SCRIPTS = {".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl"}
"""Suffixes of what a program runs, not writes."""
_MOST_BYTES = 10**18
"""What every kernel takes for a limit."""


def find_folder(find: Callable[[str, str], Path], path: str, key: str) -> Path:
    """As `Config.find_path`, a folder. Raises ConfigError if it is none."""
    folder = find(path, key)
    if not folder.is_dir():
        raise ConfigError(f"{key}: {folder} is not a folder")
    return folder


class WorkspaceConfig(Block):
    """The folder in which each episode starts: a copy of another one, or of a commit."""

    model_config = ConfigDict(serialize_by_alias=True)

    source: str | None = Field(default=None, alias="copy", min_length=1)
    """Folder to copy, relative to the working directory or the YAML file; `{column}` is replaced by the row's value."""
    git: str | None = Field(default=None, min_length=1)
    """Repository, as a URL or folder, and `@REV` for a commit, branch or tag. Its files are fetched once, without their
    history."""
    result: list[str] | None = Field(default=None, min_length=1)
    """Files and folders of the workspace that are the agent's work, with placeholders as in `copy`; `verify` judges
    these alone, in a new copy. `.` is all, which judges less strictly."""
    readable: list[str] = Field(default_factory=list)
    """Files and folders, relative as `copy`, that the program and `verify` can read besides what they run with."""
    keep: Literal["failed", "all", "none"] = "failed"
    """Of which episodes to keep the workspace, in `workspaces` in the run's directory; if `verify` fails, `result`."""
    max_kept: int = Field(default=20, ge=0)
    """How many workspaces are kept there."""
    folder: Path | None = None
    """Where files of running episodes are; none: the folder for temporary files."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.source is None) == (self.git is None):
            raise ValueError("set one of copy (a folder) and git (a repository)")
        for path in self.result or ():
            parts = PurePath(path).parts
            if path.startswith("/") or ".." in parts or "\0" in path:
                raise ValueError(f"result has {path!r}; allowed: paths in the workspace, and . for all of it")
            if forbidden := {".git", "__pycache__"} & set(parts):
                raise ValueError(f"result has {path!r}; {forbidden.pop()} is never taken from an agent")
        return self


class Limits(Block):
    """What the processes of an episode may use together, and each of its files; also those of its verifier."""

    processes: int = Field(default=512, ge=1, le=4_000_000)
    """Number of processes and threads."""
    memory: ByteSize | None = Field(default=ByteSize(4 * 2**30), le=_MOST_BYTES)
    """Bytes of memory, such as `4GiB`, with those of the workspace, which is in memory; none: no limit."""
    folder_size: ByteSize | None = Field(default=ByteSize(4 * 2**30), le=_MOST_BYTES)
    """Bytes that the workspace and temporary files take, with `network: model`; none: half of the machine's memory."""
    files: int = Field(default=100_000, ge=1, le=10**9)
    """Number of files that `result` or a kept workspace has."""
    file_size: ByteSize | None = Field(default=ByteSize(2**30), le=_MOST_BYTES)
    """Largest file, in bytes; none: no limit."""
    sockets: int = Field(default=4096, ge=1)
    """Number of sockets, with `network: model`; a connection between two of its processes has two."""
    cpu_seconds: float | None = Field(default=None, gt=0, le=10**9)
    """Seconds of processor time; none: no limit. `timeout` is that of the clock."""


class WorkspaceKeys(BaseModel):
    """The keys of `_type: command` that need a workspace."""

    workspace: WorkspaceConfig | None = None
    """A new folder for each episode, in which the program runs; none: all run in `cwd`."""
    verify: list[str] | None = Field(default=None, min_length=1)
    """Program that runs in a new copy with the agent's `result`, once the agent has ended, with placeholders as in
    `command` and the row as JSON on its standard input. The reward is that in `reward.json`, if it writes one,
    otherwise 1 for exit code 0 and 0 for 1 to 125."""
    verify_files: str | None = Field(default=None, min_length=1)
    """Folder whose files and folders take the place of those in the copy before `verify`, with placeholders as in
    `workspace.copy`; agents do not see it, and `verify` finds it at `{verify_files}`."""
    network: Literal["model", "host"] | None = None
    """What programs reach: `model`, the default with a workspace, only the episode's endpoint, and they can write only
    to the workspace and to temporary files; `host`, what the account reaches and may write."""
    limits: Limits = Field(default_factory=Limits)
    """Limits of a program and all that it starts."""

    @model_validator(mode="after")
    def _keys_belong_together(self) -> Self:
        needing = {"verify", "verify_files", "network", "limits"} & self.model_fields_set
        if self.workspace is None and needing:
            raise ValueError(f"{', '.join(sorted(needing))} needs workspace")
        if self.verify_files is not None and self.verify is None:
            raise ValueError("verify_files needs verify")
        if self.verify is not None and self.workspace is not None and self.workspace.result is None:
            raise ValueError(
                "verify needs workspace.result, which says what of the agent's work is judged; add, for example,\n"
                "  result: [solution.py]\nto workspace, or result: [.] for all of it"
            )
        if self.network == "host" and "folder_size" in self.limits.model_fields_set:
            raise ValueError("limits.folder_size needs network: model, with which the workspace is a file system")
        if self.network == "host" and self.workspace is not None and self.workspace.readable:
            raise ValueError("workspace.readable needs network: model; with host, programs read what the account can")
        if self.network == "host" and "sockets" in self.limits.model_fields_set:
            raise ValueError("limits.sockets needs network: model, with which they can be counted")
        self._templates()
        return self

    def _templates(self) -> list[tuple[str, str]]:
        texts: dict[str, Any] = {"verify_files": self.verify_files}
        if self.workspace is not None:
            texts |= {"workspace.copy": self.workspace.source, "workspace.result": self.workspace.result}
        return [each for where, text in texts.items() if text for each in template_texts(text, where)]

    def check_files(self, where: str, find: Callable[[str, str], Path]) -> None:
        """As FunctionBaseConfig's; what has placeholders is found when a row fills them."""
        if self.workspace is None:
            return
        paths, folders = {"workspace.copy": self.workspace.source, "verify_files": self.verify_files}, []
        for key, path in paths.items():
            if path is not None and "{" not in path:
                folders.append(find_folder(find, path, f"{where}.{key}"))
        for path in self.workspace.readable:
            if has_any(found := find(path, f"{where}.workspace.readable").resolve(), PRIVATE):
                without = f"paths without {', '.join(PRIVATE)} in them"
                raise ConfigError(f"{where}.workspace.readable has {found}; allowed: {without}")
        if not any("{" in path for path in paths.values() if path is not None):
            self._check_script(f"{where}.verify", self.workspace, folders)

    def _check_script(self, key: str, workspace: WorkspaceConfig, folders: Sequence[Path]) -> None:
        """Raises ConfigError if the first file that `verify` names is in none of the folders that it is made of, nor
        can be the agent's."""
        script = next((each for each in (self.verify or [])[1:] if not each.startswith("-")), "")
        if "{" in script or PurePath(script).suffix not in _SCRIPTS or workspace.git is not None:
            return
        agents = any("{" in path or PurePath(script).is_relative_to(path) for path in workspace.result or ())
        if not agents and not any((folder / script).exists() for folder in folders):
            raise ConfigError(f"{key}: {script} is not in {' or '.join(map(str, folders))}")

    def check_columns(self, columns: Collection[str]) -> None:
        for where, text in self._templates():
            check_placeholders(text, where, [*dict.fromkeys((*columns, "input", "row_id"))])
