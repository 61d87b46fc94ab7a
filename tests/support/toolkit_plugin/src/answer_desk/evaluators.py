"""Evaluators that look at what happened: at the candidates of a turn, and at the tools that were called."""

from nat.builder.builder import EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.intermediate_step import (
    IntermediateStepCategory,
    IntermediateStepState,
    IntermediateStepType,
    TTCEventData,
)
from nat.eval.evaluator.base_evaluator import BaseEvaluator
from nat.eval.evaluator.evaluator_model import EvalInputItem, EvalOutputItem


class DraftQualityConfig(EvaluatorBaseConfig, name="desk_draft_quality"):
    """The score of the draft that was chosen."""


class DraftQuality(BaseEvaluator):
    def __init__(self, max_concurrency: int) -> None:
        super().__init__(max_concurrency=max_concurrency, tqdm_desc="Judging drafts")

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        candidates = [
            step.payload
            for step in item.trajectory
            if step.event_category == IntermediateStepCategory.TTC and step.event_state == IntermediateStepState.END
        ]
        chosen = [p.data for p in candidates if p.metadata["chosen"] and isinstance(p.data, TTCEventData)]
        reasoning = {"candidates": len(candidates), "turns": len({p.data.turn_id for p in candidates})}
        return EvalOutputItem(id=item.id, score=chosen[0].score, reasoning=reasoning)


@register_evaluator(config_type=DraftQualityConfig)
async def draft_quality(config: DraftQualityConfig, builder: EvalBuilder):
    evaluator = DraftQuality(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Quality of the chosen draft")


class ToolUseConfig(EvaluatorBaseConfig, name="desk_tool_use"):
    """How much an agent has looked up, and how much it has said."""

    enough: int = 4


class ToolUse(BaseEvaluator):
    def __init__(self, max_concurrency: int, enough: int) -> None:
        super().__init__(max_concurrency=max_concurrency, tqdm_desc="Counting tools")
        self.enough = enough

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        ended = [step for step in item.trajectory if step.event_type == IntermediateStepType.TOOL_END]
        names = [step.name for step in ended]
        said = len(str(item.output_obj)) % 10 / 100
        return EvalOutputItem(id=item.id, score=min(len(names) / self.enough, 1.0) + said, reasoning={"tools": names})


@register_evaluator(config_type=ToolUseConfig)
async def tool_use(config: ToolUseConfig, builder: EvalBuilder):
    evaluator = ToolUse(builder.get_max_concurrency(), config.enough)
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Tools that were called")
