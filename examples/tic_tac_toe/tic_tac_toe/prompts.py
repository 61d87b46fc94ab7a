"""The prompts of the player, the format of its answers, and the replies to unusable answers."""

import re

from tic_tac_toe.board import LINES, free_squares

FORMAT = "Answer with a free square, as <move>N</move>."
_MOVE = re.compile(r"<move>\s*([1-9])\s*</move>")


def show(board: str) -> str:
    """All eight lines of three; a free square shows its number."""
    cells = [str(square + 1) if content == "." else content for square, content in enumerate(board)]
    lines = ["".join(cells[square] for square in line) for line in LINES]
    named = {"Rows": lines[:3], "Columns": lines[3:6], "Diagonals": lines[6:]}
    return "\n".join(f"{name}: {' '.join(words)}" for name, words in named.items())


def ask(board: str, mark: str) -> str:
    return f"You play {mark}. {FORMAT}\n{show(board)}"


def read(answer: str | None) -> int | None:
    """The square (0 to 8) of an answer that names exactly one, or None."""
    found = _MOVE.findall(answer or "")
    return int(found[0]) - 1 if len(found) == 1 else None


def problem(board: str, square: int | None) -> str | None:
    """Why a move cannot be played, or None if it can."""
    if square is None:
        return "That is not a move."
    if square not in free_squares(board):
        return f"Square {square + 1} is taken."
    return None


def ask_again(reason: str) -> str:
    return f"{reason} {FORMAT}"


def write(square: int) -> str:
    """The answer that `read` reads as this square."""
    return f"<move>{square + 1}</move>"
