"""The workflow, rows and scores of a task of inspect_ai.

    workflow: {_type: inspect, task: "tasks.py@sums", model: student, workers: 4}
    eval:
      general: {dataset: {_type: inspect}}
      evaluators: {reward: {_type: inspect}}

An episode is one sample of the task. Its solvers ask the model at an endpoint of a gateway, its scorers give the
reward.
"""

import json
import math
from collections.abc import AsyncIterator, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, field_validator

from insitu.builder import Builder
from insitu.collect.datasets import DatasetConfig
from insitu.collect.outcomes import OutcomeConfig, outcome_score
from insitu.config import Config
from insitu.disk.files import writable_folder
from insitu.disk.temporary import temporary_folder
from insitu.errors import ConfigError, EpisodeTimeout, WorkflowError
from insitu.gateway.agents import episode_endpoint
from insitu.gateway.endpoint import EpisodeEndpoint
from insitu.gateway.server import Gateway, GatewayConfig
from insitu.integrations.environments.inspect.pool import WorkerPool, command, describe
from insitu.registry import register_dataset_loader, register_evaluator
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.schemas.evaluation import Outcome
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo, register_function

_OURS = {"tasks", "model", "model_roles", "epochs", "fail_on_error", "max_samples", "max_connections", "log_dir"}
_OURS |= {"log_realtime", "log_model_api", "display", "score_display", "ctl_server", "sample_id", "limit"}
"""Arguments of `inspect_ai.eval` that the worker sets."""


