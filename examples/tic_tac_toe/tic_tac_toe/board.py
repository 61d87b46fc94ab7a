"""The rules: a board is nine characters, row by row, of X, O and a dot for a free square.

"X...O...."  ->  X 2 3      squares are 0 to 8 in code, 1 to 9 in what the player reads and writes
                 4 O 6
                 7 8 9
"""

EMPTY = "........."
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def other(mark: str) -> str:
    return "O" if mark == "X" else "X"


def to_move(board: str) -> str:
    """X begins, so X moves whenever both have as many marks."""
    return "X" if board.count("X") == board.count("O") else "O"


def free_squares(board: str) -> list[int]:
    return [square for square, content in enumerate(board) if content == "."]


def place(board: str, square: int) -> str:
    """The board after the side to move has taken a free square."""
    return board[:square] + to_move(board) + board[square + 1 :]


def winner(board: str) -> str | None:
    for a, b, c in LINES:
        if board[a] == board[b] == board[c] != ".":
            return board[a]
    return None


def is_over(board: str) -> bool:
    return "." not in board or winner(board) is not None


def score(board: str, mark: str) -> float:
    """What a finished game is worth to `mark`: win 1, draw 0.5, loss 0."""
    won_by = winner(board)
    return 0.5 if won_by is None else float(won_by == mark)
