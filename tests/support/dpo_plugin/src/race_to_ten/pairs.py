"""A trajectory builder that counts its evaluations, and leaves the pairs to the one that it is derived from."""

import logging

from nat.builder.builder import Builder
from nat.cli.register_workflow import register_trajectory_builder
from nat.eval.config import EvaluationRunOutput
from nat.plugins.customizer.dpo.config import DPOTrajectoryBuilderConfig
from nat.plugins.customizer.dpo.trajectory_builder import DPOTrajectoryBuilder

logger = logging.getLogger(__name__)


class CountedPairsConfig(DPOTrajectoryBuilderConfig, name="race_counted_pairs"):
    """Pairs of scored moves."""


class CountedPairs(DPOTrajectoryBuilder):
    async def run_eval(self) -> EvaluationRunOutput:
        output = await super().run_eval()
        logger.warning("evaluated %d games", len(output.eval_input.eval_input_items))
        return output


@register_trajectory_builder(config_type=CountedPairsConfig)
async def counted_pairs(config: CountedPairsConfig, builder: Builder):
    yield CountedPairs(trajectory_builder_config=config)
