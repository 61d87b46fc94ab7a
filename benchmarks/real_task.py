"""The task on which the real model is trained: name the product that a customer's message is about.

In: rows with a message and its product. Out: `answer` (the agent) and `score`, for `insitu finetune` and for TRL.
"""

import random
from typing import Any

import insitu

TRAINED = ("kettle", "desk lamp", "office chair", "coffee grinder", "rice cooker", "tent", "printer", "bicycle pump")
HELD_OUT = (
    *("toaster", "garden hose", "headphones", "water bottle", "sewing machine", "tripod", "heater", "backpack"),
    *("camping stove", "keyboard", "mirror", "hair dryer", "ladder", "suitcase", "wall clock", "drill"),
)
MESSAGES = (
    "Hi, I ordered a {} last week and it still has not arrived. Can you look into it?",
    "The {} that you sent me broke after two days, I would like my money back.",
    "Hello, my name is Sandra, and I wonder if your {} comes with a longer warranty.",
    "I am very happy with the {}, thank you! Do you sell spare parts for it too?",
)
QUESTION = "Which product is this message about? Answer with the name of the product only.\n\nMessage: {}"
MAX_TOKENS = 16


def rows(products: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """So many rows, products and messages in a seeded order."""
    pairs = [(product, message) for message in MESSAGES for product in products]
    chosen = random.Random(0).sample(pairs, count)
    return [
        {"id": number, "question": QUESTION.format(message.format(product)), "answer": product}
        for number, (product, message) in enumerate(chosen)
    ]


async def answer(question: str, model: insitu.Model) -> str:
    return await model.ask(question)


def score(answer: str, expected: str) -> float:
    """1 for the product alone; for an answer that contains it, its share of the answer, so that shorter is better."""
    given = answer.strip().strip(".\"'*").lower()
    if given == expected:
        return 1.0
    return 0.9 * len(expected) / len(given) if expected in given else 0.0
