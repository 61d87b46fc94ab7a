"""The tasks that an OpenEnv environment makes from seeds, as a dataset, and a project that trains on them.

eval: {general: {dataset: {_type: openenv, episodes: 64}}}
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field, ValidationError

from insitu.collect.datasets import DatasetConfig
from insitu.config import Config
from insitu.errors import ConfigError, InsituError, first_problem
from insitu.integrations.environments.openenv.workflow import OpenEnvConfig, action_of_schema, server_of
from insitu.registry import register_dataset_loader
from insitu.starter import EnvironmentProject

_EPISODES = 64
_CHECK = {"timeout": 10.0, "patience": 60.0}


class OpenEnvTasksConfig(DatasetConfig, name="openenv"):
    """Tasks that an OpenEnv environment makes from seeds. Each row is a seed."""

    episodes: int = Field(ge=1)
    """Number of rows."""
    first_seed: int = Field(default=0, ge=0)
    """The seed of the first row; the others follow. Another one, after the last, gives the rows of a validation."""


@register_dataset_loader(config_type=OpenEnvTasksConfig)
def tasks(block: OpenEnvTasksConfig, config: Config) -> Iterator[dict[str, Any]]:
    for seed in range(block.first_seed, block.first_seed + block.episodes):
        yield {block.id_key: seed, block.structure.question_key: "", "seed": seed}


def project(what: str) -> EnvironmentProject:
    """The blocks of a file for the server at a URL, or for MODULE:CLASS.

    Raises ConfigError for anything else, if no OpenEnv server answers there, or if the class cannot be served.
    """
    workflow: dict[str, Any] = {"model": "student", "no_reward": 0}
    if re.match("https?://", what):
        workflow["url"], needs = what, "The server must run when you train."
    elif re.fullmatch(r"[\w.]+:\w+", what):
        workflow["class"], needs = what, "The class is served by a separate process."
        module = Path(*what.partition(":")[0].split("."))
        if module.is_dir() or module.with_suffix(".py").is_file():  # the project is in another folder
            workflow["env"] = {"PYTHONPATH": str(Path.cwd())}
    else:
        raise ConfigError(f"--environment openenv:{what}: expected a URL, http://HOST:PORT, or a class, MODULE:CLASS")
    try:
        needs += asyncio.run(_check(OpenEnvConfig.model_validate(workflow)))
    except (ValidationError, InsituError) as error:
        raise ConfigError(f"--environment openenv:{what}: {first_problem(error)}") from error
    return EnvironmentProject(
        workflow=workflow,
        dataset={"episodes": _EPISODES},
        about=(
            f"{needs} The rows are {_EPISODES} seeds, of which the environment makes its tasks. An episode in which it "
            "gives no reward has `no_reward`."
        ),
    )


async def _check(config: OpenEnvConfig) -> str:
    """What is missing in the block of a server that answers. Raises BackendUnavailable if it does not."""
    with TemporaryDirectory() as empty:
        async with server_of(config.model_copy(update=_CHECK), Config(folder=Path(empty))).open() as server:
            try:
                action_of_schema(await server.action_schema(), server.url)
            except ConfigError as error:
                return f" Before you start: {error}."
    return ""
