"""Agents and scores for tests of `insitu doctor`: a healthy one of each, and sick ones."""

import asyncio
import itertools
import os
from typing import Any

import insitu

_count = itertools.count()


async def ask(question: str, model: insitu.Model) -> str:
    return await model.ask(question)


async def by_own_client(question: str, model: insitu.Model) -> str:
    """Asks the server of the policy, past insitu."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=os.environ["POLICY"] + "/v1", api_key="t") as client:
        messages: Any = [{"role": "user", "content": question}]
        return (await client.chat.completions.create(model="policy", messages=messages)).choices[
            0
        ].message.content or ""


async def converse(question: str, model: insitu.Model) -> str:
    return await _talk(question, model, lambda answer: answer)


async def rewrite(question: str, model: insitu.Model) -> str:
    return await _talk(question, model, lambda answer: f"I said: {answer}")


async def _talk(question: str, model: insitu.Model, kept: Any) -> str:
    first = await model.ask([{"role": "user", "content": question}])
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": kept(first)}]
    return await model.ask([*messages, {"role": "user", "content": question}])


async def fail(question: str, model: insitu.Model) -> str:
    raise ValueError(f"no idea: {await model.ask(question)!r}")


async def hang(question: str, model: insitu.Model) -> str:
    await asyncio.Event().wait()
    return question


async def elaborate(question: str, model: insitu.Model) -> str:
    return await model.ask(question * 200)


def score(answer: str) -> float:
    """Its last digit, as a share of 9."""
    return int(next((c for c in reversed(answer) if c.isdigit()), 0)) / 9


def always_half(answer: str) -> float:
    return 0.5


def by_row(answer: str, row: insitu.Row) -> float:
    return row["id"] / 10


def moody(answer: str) -> float:
    return score(answer) + next(_count)


def broken(answer: str) -> float:
    raise KeyError("expected")


def not_a_number(answer: str) -> float:
    return float("nan")
