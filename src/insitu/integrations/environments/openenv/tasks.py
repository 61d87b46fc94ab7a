"""The tasks that an OpenEnv environment makes from seeds, as a dataset, and a project that trains on them.

eval: {general: {dataset: {_type: openenv, episodes: 64}}}
"""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from insitu.collect.datasets import DatasetConfig
from insitu.config import Config
from insitu.errors import ConfigError
from insitu.registry import register_dataset_loader
from insitu.starter import EnvironmentProject

_EPISODES = 64


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
    """The blocks of a file for the server at a URL, or for MODULE:CLASS. Raises ConfigError for anything else."""
    if re.match("https?://", what):
        server, needs = "url", "The server must run when you train."
    elif re.fullmatch(r"[\w.]+:\w+", what):
        server, needs = "class", "The class is served by a separate process; its module must be installed or be here."
    else:
        raise ConfigError(f"--environment openenv:{what}: expected a URL, http://HOST:PORT, or a class, MODULE:CLASS")
    return EnvironmentProject(
        workflow={"_type": "openenv", server: what, "model": "student", "no_reward": 0},
        dataset={"_type": "openenv", "episodes": _EPISODES},
        evaluator={"_type": "openenv"},
        extra="openenv",
        about=(
            f"{needs} The rows are {_EPISODES} seeds, of which the environment makes its tasks. An environment without "
            "MCP tools whose actions are not one text needs `action: MODULE:NAME` in the block `workflow`, a function "
            "of the model's text that returns the action. An episode in which the environment gives no reward has "
            "`no_reward`."
        ),
    )
