"""An evaluator for the agent in JavaScript: 1 if the answer has the expected colour."""

from insitu.plugin_api import (
    BaseEvaluator,
    EvalInputItem,
    EvalOutputItem,
    EvaluatorBaseConfig,
    EvaluatorInfo,
    register_evaluator,
)


class ColourConfig(EvaluatorBaseConfig, name="colour"):
    """1 if the answer has the expected colour, otherwise 0."""


class Colour(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=float(item.expected_output_obj in item.output_obj))


@register_evaluator(config_type=ColourConfig)
async def colour(config, builder):
    yield EvaluatorInfo(config=config, evaluate_fn=Colour().evaluate)
