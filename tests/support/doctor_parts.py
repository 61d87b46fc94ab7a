"""Agents and scores for tests of `insitu doctor`: a healthy one of each, and sick ones."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from typing import Any

import insitu
from insitu.integrations.nat.base_parser import parse_to_openai_messages
from insitu.plugin_api import (
    Builder,
    EpisodeItem,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
    register_trajectory_builder,
)

_count = itertools.count()
_asked: list[str] = []
_HANGS = 3
"""After those that are played before: a run plays a row first."""


async def ask(question: str, model: insitu.Model) -> str:
    return await model.ask(question)


async def by_own_client(question: str, model: insitu.Model) -> str:
    """Asks the server of the policy, past insitu."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=os.environ["POLICY"] + "/v1", api_key="t") as client:
        messages: Any = [{"role": "user", "content": question}]
        return (await client.chat.completions.create(model="policy", messages=messages)).choices[
            0
        ].message.content or ""


async def converse(question: str, model: insitu.Model) -> str:
    return await _talk(question, model, lambda answer: answer)


async def rewrite(question: str, model: insitu.Model) -> str:
    return await _talk(question, model, lambda answer: f"I said: {answer}")


async def _talk(question: str, model: insitu.Model, kept: Any) -> str:
    first = await model.ask([{"role": "user", "content": question}])
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": kept(first)}]
    return await model.ask([*messages, {"role": "user", "content": question}])


async def fail(question: str, model: insitu.Model) -> str:
    raise ValueError(f"no idea: {await model.ask(question)!r}")


async def hang(question: str, model: insitu.Model) -> str:
    await asyncio.Event().wait()
    return question


async def hang_once(question: str, model: insitu.Model) -> str:
    """In one of a row's first four episodes."""
    _asked.append(question)
    if _asked.count(question) == _HANGS:
        await asyncio.Event().wait()
    return await model.ask(question, max_tokens=4)


async def silent(question: str, model: insitu.Model) -> None:
    await model.ask(question)


async def elaborate(question: str, model: insitu.Model) -> str:
    return await model.ask(question * 200)


def score(answer: str) -> float:
    """Scores the last digit of the answer, as a share of 9."""
    return int(next((c for c in reversed(answer) if c.isdigit()), 0)) / 9


def distinct(answer: str) -> float:
    """From 10 to 11."""
    return 10 + sum(answer.encode()) % 97 / 100


def always_half(answer: str) -> float:
    return 0.5


def by_row(answer: str, row: insitu.Row) -> float:
    return row["id"] / 10


def moody(answer: str) -> float:
    return score(answer) + next(_count)


def broken(answer: str) -> float:
    raise KeyError("expected")


def not_a_number(answer: str) -> float:
    return float("nan")


class ThreeEvaluationsConfig(TrajectoryBuilderConfig, name="three_evaluations"):
    pass


class ThreeEvaluations(TrajectoryBuilder):
    """A builder as plugins for the toolkit have them: each evaluation is a generation of every row."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        self.runs = [asyncio.create_task(self.run_eval()) for _ in range(3)]

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        groups: dict[str, list[Trajectory]] = {}
        for output in await asyncio.gather(*self.runs):
            scores = {item.id: item for item in output.evaluation_results[0][1].eval_output_items}
            for item in output.eval_input.eval_input_items:
                messages = [
                    EpisodeItem(role=m["role"], content=m["content"], logprobs=m.get("logprobs"))
                    for m in parse_to_openai_messages(item.trajectory)
                ]
                trajectory = Trajectory(episode=messages, reward=await self.compute_reward(scores[item.id]))
                groups.setdefault(str(item.id), []).append(trajectory)
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None: ...


@register_trajectory_builder(config_type=ThreeEvaluationsConfig)
async def three_evaluations(config: ThreeEvaluationsConfig, builder: Builder) -> AsyncIterator[ThreeEvaluations]:
    yield ThreeEvaluations(config)
