"""Drafts several answers, and reports each as a candidate of the turn before it picks the best."""

import uuid

from nat.builder.builder import Builder
from nat.builder.context import Context
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.component_ref import TTCStrategyRef
from nat.data_models.function import FunctionBaseConfig
from nat.data_models.intermediate_step import IntermediateStepPayload, IntermediateStepType, TTCEventData
from nat.experimental.test_time_compute.models.stage_enums import PipelineTypeEnum, StageTypeEnum
from nat.experimental.test_time_compute.models.ttc_item import TTCItem
from pydantic import Field

from .models import Draft, Question


class DraftingConfig(FunctionBaseConfig, name="desk_drafting"):
    """Drafts several answers and picks the best."""

    search: TTCStrategyRef = Field(description="Makes the drafts.")
    scoring: TTCStrategyRef = Field(description="Scores them.")
    selection: TTCStrategyRef = Field(description="Picks one.")


@register_function(config_type=DraftingConfig)
async def desk_drafting(config: DraftingConfig, builder: Builder):
    async def strategy(name: str, stage: StageTypeEnum):
        return await builder.get_ttc_strategy(
            strategy_name=name, pipeline_type=PipelineTypeEnum.AGENT_EXECUTION, stage_type=stage
        )

    search = await strategy(config.search, StageTypeEnum.SEARCH)
    scoring = await strategy(config.scoring, StageTypeEnum.SCORING)
    selection = await strategy(config.selection, StageTypeEnum.SELECTION)

    async def _draft(question: Question) -> Draft:
        turn_id = str(uuid.uuid4())
        items = await search.ainvoke([TTCItem(input=question.text)], question.text, drafts=question.drafts)
        items = await scoring.ainvoke(items, original_prompt=question.text)
        [best] = await selection.ainvoke(items, original_prompt=question.text)
        manager = Context.get().intermediate_step_manager
        for index, item in enumerate(items):
            manager.push_intermediate_step(
                IntermediateStepPayload(
                    event_type=IntermediateStepType.TTC_END,
                    name="desk_candidate",
                    metadata={"chosen": item is best, "strategy": item.seen_by, "pipeline": search.pipeline_type},
                    data=TTCEventData(
                        input=question.text,
                        output=item.output,
                        turn_id=turn_id,
                        turn_index=0,
                        candidate_index=index,
                        score=item.score,
                    ),
                )
            )
        return Draft(text=best.output, score=best.score, turn_id=turn_id)

    yield FunctionInfo.from_fn(_draft, description="Drafts several answers and picks the best.")
