"""A real pretrained model in `insitu backend`: what is sampled depends on the request alone, and a LoRA job trains it.

A minute and a half of computing, so with the slow tests; `make test WITH=real` asks it more.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from processes import serving
from real_model import real_model

pytestmark = pytest.mark.slow

TEXT = "The kettle that you sent me broke after two days, and I would like to have my money back, please. "
LENGTHS = (1, 1, 2, 3, 4, 6, 9, 12)
"""How often each prompt has the text; two are equal."""
TOKENS = 8
LORA = {"rank": 8, "alpha": 16}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("real")
    with serving("backend", "--model", real_model(), "--port", "0", "--output_dir", folder) as (_, address):
        yield address


@pytest.fixture
async def session(address: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield session


async def ask(session: aiohttp.ClientSession, number: int, **options: Any) -> dict[str, Any]:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": TEXT * LENGTHS[number]}],
        "max_tokens": TOKENS,
        "seed": number,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    async with session.post("/v1/chat/completions", json=body | options) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
    return answer


def sampled(answer: dict[str, Any]) -> list[tuple[int, float]]:
    (choice,) = answer["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return [*zip(choice["token_ids"], logprobs, strict=True)]


async def in_batches(session: aiohttp.ClientSession, *batches: list[int]) -> dict[int, list[tuple[int, float]]]:
    answers: dict[int, list[tuple[int, float]]] = {}
    for batch in batches:
        together = await asyncio.gather(*(ask(session, number) for number in batch))
        answers |= zip(batch, map(sampled, together), strict=True)
    return answers


async def test_what_is_sampled_does_not_depend_on_the_batch(session: aiohttp.ClientSession) -> None:
    """Token by token and logprob by logprob."""
    together = await in_batches(session, [*range(8)])
    assert await in_batches(session, [7, 2], [5], [4, 1, 6], [3, 0]) == together
    assert together[0] != together[1]  # of another seed


async def test_a_job_trains_adapters(session: aiohttp.ClientSession) -> None:
    answers = [await ask(session, number) for number in (0, 1)]
    lines: list[dict[str, Any]] = [{"settings": {"learning_rate": 1e-4, "lora": LORA}, "num_rows": len(answers)}]
    for answer, advantage in zip(answers, (1.0, -1.0), strict=True):
        prompt, tokens = answer["prompt_token_ids"], sampled(answer)
        lines.append(
            {
                "token_ids": prompt + [token for token, _ in tokens],
                "loss_mask": [0] * len(prompt) + [1] * len(tokens),
                "logprobs": [0.0] * len(prompt) + [logprob for _, logprob in tokens],
                "advantages": advantage,
                "episode": str(advantage),
            }
        )
    body = "\n".join(map(json.dumps, lines))
    async with session.post("/v1/train/jobs", data=body, headers={"Content-Type": "application/x-ndjson"}) as response:
        job = await response.json()
        assert response.status < 300, job
    async with session.get(f"/v1/train/jobs/{job['id']}/events") as response:
        states = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: ")]
    assert states[-1]["status"] == "completed", states[-1]
    metrics = states[-1]["metrics"]
    assert metrics["logprob_gap"] < 1e-4
    assert metrics["grad_norm"] > 0
    before, after = answers[0], await ask(session, 0)
    assert sampled(after) != sampled(before)
    assert sampled(await ask(session, 0, model="policy@0")) == sampled(before)
