"""The workflow, in which both players choose among scored candidates, and the evaluator of its result."""

from nat.builder.builder import Builder
from nat.builder.context import Context
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import TTCStrategyRef
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.data_models.intermediate_step import IntermediateStepPayload, IntermediateStepType, TTCEventData
from nat.eval.evaluator.base_evaluator import BaseEvaluator
from nat.eval.evaluator.evaluator_model import EvalInputItem, EvalOutputItem
from nat.experimental.test_time_compute.models.stage_enums import PipelineTypeEnum, StageTypeEnum
from pydantic import Field

from .moves import GOAL, move_in


class RaceConfig(FunctionBaseConfig, name="race_to_ten"):
    """Plays one game from the total that a row names."""

    first: TTCStrategyRef = Field(description="Makes the moves of the first player.")
    second: TTCStrategyRef = Field(description="Makes the moves of the second player.")
    scorer: TTCStrategyRef = Field(description="Scores moves.")
    selector: TTCStrategyRef = Field(description="Picks the move that is played.")


@register_function(config_type=RaceConfig)
async def race_to_ten(config: RaceConfig, builder: Builder):
    async def strategy(name, stage):
        return await builder.get_ttc_strategy(
            strategy_name=name, pipeline_type=PipelineTypeEnum.AGENT_EXECUTION, stage_type=stage
        )

    players = [await strategy(name, StageTypeEnum.SEARCH) for name in (config.first, config.second)]
    scorer = await strategy(config.scorer, StageTypeEnum.SCORING)
    selector = await strategy(config.selector, StageTypeEnum.SELECTION)

    async def play(start: str) -> str:
        """Plays a game and says who has won."""
        total, turn = int(start), 0
        while total < GOAL:
            prompt = f"The total is {total}. Add 1, 2 or 3."
            candidates = await players[turn % 2].ainvoke([], original_prompt=prompt)
            candidates = await scorer.ainvoke(candidates, original_prompt=prompt, total=total)
            [best] = await selector.ainvoke(candidates)
            for index, item in enumerate(candidates):
                Context.get().intermediate_step_manager.push_intermediate_step(
                    IntermediateStepPayload(
                        event_type=IntermediateStepType.TTC_END,
                        name="dpo_candidate_move",
                        metadata={"player": turn % 2},
                        data=TTCEventData(
                            turn_id=f"turn {turn}",
                            turn_index=turn,
                            candidate_index=index,
                            input=prompt,
                            output=item.output,
                            score=item.score,
                        ),
                    )
                )
            total += move_in(best.output) or 1
            turn += 1
        return "first" if turn % 2 else "second"

    yield FunctionInfo.from_fn(play, description="Plays a game and says who has won.")


class WinnerConfig(EvaluatorBaseConfig, name="race_winner"):
    """1 if the first player has won."""


class Winner(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=float(item.output_obj == "first"), reasoning=item.output_obj)


@register_evaluator(config_type=WinnerConfig)
async def race_winner(config: WinnerConfig, builder: Builder):
    evaluator = Winner(max_concurrency=builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Who has won")
