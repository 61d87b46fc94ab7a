"""The agent that `never_wait.py` trains: a help desk with two questions in an episode, whose tools take their time."""

import asyncio
import json
import math
import random
import zlib
from typing import Any

import insitu

ITEMS = ("kettle", "lamp", "chair", "clock", "radio", "table", "mirror", "fridge", "heater", "sofa", "stove", "desk")
ORDERS = dict(zip(ITEMS, ("shipped", "packed", "delivered", "returned") * 3, strict=True))
MANUAL = dict(zip(ITEMS, ("vinegar", "water", "soap", "oil", "nothing", "soap") * 2, strict=True))
TOOLS = {"orders": ORDERS, "manual": MANUAL}
ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
SCHEMAS = [{"type": "function", "function": {"name": name, "parameters": ITEM}} for name in TOOLS]
MEDIAN, PERCENTILE_99 = 0.3, 6.0
"""Seconds that a tool takes, log-normal."""
SIGMA = math.log(PERCENTILE_99 / MEDIAN) / 2.3263


async def answer(questions: str, model: insitu.Model, row: insitu.Row, seed: int) -> str:
    """Four model calls: each question needs a look-up, and its answer is sent to the customer."""
    rng, answers = random.Random(seed), []

    async def wait_for_tool() -> None:
        await asyncio.sleep(row["pause"] * MEDIAN * math.exp(SIGMA * rng.gauss()))

    for question in questions.split("|"):
        messages = [{"role": "user", "content": question}]
        message = (await model.complete(messages, tools=SCHEMAS)).choices[0].message
        await wait_for_tool()
        messages += [message.model_dump(exclude_none=True), *map(look_up, message.tool_calls or [])]
        if not message.tool_calls:
            messages.append({"role": "user", "content": "nothing"})
        answers.append((await model.complete(messages, tools=SCHEMAS)).choices[0].message.content or "")
        await wait_for_tool()
    return "|".join(answers)


def look_up(call: Any) -> dict[str, str]:
    item = json.loads(call.function.arguments).get("item")
    return {"role": "tool", "tool_call_id": call.id, "content": TOOLS.get(call.function.name, {}).get(item, "nothing")}


def share_right(answer: str, row: insitu.Row) -> float:
    """Of the two questions."""
    pairs = zip(answer.split("|"), row["answer"].split("|"), strict=False)
    return sum(given == expected for given, expected in pairs) / 2


def coin(answer: str) -> float:
    """A score of random answers, as a model that has learned nothing gives them."""
    return float(zlib.crc32(answer.encode()) % 2)
