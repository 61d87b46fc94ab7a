"""The task on which the real model is trained: name the product that a customer's message is about.

In: rows with a message and its product. Out: `answer` (the agent) and `score`, for `insitu finetune` and for TRL.
"""

import random
from typing import Any

import insitu

TRAINED = ("kettle", "lamp", "chair", "phone", "jacket", "bicycle", "printer", "sofa")
HELD_OUT = (
    *("toaster", "hose", "camera", "bottle", "tent", "tripod", "heater", "backpack"),
    *("stove", "keyboard", "mirror", "table", "ladder", "suitcase", "clock", "drill"),
)
MESSAGES = (
    "The {} that I ordered last week has not arrived.",
    "Good morning, can I send back a {} without the box?",
    "My new {} broke after two days. What can I do?",
    "How much is the delivery of one {} to Madrid?",
)
SYSTEM = "Answer with the product that the customer writes about, in one word."
SHOWN = {"The red bench that I bought is broken.": "bench", "When will you have the new freezer?": "freezer"}
"""Messages and answers in the prompt, without which the model hardly ever gives a single word."""
MAX_TOKENS = 16


def rows(products: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """So many rows, products and messages in a seeded order."""
    pairs = [(product, message) for message in MESSAGES for product in products]
    chosen = random.Random(0).sample(pairs, count)
    return [
        {"id": number, "question": message.format(product), "answer": product}
        for number, (product, message) in enumerate(chosen)
    ]


def messages(question: str) -> list[dict[str, str]]:
    """The prompt."""
    turns = [turn for asked, product in SHOWN.items() for turn in (("user", asked), ("assistant", product))]
    return [{"role": role, "content": text} for role, text in (("system", SYSTEM), *turns, ("user", question))]


async def answer(question: str, model: insitu.Model) -> str:
    return await model.ask(messages(question))


def score(answer: str, expected: str) -> float:
    """1 for the product alone; for an answer that contains it, its share of the answer, so that shorter is better."""
    given = answer.strip().strip(".\"'*").lower()
    if given == expected:
        return 1.0
    return 0.9 * len(expected) / len(given) if expected in given else 0.0
