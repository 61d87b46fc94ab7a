"""One game between a player that is asked for its moves in words and an opponent of a given skill."""

import random
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tic_tac_toe import prompts, solver
from tic_tac_toe.board import EMPTY, is_over, place, score, to_move

Opponent = Literal["random", "perfect"] | Annotated[float, Field(ge=0, le=1)]
"""`random`, `perfect`, or the probability that a move is a perfect one (else it is random)."""
Dialogue = list[dict[str, str]]
Ask = Callable[[Dialogue, str], Awaitable[str]]
"""The player: what it answers to a dialogue about a board."""


class Start(BaseModel):
    """A dataset row's question: the side the player has, and where the game begins."""

    model_config = ConfigDict(extra="forbid")

    mark: Literal["X", "O"]
    board: str = EMPTY
    opponent: Opponent | None = None
    """Instead of the one in the workflow's configuration."""


class Answer(BaseModel):
    """One answer of the player: the board it was shown, its words, and the square (0 to 8) if that could be played."""

    board: str
    text: str
    square: int | None = None


class GameResult(BaseModel):
    """A finished game; `score` is its value to the player, for which a forfeit is a loss."""

    mark: str
    skill: float
    """The opponent's."""
    outcome: Literal["win", "draw", "loss", "forfeit"]
    score: float
    board: str
    answers: list[Answer]


def skill_of(opponent: Opponent) -> float:
    return {"random": 0.0, "perfect": 1.0}[opponent] if isinstance(opponent, str) else opponent


async def choose(board: str, ask: Ask, max_retries: int, answers: list[Answer]) -> int | None:
    """The player's move, or None if it has found none it can play; every answer is added to `answers`."""
    dialogue = [{"role": "user", "content": prompts.ask(board, to_move(board))}]
    for _ in range(max_retries + 1):
        text = await ask(dialogue, board)
        square = prompts.read(text)
        problem = prompts.problem(board, square)
        answers.append(Answer(board=board, text=text, square=None if problem else square))
        if problem is None:
            return square
        dialogue = [
            *dialogue,
            {"role": "assistant", "content": text},
            {"role": "user", "content": prompts.ask_again(problem)},
        ]
    return None


async def play_game(start: Start, opponent: Opponent, ask: Ask, max_retries: int, seed: int) -> GameResult:
    """Play to the end, or until the player has no retries left for a move."""
    rng = random.Random(seed)
    skill = skill_of(opponent if start.opponent is None else start.opponent)
    board, mark = start.board, start.mark
    if is_over(board) or board not in solver.values(mark, skill):
        raise ValueError(f"board is {board!r}; allowed: a position that a game can reach and in which it is not over")

    answers: list[Answer] = []
    while not is_over(board):
        if to_move(board) == mark:
            square = await choose(board, ask, max_retries, answers)
            if square is None:
                return _result(start, skill, board, answers, "forfeit")
        else:
            moves = solver.moves(board, skill)
            (square,) = rng.choices(list(moves), weights=list(moves.values()))
        board = place(board, square)
    outcomes = {1.0: "win", 0.5: "draw", 0.0: "loss"}
    return _result(start, skill, board, answers, outcomes[score(board, mark)])


def _result(start: Start, skill: float, board: str, answers: list[Answer], outcome: str) -> GameResult:
    points = 0.0 if outcome == "forfeit" else score(board, start.mark)
    return GameResult(mark=start.mark, skill=skill, outcome=outcome, score=points, board=board, answers=answers)
