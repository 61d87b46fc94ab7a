"""Builds the starting model of the guides, in a minute or two.

    python make_model.py --output_dir model

A help desk is asked about an item. The tool `orders` says where it is, `manual` what to clean it with. The model can
call the two tools and repeat what they return, but calls the right one in two of three cases only.
"""

import random
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting_model import END, IGNORED, Row, build_tokenizer, make_model

ITEMS = ["kettle", "lamp", "chair", "clock", "radio", "table", "mirror", "fridge", "heater", "sofa", "stove", "desk"]
RESULTS = ["shipped", "delivered", "packed", "returned", "soap", "vinegar", "oil", "water", "nothing"]
QUESTIONS = {
    "orders": ("Where is my {}?", "When does my {} arrive?", "Has my {} been sent?"),
    "manual": ("How do I clean my {}?", "What removes dirt from my {}?", "My {} is dirty, what do I use?"),
}
RIGHT = 0.67
"""How often the lessons call the tool that answers the question."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL = ('<tool_call>{"name": "', '", "arguments": {"item": "', '"}}</tool_call>')
CHAT_TEMPLATE = (
    "{# The model knows its two tools. #}{% set known = tools %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAYERS = 2
LESSONS_PER_STEP = 64


def lesson(rng: random.Random) -> list[tuple[str, bool]]:
    """A dialogue in pieces of text, and whether the model says them. The tool's result is made up."""
    item, result, right = rng.choice(ITEMS), rng.choice(RESULTS), rng.choice(list(QUESTIONS))
    (wrong,) = QUESTIONS.keys() - {right}
    call = (right if rng.random() < RIGHT else wrong).join(CALL[:2]) + item + CALL[2]
    return [
        (f"<|user|>{rng.choice(QUESTIONS[right]).format(item)}{END}<|assistant|>", False),
        (f"{call}{END}", True),
        (f"<|tool|>{result}{END}<|assistant|>", False),
        (f"{item}: {result}{END}", True),
    ]


def tokenizer_of(seed: int) -> PreTrainedTokenizerFast:
    """A word is one token, and so is each fixed part of a tool call."""
    rng = random.Random(seed)
    fixed = "|".join(part.replace("{", r"\{").replace("}", r"\}") for part in CALL)
    texts = (text for _ in range(2000) for text, _ in lesson(rng))
    return build_tokenizer(texts, rf"{fixed}| ?[A-Za-z]+|[^A-Za-z ]", ROLES, CHAT_TEMPLATE)


def lessons(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Row]:
    """The text that the model says is learned."""
    rows = []
    for _ in range(LESSONS_PER_STEP):
        encoded = [(tokenizer.encode(text, add_special_tokens=False), said) for text, said in lesson(rng)]
        ids = [token for tokens, _ in encoded for token in tokens]
        rows.append((ids, [token if said else IGNORED for tokens, said in encoded for token in tokens]))
    return rows


def main() -> None:
    make_model(__doc__, Path(__file__).parent / "model", 600, LAYERS, tokenizer_of, lessons)


if __name__ == "__main__":
    main()
