"""Text completions are recorded, stored, shown and trained as chats are, from any client."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from factories import connected, digits_project, read_lines, write_rows
from fake_openai import FakeOpenAI, encode, logprob
from marks import slow_but
from processes import FORK_SERVER, forked_python, run_project
from test_backend_inference import TOKEN, backend
from test_inspection import show
from tiny_models import save_tiny_model

from insitu.advantages.estimator import rows_of
from insitu.agents.frameworks import async_client
from insitu.capture.recorder import Recorder
from insitu.collect.conversations import conversations
from insitu.errors import CaptureError
from insitu.integrations.nat.base_parser import parse_to_openai_messages
from insitu.runs.episodes import Selection
from insitu.runs.records import call_records, restore_calls
from insitu.workflow.context import EpisodeScope
from insitu.workflow.llms import ModelClient


async def complete(plain: ModelClient, prompt: Any, **more: Any) -> Any:
    return await plain.client.completions.create(model="fake", prompt=prompt, **more)


async def streamed(plain: ModelClient, prompt: Any, **more: Any) -> list[Any]:
    return [chunk async for chunk in await complete(plain, prompt, stream=True, **more)]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_training_episode(server: FakeOpenAI, stream: bool) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True, seed=1) as scope:
            if stream:
                chunks = await streamed(plain, "hi", temperature=0.5, stream_options={"include_usage": True})
                choices = [choice for chunk in chunks for choice in chunk.choices]
            else:
                choices = (await complete(plain, "hi", temperature=0.5)).choices
    assert "".join(choice.text for choice in choices) == "echo: hi"
    assert all(c.logprobs is None and not (c.model_extra or {}).get("token_ids") for c in choices)
    assert not any((c.model_extra or {}).get("prompt_token_ids") for c in choices)
    (call,) = scope.calls
    assert (call.index, call.choice, call.model, call.llm) == (0, 0, "fake", "player")
    assert (call.messages, call.message) == (user("hi"), {"role": "assistant", "content": "echo: hi"})
    assert (call.prompt_token_ids, call.token_ids) == (encode("hi"), encode("echo: hi"))
    assert call.logprobs == [logprob(c) for c in "echo: hi"]
    assert (call.finish_reason, call.policy_version, call.error) == ("stop", 3, None)
    assert call.usage is not None
    sent = server.requests[-1]
    assert (sent["logprobs"], sent["return_token_ids"]) == (0, True)
    wanted = {name: sent[name] for name in ("temperature", "logprobs", "return_token_ids", "seed")}
    assert call.sampling == wanted
    start, end = scope.steps
    assert (start.data.input, end.data.output) == (user("hi"), "echo: hi")
    assert [m["content"] for m in parse_to_openai_messages(scope.steps)] == ["hi", "echo: hi"]


async def test_what_was_asked_for_is_seen(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            extra = {"return_token_ids": True}
            choice = (await complete(plain, "hi", logprobs=0, extra_body=extra)).choices[0]
            assert choice.logprobs.token_logprobs == scope.calls[0].logprobs
            assert choice.model_extra == {"prompt_token_ids": encode("hi"), "token_ids": encode("echo: hi")}
            await complete(plain, "hi", logprobs=2)
            assert server.requests[-1]["logprobs"] == 2
        with EpisodeScope() as scope:
            assert (await complete(plain, "hi")).choices[0].logprobs is None
    assert set(server.requests[-1]) == {"model", "prompt", "seed"}
    assert scope.calls[0].token_ids is None


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_choices(server: FakeOpenAI, stream: bool) -> None:
    prompts = ["a", "b", encode("a")]
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            await (streamed if stream else complete)(plain, prompts, n=2)
            await complete(plain, "next")
            await complete(plain, encode("ids"))
    made = [(c.index, c.messages[0]["content"], c.choice, c.prompt_token_ids) for c in scope.calls]
    ids = [(text, choice, encode(text)) for text in "aba" for choice in (0, 1)]
    first = [(index, "[97]" if index > 3 else text, *rest) for index, (text, *rest) in enumerate(ids)]
    assert made == [*first, (6, "next", 0, encode("next")), (7, "[105,100,115]", 0, encode("ids"))]
    assert scope.calls[3].token_ids == encode("echo 1: b")
    assert all(call.error is None for call in scope.calls)


async def test_attempts_and_seeds_are_as_for_chats(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True, seed=5) as scope:
            await complete(plain, "fail 2")
            with pytest.raises(openai.BadRequestError):
                await complete(plain, "status 400")
            await asyncio.gather(*(complete(plain, "same") for _ in range(3)))
            await plain.complete(user("same"))
    assert scope.ledger.failed_attempts == {"http 500": 2, "http 400": 1}
    assert [c.index for c in scope.calls] == list(range(5))
    tried = [r["seed"] for r in server.requests if r.get("prompt") == "fail 2"]
    assert len(tried) == 3
    assert len(set(tried)) == 1
    assert len({call.sampling["seed"] for call in scope.calls}) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_trained_is_told(stream: bool) -> None:
    for lacking in ("token_ids", "logprobs"):
        with FakeOpenAI(**{lacking: False}) as server:
            async with connected(server) as plain:
                with EpisodeScope(training=True) as scope, pytest.raises(CaptureError, match="training needs the"):
                    await (streamed if stream else complete)(plain, "hi")
                assert scope.ledger.capture_error is not None
                with EpisodeScope(training=True) as scope, pytest.raises(CaptureError, match="does not support `echo`"):
                    await (streamed if stream else complete)(plain, "hi", echo=True)
            assert len(server.requests) == 1


async def test_the_client_of_a_framework_gets_the_configured_parameters(server: FakeOpenAI) -> None:
    async with connected(server, temperature=0.5, logprobs=True, top_logprobs=2) as plain:
        with EpisodeScope(training=True) as scope:
            await async_client(plain).completions.create(model="gpt-3.5-turbo-instruct", prompt="hi")
    sent = server.requests[-1]
    assert (sent["model"], sent["temperature"], sent["logprobs"], "top_logprobs" in sent) == ("fake", 0.5, 2, False)
    assert len(scope.calls) == 1


async def test_a_prompt_that_goes_on_from_an_answer_is_one_row(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with EpisodeScope(training=True) as scope:
            first = (await complete(plain, "hi")).choices[0].text
            ids = {"return_token_ids": True}
            second = (await complete(plain, f"hi{first} and", extra_body=ids)).choices[0].model_extra
            await complete(plain, [*second["prompt_token_ids"], *second["token_ids"], ord("!")])
            await complete(plain, "other")
    weights = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    joined, other = rows_of(scope.calls, weights)
    assert (joined.calls, other.calls) == ([0, 1, 2], [3])
    assert joined.token_ids == [*scope.calls[2].prompt_token_ids, *scope.calls[2].token_ids]
    assert sum(joined.loss_mask) == sum(len(call.token_ids) for call in scope.calls[:3])
    assert [turns[-1].call.index for turns in conversations(scope.calls)] == [0, 1, 2, 3]
    records = [orjson.loads(orjson.dumps(record)) for record in call_records("r/1/x/0/0", scope.calls)]
    assert restore_calls(records) == scope.calls


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"prompt": 7}', b'{"prompt": []}', b'{"messages": []}'])
def test_a_body_that_is_no_text_completion_passes_through(body: bytes) -> None:
    with EpisodeScope():
        assert Recorder("here").begin("POST", "/v1/completions", body) is None


def test_a_stream_that_brings_nothing_is_a_failed_attempt() -> None:
    with EpisodeScope(seed=1) as scope:
        sent = []
        for events in (
            b"data: [DONE]\n\n",
            b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}\n\n',
        ):
            exchange = Recorder("here").begin("POST", "/v1/completions", b'{"prompt": "a", "stream": true}')
            assert exchange is not None
            sent.append(exchange.content)
            assert exchange.feed(events) == events
            exchange.end({})
    assert sent[0] == sent[1]
    assert scope.ledger.failed_attempts == {"empty stream": 1}
    assert [(call.index, call.message["content"], call.error) for call in scope.calls] == [(0, "a", None)]


ASK = """
    extra = {"return_token_ids": True, "ignore_eos": True}
    first = (AWAIT client.completions.create(model=name, prompt=text, max_tokens=6, extra_body=extra)).choices[0]
    ids = [*first.prompt_token_ids, *first.token_ids]
    more = (AWAIT client.completions.create(model=name, prompt=ids, max_tokens=6)).choices[0]
    return "|" + first.text + more.text
