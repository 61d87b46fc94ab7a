"""Test-time compute: sampling several drafts, and scoring them."""

import asyncio

from nat.builder.builder import Builder
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.cli.register_workflow import register_ttc_strategy
from nat.data_models.component_ref import LLMRef
from nat.data_models.ttc_strategy import TTCStrategyBaseConfig
from nat.experimental.test_time_compute.models.stage_enums import PipelineTypeEnum, StageTypeEnum
from nat.experimental.test_time_compute.models.strategy_base import StrategyBase
from nat.experimental.test_time_compute.models.ttc_item import TTCItem
from pydantic import Field


class DraftSearchConfig(TTCStrategyBaseConfig, name="desk_draft_search"):
    """Samples several drafts concurrently."""

    llm_name: LLMRef = Field(description="The model that drafts.")


class DraftSearch(StrategyBase):
    def __init__(self, config: DraftSearchConfig) -> None:
        super().__init__(config)
        self.llm = None

    async def build_components(self, builder: Builder) -> None:
        self.llm = await builder.get_llm(self.config.llm_name, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    def supported_pipeline_types(self) -> list[PipelineTypeEnum]:
        return [PipelineTypeEnum.PLANNING, PipelineTypeEnum.AGENT_EXECUTION]

    def stage_type(self) -> StageTypeEnum:
        return StageTypeEnum.SEARCH

    async def ainvoke(
        self, items: list[TTCItem], original_prompt: str | None = None, agent_context: str | None = None, **kwargs
    ) -> list[TTCItem]:
        prompts = [item.input for item in items for _ in range(kwargs["drafts"])]
        answers = await asyncio.gather(*(self.llm.ainvoke(prompt) for prompt in prompts))
        return [
            TTCItem(input=prompt, output=answer.content, name=f"draft {i}", metadata={"place": i}, seen_by="search")
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]


class DigitScoringConfig(TTCStrategyBaseConfig, name="desk_digit_scoring"):
    """Likes large digits."""


class DigitScoring(StrategyBase):
    async def build_components(self, builder: Builder) -> None:
        pass

    def supported_pipeline_types(self) -> list[PipelineTypeEnum]:
        return [PipelineTypeEnum.AGENT_EXECUTION]

    def stage_type(self) -> StageTypeEnum:
        return StageTypeEnum.SCORING

    async def ainvoke(
        self, items: list[TTCItem], original_prompt: str | None = None, agent_context: str | None = None, **kwargs
    ) -> list[TTCItem]:
        for item in items:
            digits = [int(c) for c in item.output if c in "0123456789"]
            item.score = sum(digits) / len(digits) / 9 if digits else 0.0
        return items


@register_ttc_strategy(config_type=DraftSearchConfig)
async def draft_search(config: DraftSearchConfig, builder: Builder):
    yield DraftSearch(config)


@register_ttc_strategy(config_type=DigitScoringConfig)
async def digit_scoring(config: DigitScoringConfig, builder: Builder):
    yield DigitScoring(config)
