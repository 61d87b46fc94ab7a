"""Builds the starting model: a tokenizer and a small Llama that knows the format and the free squares, and no tactics.

    python make_model.py --output_dir model

It is taught on random positions with a random free square as the answer, so it plays as well as chance does.
"""

import random
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting_model import IGNORED, Row, build_tokenizer, make_model
from tic_tac_toe.board import EMPTY, free_squares, is_over, place, to_move
from tic_tac_toe.prompts import ask, ask_again, problem, write

ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAYERS = 3
LESSONS_PER_STEP = 128

Dialogue = list[dict[str, str]]


def random_position(rng: random.Random) -> str:
    """An unfinished board after a random number of random moves."""
    while True:
        board = EMPTY
        for _ in range(rng.randrange(9)):
            if not is_over(board):
                board = place(board, rng.choice(free_squares(board)))
        if not is_over(board):
            return board


def lesson(rng: random.Random) -> Dialogue:
    """A question and a random legal answer to it; in one of six an answer that cannot be used comes first."""
    board = random_position(rng)
    dialogue = [{"role": "user", "content": ask(board, to_move(board))}]
    if rng.random() < 1 / 6:
        taken = [square for square in range(9) if square not in free_squares(board)]
        square = rng.choice([*taken, None])
        wrong = "" if square is None else write(square)
        dialogue += [
            {"role": "assistant", "content": wrong},
            {"role": "user", "content": ask_again(problem(board, square) or "")},
        ]
    return [*dialogue, {"role": "assistant", "content": write(rng.choice(free_squares(board)))}]


def tokenizer_of(seed: int) -> PreTrainedTokenizerFast:
    """A line of three squares is one token, and a single square another."""
    rng = random.Random(seed)
    texts = (m["content"] for _ in range(2000) for m in lesson(rng))
    return build_tokenizer(texts, r" [XO1-9]{3}| ?[XO1-9](?![A-Za-z])", ROLES, CHAT_TEMPLATE)


def lessons(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Row]:
    """The last answer of each dialogue is learned."""
    dialogues = [lesson(rng) for _ in range(LESSONS_PER_STEP)]
    prompts = tokenizer.apply_chat_template([d[:-1] for d in dialogues], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(dialogues)["input_ids"]
    return [
        (tokens, [IGNORED] * len(prompt) + tokens[len(prompt) :]) for prompt, tokens in zip(prompts, whole, strict=True)
    ]


def main() -> None:
    make_model(__doc__, Path(__file__).parent / "model", 1000, LAYERS, tokenizer_of, lessons)


if __name__ == "__main__":
    main()
