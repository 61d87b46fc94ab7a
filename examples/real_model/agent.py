"""An agent that takes the order number out of a customer's message."""

import insitu

TASK = "Find the order number in the message of a customer."
EXAMPLE = [
    {"role": "user", "content": "My order 73155 came without the cable."},
    {"role": "assistant", "content": "73155"},
]


async def answer(question: str, model: insitu.Model) -> str:
    messages = [{"role": "system", "content": TASK}, *EXAMPLE, {"role": "user", "content": question}]
    return (await model.ask(messages)).strip()