class InspectConfig(FunctionBaseConfig, name="inspect"):
    """A task of inspect_ai, of which each episode is a sample."""

    task: str
    """`FILE.py@TASK`, or `MODULE_OR_PACKAGE/TASK`, such as `inspect_evals/gsm8k`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task."""
    model: LLMRef
    """The model that the task evaluates."""
    roles: dict[str, LLMRef] = Field(default_factory=dict)
    """Models by their role in the task, such as `grader`."""
    workers: int = Field(default=1, ge=1)
    """Processes that samples run in; each runs as many at once as there are."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `inspect_ai.eval`, such as `message_limit`."""
    on_limit: Literal["fail", "score"] = "fail"
    """What happens to an episode that reaches a limit of the task other than its time: it fails, or it gets the score
    that inspect gives it."""
    python: Path | None = None
    """The interpreter of an environment with inspect_ai and the packages of the task, relative to the folder of the
    YAML file; none: that of insitu."""
    logs: Path | None = None
    """Folder for inspect's logs, one per worker, relative to the working directory; none: they are not kept."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The gateway that the task calls instead of the model's server."""

    @field_validator("options")
    @classmethod
    def _are_free(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(options.keys() & _OURS):
            raise ValueError(f"{', '.join(taken)}: set by insitu; allowed: other arguments of inspect_ai.eval")
        return options

    def check_columns(self, columns: Collection[str]) -> None:
        if "id" not in columns:
            raise ValueError("task: its rows have the ids of samples; use dataset: {_type: inspect}")

    def interpreter(self, config: Config) -> Path | None:
        return self.python and config.folder / self.python

    def settings(self, config: Config) -> dict[str, Any]:
        """What a worker needs to load the task."""
        seed, folder = config.general.seed, str(config.folder.resolve())
        return {"task": self.task, "args": self.args, "folder": folder, "seed": seed}


def description(block: InspectConfig, config: Config) -> dict[str, Any]:
    """The rows, scores and epochs of the task; it is loaded once. Raises ConfigError if it cannot be."""
    return _description(block.interpreter(config), json.dumps(block.settings(config)))


@cache
def _description(python: Path | None, settings: str) -> dict[str, Any]:
    return describe(python, json.loads(settings))


class InspectDatasetConfig(DatasetConfig, name="inspect"):
    """The samples of the task of `workflow`."""

    limit: NonNegativeInt | tuple[NonNegativeInt, NonNegativeInt] | None = None
    """How many samples, or the positions of the first one and of the one after the last; none: all."""

    @field_validator("limit")
    @classmethod
    def _is_a_range(cls, limit: int | tuple[int, int] | None) -> int | tuple[int, int] | None:
        if limit is not None and not (limit > 0 if isinstance(limit, int) else limit[0] < limit[1]):
            raise ValueError("allowed: at least 1, or [FIRST, END] with FIRST below END")
        return limit

    def origin(self, config: Config) -> dict[str, Any]:
        block = task_block(config)
        return {"task": block.task, "args": block.args, "inspect_ai": description(block, config)["inspect_ai"]}


@register_dataset_loader(config_type=InspectDatasetConfig)
def samples(block: InspectDatasetConfig, config: Config) -> Iterator[dict[str, Any]]:
    start, end = (0, block.limit) if isinstance(block.limit, int | None) else block.limit
    yield from description(task_block(config), config)["rows"][start:end]


def task_block(config: Config) -> InspectConfig:
    """The block of the file that runs a task. Raises ConfigError if there is not one."""
    blocks = [block for block in config.blocks.values() if isinstance(block, InspectConfig)]
    if len(blocks) != 1:
        raise ConfigError(f"{config.source}: _type: inspect needs one workflow of _type inspect; it has {len(blocks)}")
    return blocks[0]


@register_function(config_type=InspectConfig)
async def inspect_task(config: InspectConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    whole, timeout = builder.config, builder.config.eval.episode_timeout
    llms = [await builder.get_llm(name) for name in dict.fromkeys((config.model, *config.roles.values()))]
    trained = whole.trained_llms()

    async def run(value: Any) -> dict[str, Any]:
        context = Context.get()
        with episode_endpoint(gateway) as endpoint:
            request = {
                "id": str(context.row_id),
                "question": value,
                "url": endpoint.openai_url,
                "unscored_llms": sorted(trained) if context.is_training else [],
            }
            return _outcome(await pool.evaluate(request), endpoint, config)

    python, most, logs = config.interpreter(whole), {}, None
    if config.logs is not None:
        logs, most = writable_folder(whole.working_dir / config.logs, "workflow.logs"), {"most_samples": math.inf}
    async with temporary_folder() as folder:
        settings = {
            **config.settings(whole),
            "llm": config.model,
            "roles": config.roles,
            "options": config.options,
            "capacity": whole.max_concurrency,
            "time_limit": None if timeout is None else math.ceil(timeout),
            "logs": str(logs or folder),
        }
        async with (
            Gateway(llms, bind=config.gateway) as gateway,
            WorkerPool(command(python, "run", settings), config.workers, folder, **most).open() as pool,
        ):
            yield FunctionInfo.from_fn(run, description=f"Runs {config.task}")


def _outcome(result: dict[str, Any], endpoint: EpisodeEndpoint, config: InspectConfig) -> dict[str, Any]:
    """Raises WorkflowError for a sample that inspect has not scored with a number."""
    where, limit = f"{config.task}, sample {Context.get().row_id!r}", result.get("limit")
    if (error := result["error"]) is not None:
        raise endpoint.error(f"{where}: {error}")
    if limit is not None:
        message = f"{where}: it reached its limit of {limit['type']}: {limit['limit']:g}"
        if limit["type"] in ("time", "working"):
            raise EpisodeTimeout(message)
        if config.on_limit == "fail":
            raise WorkflowError(message)
    scores, names = result["scores"], result["names"]
    if not names:
        raise WorkflowError(f"{where}: the task has given no score; it needs a scorer")
    first = next((value for key, value in scores.items() if key.split("/")[0] == names[0]), None)
    if first is None:
        raise WorkflowError(f"{where}: the value of the score {names[0]} is not a number")
    metrics = {"messages": float(result["messages"])}
    return Outcome(answer=result["answer"], reward=first, rewards=scores, metrics=metrics).model_dump()


class InspectScoreConfig(OutcomeConfig, name="inspect"):
    """The score of the task of `workflow`, or one of several, by its name: `part: SCORER`."""


register_evaluator(config_type=InspectScoreConfig)(outcome_score)
