"""Writes train.jsonl and validation.jsonl: where each game begins, and which side the model plays.

python make_data.py
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tic_tac_toe.board import EMPTY, free_squares, is_over, place

SIDES = ("X", "O")
Row = dict[str, Any]


def opening(rng: random.Random, depth: int) -> str:
    """An unfinished board after `depth` random moves."""
    while True:
        board = EMPTY
        for _ in range(depth):
            if not is_over(board):
                board = place(board, rng.choice(free_squares(board)))
        if not is_over(board):
            return board


def training_rows(count: int, depths: tuple[int, ...], seed: int) -> Iterator[Row]:
    """Both sides in turn, from openings of the given depths in turn."""
    rng = random.Random(seed)
    for number in range(count):
        board = opening(rng, depths[number // 2 % len(depths)])
        yield {"id": f"train-{number:03}", "question": {"mark": SIDES[number % 2], "board": board}, "answer": "win"}


def validation_rows(count: int) -> Iterator[Row]:
    """Whole games, both sides in turn; they differ in what the opponent does, which their ids decide."""
    for number in range(count):
        yield {"id": f"held-out-{number:03}", "question": {"mark": SIDES[number % 2]}, "answer": "win"}


def write(path: Path, rows: Iterator[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    write(args.output_dir / "train.jsonl", training_rows(64, depths=(0,), seed=0))
    write(args.output_dir / "validation.jsonl", validation_rows(600))


if __name__ == "__main__":
    main()
