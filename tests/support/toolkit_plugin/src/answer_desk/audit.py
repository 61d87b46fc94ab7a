"""An evaluator that checks the desk's own record, by the newer spelling of the paths."""

from nat.builder.builder import EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.invocation_node import InvocationNode
from nat.plugins.eval.data_models.evaluator_io import EvalInputItem, EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator
from pydantic import Field


class RecordConfig(EvaluatorBaseConfig, name="desk_record_audit"):
    """Whether the desk's record of an answer is right."""

    topic_key: str = Field(default="topic", description="The column of the dataset that holds the topic.")


class RecordAudit(BaseEvaluator):
    def __init__(self, config: RecordConfig, max_concurrency: int) -> None:
        super().__init__(max_concurrency=max_concurrency, tqdm_desc="Auditing")
        self.config = config

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        [end] = [s for s in item.trajectory if s.event_type == "CUSTOM_END" and s.name == "desk_record"]
        [start] = [s for s in item.trajectory if s.UUID == end.UUID and s is not end]
        function: InvocationNode = end.function_ancestry
        topic = item.full_dataset_entry[self.config.topic_key]
        if topic == "unreadable":
            raise ValueError(f"no audit of {item.input_obj}")
        reasoning = {
            "topic": topic,
            "record": end.metadata,
            "said": start.data.words,
            "function_id": function.function_id,
            "expected": item.expected_output_obj,
            "answer": item.output_obj.text,
        }
        right = end.metadata["words"] == len(start.data.words)
        return EvalOutputItem(id=item.id, score=1.0 if right else 0.0, reasoning=reasoning)


@register_evaluator(config_type=RecordConfig)
async def record_audit(config: RecordConfig, builder: EvalBuilder):
    evaluator = RecordAudit(config, builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Audit of the record")
