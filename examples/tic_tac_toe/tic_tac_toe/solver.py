"""The exact value of every reachable position, for either side, against an opponent of any skill.

    moves("X...O....", skill=0.0)   ->  {1: 0.142..., 2: 0.142..., ...}    each free square alike: a random opponent
    values("O", skill=1.0)[EMPTY]   ->  0.5                             the best O can do against a perfect X

A skill is the probability that a move is a perfect one (uniform over the squares that minimax finds best); otherwise
it is uniform over the free squares. A value is an expected score (win 1, draw 0.5, loss 0) of the side it is asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType

from tic_tac_toe.board import EMPTY, free_squares, is_over, place, score, to_move

Strategy = Callable[[str], Mapping[int, float]]
"""From a board to the probability of each move of the side whose turn it is."""


def positions() -> Iterator[str]:
    """All reachable boards, finished games included, in a fixed order."""
    seen, stack = {EMPTY}, [EMPTY]
    while stack:
        board = stack.pop()
        yield board
        if not is_over(board):
            new = [after for square in free_squares(board) if (after := place(board, square)) not in seen]
            seen.update(new)
            stack.extend(new)


@cache
def minimax(board: str) -> float:
    """What X scores when both sides play their best from here on."""
    if is_over(board):
        return score(board, "X")
    best = max if to_move(board) == "X" else min
    return best(minimax(place(board, square)) for square in free_squares(board))


@cache
def best_squares(board: str) -> tuple[int, ...]:
    """The moves that keep the minimax value for the side to move."""
    return tuple(square for square in free_squares(board) if minimax(place(board, square)) == minimax(board))


@cache
def moves(board: str, skill: float) -> Mapping[int, float]:
    """The probability of each move of a player of that skill."""
    squares, best = free_squares(board), best_squares(board)
    return MappingProxyType(
        {square: (1 - skill) / len(squares) + skill * (square in best) / len(best) for square in squares}
    )


def value(mark: str, player: Strategy, opponent: Strategy, board: str = EMPTY) -> float:
    """The expected score of `mark`, played by `player`, from `board` on."""

    @cache
    def expected(board: str) -> float:
        if is_over(board):
            return score(board, mark)
        strategy = player if to_move(board) == mark else opponent
        return sum(share * expected(place(board, square)) for square, share in strategy(board).items() if share)

    return expected(board)


@cache
def values(mark: str, skill: float) -> Mapping[str, float]:
    """For each reachable position the best expected score of `mark` against an opponent of that skill."""

    @cache
    def best(board: str) -> float:
        if is_over(board):
            return score(board, mark)
        if to_move(board) == mark:
            return max(best(place(board, square)) for square in free_squares(board))
        return sum(share * best(place(board, square)) for square, share in moves(board, skill).items() if share)

    return MappingProxyType({board: best(board) for board in positions()})


def value_lost(board: str, square: int, skill: float) -> float:
    """How much less this move is worth to the side to move than its best one; 0 for a best move."""
    table = values(to_move(board), skill)
    return table[board] - table[place(board, square)]


def value_gained(board: str, square: int, skill: float) -> float:
    """How much more this move is worth to the side to move than a random one on average."""
    table = values(to_move(board), skill)
    squares = free_squares(board)
    return table[place(board, square)] - sum(table[place(board, other)] for other in squares) / len(squares)
