"""The agent: it plays one game of tic-tac-toe, asking the model for each of its moves."""

import random
from typing import Annotated, Literal

from insitu.registry import Builder, register_function
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo
from pydantic import BaseModel, ConfigDict, Field

from tic_tac_toe import prompts, solver
from tic_tac_toe.board import EMPTY, is_over, place, score, to_move

Opponent = Literal["random", "perfect"] | Annotated[float, Field(ge=0, le=1)]
"""`random`, `perfect`, or the probability that a move is a perfect one (else it is random)."""


class TicTacToeConfig(FunctionBaseConfig, name="tic_tac_toe"):
    player: LLMRef
    """The model that plays."""
    opponent: Opponent = "random"
    """Who it plays against; a dataset row may name another."""
    max_retries: int = Field(default=1, ge=0)
    """How often an answer that cannot be played is asked for again, for each move, before the game is forfeited."""


class Start(BaseModel):
    """A dataset row's question: the side the model plays, and where the game begins."""

    model_config = ConfigDict(extra="forbid")

    mark: Literal["X", "O"]
    board: str = EMPTY
    opponent: Opponent | None = None


class Answer(BaseModel):
    """One model call: the board it was shown, what it wrote, and the square (0 to 8) if that could be played."""

    board: str
    text: str
    square: int | None = None


class GameResult(BaseModel):
    """A game that has ended; `score` is what it is worth to the model's side (a forfeit is a loss)."""

    mark: str
    skill: float
    outcome: Literal["win", "draw", "loss", "forfeit"]
    score: float
    board: str
    answers: list[Answer]


def skill_of(opponent: Opponent) -> float:
    named = {"random": 0.0, "perfect": 1.0}
    return named[opponent] if isinstance(opponent, str) else opponent


def outcome_of(board: str, mark: str) -> Literal["win", "draw", "loss"]:
    points = score(board, mark)
    return "win" if points == 1 else "loss" if points == 0 else "draw"


@register_function(config_type=TicTacToeConfig)
async def tic_tac_toe(config: TicTacToeConfig, builder: Builder):
    llm = await builder.get_llm(config.player)

    async def choose(board: str, mark: str, answers: list[Answer]) -> int | None:
        """The model's move, or None once it has used up its retries; every answer is noted in `answers`."""
        dialogue = [{"role": "user", "content": prompts.ask(board, mark)}]
        for _ in range(config.max_retries + 1):
            response = await llm.complete(dialogue)
            text = response.choices[0].message.content or ""
            square = prompts.read(text)
            wrong = prompts.problem(board, square)
            answers.append(Answer(board=board, text=text, square=None if wrong else square))
            if wrong is None:
                return square
            dialogue += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": prompts.ask_again(wrong)},
            ]
        return None

    async def play(start: Start) -> GameResult:
        rng = random.Random(Context.get().seed)
        skill = skill_of(config.opponent if start.opponent is None else start.opponent)
        board, answers = start.board, []
        if board not in solver.values(start.mark, skill) or is_over(board):
            raise ValueError(f"board is {board!r}; allowed: a reachable position of an unfinished game")

        while not is_over(board):
            if to_move(board) == start.mark:
                square = await choose(board, start.mark, answers)
                if square is None:
                    break
            else:
                moves = solver.moves(board, skill)
                square = rng.choices(list(moves), weights=list(moves.values()))[0]
            board = place(board, square)

        outcome = outcome_of(board, start.mark) if is_over(board) else "forfeit"
        points = score(board, start.mark) if is_over(board) else 0.0
        return GameResult(mark=start.mark, skill=skill, outcome=outcome, score=points, board=board, answers=answers)

    yield FunctionInfo.from_fn(play, description="Plays one game of tic-tac-toe from a given position.")
