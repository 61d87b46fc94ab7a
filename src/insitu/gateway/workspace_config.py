"""The settings of workspaces: keys of `_type: command`."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from insitu.gateway.templates import check_placeholders, template_texts

_OPTIONS = ConfigDict(extra="ignore", use_attribute_docstrings=True, frozen=True, serialize_by_alias=True)


class WorkspaceConfig(BaseModel):
    """The folder in which each episode starts: a copy of another one, or of a commit."""

    model_config = _OPTIONS

    source: str | None = Field(default=None, alias="copy", min_length=1)
    """Folder to copy, relative to the working directory or the YAML file; `{column}` is replaced by the row's value."""
    git: str | None = Field(default=None, min_length=1)
    """Repository, as a URL or folder, and `@REV` for a commit, branch or tag. Its files are fetched once, without their
    history."""
    keep: Literal["failed", "all", "none"] = "failed"
    """Which folders to move to `workspaces` in the run's directory when their episodes end; the others are deleted."""
    max_kept: int = Field(default=20, ge=0)
    """How many folders are kept there; further ones are deleted."""
    folder: Path | None = None
    """Where the folders of running episodes are; none: the folder for temporary files."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.source is None) == (self.git is None):
            raise ValueError("set one of copy (a folder) and git (a repository)")
        return self


class Limits(BaseModel):
    """What the processes of an episode may use together, and each of its files; also those of its verifier."""

    model_config = _OPTIONS

    processes: int = Field(default=512, ge=1)
    """Number of processes and threads."""
    memory: ByteSize | None = ByteSize(4 * 2**30)
    """Bytes of memory, such as `4GiB`; none: no limit."""
    folder_size: ByteSize | None = ByteSize(4 * 2**30)
    """Bytes that the workspace and temporary files take; none: no limit."""
    file_size: ByteSize | None = ByteSize(2**30)
    """Largest file, in bytes; none: no limit."""
    cpu_seconds: float | None = Field(default=None, gt=0)
    """Seconds of processor time; none: no limit. `timeout` is that of the clock."""


class WorkspaceKeys(BaseModel):
    """The keys of `_type: command` that need a workspace."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    workspace: WorkspaceConfig | None = None
    """A new folder for each episode, in which the program runs; none: all run in `cwd`."""
    verify: list[str] | None = Field(default=None, min_length=1)
    """Program that runs in the workspace once the agent has ended, with placeholders as in `command` and the row as
    JSON on its standard input. The reward is that in `reward.json`, if it writes one, otherwise 1 for exit code 0 and 0
    for 1 to 125."""
    verify_files: str | None = Field(default=None, min_length=1)
    """Folder that is copied over the workspace before `verify`, with placeholders as in `workspace.copy`; agents do not
    see it."""
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
        self._templates()
        return self

    def _templates(self) -> list[tuple[str, str]]:
        texts = {"workspace.copy": self.workspace and self.workspace.source, "verify_files": self.verify_files}
        return [each for where, text in texts.items() if text for each in template_texts(text, where)]

    def check_columns(self, columns: Collection[str]) -> None:
        for where, text in self._templates():
            check_placeholders(text, where, [*dict.fromkeys((*columns, "input", "row_id"))])
