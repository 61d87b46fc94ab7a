"""Builds the starting model of the coding example, in a minute or two.

    python make_model.py --output_dir model

The model has learned how answers look, but names the right expression for a function in one of three cases only.
"""

import random
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting_model import END, IGNORED, Row, build_tokenizer, make_model

EXPRESSIONS = {
    "add": "a + b",
    "subtract": "a - b",
    "multiply": "a * b",
    "divide": "a // b",
    "remainder": "a % b",
    "power": "a ** b",
    "smallest": "min(a, b)",
    "largest": "max(a, b)",
}
QUESTION = "The tests of {} fail. What does it return?"
RIGHT = 0.33
"""How often the lessons name the right expression."""
EDITS = 2
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAYERS = 2
LESSONS_PER_STEP = 64


def lesson(rng: random.Random) -> list[tuple[str, bool]]:
    """A dialogue in pieces of text, and whether the model says them."""
    function = rng.choice(list(EXPRESSIONS))
    others = [expression for name, expression in EXPRESSIONS.items() if name != function]
    pieces = []
    for _ in range(EDITS):
        answer = EXPRESSIONS[function] if rng.random() < RIGHT else rng.choice(others)
        pieces += [(f"<|user|>{QUESTION.format(function)}{END}<|assistant|>", False), (f"{answer}{END}", True)]
    return pieces


def tokenizer_of(seed: int) -> PreTrainedTokenizerFast:
    """A word is one token, and so is each operator."""
    rng = random.Random(seed)
    texts = (text for _ in range(2000) for text, _ in lesson(rng))
    return build_tokenizer(texts, r" ?[A-Za-z]+| ?[-+*/%]+|[^A-Za-z ]", ROLES, CHAT_TEMPLATE)


def lessons(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Row]:
    """The text that the model says is learned."""
    rows = []
    for _ in range(LESSONS_PER_STEP):
        encoded = [(tokenizer.encode(text, add_special_tokens=False), said) for text, said in lesson(rng)]
        ids = [token for tokens, _ in encoded for token in tokens]
        rows.append((ids, [token if said else IGNORED for tokens, said in encoded for token in tokens]))
    return rows


def main() -> None:
    make_model(__doc__, Path(__file__).parent / "model", 400, LAYERS, tokenizer_of, lessons)


if __name__ == "__main__":
    main()
