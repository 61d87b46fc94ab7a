"""The tasksets of verifiers, and their tasks as the rows of a dataset.

dataset: {_type: verifiers}                                       # of the workflow's taskset
dataset: {_type: verifiers, taskset: {id: gsm8k}, skip: 100, limit: 50}
"""

import importlib.util
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, Field, ValidationError

from insitu.collect.datasets import DatasetConfig
from insitu.config import Config
from insitu.config.code import make_importable
from insitu.errors import ConfigError, first_problem, needing
from insitu.registry import register_dataset_loader
from insitu.schemas.components import WORKFLOW
from insitu.schemas.kinds import FUNCTION


def _check_id(value: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value.get("id"), str) or not value["id"]:
        raise ValueError("id is missing: the name of an installed taskset, or of a module in the file's folder")
    return value


TasksetSettings = Annotated[dict[str, Any], AfterValidator(_check_id)]
"""The `id` of a taskset, and its own settings."""


def check_verifiers() -> None:
    """Raises ConfigError if verifiers is missing, or too old."""
    with needing("verifiers", "_type: verifiers"):
        installed = version("verifiers")
    if tuple(int(part) for part in installed.split(".")[:2]) < (0, 4):
        raise ConfigError(f"verifiers {installed} is too old: insitu runs tasksets of verifiers.v1, from 0.4 on")


def taskset_type(settings: Mapping[str, Any], folder: Path | None) -> Any:
    """The class of a taskset, which is installed or in `folder`. Raises ConfigError if it is neither, or not of
    verifiers.v1."""
    check_verifiers()
    from verifiers.v1.utils.loaders import taskset_class

    if folder is not None:
        make_importable(folder)
    name = settings["id"]
    try:
        return taskset_class(name)
    except Exception as error:  # the import of a package may raise anything
        if _has_load_environment(name):
            problem = f"taskset {name!r} has load_environment, which verifiers 0.4 has removed"
            advice = "it needs a release of its package for verifiers.v1 (a Taskset in __all__)"
            raise ConfigError(f"{problem}: {advice}") from error
        raise ConfigError(f"taskset {name!r} cannot be loaded: {error}") from error


def module_of(name: str) -> str:
    """The module of a taskset: verifiers finds `owner/my-taskset@1.0` in the module `my_taskset`."""
    return name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower()


def _has_load_environment(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(module_of(name))
    except (ImportError, ValueError):
        return False
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    return origin is not None and origin.is_file() and b"def load_environment(" in origin.read_bytes()


class VerifiersDatasetConfig(DatasetConfig, name="verifiers"):
    """The tasks of a taskset of verifiers: a row has its position, its prompt, and in the column `task` its data."""

    taskset: TasksetSettings | None = None
    """The taskset's `id` and settings; none: that of the workflow."""
    shuffle: int | None = None
    """Seed to shuffle the tasks with; none: in the taskset's order."""
    skip: int = Field(default=0, ge=0)
    """How many tasks to leave out, after shuffling."""
    limit: int | None = Field(default=None, ge=1)
    """How many tasks to take; required for a taskset without end."""

    def settings(self, config: Config) -> dict[str, Any]:
        """Raises ConfigError if neither the block nor the workflow names a taskset."""
        taskset = self.taskset or getattr(config.blocks.get((FUNCTION.section, WORKFLOW)), "taskset", None)
        if taskset is None:
            raise ConfigError("eval.general.dataset.taskset is missing, and the workflow is not of _type verifiers")
        return dict(taskset)

    def origin(self, config: Config) -> dict[str, Any]:
        name = self.settings(config)["id"]
        module = taskset_type(self.settings(config), config.folder).__module__.partition(".")[0]
        packages = {"verifiers", *packages_distributions().get(module, ())}
        return {"taskset": name, "packages": {package: version(package) for package in sorted(packages)}}


@register_dataset_loader(config_type=VerifiersDatasetConfig)
def verifiers_rows(block: VerifiersDatasetConfig, config: Config) -> Iterator[dict[str, Any]]:
    settings = orjson.dumps(block.settings(config), option=orjson.OPT_SORT_KEYS, default=str)
    yield from _rows(settings, config.folder, block.shuffle, block.skip, block.limit)


@lru_cache(maxsize=8)
def _rows(taskset: bytes, folder: Path, shuffle: int | None, skip: int, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a taskset, which a run reads several times: some are downloaded or computed."""
    settings = orjson.loads(taskset)
    kind = taskset_type(settings, folder)
    from verifiers.v1.utils.loaders import taskset_config_type

    try:
        tasks = kind(taskset_config_type(settings["id"]).model_validate(settings))
    except ValidationError as error:
        raise ConfigError(f"taskset {settings['id']!r}: {first_problem(error)}") from error
    if not tasks.bounded and limit is None:
        raise ConfigError(f"taskset {settings['id']!r} has no end: set eval.general.dataset.limit")
    if shuffle is not None:
        tasks = (tasks if tasks.bounded else tasks.take(skip + (limit or 0))).shuffle(shuffle)
    tasks = tasks.skip(skip)
    return [_row(task.data) for task in (tasks if limit is None else tasks.take(limit))]


def _row(data: Any) -> dict[str, Any]:
    task = data.model_dump(mode="json")
    answer = {"answer": task["answer"]} if "answer" in task else {}
    return {"id": data.idx, "question": data.prompt_text or data.name or "", **answer, "task": task}
