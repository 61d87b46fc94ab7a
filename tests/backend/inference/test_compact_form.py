"""The compact form of completions, which our recorder asks for, beside OpenAI's: over a backend with each sampler."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal
from factories import connected, model_client
from fake_vllm import FakeVllm
from marks import slow_after
from processes import HANGS, serving
from test_gateway import gateway_to, plain
from test_odd_servers import CHOICE, server_of
from tiny_models import byte_tokenizer, save_tiny_model

from insitu.backend.inference.sampler import Completion, SampledTokens, SamplingParams
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.model import load_model
from insitu.capture.recorder import Recorder
from insitu.capture.transport import recording_transport
from insitu.schemas.episodes import ModelCall
from insitu.wire.http_format import COMPACT, JSON
from insitu.workflow.context import EpisodeScope

HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "logprobs": True}
TEXT: dict[str, Any] = {"prompt": "hello", "logprobs": 0}
SAMPLING: dict[str, Any] = {"max_tokens": 40, "seed": 5, "n": 2}


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=pytest.mark.slow)])
def base_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A backend in its own process, whose sampler is its own, or a vLLM server."""
    model = save_tiny_model(tmp_path_factory.mktemp("served") / "model")
    with ExitStack() as stack:
        options = ["--model", model, "--name", "fake", "--port", 0, "--threads", 1]
        if request.param == "vllm":
            portal = stack.enter_context(start_blocking_portal())
            module = load_model(str(model), "cpu").module
            vllm = stack.enter_context(portal.wrap_async_context_manager(FakeVllm(module)))
            options += ["--sampler", "vllm", "--sampler_addresses", vllm.address]
        _, address = stack.enter_context(serving("backend", *options))
        yield f"{address}/v1"


