"""The agent: it plays one game of tic-tac-toe, asking the model for each of its moves."""

from collections.abc import AsyncIterator

from pydantic import Field

from insitu.plugin_api import Builder, register_function
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo
from tic_tac_toe.game import Dialogue, GameResult, Opponent, Start, play_game


class TicTacToeConfig(FunctionBaseConfig, name="tic_tac_toe"):
    player: LLMRef
    """The model that plays."""
    opponent: Opponent = "random"
    """The opponent; a dataset row may override it."""
    max_retries: int = Field(default=1, ge=0)
    """How often, for each move, an answer that cannot be played is asked for again before the game is forfeited."""


@register_function(config_type=TicTacToeConfig)
async def tic_tac_toe(config: TicTacToeConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.player)

    async def ask(dialogue: Dialogue) -> str:
        response = await llm.complete(dialogue)
        return response.choices[0].message.content or ""

    async def play(start: Start) -> GameResult:
        return await play_game(start, config.opponent, ask, config.max_retries, Context.get().seed)

    yield FunctionInfo.from_fn(play, description="Plays one game of tic-tac-toe from a given position")
