"""Writes the rows of the example: messages of customers, and the order number in each.

    python make_data.py

The held-out messages have sentences and numbers that no training message has.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
PRODUCTS = ("kettle", "desk lamp", "office chair", "wall clock", "radio", "toaster", "hair dryer", "backpack")
TRAINED = (
    "Hello, my order {order} has still not arrived. I have waited {days} days for the {product}.",
    "I paid {price} euros for a {product} and it is broken. The order is {order}.",
    "Please cancel order {order}. I no longer need the {product}.",
    "You can call me on {phone}. It is about the {product} of order {order}.",
    "The {product} makes a loud noise. I got it {days} days ago with order {order}. Can I return it?",
    "Order {order}: you have charged me {price} euros twice!",
    "Why does the {product} cost {price} euros now? In order {order} it was cheaper.",
    "My number is {phone}, please tell me when order {order} will be delivered.",
    "I have moved to 14 Mill Lane. Please send order {order} with the {product} there.",
    "The {product} in order {order} has the wrong colour, and the box was open.",
    "You still owe me {price} euros for the {product} that I sent back. It was order {order}.",
    "I was promised {price} euros for the broken {product}, order {order}, and got nothing.",
    "{days} days ago I ordered a {product}. When will order {order} leave?",
    "Is there an invoice for order {order}? I paid {price} euros on 3 May.",
    "Could you change the address of order {order}? The {product} should go to 8 High Street.",
    "The lid of my {product} is cracked. Call {phone}; the order is {order}.",
    "Thank you for the {product}! But why was order {order} split into 2 parcels?",
    "Send me a new {product}, please. This one lasted {days} days. Order number: {order}.",
    "Your site shows {price} euros, but order {order} says {days} euros more.",
    "Somebody else got my {product}. The label said order {order}, floor 3.",
)
HELD_OUT = (
    "Where is my {product}? The order {order} was placed {days} days ago.",
    "Good morning. I want my {price} euros back for order {order}, the {product} does not work.",
    "Since the storm the {product} is dead. Order {order}, phone {phone}. Can you help?",
    "I ordered a {product} for {price} euros, order {order}, and got two of them.",
    "Can you add a second {product} to order {order} before it leaves in {days} days?",
)


def rows(templates: tuple[str, ...], count: int, rng: random.Random, used: set[int]) -> list[dict[str, object]]:
    """Rows with order numbers that are not `used`, to which they are added."""
    made: list[dict[str, object]] = []
    while len(made) < count:
        order = rng.randrange(10_000, 100_000)
        if order not in used:
            used.add(order)
            values = {"product": rng.choice(PRODUCTS), "days": rng.randrange(4, 30), "price": rng.randrange(15, 300)}
            phone = f"555 {rng.randrange(1000, 10_000)}"
            text = templates[len(made) % len(templates)].format(order=order, phone=phone, **values)
            made.append({"id": order, "question": text, "answer": str(order)})
    return made


def write(name: str, made: list[dict[str, object]]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")


if __name__ == "__main__":
    generator, orders = random.Random(0), {73155}
    write("train.jsonl", rows(TRAINED, 160, generator, orders))
    write("held_out.jsonl", rows(HELD_OUT, 100, generator, orders))