"""
IN_PROCESS = """
from insitu.plugin_api import *
import digits_plugin

class TextsConfig(FunctionBaseConfig, name="texts"):
    llm: LLMRef

@register_function(config_type=TextsConfig)
async def texts(config, builder):
    llm = await builder.get_llm(config.llm)
    async def answer(question: dict) -> str:
        return await ask(llm.client, llm.model, question["say"])
    yield FunctionInfo.from_fn(answer, description="continues a text")

async def ask(client, name, text):
""" + ASK.replace("AWAIT", "await")
PROGRAM = f"""
import json, sys, openai
def ask(client, name, text):{ASK.replace("AWAIT ", "")}
print(ask(openai.OpenAI(), "gpt-3.5-turbo-instruct", json.load(sys.stdin)["question"]["say"]))
"""


@pytest.mark.parametrize("way", slow_but(["through the gateway"], ["in process", "through the gateway"]))
def test_text_completions_are_trained(tmp_path: Path, way: str) -> None:
    """Two prompts an episode, the second of which goes on from the first answer, against a log of what was sampled."""
    program = {"_type": "command", "command": [forked_python(), "agent.py"], "pass_env": [FORK_SERVER]}
    block = {"_type": "texts"} if way == "in process" else program
    (tmp_path / "texts_plugin.py").write_text(IN_PROCESS)
    (tmp_path / "agent.py").write_text(PROGRAM)
    write_rows(tmp_path, [{"say": f"Row {i}: 1 2 3 "} for i in range(2)])
    log = tmp_path / "samples.jsonl"
    with backend(save_tiny_model(tmp_path / "model"), log, token=TOKEN) as (_, address):
        digits_project(tmp_path, workflow=block, plugin="texts_plugin", url=address, api_key=TOKEN)
        code, _, err = run_project(tmp_path)
    assert code == 0, err
    metrics = read_lines(tmp_path / "run/training_metrics.jsonl")
    assert [m["policy_version"] for m in metrics] == [1, 2]
    assert all(m["logprob_gap"] < 1e-3 for m in metrics)
    calls = read_lines(tmp_path / "run/calls.jsonl.gz")[1:]
    assert len(calls) == 2 * 2 * 4 * 2
    selection = Selection(tmp_path / "run")
    recorded = []
    for read in map(selection.read, selection.find()):
        (row,) = read.rows
        assert row.calls == [0, 1]
        assert sum(row.loss_mask) == sum(len(call.token_ids or ()) for call in read.calls) >= 7
        recorded += [(c.prompt_token_ids, c.token_ids, c.logprobs, c.policy_version) for c in read.calls]
    sampled = [(s["prompt_token_ids"], s["token_ids"], s["logprobs"], s["version"]) for s in read_lines(log)]
    rehearsed = [sample for sample in sampled if sample not in recorded]
    assert [version for *_, version in rehearsed] == [0, 0]
    assert sorted(recorded + rehearsed) == sorted(sampled)
    shown = show(tmp_path / "run", "--epoch", 1, "--row", 0, "--generation", 0).out
    assert "user: Row 0: 1 2 3" in shown
    assert "row 1: calls 0, 1;" in shown
