"""An episode of a taskset of verifiers, and the evaluator that reads its reward.

workflow: {_type: verifiers, taskset: {id: gsm8k}, model: student}
evaluators: {reward: {_type: verifiers}}
"""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from insitu.builder import Builder
from insitu.collect.outcomes import OutcomeConfig, outcome_score
from insitu.errors import BackendUnavailable, ConfigError, EpisodeTimeout, WorkflowError, first_problem
from insitu.gateway.agents import episode_endpoint
from insitu.gateway.endpoint import EpisodeEndpoint
from insitu.gateway.server import Gateway, GatewayConfig
from insitu.integrations.environments.verifiers.tasksets import TasksetSettings, taskset_type
from insitu.registry import register_evaluator
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.schemas.evaluation import Outcome
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo, register_function

_OWN = "insitu"
_TRANSIENT = ("ProviderError", "InterceptionError", "TunnelError")
"""Errors of verifiers after which another attempt may succeed, if they have no status or that of one."""
_LOST = re.compile(
    r": (Connect\w*|ReadTimeout|ReadError|RemoteProtocolError): | timed out$"
    r"|\(code: (CAPACITY_REACHED|FACTORY_ERROR|SESSION_ERROR)\)"
)
"""What verifiers says of an environment that has lost a server, or got no session, as its reader of OpenEnv may."""


class VerifiersConfig(FunctionBaseConfig, name="verifiers"):
    """A taskset of verifiers. Its tasks are the rows of a dataset of `_type: verifiers`."""

    taskset: TasksetSettings
    """The `id` of the taskset, an installed package or a module in the file's folder, and the taskset's settings."""
    model: LLMRef
    """The model that the harness calls."""
    harness: str | dict[str, Any] | None = None
    """The name of a harness of verifiers, such as `bash`, or its `id` and settings; none: that of the taskset's package
    if it has one, else `insitu`, a chat loop with tools in this process."""
    runtime: dict[str, Any] = Field(default_factory=lambda: {"type": "subprocess"})
    """Where verifiers runs programs of the harness and the task: its `type` and settings."""
    max_turns: int | None = Field(default=16, ge=1)
    """Limit of model calls in an episode, which is then scored as it is; none: no limit."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The gateway that verifiers calls instead of the model server."""


class VerifiersScoreConfig(OutcomeConfig, name="verifiers"):
    """The reward that the taskset has given to the episode; its parts and metrics by name."""


register_evaluator(config_type=VerifiersScoreConfig)(outcome_score)


def make_environment(config: VerifiersConfig, folder: Path, max_retries: int) -> Any:
    """verifiers' environment of the taskset; each of its agents gets the harness and the runtime of `config`."""
    taskset_type(config.taskset, folder)
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

    from insitu.integrations.environments.verifiers.harness import HARNESS_ID

    name = config.taskset["id"]
    harness = {"id": config.harness} if isinstance(config.harness, str) else dict(config.harness or {})
    if not harness:
        bundled = default_harness_id(name)
        harness["id"] = bundled if bundled != "bash" else _OWN
    if harness.get("id") == _OWN:
        harness = {"max_retries": max_retries, **harness, "id": HARNESS_ID}
    agent = {"harness": harness, "runtime": config.runtime, "max_turns": config.max_turns}
    fields = env_config_type(name).model_fields
    roles = [role for role, field in fields.items() if isinstance(field.default, AgentConfig)]
    try:
        return load_environment(resolve_env_config({"taskset": config.taskset, **dict.fromkeys(roles, agent)}))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"workflow: verifiers refuses taskset {name!r}: {first_problem(error)}") from error


@register_function(config_type=VerifiersConfig)
async def verifiers_workflow(config: VerifiersConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.model)
    environment = make_environment(config, builder.config.folder, llm.config.max_retries)
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    kind = environment.taskset.task_type()

    async def run(value: Any) -> dict[str, Any]:
        row = Context.get().row
        if not isinstance(row, dict) or "task" not in row:
            raise WorkflowError("the row has no column `task`: use a dataset of _type: verifiers")
        task = kind(kind.data_type().model_validate(row["task"]), environment.taskset.config.task)
        with episode_endpoint(gateway) as endpoint:
            episode = await environment.run_episode(
                task, model, on_trace=lambda trace: gateway.add_session(endpoint, trace.id)
            )
            return outcome_of(episode, endpoint).model_dump()

    async with Gateway([llm], bind=config.gateway) as gateway, environment.serving():
        # one address for all episodes: verifiers keeps an HTTP client for each that it has seen
        client = EvalClientConfig(base_url=gateway.session_url, api_key_var="INSITU_GATEWAY")
        model = ModelContext(model=llm.model, client=client)
        yield FunctionInfo.from_fn(run, description=f"Runs tasks of {config.taskset['id']}")


def outcome_of(episode: Any, endpoint: EpisodeEndpoint) -> Outcome:
    """What the trace of an episode says. Raises an error if the episode or its scoring has failed.

    verifiers gives such an episode the reward 0.
    """
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    if not episode.ok:
        error = errors[-1] if errors else None
        said = f"{error.type}: {error.message}" if error is not None else "verifiers says that it has failed"
        status = getattr(error, "status_code", None)
        if error is not None and endpoint.failure is None:
            is_transient = error.type in _TRANSIENT and (status is None or status == 429 or status >= 500)
            if is_transient or (error.type == "EnvError" and _LOST.search(error.message)):
                raise BackendUnavailable(said)
        raise endpoint.error(said)
    if len(episode.traces) != 1:
        raise WorkflowError(f"the environment has run {len(episode.traces)} agents; only one is supported")
    (trace,) = episode.traces
    if trace.is_timeout and trace.stop_condition != "agent_timeout":  # the task has a limit, and is scored after it
        raise EpisodeTimeout(f"the environment ended with {trace.stop_condition}")
    if not trace.num_turns:
        raise WorkflowError("the harness has made no model call")
    if unscored := [name for name, reward in trace.rewards.items() if reward is None] or not trace.rewards:
        raise WorkflowError(f"the taskset has not scored the episode: {unscored or 'it has no rewards'}")
    try:
        return Outcome(
            answer=trace.last_reply,
            reward=trace.reward,
            rewards={name: reward.value for name, reward in trace.rewards.items()},
            metrics={
                "turns": trace.num_turns,
                "truncated": float(trace.is_truncated),
                **{name: value for name, value in trace.metrics.items() if value is not None},
            },
            step_rewards=trace.info.get("step_rewards"),
        )
    except ValidationError as error:
        problem = "the rewards of the taskset are not numbers that can be used"
        raise WorkflowError(f"{problem}: {first_problem(error)}") from error
