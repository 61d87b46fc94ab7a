"""Test-time compute: candidates for a move, of a model or of a script, and their scores."""

import asyncio
import random
import re

from nat.builder.builder import Builder
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.cli.register_workflow import register_ttc_strategy
from nat.data_models.component_ref import LLMRef
from nat.data_models.ttc_strategy import TTCStrategyBaseConfig
from nat.experimental.test_time_compute.models.stage_enums import PipelineTypeEnum, StageTypeEnum
from nat.experimental.test_time_compute.models.strategy_base import StrategyBase
from nat.experimental.test_time_compute.models.ttc_item import TTCItem
from pydantic import Field

GOAL = 10


def move_in(answer: str) -> int | None:
    """The last number of an answer, if it is a move."""
    numbers = [int(found) for found in re.findall(r"\d+", answer)]
    return numbers[-1] if numbers and numbers[-1] in (1, 2, 3) else None


class MoveStrategy(StrategyBase):
    async def build_components(self, builder: Builder) -> None:
        pass

    def supported_pipeline_types(self) -> list[PipelineTypeEnum]:
        return [PipelineTypeEnum.AGENT_EXECUTION]


class ModelMovesConfig(TTCStrategyBaseConfig, name="race_model_moves"):
    """Asks a model several times."""

    llm_name: LLMRef = Field(description="The model that plays.")
    candidates: int = Field(default=3, description="How often it is asked.")


class ModelMoves(MoveStrategy):
    async def build_components(self, builder: Builder) -> None:
        self.llm = await builder.get_llm(self.config.llm_name, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    def stage_type(self) -> StageTypeEnum:
        return StageTypeEnum.SEARCH

    async def ainvoke(self, items, original_prompt=None, agent_context=None, **kwargs) -> list[TTCItem]:
        messages = [("system", "You race to ten."), ("human", original_prompt)]
        answers = await asyncio.gather(*(self.llm.ainvoke(messages) for _ in range(self.config.candidates)))
        return [TTCItem(input=original_prompt, output=answer.content) for answer in answers]


class ScriptedMovesConfig(TTCStrategyBaseConfig, name="race_scripted_moves"):
    """Draws moves at random: a player without a model."""

    candidates: int = Field(default=3, description="Moves to draw.")


class ScriptedMoves(MoveStrategy):
    def stage_type(self) -> StageTypeEnum:
        return StageTypeEnum.SEARCH

    async def ainvoke(self, items, original_prompt=None, agent_context=None, **kwargs) -> list[TTCItem]:
        draw = random.Random(original_prompt)
        moves = draw.sample((1, 2, 3), min(3, self.config.candidates))
        return [TTCItem(input=original_prompt, output=str(move)) for move in moves]


class ScoreMovesConfig(TTCStrategyBaseConfig, name="race_score_moves"):
    """Scores a move by what it leaves to the other player."""


class ScoreMoves(MoveStrategy):
    def stage_type(self) -> StageTypeEnum:
        return StageTypeEnum.SCORING

    async def ainvoke(self, items, original_prompt=None, agent_context=None, **kwargs) -> list[TTCItem]:
        for item in items:
            move = move_in(item.output)
            left = GOAL - kwargs["total"] - (move or 0)
            item.score = 0.0 if move is None or left < 0 else 1.0 if left % 4 == 0 else 0.5 / left
        return items


@register_ttc_strategy(config_type=ModelMovesConfig)
async def model_moves(config: ModelMovesConfig, builder: Builder):
    yield ModelMoves(config)


@register_ttc_strategy(config_type=ScriptedMovesConfig)
async def scripted_moves(config: ScriptedMovesConfig, builder: Builder):
    yield ScriptedMoves(config)


@register_ttc_strategy(config_type=ScoreMovesConfig)
async def score_moves(config: ScoreMovesConfig, builder: Builder):
    yield ScoreMoves(config)
