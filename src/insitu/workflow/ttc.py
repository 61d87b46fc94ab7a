"""Strategies that spend test-time compute: each makes some candidates out of others.

best = await builder.get_ttc_strategy("best", PipelineTypeEnum.PLANNING, StageTypeEnum.SELECTION)
[chosen] = await best.ainvoke([TTCItem(output="a1", score=0.2), TTCItem(output="b2", score=0.8)])
"""

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from insitu.builder import Builder
from insitu.errors import WorkflowError
from insitu.registry import register_ttc_strategy
from insitu.schemas.components import TTCStrategyBaseConfig
from insitu.schemas.ttc import PipelineTypeEnum, StageTypeEnum, TTCItem


class StrategyBase(ABC):
    """A strategy. `builder.get_ttc_strategy` sets its `pipeline_type`, then calls `build_components`, once."""

    def __init__(self, config: TTCStrategyBaseConfig) -> None:
        self.config = config
        self.pipeline_type: PipelineTypeEnum | None = None

    @abstractmethod
    async def build_components(self, builder: Builder) -> None:
        """Get the models and functions the strategy needs."""

    @abstractmethod
    async def ainvoke(
        self,
        items: list[TTCItem],
        original_prompt: str | None = None,
        agent_context: str | None = None,
        **kwargs: Any,
    ) -> list[TTCItem]:
        """The candidates made out of `items`."""

    @abstractmethod
    def supported_pipeline_types(self) -> list[PipelineTypeEnum]:
        """What its candidates may be for."""

    @abstractmethod
    def stage_type(self) -> StageTypeEnum:
        """What it does with candidates."""

    def set_pipeline_type(self, pipeline_type: PipelineTypeEnum) -> None:
        """Say what the candidates are for."""
        self.pipeline_type = pipeline_type


class BestOfNSelectionConfig(TTCStrategyBaseConfig, name="best_of_n_selection"):
    """Chooses the candidate with the highest score; of equals, the first."""


class BestOfNSelection(StrategyBase):
    """Candidates without a score are passed over; WorkflowError if none has one."""

    async def build_components(self, builder: Builder) -> None:
        pass

    async def ainvoke(
        self,
        items: list[TTCItem],
        original_prompt: str | None = None,
        agent_context: str | None = None,
        **kwargs: Any,
    ) -> list[TTCItem]:
        scored = [(item.score, item) for item in items if item.score is not None and not math.isnan(item.score)]
        if not scored:
            raise WorkflowError(f"best_of_n_selection: none of {len(items)} candidates has a score to choose by")
        return [max(scored, key=lambda pair: pair[0])[1]]

    def supported_pipeline_types(self) -> list[PipelineTypeEnum]:
        return list(PipelineTypeEnum)

    def stage_type(self) -> StageTypeEnum:
        return StageTypeEnum.SELECTION


@register_ttc_strategy(config_type=BestOfNSelectionConfig)
async def best_of_n_selection(config: BestOfNSelectionConfig, builder: Builder) -> AsyncIterator[BestOfNSelection]:
    yield BestOfNSelection(config)
