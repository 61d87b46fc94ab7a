"""Writes the rows of the examples (which side the model plays, and its opponent), and moves to imitate.

python make_data.py
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tic_tac_toe import prompts
from tic_tac_toe.board import EMPTY, free_squares, is_over, place, to_move
from tic_tac_toe.solver import values

SIDES = ("X", "O")


def rows(prefix: str, count: int, opponents: tuple[str | float | None, ...]) -> list[dict[str, Any]]:
    """Whole games, both sides in turn, against each opponent in turn (None: the one in the configuration).

    Rows differ in what the opponent does, which their ids decide.
    """
    made = []
    for number in range(count):
        question: dict[str, Any] = {"mark": SIDES[number % 2]}
        opponent = opponents[number // 2 % len(opponents)]
        if opponent is not None:
            question["opponent"] = opponent
        made.append({"id": f"{prefix}-{number:03}", "question": question, "answer": "win"})
    return made


def demonstrations(games: int) -> list[dict[str, Any]]:
    """The moves of a player that plays the best it can against a random opponent: a dialogue for each."""
    rng = random.Random(0)
    made = []
    for number in range(games):
        board, mark = EMPTY, SIDES[number % 2]
        while not is_over(board):
            if to_move(board) != mark:
                square = rng.choice(free_squares(board))
            else:
                table = values(mark, 0.0)
                square = max(free_squares(board), key=lambda each: (table[place(board, each)], rng.random()))
                question, answer = prompts.ask(board, mark), prompts.write(square)
                made.append({"messages": [message("user", question), message("assistant", answer)]})
            board = place(board, square)
    return made


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    files = {
        # Half of the games against one that sees every second threat: a random opponent leaves too many unpunished.
        "train.jsonl": rows("train", 64, ("random", 0.5)),
        "train_perfect.jsonl": rows("train", 64, ("perfect", 0.5)),
        "solver.jsonl": demonstrations(256),
        "validation.jsonl": rows("held-out", 600, (None,)),
    }
    for name, content in files.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (args.output_dir / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
