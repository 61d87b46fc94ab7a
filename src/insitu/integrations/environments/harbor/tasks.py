"""Harbor's task folders (`task.toml`, `instruction.md`, `environment/`, `tests/`), as the rows of a dataset.

dataset: {_type: harbor}                                     # of the workflow's folder
dataset: {_type: harbor, tasks: tasks/train, skip: 100, limit: 50}
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.collect.datasets import DatasetConfig
from insitu.config import Config
from insitu.errors import ConfigError, first_problem
from insitu.registry import register_dataset_loader
from insitu.schemas.components import WORKFLOW
from insitu.schemas.kinds import FUNCTION

_TEST = "tests/test.sh"
_CANARY = re.compile(r"\A(\s*(<!--|#)[^\n]*canary[^\n]*\n)+", re.IGNORECASE)
"""Lines by which crawlers recognise a benchmark; agents do not get them."""
_UNSUPPORTED = {
    "agent": ("user",),
    "verifier": ("user", "environment", "collect"),
    "environment": ("mcp_servers", "healthcheck", "skills_dir"),
}
"""Keys of `task.toml` without which a task would be another one."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = Field(default_factory=dict)


class _Environment(_Section):
    docker_image: str | None = None
    workdir: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0)
    cpus: float = Field(default=1, gt=0)
    memory_mb: int = Field(default=2048, gt=0)


class TaskSettings(BaseModel):
    """What is used of `task.toml`, with Harbor's defaults."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: _Section = _Section()
    verifier: _Section = _Section()
    environment: _Environment = _Environment()


@dataclass(frozen=True)
class Task:
    """A task by its name, which is its folder below that of all tasks."""

    name: str
    folder: Path
    instruction: str
    settings: TaskSettings

    def digest(self, part: str = "") -> str:
        """SHA-256 of its files, or of those in `part`."""
        digest = hashlib.sha256()
        for file in sorted(path for path in (self.folder / part).rglob("*") if path.is_file()):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(self.folder)}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


def read_tasks(folder: Path, root: Path) -> list[Task]:
    """The tasks in a folder, or the folder as one, with their names below `root`.

    Raises ConfigError if there are none, and for one that cannot be run.
    """
    folders = sorted(file.parent for file in folder.rglob("task.toml"))
    if not folders:
        raise ConfigError(f"tasks: no task.toml below {folder}")
    return [_read_task(each, each.name if each == root else each.relative_to(root).as_posix()) for each in folders]


def _read_task(folder: Path, name: str) -> Task:
    try:
        data = tomllib.loads((folder / "task.toml").read_text("utf-8"))
        settings = TaskSettings.model_validate(data)
        instruction = _CANARY.sub("", (folder / "instruction.md").read_text("utf-8")).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"task {folder} cannot be read: {first_problem(error)}") from error
    keys = [f"{part}.{key}" for part, names in _UNSUPPORTED.items() for key in names if data.get(part, {}).get(key)]
    keys += ["verifier.environment_mode"] * (data.get("verifier", {}).get("environment_mode") == "separate")
    keys += ["steps"] * bool(data.get("steps"))
    if keys:
        raise ConfigError(f"{folder / 'task.toml'}: {', '.join(keys)}: not supported by _type: harbor")
    files = {path.name for path in folder.glob("environment/*")}
    if "docker-compose.yaml" in files:
        raise ConfigError(f"task {folder}: environment/docker-compose.yaml is not supported by _type: harbor")
    if "Dockerfile" not in files and (files or settings.environment.docker_image is None):
        allowed = "environment/Dockerfile, or [environment] docker_image and no files there"
        raise ConfigError(f"task {folder} has no image; expected {allowed}")
    if not (folder / _TEST).is_file():
        raise ConfigError(f"task {folder} has no {_TEST}")
    return Task(name, folder, instruction, settings)


class HarborDatasetConfig(DatasetConfig, name="harbor"):
    """The tasks of a folder: a row has the name of its task, its instruction, metadata, and the digest of its files."""

    tasks: Path | None = None
    """Folder of tasks, that of the workflow or one below it; none: that of the workflow."""
    skip: int = Field(default=0, ge=0)
    """How many tasks to leave out, in the order of their names."""
    limit: int | None = Field(default=None, ge=1)
    """How many tasks to take; none: all others."""

    def read(self, config: Config) -> list[Task]:
        """Raises ConfigError if the workflow has no tasks, or none in this folder."""
        tasks = getattr(config.blocks.get((FUNCTION.section, WORKFLOW)), "tasks", None)
        if tasks is None:
            raise ConfigError("eval.general.dataset: _type: harbor needs a workflow of _type: harbor")
        root = config.find_path(tasks, "workflow.tasks").resolve()
        folder = config.find_path(self.tasks or tasks, "eval.general.dataset.tasks").resolve()
        if not folder.is_relative_to(root):
            raise ConfigError(f"eval.general.dataset.tasks: {folder} is not in the folder of workflow.tasks: {root}")
        return read_tasks(folder, root)[self.skip : None if self.limit is None else self.skip + self.limit]


@register_dataset_loader(config_type=HarborDatasetConfig)
def task_rows(block: HarborDatasetConfig, config: Config) -> Iterator[dict[str, Any]]:
    for task in block.read(config):
        row = {block.id_key: task.name, block.structure.question_key: task.instruction}
        yield {**row, "task": task.name, "metadata": task.settings.metadata, "sha256": task.digest()}
