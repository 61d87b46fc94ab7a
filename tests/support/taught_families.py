"""What is true of every family of models: agents run on a model that was taught to answer in its form.

`tests/formats/test_taught_families.py` and `tests/with_models/test_forms.py` collect these tests for their families.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from message_formats import ALL_FAMILIES, Family
from processes import serving
from taught_agents import AGENTS, Answer, expected, post_job
from taught_models import BREAK, QUESTION, Turn, cut_off, dialogue, lessons, teach, tokenizer_of

from insitu.advantages.estimator import rows_of
from insitu.gateway.server import Gateway
from insitu.schemas.episodes import ModelCall
from insitu.workflow.context import EpisodeScope
from insitu.workflow.llms import PolicyConfig, connect

TOKEN = "t"
OWN_IDS = ("kimi_k2", "mistral_nemo")
"""Families whose models write the ids of calls themselves."""
each_way = pytest.mark.parametrize(
    ("dialect", "streamed"), [(dialect, streamed) for dialect in AGENTS for streamed in (False, True)]
)
some_ways = pytest.mark.parametrize(
    ("dialect", "streamed"), [("chat", True), ("responses", False), ("messages", True)], ids=str
)


class Taught(NamedTuple):
    name: str
    family: Family
    address: str


def taught_family(request: pytest.FixtureRequest, folder: Path) -> Iterator[Taught]:
    family = ALL_FAMILIES[request.param]
    options = {"model": teach(family, folder / "model"), "port": 0, "token": TOKEN, "output_dir": folder / "out"}
    with serving("backend", *(part for key, value in options.items() for part in (f"--{key}", value))) as (_, address):
        yield Taught(request.param, family, address)


@asynccontextmanager
async def gateway_to(taught: Taught, **settings: Any) -> AsyncIterator[Gateway]:
    config = PolicyConfig(temperature=0, **settings)
    llm = connect("player", config, "policy", f"{taught.address}/v1", TOKEN)
    try:
        async with Gateway([llm]) as gateway:
            yield gateway
    finally:
        await llm.aclose()


async def run_agent(
    taught: Taught, dialect: str, streamed: bool, question: str = QUESTION, turns: list[Turn] | None = None, **more: Any
) -> tuple[list[Answer], list[ModelCall]]:
    """What the agent got, and the calls that were recorded; `more` are settings of the llm."""
    async with gateway_to(taught, **more) as gateway:
        with EpisodeScope(training=True, seed=1) as scope, gateway.endpoint(scope) as door:
            answers = await AGENTS[dialect](door, question, turns or dialogue(taught.family), streamed)
    return answers, scope.calls


@each_way
async def test_an_agent_gets_what_the_model_was_taught(taught: Taught, dialect: str, streamed: bool) -> None:
    answers, calls = await run_agent(taught, dialect, streamed)
    assert [answer._replace(ids=[]) for answer in answers] == expected(taught.family)
    ids = [called for answer in answers for called in answer.ids]
    assert all(len({*answer.ids}) == len(answer.ids) for answer in answers)
    assert taught.name in OWN_IDS or len({*ids}) == len(ids)
    if taught.family.tools == "mistral":
        assert all(len(each) == 9 and each.isalnum() for each in ids)
    recorded = [call["id"] for each in calls for call in (each.message or {}).get("tool_calls") or ()]
    assert recorded == ids
    tokenizer = tokenizer_of(taught.family)
    for call, (prompt, text) in zip(calls, lessons(taught.family), strict=False):
        assert call.prompt_token_ids == tokenizer.encode(prompt, add_special_tokens=False)
        assert call.token_ids == tokenizer.encode(text, add_special_tokens=False)
        assert not call.tool_call_malformed


async def test_sampled_tokens_are_the_trained_tokens(taught: Taught) -> None:
    """The calls of an episode are one row, whose log-probabilities are those of the learner."""
    rows = []
    for advantage, (dialect, streamed) in zip((1.0, -1.0), (("chat", True), ("messages", False)), strict=True):
        _, calls = await run_agent(taught, dialect, streamed)
        made = rows_of(calls, dict.fromkeys(range(len(calls)), advantage), f"{taught.name}/{dialect}")
        assert [row.calls for row in made] == [[0, 1, 2]]
        assert made[0].token_ids == calls[-1].all_token_ids
        rows += made
    body = [row.model_dump(include={"token_ids", "loss_mask", "logprobs", "advantages", "episode"}) for row in rows]
    settings = {"learning_rate": 1e-5, "attention": "packed"}
    job = await asyncio.to_thread(post_job, taught.address, TOKEN, body, **settings)
    assert job["status"] == "completed", job
    assert job["metrics"]["logprob_gap"] < 1e-5
    assert job["metrics"]["ratio_mean"] == pytest.approx(1, abs=1e-5)


@some_ways
async def test_calls_that_end_too_early_stay_in_the_text(taught: Taught, dialect: str, streamed: bool) -> None:
    nothing = [Turn("", [], "", [])]
    (answer,), (call,) = await run_agent(taught, dialect, streamed, BREAK, nothing)
    assert answer == Answer(cut_off(taught.family), "", [], [], "stop")
    assert call.tool_call_malformed
    assert (call.message or {})["content"] == answer.content
    assert "tool_calls" not in (call.message or {})


@some_ways
async def test_calls_that_are_cut_off_stay_in_the_text(taught: Taught, dialect: str, streamed: bool) -> None:
    first, nothing = dialogue(taught.family)[0], Turn("", [], "", [])
    length = len(tokenizer_of(taught.family).encode(lessons(taught.family)[0][1], add_special_tokens=False))
    limit = {"max_tokens": length - 9, "override_sampling": True}
    (answer,), (call,) = await run_agent(taught, dialect, streamed, turns=[nothing], **limit)
    assert (answer.reasoning, answer.calls, answer.ended) == (first.reasoning, [], "length")
    assert answer.content.startswith(first.content)
    assert "日本" in answer.content
    assert call.tool_call_malformed
    assert call.finish_reason == "length"
    assert len(call.token_ids or ()) == length - 9
