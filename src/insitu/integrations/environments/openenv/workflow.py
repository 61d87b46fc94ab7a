"""An OpenEnv environment as a workflow, and the evaluator that reads its reward.

workflow: {_type: openenv, url: "http://127.0.0.1:8000", model: student}
evaluators: {reward: {_type: openenv}}
"""

import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from math import fsum
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from insitu.builder import Builder
from insitu.collect.outcomes import OutcomeConfig, outcome_score
from insitu.config import Config
from insitu.config.code import call_with, called, load_code
from insitu.errors import ConfigError, WorkflowError, a_type
from insitu.gateway.server import Address
from insitu.gateway.templates import check_placeholders, filled, template_texts
from insitu.integrations.environments.openenv.sessions import EnvironmentServer, Observation, Session
from insitu.integrations.environments.tool_loop import Message, converse, run_tools
from insitu.registry import register_evaluator
from insitu.schemas.components import CodeRef, FunctionBaseConfig, LLMRef
from insitu.schemas.evaluation import Number, Outcome
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo, register_function
from insitu.workflow.llms import ModelClient
from insitu.workflow.programs import inherited_environment

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessage

_TOOL_FIELDS = frozenset(("type", "tool_name", "arguments"))
"""The fields of actions that are calls of MCP tools; the general action, which has none, is such a call as well."""
_SEED_BITS = 2**31 - 1
"""Environments pass seeds to generators that take 32 bits."""
_SERVED_CLASS = "insitu.integrations.environments.openenv.served_class"


class OpenEnvConfig(FunctionBaseConfig, name="openenv"):
    """An environment of OpenEnv. Each episode is a session of its server: what `reset` returns is the first message to
    the model, each answer of the model is a step, and the episode ends when the environment is done. Environments with
    MCP tools give them to the model."""

    model: LLMRef
    """The model that acts."""
    url: Address | None = None
    """URL of a running server."""
    command: list[str] | None = Field(default=None, min_length=1)
    """Command that starts a server for the run, in place of `url`; `{port}` is replaced by a free port, which is in the
    variable PORT as well. It runs in the folder of the YAML file."""
    class_: str | None = Field(default=None, alias="class", pattern=r"^[\w.]+:\w+$")
    """An environment class as MODULE:CLASS, which is served for the run by a separate process, in place of `url`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of a server that is started."""
    pass_env: list[str] = Field(default_factory=list)
    """Environment variables that it gets besides those that every program needs, such as PATH and LANG."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of requests to the server, such as `Authorization`."""
    sessions: int | None = Field(default=None, ge=1)
    """Sessions open at once; none: as many as the server allows, which it says when it refuses one. Episodes wait for
    a session within their `episode_timeout`."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `reset`; in its texts, `{column}` is replaced by the row's value. `seed` is the row's `seed`, if it
    has that column, or the episode's."""
    system: str | None = None
    """A system message for the model."""
    message: CodeRef | None = None
    """A function of an observation (a mapping) that returns the text for the model, as MODULE:NAME or FILE.py:NAME;
    none: the observation's only text, or all of it as JSON."""
    action: CodeRef | None = None
    """A function of the model's text, with `observation` and `row` as optional parameters, that returns the action (a
    mapping); none: the tools of an MCP environment, or the action's only field, if that is text."""
    reward: Literal["sum", "last"] = "sum"
    """The episode's reward: the sum of the rewards of its steps, or the last one. They are step rewards in any case."""
    no_reward: Number | None = None
    """Reward of an episode in which the environment has given none, such as one in which the model stops before the
    environment is done; none: it has failed."""
    max_turns: int = Field(default=32, ge=1)
    """Answers of the model after which the episode ends, even if the environment is not done."""
    timeout: float = Field(default=60, gt=0)
    """Seconds for the server to answer a `reset` or a step; then the episode is tried again."""
    patience: float = Field(default=120, gt=0)
    """Seconds for a server to start, to be reached again after the run has begun, and to have a session left while no
    episode is at work with it."""

    @model_validator(mode="after")
    def _has_one_server(self) -> Self:
        if [self.url, self.command, self.class_].count(None) != 2:
            raise ValueError("set one of url, command and class")
        [*template_texts(self.reset, "reset")]
        return self

    def check_columns(self, columns: Collection[str]) -> None:
        for where, text in template_texts(self.reset, "reset"):
            check_placeholders(text, where, [*columns, "row_id"])


class OpenEnvScoreConfig(OutcomeConfig, name="openenv"):
    """The reward that an OpenEnv environment has given."""


register_evaluator(config_type=OpenEnvScoreConfig)(outcome_score)


