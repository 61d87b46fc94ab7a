"""Evaluators that look at what the workflow did, step by step."""

from nat.builder.builder import EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.intermediate_step import IntermediateStepCategory, IntermediateStepState, TTCEventData
from nat.eval.evaluator.base_evaluator import BaseEvaluator
from nat.eval.evaluator.evaluator_model import EvalInputItem, EvalOutputItem
from pydantic import Field


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


class RecordConfig(EvaluatorBaseConfig, name="desk_record_audit"):
    """Whether the desk's record of an answer is right."""

    topic_key: str = Field(default="topic", description="The column of the dataset that holds the topic.")


@register_evaluator(config_type=DraftQualityConfig)
async def draft_quality(config: DraftQualityConfig, builder: EvalBuilder):
    evaluator = DraftQuality(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Quality of the chosen draft")


@register_evaluator(config_type=RecordConfig)
async def record_audit(config: RecordConfig, builder: EvalBuilder):
    class Audit(BaseEvaluator):
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            [end] = [s for s in item.trajectory if s.event_type == "CUSTOM_END" and s.name == "desk_record"]
            [start] = [s for s in item.trajectory if s.UUID == end.UUID and s is not end]
            topic = item.full_dataset_entry[config.topic_key]
            if topic == "unreadable":
                raise ValueError(f"no audit of {item.input_obj}")
            reasoning = {
                "topic": topic,
                "record": end.metadata,
                "said": start.data.words,
                "function_id": end.function_ancestry.function_id,
                "expected": item.expected_output_obj,
                "answer": item.output_obj.text,
            }
            return EvalOutputItem(
                id=item.id, score=float(end.metadata["words"] == len(start.data.words)), reasoning=reasoning
            )

    evaluator = Audit(max_concurrency=builder.get_max_concurrency(), tqdm_desc="Auditing")
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Audit of the record")
