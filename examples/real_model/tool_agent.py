"""An agent that calls a tool to find the order of a customer's message, and answers with the date of delivery."""

import json

import insitu

TASK = "Find the order of the customer's message with the tool, then answer with the date of its delivery."
MONTHS = ("January", "March", "April", "June", "July", "August", "October", "December")
TOOL = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Returns the date on which an order is delivered.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}
EXAMPLE = "My order 73155 came without the cable."


def find_order(order: str) -> str:
    """Stands for the shop's database; order numbers have five digits."""
    if len(order) != 5 or not order.isdecimal():
        return "There is no such order."
    return f"{int(order) % 27 + 1} {MONTHS[int(order) // 100 % len(MONTHS)]}"


def called(order: str) -> list[dict]:
    """The messages of a call of the tool, and of what it returned."""
    function = {"name": "find_order", "arguments": json.dumps({"order": order})}
    call = {"id": "call_1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "call_1", "content": find_order(order)}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


async def answer(question: str, model: insitu.Model) -> str:
    example = [{"role": "user", "content": EXAMPLE}, *called("73155")]
    example += [{"role": "assistant", "content": find_order("73155")}]
    messages = [{"role": "system", "content": TASK}, *example, {"role": "user", "content": question}]
    message = (await model.complete(messages, tools=[TOOL])).choices[0].message
    if not message.tool_calls:
        return (message.content or "").strip()
    arguments = json.loads(message.tool_calls[0].function.arguments)
    messages += called(str(arguments.get("order")))
    return (await model.ask(messages, tools=[TOOL])).strip()


def delivered(answer: str, row: insitu.Row) -> float:
    """1 for the date of the right order and nothing else."""
    return float(answer == find_order(row.answer))