class Play:
    """An episode: what the environment has answered, and its rewards by answer of the model."""

    def __init__(
        self, config: OpenEnvConfig, session: Session, first: Observation, to_text: Callable[..., Any]
    ) -> None:
        self.state = first
        self.steps = 0
        self.answer: str | None = None
        self.rewards: list[list[float]] = []
        self._config, self._session, self._to_text = config, session, to_text

    async def text(self) -> Any:
        """The latest observation as a text for the model."""
        return await called(self._to_text, self.state.observation)

    async def on_turn(self, message: "ChatCompletionMessage") -> None:
        self.rewards.append([])
        self.answer = message.content or self.answer

    async def step(self, action: Any) -> Observation:
        if not isinstance(action, dict):
            raise WorkflowError(f"workflow.action returned {a_type(action)}; it must return a mapping, the action")
        self.state = await self._session.step(action)
        self.steps += 1
        if self.state.reward is not None:
            self.rewards[-1].append(self.state.reward)
        return self.state

    async def act(
        self, to_action: Callable[..., Any], row: Mapping[str, Any], message: "ChatCompletionMessage"
    ) -> list[Message]:
        """The next observation for the model; none if the action that it has chosen ends the episode."""
        await self.on_turn(message)
        offered = {"observation": self.state.observation, "row": row}
        state = await self.step(await called(partial(call_with, to_action, message.content or "", **offered)))
        return [] if state.done else [{"role": "user", "content": await self.text()}]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str | None:
        """The result of a tool of the environment; None if that ends the episode."""
        state = await self.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
        return None if state.done else tool_text(state.observation)

    def outcome(self) -> Outcome:
        """Raises WorkflowError if the environment has given no reward, and the file says of none what it is."""
        rewards = [reward for turn in self.rewards for reward in turn]
        steps = [fsum(turn) for turn in self.rewards]
        if rewards:
            reward = fsum(rewards) if self._config.reward == "sum" else rewards[-1]
        elif self._config.no_reward is not None:
            reward = self._config.no_reward
            steps = [*steps[:-1], reward] if steps else []
        else:
            problem = "is done" if self.state.done else f"is not done after {len(steps)} answers of the model"
            raise WorkflowError(f"the environment {problem} and has given no reward; set no_reward to have it count")
        metrics = {"turns": float(len(steps)), "steps": float(self.steps), "done": float(self.state.done)}
        return Outcome(answer=self.answer, reward=reward, metrics=metrics, step_rewards=steps)


def text_of(observation: dict[str, Any]) -> str:
    """The only text of an observation, or its fields as JSON; empty ones and `metadata` are left out."""
    fields = {key: value for key, value in observation.items() if key != "metadata" and value not in (None, "", [], {})}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def tool_text(observation: dict[str, Any]) -> str:
    """The result of a tool as a text for the model: the texts of its content, its value, or its error."""
    if error := observation.get("error"):
        return f"error: {error.get('message') if isinstance(error, dict) else error}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(content := result.get("content"), list):
        return "\n".join(part["text"] if "text" in part else json.dumps(part) for part in content)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def tools_of(observation: dict[str, Any]) -> list[Message]:
    """The tools that an environment lists, as the model's API describes them."""
    keys = ("name", "description", "parameters")
    tools = [(each["name"], each.get("description", ""), each["input_schema"]) for each in observation["tools"]]
    return [{"type": "function", "function": dict(zip(keys, tool, strict=True))} for tool in tools]


def action_of_schema(schema: dict[str, Any], url: str | None) -> Callable[[str], dict[str, Any]] | None:
    """The function that puts the model's text into an action's only field; None if actions are calls of tools.

    Raises ConfigError if there are other fields.
    """
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    if fields.keys() <= _TOOL_FIELDS:
        return None
    needed = [name for name in schema.get("required", ()) if name in fields] or [*fields]
    if len(needed) != 1 or fields[needed[0]].get("type") != "string":
        kinds = ", ".join(f"{name} ({field.get('type', 'any')})" for name, field in fields.items()) or "none"
        problem = f"an action at {url} has the fields {kinds}, not one text"
        advice = "name a function of the model's text that returns the action, such as my_agent:to_action"
        raise ConfigError(f"workflow.action is missing: {problem}; {advice}")
    return lambda text: {needed[0]: text}


def server_of(config: OpenEnvConfig, file: Config) -> EnvironmentServer:
    """The server of a workflow, not started yet."""
    command = [*(config.command or ())]
    if config.class_ is not None:
        limit = str(config.sessions or file.max_concurrency)
        command = [sys.executable, "-m", _SERVED_CLASS, config.class_, "{port}", limit]
    if missing := [name for name in config.pass_env if name not in os.environ]:
        raise ConfigError(f"workflow.pass_env names {', '.join(missing)}: no such environment variable")
    variables = {**inherited_environment(config.pass_env), **config.env}
    limits = config.sessions, config.timeout, config.patience
    return EnvironmentServer(config.url, command, variables, file.folder, config.headers, *limits)


@register_function(config_type=OpenEnvConfig)
async def openenv_environment(config: OpenEnvConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    model: ModelClient = await builder.get_llm(config.model)
    folder = builder.config.folder
    to_text = load_code(config.message, "workflow.message", folder) if config.message is not None else text_of
    to_action = load_code(config.action, "workflow.action", folder) if config.action is not None else None
    async with server_of(config, builder.config).open() as server:
        schema = await server.action_schema()
        to_action = to_action or action_of_schema(schema, server.url)

        async def run(question: Any) -> dict[str, Any]:
            context = Context.get()
            row = context.row if isinstance(context.row, dict) else {}
            arguments = {"seed": row.get("seed", context.seed & _SEED_BITS)}
            arguments |= filled(config.reset, {**row, "row_id": context.row_id or ""}, "workflow.reset")
            async with server.session(arguments) as (session, first):
                play = Play(config, session, first, to_text)
                texts = [str(text) for text in (question, await play.text()) if text]
                messages = [{"role": "system", "content": config.system}] if config.system else []
                messages.append({"role": "user", "content": "\n\n".join(texts)})
                if to_action is None:
                    tools = tools_of((await session.step({"type": "list_tools"})).observation)
                    await run_tools(model, messages, tools, play.call_tool, config.max_turns, play.on_turn)
                elif not first.done:
                    await converse(model, messages, partial(play.act, to_action, row), config.max_turns)
                return play.outcome().model_dump()

        yield FunctionInfo.from_fn(run, description=f"An episode of {config.url or config.class_ or server.command}")
