"""Writes train.jsonl, train_perfect.jsonl and validation.jsonl: which side the model plays, and its opponent.

python make_data.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    files = {
        # Half of the games against one that sees every second threat: a random opponent leaves too many unpunished.
        "train.jsonl": rows("train", 64, ("random", 0.5)),
        "train_perfect.jsonl": rows("train", 64, ("perfect", 0.5)),
        "validation.jsonl": rows("held-out", 600, (None,)),
    }
    for name, content in files.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (args.output_dir / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
