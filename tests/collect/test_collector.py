"""The collector: a plan of rows x generations becomes scored groups, each with its last episode."""

from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_parts  # noqa: F401 - registers the workflow and the evaluator
import pytest

from insitu.collect.collector import Plan, collect
from insitu.collect.datasets import load_dataset
from insitu.collect.episodes import EpisodeOptions
from insitu.collect.evaluators import Scoring
from insitu.collect.shared_run import RunState
from insitu.config import Config, load_config
from insitu.plugin_api import Builder
from insitu.schemas.episodes import Episode, EpisodeKey, EpisodeStatus
from insitu.schemas.evaluation import EvalOutputItem
from insitu.schemas.finetuning import RewardFunctionConfig
from insitu.schemas.groups import GroupRecord

ROWS = ("good", "raise no idea", "fine")
GENERATIONS = 2


@pytest.fixture
def config(write: Any, tmp_path: Path) -> Config:
    write([{"id": f"row {i}", "question": text, "answer": text.upper()} for i, text in enumerate(ROWS)], "rows.jsonl")
    general = {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}}
    evaluation = {"general": general, "evaluators": {"exact": {"_type": "judge"}}}
    return load_config(write({"workflow": {"_type": "parts"}, "eval": evaluation}))


@pytest.fixture
def plan(config: Config) -> Plan:
    members = [(row, generation) for row in load_dataset(config) for generation in range(GENERATIONS)]
    scoring = Scoring(["exact"], RewardFunctionConfig(name="exact"))
    return Plan("run", 1, members, EpisodeOptions(), limit=1, scoring=scoring, rewarded=True)


async def collected(config: Config, plan: Plan, *, seen: list[str]) -> list[GroupRecord]:
    """All groups; `seen` gets the episodes and the groups in the order in which they come."""
    groups = []
    async with Builder(config) as builder:
        on_episode = lambda episode: seen.append(episode.key.text())  # noqa: E731
        async with aclosing(collect(plan, builder, RunState.of(builder), on_episode)) as completed:
            async for group in completed:
                seen.append(group.row_id)
                groups.append(group)
    return groups


async def test_a_group_comes_with_its_last_episode_scored_and_with_its_drops(config: Config, plan: Plan) -> None:
    seen: list[str] = []
    groups = await collected(config, plan, seen=seen)
    expected: list[str] = []
    for number in range(len(ROWS)):
        expected += [*(f"run/1/row {number}/{generation}/0" for generation in range(GENERATIONS)), f"row {number}"]
    assert seen == expected
    assert [[episode.scores for episode in group.episodes] for group in groups] == [
        [{"exact": 1.0}] * GENERATIONS,
        [{}] * GENERATIONS,
        [{"exact": 1.0}] * GENERATIONS,
    ]
    drops = [Counter(no_calls=GENERATIONS), Counter(workflow_error=GENERATIONS), Counter(no_calls=GENERATIONS)]
    assert [group.dropped for group in groups] == drops  # the agent calls no model


@pytest.mark.parametrize("returned", [ZeroDivisionError("by 0"), None])
async def test_a_builder_that_computes_no_reward_costs_its_episodes(
    config: Config, plan: Plan, returned: Exception | None
) -> None:
    async def compute(scored: EvalOutputItem) -> float:
        if isinstance(returned, Exception):
            raise returned
        return returned  # type: ignore[return-value]

    assert plan.scoring is not None
    plan = replace(plan, scoring=replace(plan.scoring, compute_reward=compute))
    groups = await collected(config, plan, seen=[])
    reasons = [episode.reason for group in groups for episode in group.episodes]
    assert Counter(reasons) == {"evaluator_error": 2 * GENERATIONS, "workflow_error": GENERATIONS}
    said = "compute_reward: ZeroDivisionError: by 0" if returned else "compute_reward: TypeError: float() argument"
    assert str(groups[0].episodes[0].error).startswith(said)


async def test_finished_episodes_are_not_run_again(config: Config, plan: Plan) -> None:
    kept = Episode(EpisodeKey("run", 1, "row 2", 1), EpisodeStatus.OK, output="kept", reward=0.5)
    seen: list[str] = []
    groups = await collected(config, replace(plan, finished=[kept]), seen=seen)
    assert kept.key.text() in seen
    assert len([name for name in seen if "/" in name]) == len(plan.members)
    assert [episode.output for episode in groups[-1].episodes] == ["FINE", "kept"]


async def test_pairs_take_the_place_of_trajectories(config: Config, plan: Plan) -> None:
    pairs = lambda group: group._replace(row_id=f"pairs of {group.row_id}")  # noqa: E731
    groups = await collected(config, replace(plan, pairs=pairs, rewarded=False), seen=[])
    assert [group.row_id for group in groups] == [f"pairs of row {number}" for number in range(len(ROWS))]
    assert [group.dropped for group in groups] == [Counter(), Counter(workflow_error=GENERATIONS), Counter()]
