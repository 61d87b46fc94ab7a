"""An evaluator that looks at the candidates of a turn."""

from nat.builder.builder import EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.intermediate_step import IntermediateStepCategory, IntermediateStepState, TTCEventData
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
