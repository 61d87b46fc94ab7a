"""A backend with a real model: structured output, long prompts, many requests at once."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import jsonschema
import pytest
import torch
from processes import serving
from real_model import real_model
from test_real_model import sampled
from transformers import AutoModelForCausalLM

SCHEMA = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["complaint", "question"]},
        "urgent": {"type": "boolean"},
    },
    "required": ["product", "kind", "urgent"],
    "additionalProperties": False,
}
MESSAGE = "The kettle that you sent me broke after two days, and I would like to have my money back. "
LONG = 3000
"""Tokens of a long prompt."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("backend", "--model", real_model(), "--port", "0") as (_, address):
        yield address


@pytest.fixture
async def session(address: str) -> AsyncIterator[aiohttp.ClientSession]:
    options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=None), "connector": aiohttp.TCPConnector(limit=0)}
    async with aiohttp.ClientSession(address, **options) as session:
        yield session


async def ask(session: aiohttp.ClientSession, text: str, **options: Any) -> dict[str, Any]:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "logprobs": True,
        "return_token_ids": True,
        **options,
    }
    async with session.post("/v1/chat/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
    return answer


async def test_answers_match_a_schema(session: aiohttp.ClientSession) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "message", "schema": SCHEMA}}
    options = {"response_format": wanted, "max_tokens": 100}
    answers = await asyncio.gather(*(ask(session, MESSAGE, seed=seed, **options) for seed in range(4)))
    for (choice,) in (answer["choices"] for answer in answers):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


async def test_long_prompts(session: aiohttp.ClientSession) -> None:
    """As a forward pass by transformers, and to the bit the same when it is cached, and beside others."""
    text = MESSAGE * (LONG // 20)
    first = await ask(session, text, seed=1)
    assert first["usage"]["prompt_tokens"] >= LONG
    again, *others = await asyncio.gather(
        *(ask(session, prompt, seed=1) for prompt in (text, MESSAGE, "Hello!", "Hi. " + text))
    )
    assert sampled(again) == sampled(first)
    plain = AutoModelForCausalLM.from_pretrained(real_model()).eval()
    for answer in (first, others[-1]):
        prompt, tokens = answer["prompt_token_ids"], sampled(answer)
        ids = torch.tensor([prompt + [token for token, _ in tokens]])
        with torch.inference_mode():
            logits = plain(input_ids=ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, -len(tokens) :, None])[:, 0]
        assert [logprob for _, logprob in tokens] == pytest.approx(expected.tolist(), abs=1e-4)


async def test_200_requests_at_once(session: aiohttp.ClientSession) -> None:
    """Each is answered as it is alone."""
    prompts = [f"{MESSAGE * (1 + number % 5)}This is message {number % 40}." for number in range(200)]
    answers = await asyncio.gather(*(ask(session, prompt, seed=n) for n, prompt in enumerate(prompts)))
    for number in (0, 63, 64, 127, 199):
        assert sampled(await ask(session, prompts[number], seed=number)) == sampled(answers[number])
