"""Test-time compute: candidates, the strategy interface, and `best_of_n_selection`.

best = await builder.get_ttc_strategy("best", PipelineTypeEnum.PLANNING, StageTypeEnum.SELECTION)
[chosen] = await best.ainvoke([TTCItem(output="a1", score=0.2), TTCItem(output="b2", score=0.8)])
"""

import math
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from insitu.builder import Builder
from insitu.errors import WorkflowError
from insitu.registry import register_ttc_strategy
from insitu.schemas.components import TTCStrategyBaseConfig

__all__ = ["PipelineTypeEnum", "StageTypeEnum", "StrategyBase", "TTCItem"]


class StageTypeEnum(StrEnum):
    """The stage a strategy implements."""

    SEARCH = "search"
    EDITING = "editing"
    SCORING = "scoring"
    SELECTION = "selection"
    CUSTOM = "custom"


class PipelineTypeEnum(StrEnum):
    """The pipeline a strategy is used in."""

    PLANNING = "planning"
    TOOL_USE = "tool_use"
    AGENT_EXECUTION = "agent_execution"
    CUSTOM = "custom"


class TTCItem(BaseModel):
    """A candidate. Unknown keys are kept."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    input: Any = None
    output: Any = None
    plan: Any = None
    feedback: str | None = None
    score: float | None = None
    metadata: dict[str, Any] | None = None
    name: str | None = None


class StrategyBase(ABC):
    """Base class of strategies.

    `builder.get_ttc_strategy` sets `pipeline_type`, then calls `build_components` once.
    """

    def __init__(self, config: TTCStrategyBaseConfig) -> None:
        self.config = config
        self.pipeline_type: PipelineTypeEnum | None = None

    @abstractmethod
    async def build_components(self, builder: Builder) -> None:
        """Fetches the models and functions the strategy needs."""

    @abstractmethod
    async def ainvoke(
        self, items: list[TTCItem], original_prompt: str | None = None, agent_context: str | None = None, **kwargs: Any
    ) -> list[TTCItem]:
        """Returns the candidates derived from `items`."""

    @abstractmethod
    def supported_pipeline_types(self) -> list[PipelineTypeEnum]: ...

    @abstractmethod
    def stage_type(self) -> StageTypeEnum: ...

    def set_pipeline_type(self, pipeline_type: PipelineTypeEnum) -> None:
        self.pipeline_type = pipeline_type


class BuiltInStrategy(StrategyBase):
    """A strategy for any pipeline; needs no components by default."""

    stage: ClassVar[StageTypeEnum]

    def __init__(self, config: TTCStrategyBaseConfig, builder: Builder | None = None) -> None:
        super().__init__(config)

    async def build_components(self, builder: Builder) -> None:
        pass

    def supported_pipeline_types(self) -> list[PipelineTypeEnum]:
        return list(PipelineTypeEnum)

    def stage_type(self) -> StageTypeEnum:
        return self.stage


class BestOfNSelectionConfig(TTCStrategyBaseConfig, name="best_of_n_selection"):
    """Selects the candidate with the highest score, the first one in a tie."""


@register_ttc_strategy(config_type=BestOfNSelectionConfig)
class BestOfNSelection(BuiltInStrategy):
    """Ignores candidates without a score; raises WorkflowError if none has one."""

    stage = StageTypeEnum.SELECTION

    async def ainvoke(self, items: list[TTCItem], *args: Any, **kwargs: Any) -> list[TTCItem]:
        scored = [(item.score, item) for item in items if item.score is not None and not math.isnan(item.score)]
        if not scored:
            raise WorkflowError(f"best_of_n_selection: none of {len(items)} candidates has a score")
        return [max(scored, key=lambda pair: pair[0])[1]]
