"""Preference pairs from real episodes: candidates sampled and scored by strategies, and the best and worst of a row."""

import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tiny_backend import Served

from insitu.config import load_config
from insitu.errors import ConfigError
from insitu.plugin_api import (
    BaseEvaluator,
    Builder,
    DPOItem,
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationRunOutput,
    EvaluatorBaseConfig,
    EvaluatorInfo,
    FunctionBaseConfig,
    IntermediateStep,
    IntermediateStepPayload,
    InvocationNode,
    LLMRef,
    PipelineTypeEnum,
    StageTypeEnum,
    TTCEventData,
    TTCItem,
    TTCStrategyRef,
    register_evaluator,
    register_function,
)
from insitu.preferences.candidates import Targets, candidates_of
from insitu.preferences.pairs import PairOptions, preference_pairs
from insitu.schemas.finetuning import FinetuneConfig, TrajectoryCollection
from insitu.training.preference_builders import DPOTrajectoryBuilder, DPOTrajectoryBuilderConfig

ROWS = 2


class SearchConfig(FunctionBaseConfig, name="preference_search"):
    strategies: list[TTCStrategyRef]
    turns: int = 2


@register_function(config_type=SearchConfig)
async def preference_search(config: SearchConfig, builder: Builder) -> AsyncIterator[Any]:
    stages = (StageTypeEnum.SEARCH, StageTypeEnum.SCORING, StageTypeEnum.SELECTION)
    search, judge, best = [
        await builder.get_ttc_strategy(name, PipelineTypeEnum.AGENT_EXECUTION, stage)
        for name, stage in zip(config.strategies, stages, strict=True)
    ]

    async def answer(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        for _ in range(config.turns):
            candidates = await judge.ainvoke(await search.ainvoke([TTCItem(input=list(messages))]))
            [chosen] = await best.ainvoke(candidates)
            messages += [{"role": "assistant", "content": chosen.output}, {"role": "user", "content": "again"}]
        return str(chosen.output)

    yield answer


class CharactersConfig(FunctionBaseConfig, name="preference_characters"):
    pass


@register_function(config_type=CharactersConfig)
async def preference_characters(config: CharactersConfig, builder: Builder) -> AsyncIterator[Any]:
    async def score(text: str) -> float:
        return float(sum(text.encode()) % 101)

    yield score


class AskConfig(FunctionBaseConfig, name="preference_ask"):
    llm: LLMRef


@register_function(config_type=AskConfig)
async def preference_ask(config: AskConfig, builder: Builder) -> AsyncIterator[Any]:
    llm = await builder.get_llm(config.llm)

    async def ask(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        for _ in range(2):
            completion = await llm.complete(messages)
            messages += [
                {"role": "assistant", "content": completion.choices[0].message.content},
                {"role": "user", "content": "again"},
            ]
        return str(messages[-2]["content"])

    yield ask


class JudgeConfig(EvaluatorBaseConfig, name="preference_judge"):
    """Scores the expected answer's length and the characters of the output."""


class Judge(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        assert item.expected_output_obj == "sure"
        return EvalOutputItem(id=item.id, score=float(sum(str(item.output_obj).encode()) % 101))


@register_evaluator(config_type=JudgeConfig)
async def preference_judge(config: JudgeConfig, builder: Any) -> AsyncIterator[EvaluatorInfo]:
    yield EvaluatorInfo(config=config, evaluate_fn=Judge().evaluate, description="sums characters")


def file(served: Served, builder: dict[str, Any], **changes: Any) -> dict[str, Any]:
    model = {"_type": "openai", "base_url": f"{served.address}/v1", "api_key": "t", "model_name": "policy"}
    return {
        "llms": {"player": model | {"max_tokens": 3}},
        "functions": {"characters": {"_type": "preference_characters"}},
        "ttc_strategies": {
            "sample": {"_type": "sample_candidates", "llm": "player", "n": 3},
            "judge": {"_type": "score_candidates", "function": "characters"},
            "best": {"_type": "best_of_n_selection"},
        },
        "workflow": {"_type": "preference_search", "strategies": ["sample", "judge", "best"]},
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
            "evaluators": {"score": {"_type": "preference_judge"}},
        },
        "trajectory_builders": {"pairs": builder},
        "trainer_adapters": {"a": {"_type": "insitu_trainer_adapter", "url": served.address, "api_key": "t"}},
        "trainers": {"t": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "pairs",
            "trainer_adapter": "a",
            "target_model": "player",
        },
        **changes,
    }


async def collected(write: Any, content: dict[str, Any]) -> TrajectoryCollection:
    write([{"id": f"r{i}", "question": f"row {i}", "answer": "sure"} for i in range(ROWS)], "rows.jsonl")
    config = load_config(write(content))
    async with Builder(config) as builder:
        made = await builder.get_trajectory_builder("pairs")
        await made.initialize(config.finetuning)
        await made.start_run("run", {"epoch": 1})
        return await made.finalize("run")


def sampled(served: Served, since: int) -> set[tuple[int, ...]]:
    return {tuple(s["prompt_token_ids"] + s["token_ids"]) for s in served.samples()[since:]}


@pytest.mark.parametrize("requests", ["one", "each"])
@pytest.mark.parametrize("scorer", [{"function": "characters"}, {"evaluator": "score"}], ids=["function", "evaluator"])
async def test_candidates_become_pairs_of_what_was_sampled(
    write: Any, served: Served, requests: str, scorer: dict[str, str]
) -> None:
    before = len(served.samples())
    content = file(served, {"_type": "dpo_traj_builder"})
    content["ttc_strategies"]["sample"]["requests"] = requests
    content["ttc_strategies"]["judge"] = {"_type": "score_candidates", **scorer}
    collection = await collected(write, content)
    assert len(served.samples()) - before == ROWS * 2 * 3
    pairs = [trajectory for group in collection.trajectories for trajectory in group]
    dropped = {"equal_scores", "identical_responses"}
    assert len(pairs) + sum(collection.dropped.get(name, 0) for name in dropped) == ROWS * 2 * 3
    assert collection.dropped.keys() <= dropped
    tokens = sampled(served, before)
    for pair in pairs:
        [item] = pair.episode
        assert pair.reward == pair.metadata["score_diff"] > 0
        length = 1 if pair.metadata["turn_index"] == 0 else 3
        assert [m.role for m in item.prompt] == ["user", "assistant", "user"][:length]
        chosen, rejected = pair.rows
        assert (chosen.preferred, rejected.preferred) == (True, False)
        assert chosen.pair == rejected.pair == pair.id
        assert {tuple(row.token_ids) for row in pair.rows} <= tokens
        prompts = {tuple(t for t, m in zip(r.token_ids, r.loss_mask, strict=True) if not m) for r in pair.rows}
        assert len(prompts) == 1
    assert len({(p.metadata["row_id"], p.metadata["turn_id"]) for p in pairs}) == ROWS * 2


def evaluated(*scores: float) -> EvaluationRunOutput:
    """The output of an evaluation of one row with a turn of candidates with these scores."""
    steps = [
        IntermediateStep(
            payload=IntermediateStepPayload(
                event_type="TTC_END",
                name="dpo_candidate_move",
                metadata={"provided_metadata": {"place": k}},
                data=TTCEventData(turn_id="t", candidate_index=k, input="2 + 2 =", output=str(k), score=score),
            ),
            function_ancestry=InvocationNode(function_id="f", function_name="adder"),
        )
        for k, score in enumerate(scores)
    ]
    item = EvalInputItem(id="row 1", input_obj="2 + 2 =", output_obj="4", trajectory=steps)
    scored = EvalOutput(average_score=1.0, eval_output_items=[EvalOutputItem(id="row 1", score=1.0)])
    return EvaluationRunOutput(eval_input=EvalInput(eval_input_items=[item]), evaluation_results=[("score", scored)])


class OwnEvaluation(DPOTrajectoryBuilder):
    async def run_eval(self) -> EvaluationRunOutput:
        return evaluated(0.0, 1.0)


async def test_a_builder_is_tested_alone_as_documented() -> None:
    """The extending guide replaces `run_eval`, and calls the rest outside a run."""
    replaced = DPOTrajectoryBuilder(trajectory_builder_config=DPOTrajectoryBuilderConfig())
    replaced.run_eval = OwnEvaluation.run_eval.__get__(replaced)  # type: ignore[method-assign]
    for builder in (replaced, OwnEvaluation(DPOTrajectoryBuilderConfig())):
        await builder.initialize(FinetuneConfig(reward_function={"name": "score"}))
        await builder.start_run("test-run")
        assert "test-run" in builder.evaluation_runs
        collection = await builder.finalize("test-run")
        assert isinstance(collection, TrajectoryCollection)
        assert builder.evaluation_runs == {}
        [[pair]] = collection.trajectories
        assert pair.episode == [DPOItem(prompt="2 + 2 =", chosen_response="1", rejected_response="0")]
        assert pair.metadata["dpo_type"] == "preference_pair"
        assert (pair.metadata["example_id"], pair.metadata["turn_id"]) == ("row 1", "t")


async def test_the_documented_fields_of_candidates_and_pairs() -> None:
    [item] = evaluated(0.0, 1.0).eval_input.eval_input_items
    targets = Targets([], ["<workflow>"], text=True)
    candidates, _ = candidates_of(item.trajectory, [], "dpo_candidate_move", targets)
    [pair], _ = preference_pairs([replace(c, example_id="row 1") for c in candidates], PairOptions())
    assert (pair.example_id, pair.turn_id, pair.prompt) == ("row 1", "t", "2 + 2 =")
    assert (pair.chosen_response, pair.rejected_response, pair.score_diff) == ("1", "0", 1.0)
    assert [c.raw_metadata["provided_metadata"]["place"] for c in (pair.chosen, pair.rejected)] == [1, 0]


async def test_the_best_and_the_worst_episode_of_a_row_are_a_pair(write: Any, served: Served) -> None:
    before = len(served.samples())
    content = file(served, {"_type": "dpo_from_groups", "num_generations": 4})
    content["workflow"] = {"_type": "preference_ask", "llm": "player"}
    content["finetuning"]["reward_function"] = {"name": "score"}
    collection = await collected(write, content)
    pairs = [trajectory for group in collection.trajectories for trajectory in group]
    assert len(pairs) == ROWS
    tokens = sampled(served, before)
    for pair in pairs:
        [item] = pair.episode
        assert [m.content for m in item.prompt] == [f"row {pair.metadata['row_id'][1:]}"]
        assert item.chosen_response.count("\n\nuser: again\n\nassistant: ") == 1
        assert pair.reward == pair.metadata["chosen_score"] - pair.metadata["rejected_score"] > 0
        assert Counter(row.preferred for row in pair.rows).keys() == {True, False}
        last = [
            max((r for r in pair.rows if r.preferred is side), key=lambda r: len(r.token_ids)) for side in (True, False)
        ]
        assert {tuple(row.token_ids) for row in last} <= tokens


async def test_no_candidates_is_a_reason_with_the_names_that_were_found(
    write: Any, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    content = file(served, {"_type": "dpo_traj_builder", "ttc_step_name": "moves"})
    with caplog.at_level(logging.WARNING):
        collection = await collected(write, content)
    assert (collection.trajectories, collection.dropped) == ([], {"no_candidates": ROWS})
    expected = "no step TTC_END is named 'moves' (ttc_step_name); those of this episode are named dpo_candidate_move"
    assert expected in caplog.text


async def test_pairs_are_no_episodes_for_the_trainer_of_grpo(write: Any, served: Served) -> None:
    write([{"id": "r", "question": "row"}], "rows.jsonl")
    async with Builder(load_config(write(file(served, {"_type": "dpo_traj_builder"})))) as builder:
        parts = await builder.get_trajectory_builder("pairs"), await builder.get_trainer_adapter("a")
        with pytest.raises(
            ConfigError, match="dpo_traj_builder makes preference pairs, but insitu_trainer trains episodes"
        ):
            await builder.get_trainer("t", *parts)
