"""The agent: it plays one game of tic-tac-toe, asking the model for each of its moves.

For preferences it samples several candidates of each move in training, scores them, and plays the first.
"""

from collections.abc import AsyncIterator

from pydantic import Field

from insitu.plugin_api import Builder, IntermediateStepPayload, IntermediateStepType, TTCEventData, register_function
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo
from tic_tac_toe import prompts
from tic_tac_toe.evaluators import gained
from tic_tac_toe.game import Answer, Dialogue, GameResult, Opponent, Start, play_game, skill_of


class TicTacToeConfig(FunctionBaseConfig, name="tic_tac_toe"):
    player: LLMRef
    """The model that plays."""
    opponent: Opponent = "random"
    """The opponent; a dataset row may override it."""
    max_retries: int = Field(default=1, ge=0)
    """How often, for each move, an answer that cannot be played is asked for again before the game is forfeited."""
    candidates: int = Field(default=1, ge=1)
    """Answers to sample for each move in training; more than one are scored and reported as candidates."""
    unplayable: float = Field(default=0.3, ge=0)
    """What a candidate that cannot be played costs, as in the evaluators."""


def worth(board: str, text: str, skill: float, unplayable: float) -> float:
    """What a candidate is worth above a random move; below 0 if it cannot be played."""
    square = prompts.read(text)
    playable = square is not None and prompts.problem(board, square) is None
    return gained(Answer(board=board, text=text, square=square if playable else None), skill, unplayable)


def report(dialogue: Dialogue, board: str, index: int, text: str, score: float) -> None:
    """Reports a candidate as a step, which the builder of preference pairs reads."""
    candidate = TTCEventData(
        input=dialogue, output=text, turn_id=f"{board} {len(dialogue)}", candidate_index=index, score=score
    )
    step = IntermediateStepPayload(event_type=IntermediateStepType.TTC_END, name="dpo_candidate_move", data=candidate)
    Context.get().intermediate_step_manager.push_intermediate_step(step)


@register_function(config_type=TicTacToeConfig)
async def tic_tac_toe(config: TicTacToeConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.player)

    async def play(start: Start) -> GameResult:
        context = Context.get()
        skill = skill_of(config.opponent if start.opponent is None else start.opponent)

        async def ask(dialogue: Dialogue, board: str) -> str:
            count = config.candidates if context.is_training else 1
            response = await llm.complete(dialogue, **({"n": count} if count > 1 else {}))
            texts = [choice.message.content or "" for choice in response.choices]
            for index, text in enumerate(texts if count > 1 else ()):
                report(dialogue, board, index, text, worth(board, text, skill, config.unplayable))
            return texts[0]

        return await play_game(start, config.opponent, ask, config.max_retries, context.seed)

    yield FunctionInfo.from_fn(play, description="Plays one game of tic-tac-toe from a given position")