def post(base_url: str, accept: str, **keys: Any) -> tuple[str, Any]:
    """Content type and body of a completion."""
    body = {"model": "fake", **SAMPLING, **keys}
    headers = {"Accept": accept, "Content-Type": JSON}
    route = "chat/completions" if "messages" in body else "completions"
    request = urllib.request.Request(f"{base_url}/{route}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=HANGS) as answer:
        text = answer.read()
        return answer.headers["Content-Type"], text if keys.get("stream") else json.loads(text)


@pytest.mark.parametrize("kind", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("accept", slow_after(1, [COMPACT, f"{JSON}, {COMPACT.upper()}; q=0.9"]))
def test_only_the_logprobs_differ(base_url: str, kind: dict[str, Any], accept: str) -> None:
    openais, whole = post(base_url, "*/*", **kind, return_token_ids=True)
    compact, answer = post(base_url, accept, **kind, return_token_ids=True)
    assert (openais, compact) == (JSON, COMPACT)
    for choice, same in zip(whole["choices"], answer["choices"], strict=True):
        logprobs = choice.pop("logprobs")
        numbers = [e["logprob"] for e in logprobs["content"]] if "content" in logprobs else logprobs["token_logprobs"]
        assert same.pop("logprobs") == {"token_logprobs": numbers}
        assert len(numbers) == len(same["token_ids"]) > 1
    for body in (whole, answer):
        del body["id"], body["created"]
    assert answer == whole


@pytest.mark.parametrize(
    ("accept", "keys"),
    [
        (JSON, {**CHAT, "return_token_ids": True}),
        ("application/*, text/plain", {**CHAT, "return_token_ids": True}),
        (COMPACT, CHAT),
        (COMPACT, {**CHAT, "return_token_ids": True, "top_logprobs": 1}),
        (COMPACT, {**CHAT, "return_token_ids": True, "stream": True}),
        (COMPACT, {**TEXT, "return_token_ids": True, "logprobs": 1}),
    ],
    ids=["json", "any", "without ids", "alternatives", "stream", "alternatives of a text"],
)
def test_other_requests_keep_openais_form(base_url: str, accept: str, keys: dict[str, Any]) -> None:
    kind, answer = post(base_url, accept, **keys)
    if keys.get("stream"):
        assert kind == "text/event-stream; charset=utf-8"
        assert b'"logprobs":{"content":[{"token":' in answer
        return
    assert kind == JSON
    logprobs = answer["choices"][0]["logprobs"]
    assert set(logprobs) in ({"content", "refusal"}, {"tokens", "token_logprobs", "top_logprobs", "text_offset"})


def tokens(calls: list[ModelCall]) -> list[tuple[Any, ...]]:
    fields = "prompt_token_ids", "token_ids", "logprobs", "logprobs_temperature", "finish_reason", "weights", "choice"
    return [(*(getattr(call, field) for field in fields), (call.message or {}).get("content")) for call in calls]


def numbers(logprobs: Any) -> list[float] | None:
    return None if logprobs is None else [entry.logprob for entry in logprobs.content]


async def test_both_forms_are_the_same_trajectory_and_the_agent_gets_openais(base_url: str) -> None:
    """An agent that asks for logprobs gets OpenAI's form, so its calls are recorded from that."""
    recorded = []
    for logprobs, streamed in product((None, True), (False, True)):
        keys: Any = {"model": "fake", "messages": HELLO, "logprobs": logprobs, "stream": streamed, **SAMPLING}
        async with connected(base_url) as llm, gateway_to(model_client(base_url)) as gateway:
            with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as door:
                async with plain(door) as outside:
                    for client in (llm.client, outside):
                        response = await client.chat.completions.with_raw_response.create(**keys)
                        if streamed:
                            received = [c async for e in response.parse() for c in e.choices if c.index == 0]
                            parts = [numbers(choice.logprobs) for choice in received]
                            got = [number for part in parts if part is not None for number in part] or None
                        else:
                            assert response.headers["Content-Type"] == JSON
                            got = numbers(response.parse().choices[0].logprobs)
                        assert got == (scope.calls[-2].logprobs if logprobs else None)
        recorded += [tokens(scope.calls[:2]), tokens(scope.calls[2:])]
    assert recorded == [recorded[0]] * 8
    assert all(ids and probabilities and len(ids) == len(probabilities) for _, ids, probabilities, *_ in recorded[0])


def test_a_synchronous_client_records_the_same(base_url: str) -> None:
    recorded = []
    for logprobs in (None, True):
        transport = recording_transport(httpx)(Recorder(base_url))
        with openai.OpenAI(base_url=base_url, api_key="k", http_client=httpx.Client(transport=transport)) as client:
            with EpisodeScope(training=True) as scope:
                keys: Any = {"model": "fake", "messages": HELLO, "logprobs": logprobs, **SAMPLING}
                response = client.chat.completions.with_raw_response.create(**keys)
        assert response.headers["Content-Type"] == JSON
        assert numbers(response.parse().choices[0].logprobs) == (scope.calls[0].logprobs if logprobs else None)
        recorded.append(tokens(scope.calls))
    assert recorded[0] == recorded[1]


async def test_the_compact_form_is_asked_for_what_the_agent_does_not_get() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Accept"])
        return web.json_response({"error": {"message": "no"}}, status=400)

    async with server_of(answer) as address, connected(f"{address}/v1") as llm:

        async def ask(training: bool = True, **keys: Any) -> str:
            with EpisodeScope(training=training), pytest.raises(openai.BadRequestError):
                await llm.complete(HELLO, **keys)
            return asked[-1]

        assert await ask() == f"{COMPACT}, {JSON}"
        assert await ask(logprobs=True) == await ask(stream=True) == await ask(training=False) == JSON


@pytest.mark.parametrize("kind", [f"{COMPACT}; charset=utf-8", COMPACT.upper()])
async def test_a_proxy_may_write_the_content_type_otherwise(kind: str) -> None:
    choice = {**CHOICE, "logprobs": {"token_logprobs": [-1.0] * 3}}
    body = json.dumps({"prompt_token_ids": [1], "choices": [choice]}).encode()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": kind})

    async with server_of(answer) as address, connected(f"{address}/v1") as llm:
        with EpisodeScope(training=True) as scope:
            response = await llm.client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
    assert (response.headers["Content-Type"], scope.calls[0].logprobs) == (JSON, [-1.0] * 3)


@pytest.mark.parametrize(
    ("ids", "params"),
    [
        ([7, 8, 9], {}),
        ([7, 8, 2, 9], {}),
        ([7, 8, 2, 9], {"ignore_eos": True}),
        ([7, 8, 9, 10, 11, 12], {}),
        ([7, 8, 9, 10, 2, 12], {}),
        ([7, 8, 9, 10, 11, 2], {}),
        ([97, 98, 99, 100], {"stop": ("c",)}),
        ([], {}),
    ],
)
def test_tokens_that_come_together_end_where_they_would_one_by_one(ids: list[int], params: dict[str, Any]) -> None:
    tokenizer = ChatTokenizer(byte_tokenizer(), {2})
    for limits in ({"max_tokens": 5, "max_length": 99}, {"max_tokens": 9, "max_length": 8}):
        together, single = (
            Completion(
                [1, 2, 3], SamplingParams(0, limits["max_tokens"], **params), tokens=SampledTokens([4], [-1.0], [None])
            )
            for _ in range(2)
        )
        for completion in (together, single):
            if params.get("stop"):
                completion.detokenize(tokenizer)
        sampled = SampledTokens(ids, [-0.5] * len(ids), [None] * len(ids))
        end = SimpleNamespace(text="", reason=None)
        for token in sampled:
            text, end.reason = single.append(token, tokenizer, limits["max_length"])
            end.text += text
            if end.reason is not None:
                break
        assert together.extend(sampled, tokenizer, limits["max_length"]) == (end.text, end.reason)
        assert together.tokens == single.tokens
