"""An agent that answers a customer with the date of delivery: the model finds the order with a tool."""

import json

import insitu

TASK = "Call the tool with the order number in the customer's message."
MONTHS = ("January", "March", "April", "June", "July", "August", "October", "December")
TOOL = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Returns the date on which an order is delivered.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "find_order", "arguments": '{"order": "73155"}'}}
EXAMPLE = [
    {"role": "user", "content": "My order 73155 came without the cable."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]


def find_order(order: str) -> str:
    """Stands for the shop's database; order numbers have five digits."""
    if len(order) != 5 or not order.isdecimal():
        return "There is no such order."
    return f"{int(order) % 27 + 1} {MONTHS[int(order) // 100 % len(MONTHS)]}"


async def answer(question: str, model: insitu.Model) -> str:
    """What the tool returns for the order that the model asks for, or what the model says instead."""
    messages = [{"role": "system", "content": TASK}, *EXAMPLE, {"role": "user", "content": question}]
    message = (await model.complete(messages, tools=[TOOL])).choices[0].message
    if not message.tool_calls:
        return message.content or ""
    function = message.tool_calls[0].function
    if function.name != "find_order":
        return f"There is no tool {function.name}."
    return find_order(str(json.loads(function.arguments).get("order")))


def delivered(answer: str, expected: str) -> float:
    """1 for the date of the expected order and nothing else."""
    return float(answer == find_order(expected))
