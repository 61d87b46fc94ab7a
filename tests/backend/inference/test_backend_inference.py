"""The server as its clients see it: a separate process, asked over HTTP with the official OpenAI client."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest
import torch
from marks import slow_after
from openai.types import Completion
from openai.types.chat import ChatCompletion
from processes import HANGS, LOGGED_BACKEND, Process, forked_python, serving
from processes import run as run_command
from tiny_models import byte_tokenizer, save_tiny_model
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from insitu.backend import BackendOptions
from insitu.backend.compute import ComputeThread
from insitu.backend.inference.engine import Engine
from insitu.backend.inference.sampler import GenerationRequest, OutputDelta, SampledTokens, SamplingParams
from insitu.backend.inference.tokenizer import ChatTokenizer, CompletionText
from insitu.backend.model import load_model
from insitu.backend.protocols.openai.chat import ChatRequest, Message, template_messages
from insitu.backend.protocols.openai.text import TextFormatter, TextRequest
from insitu.backend.server import run
from insitu.errors import InsituError

TOKEN = "s3cret"
HELLO = [{"role": "user", "content": "hello"}]


def backend(
    model: Path, log: Path | None = None, **options: Any
) -> contextlib.AbstractContextManager[tuple[Process, str]]:
    """A running server process and its address; `log` gets what it samples."""
    given = {"model": model, "port": 0, "threads": 1} | options
    command = ["backend"] if log is None else [LOGGED_BACKEND, log]
    return serving(*command, *(part for name, value in given.items() for part in (f"--{name}", value)))


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """A server with a token over a tiny Llama, and the file with what it has sampled."""
    folder = tmp_path_factory.mktemp("served")
    log = folder / "samples.jsonl"
    with backend(save_tiny_model(folder / "model"), log, token=TOKEN, max_batch=16) as (_, address):
        yield address, log


@pytest.fixture
def client(served) -> openai.OpenAI:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


def post(address: str, body: Any, token: str = TOKEN, path: str = "/v1/chat/completions", method: str = "POST"):
    """(status, answer, headers) of a request with exactly this body."""
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(address + path, raw, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=HANGS) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def test_a_completion_has_everything_training_needs(served):
    body = {"model": "policy", "messages": HELLO, "max_tokens": 6, "seed": 3, "logprobs": True, "top_logprobs": 2}
    status, answer, headers = post(served[0], {**body, "return_token_ids": True, "n": 2, "user": "me"})
    assert status == 200
    checked = ChatCompletion.model_validate(answer)
    assert headers["x-policy-version"] == "0"
    assert checked.policy_version == 0
    assert checked.prompt_token_ids == ChatTokenizer(byte_tokenizer()).render_prompt(HELLO)
    assert [choice.index for choice in checked.choices] == [0, 1]
    assert checked.choices[0].token_ids != checked.choices[1].token_ids
    for choice in checked.choices:
        assert len(choice.token_ids) == len(choice.logprobs.content) <= 6
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in choice.logprobs.content)
    total = sum(len(choice.token_ids) for choice in checked.choices)
    assert checked.usage.completion_tokens == total
    assert checked.usage.total_tokens == total + len(checked.prompt_token_ids)


def test_a_seed_gives_the_same_answer_and_none_another(client):
    def text(**more):
        answer = client.chat.completions.create(model="policy", messages=HELLO, max_tokens=20, **more)
        return answer.choices[0].message.content

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0)


def test_a_stream_is_the_whole_in_parts(served, client):
    asked = {"model": "policy@0", "messages": HELLO, "max_tokens": 40, "seed": 9, "logprobs": True}
    extra = {"return_token_ids": True, "ignore_eos": True}
    whole = client.chat.completions.create(**asked, extra_body=extra)
    stream = client.chat.completions.create(
        **asked, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    chunks = [*stream]
    *pieces, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == 40
    assert pieces[0].prompt_token_ids == whole.prompt_token_ids
    assert all(piece.policy_version == 0 for piece in chunks)
    choices = [piece.choices[0] for piece in pieces]
    assert "".join(choice.delta.content for choice in choices) == whole.choices[0].message.content
    assert [token for choice in choices for token in choice.token_ids] == whole.choices[0].token_ids
    logprobs = [entry.logprob for choice in choices for entry in choice.logprobs.content]
    assert logprobs == [entry.logprob for entry in whole.choices[0].logprobs.content]
    assert [choice.finish_reason for choice in choices] == [None] * 39 + ["length"]


def test_stop_strings_end_the_text_and_keep_the_tokens(served, client):
    asked = {"model": "policy", "messages": HELLO, "max_tokens": 60, "seed": 1}
    extra = {"return_token_ids": True, "ignore_eos": True}
    full = client.chat.completions.create(**asked, extra_body=extra).choices[0]
    readable = [index for index, letter in enumerate(full.message.content) if letter.isascii() and index > 3]
    stop = full.message.content[readable[0]]
    cut = client.chat.completions.create(**asked, extra_body=extra, stop=["not there", stop]).choices[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.message.content == full.message.content[: full.message.content.index(stop)]
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert 0 < len(cut.token_ids) < len(full.token_ids)
    streamed = client.chat.completions.create(**asked, extra_body=extra, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in streamed) == cut.message.content


def test_tools_and_past_tool_calls_reach_the_template(served):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]
    body = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": 1, "return_token_ids": True}
    status, answer, _ = post(served[0], body)
    assert status == 200
    prompt = byte_tokenizer().decode(answer["prompt_token_ids"])
    assert '"name": "look"' in prompt.split("<|im_end|>")[0]
    assert '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>' in prompt
    assert "user\nhello<" in prompt


TEXT = "Once upon <|im_start|>a ti"
TEXT_IDS = ChatTokenizer(byte_tokenizer()).encode(TEXT, add_special_tokens=True)


def test_a_text_is_continued_without_a_chat_template(served):
    body = {"model": "policy@0", "prompt": TEXT, "max_tokens": 6, "seed": 31415, "logprobs": 2, "ignore_eos": True}
    status, answer, headers = post(served[0], {**body, "return_token_ids": True}, path="/v1/completions")
    assert (status, headers["x-policy-version"]) == (200, "0")
    checked = Completion.model_validate(answer)
    assert (checked.policy_version, checked.model) == (0, "policy@0")
    (choice,) = checked.choices
    assert choice.prompt_token_ids == TEXT_IDS
    assert TEXT_IDS.count(byte_tokenizer().convert_tokens_to_ids("<|im_start|>")) == 1
    assert choice.text == ChatTokenizer(byte_tokenizer()).decode(choice.token_ids)
    legacy = choice.logprobs
    assert len(choice.token_ids) == len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.top_logprobs) == 6
    for token, logprob, top in zip(legacy.tokens, legacy.token_logprobs, legacy.top_logprobs, strict=True):
        assert top[token] == logprob
        assert 1 <= len(top) <= 3
    assert legacy.text_offset == [sum(map(len, legacy.tokens[:k])) for k in range(6)]
    assert checked.usage.total_tokens == len(TEXT_IDS) + 6
    line = next(line for line in map(json.loads, served[1].read_text().splitlines()) if line["seed"] == 31415)
    same = [TEXT_IDS, choice.token_ids, legacy.token_logprobs]
    assert [line["prompt_token_ids"], line["token_ids"], line["logprobs"]] == same
    bare = post(served[0], {**body, "logprobs": None}, path="/v1/completions")[1]["choices"][0]
    assert bare == {"index": 0, "text": choice.text, "logprobs": None, "finish_reason": "length"}
    only = post(served[0], {**body, "logprobs": 0}, path="/v1/completions")[1]["choices"][0]["logprobs"]
    assert (only["token_logprobs"], only["top_logprobs"]) == (legacy.token_logprobs, None)


def test_the_official_client_continues_texts_and_token_ids_and_several(served, client):
    asked = {"model": "policy", "max_tokens": 12, "seed": 11}
    extra = {"return_token_ids": True, "ignore_eos": True}
    whole = client.completions.create(**asked, prompt=TEXT, n=2, logprobs=0, extra_body=extra)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].token_ids != whole.choices[1].token_ids
    by_ids = client.completions.create(**asked, prompt=TEXT_IDS, n=2, extra_body=extra)
    assert [choice.token_ids for choice in by_ids.choices] == [choice.token_ids for choice in whole.choices]
    several = client.completions.create(**asked, prompt=[TEXT, TEXT, "b"], n=2, extra_body=extra)
    assert [choice.index for choice in several.choices] == list(range(6))
    assert [choice.prompt_token_ids for choice in several.choices] == [TEXT_IDS] * 4 + [[65], [65]]
    assert len({tuple(choice.token_ids) for choice in several.choices}) == 6
    assert several.usage.prompt_tokens == 2 * len(TEXT_IDS) + 1
    assert client.completions.create(**asked, prompt=[TEXT_IDS, [65]]).choices[1].index == 1
    stream = client.completions.create(
        **asked, prompt=TEXT, n=2, logprobs=0, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = stream
    assert (last.choices, last.usage.completion_tokens) == ([], 24)
    for choice in whole.choices:
        parts = [p.choices[0] for p in pieces if p.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [x for part in parts for x in part.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        assert [x for part in parts for x in part.logprobs.text_offset] == choice.logprobs.text_offset
        assert [getattr(part, "prompt_token_ids", None) for part in parts] == [TEXT_IDS] + [None] * 11
        assert parts[-1].finish_reason == choice.finish_reason == "length"
    assert len(client.completions.create(model="policy", prompt=TEXT, extra_body=extra).choices[0].token_ids) == 16


def test_the_log_probabilities_of_a_prompt_are_those_it_was_sampled_with(served, client):
    """And those of a forward pass by transformers."""
    asked = {"model": "policy", "max_tokens": 12}
    extra = {"return_token_ids": True, "ignore_eos": True}
    [sampled] = client.completions.create(**asked, prompt=TEXT_IDS, seed=5, logprobs=0, extra_body=extra).choices
    text = [*TEXT_IDS, *sampled.token_ids]
    scored = client.completions.create(
        model="policy", prompt=[text, TEXT_IDS, [65]], n=2, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    first, same, short, _, one, _ = (choice.prompt_logprobs for choice in scored.choices)
    assert (first, one) == (same, [None])
    assert [next(iter(entry)) for entry in first[1:]] == [str(token) for token in text[1:]]
    logprobs = [entry[str(token)]["logprob"] for entry, token in zip(first[1:], text[1:], strict=True)]
    assert logprobs[len(TEXT_IDS) - 1 :] == pytest.approx(sampled.logprobs.token_logprobs, abs=1e-5)
    module = load_model(str(served[1].parent / "model")).module
    with torch.no_grad():
        expected = module(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    assert logprobs == pytest.approx(expected.gather(-1, torch.tensor(text)[1:, None])[:, 0].tolist(), abs=1e-5)
    assert len(short) == len(TEXT_IDS)


def test_prompts_and_texts_as_token_ids(served):
    def ask(path: str, **body: Any) -> Any:
        status, answer, _ = post(served[0], {"model": "policy", **body}, path=path)
        assert status == (400 if "error" in answer else 200)
        return answer

    rendered = ChatTokenizer(byte_tokenizer()).render_prompt(HELLO)
    assert ask("/tokenize", messages=HELLO)["tokens"] == rendered
    plain = ask("/tokenize", prompt=TEXT, add_special_tokens=False)
    assert plain == {"tokens": TEXT_IDS, "count": len(TEXT_IDS), "max_model_len": 256}
    assert ask("/detokenize", tokens=TEXT_IDS) == {"prompt": TEXT}
    characters = "<|im_start|>Zürich 日本 🙂"  # of several tokens each
    assert ask("/detokenize", tokens=ask("/tokenize", prompt=characters)["tokens"]) == {"prompt": characters}
    assert "one" in ask("/tokenize", prompt=["a", "b"])["error"]["message"]
    assert "the vocabulary ends at 319" in ask("/detokenize", tokens=[320])["error"]["message"]


def test_the_tokenizer_may_put_special_tokens_around_a_text():
    tokenizer = byte_tokenizer()
    beginning = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", beginning)]
    )
    tokens = ChatTokenizer(tokenizer)
    for text in ("hi", "x" * 20_000):
        plain = tokens.encode(text, add_special_tokens=False)
        assert tokens.encode(text, add_special_tokens=True) == [beginning, *plain]
        assert len(plain) == len(text)
    assert tokens.render_prompt(HELLO)[:2] != [beginning, beginning]


DEEP = b'{"model":"policy","messages":[{"role":"user","content":"x"}],"tools":[{"a":%s}]}' % (b"[" * 900 + b"]" * 900)
REFUSED = [
    (b"{not json", 400, None, "not JSON"),
    (b"[]", 400, None, "expected an object"),
    ({"messages": HELLO}, 400, "model", "model"),
    ({"model": "policy"}, 400, "messages", "messages"),
    ({"model": "policy", "messages": []}, 400, "messages", "at least 1"),
    ({"model": "policy", "messages": "hi"}, 400, "messages", "list"),
    ({"model": "policy", "messages": [{"content": "x"}]}, 400, "messages.0.role", "role"),
    ({"model": "policy", "messages": HELLO, "temperature": "hot"}, 400, "temperature", "'hot'"),
    ({"model": "policy", "messages": HELLO, "temperature": -1}, 400, "temperature", "-1"),
    ({"model": "policy", "messages": HELLO, "temperature": 1e39, "min_tokens": 1}, 400, "temperature", "1000000"),
    ({"model": "policy", "messages": HELLO, "top_p": 0}, 400, "top_p", "greater than 0"),
    ({"model": "policy", "messages": HELLO, "max_tokens": 0}, 400, "max_tokens", "1"),
    ({"model": "policy", "messages": HELLO, "n": True}, 400, "n", "integer"),
    ({"model": "policy", "messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs", "needs logprobs"),
    *(
        ({"model": "policy", "messages": HELLO, key: value, **more}, 400, key, problem)
        for key, value, problem, more in [
            ("logit_bias", {"320": 1}, "token 320; the vocabulary ends at 319", {}),
            ("logit_bias", {"a": 1}, "key 'a'; allowed: ids of tokens below 320", {}),
            ("logit_bias", {"9" * 5000: 1}, "allowed: ids of tokens", {}),
            ("logit_bias", [1], "dictionary", {}),
            ("presence_penalty", 2.5, "less than or equal to 2", {}),
            ("frequency_penalty", "a", "number", {}),
            ("repetition_penalty", 0, "greater than or equal to 0.01", {}),
            ("top_k", -2, "greater than or equal to -1", {}),
            ("min_p", 1.5, "less than or equal to 1", {}),
            ("bad_words", ["a"] * 65, "at most 64", {}),
            ("bad_words", [" "], "other than spaces", {}),
            ("stop_token_ids", [320], "token 320; the vocabulary ends at 319", {}),
            ("response_format", {"type": "json"}, "'json'; allowed: text, json_object, json_schema", {}),
            ("response_format", {"type": "json_schema"}, "json_schema.schema", {}),
            ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, '"not"', {}),
            ("structured_outputs", {"jso": {}}, "'jso'; allowed: json, regex", {}),
            ("structured_outputs", {"regex": "a", "json": {}}, "one of them", {}),
            ("structured_outputs", {"choice": []}, "list of texts", {}),
            ("structured_outputs", {"regex": 5}, "regex of type int; allowed: a text", {}),
            ("structured_outputs", {"regex": "a"}, "exclude", {"response_format": {"type": "json_object"}}),
            ("min_tokens", 3, "cannot be used with structured output", {"structured_outputs": {"regex": "a"}}),
        ]
    ),
    ({"model": "policy", "messages": HELLO, "temprature": 1}, 400, "temprature", "not supported"),
    ({"model": "policy", "messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", "needs tools"),
    ({"model": "other", "messages": HELLO}, 404, "model", "known models: policy, policy@0"),
    ({"model": "policy@²", "messages": HELLO}, 404, "model", "known models: policy, policy@0"),
    ({"model": "policy", "messages": HELLO, "stop": ["x"] * 65}, 400, "stop", "65 entries; allowed: 64"),
    ({"model": "policy", "messages": HELLO, "chat_template_kwargs": {"messages": []}}, 400, "messages", ".*"),
    ({"model": "policy", "messages": HELLO, "chat_template_kwargs": {"self": 1}}, 400, "messages", "multiple"),
    ({"model": "policy", "messages": HELLO, "guided_json": {}}, 400, "guided_json", "not supported"),
    (DEEP, 400, None, "nested more than 128 levels"),
    ({"model": "policy@7", "messages": HELLO}, 404, "model", "known models: policy, policy@0"),
    ({"model": "policy", "messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", r"3\d\d tokens.*256"),
    ({"model": "policy", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "messages.0.content", "'image_url'; only text"),
]  # fmt: skip


KINDS_OF_PROMPT = "a text, a list of token ids, or a list of those"
REFUSED_TEXTS = [
    ({"model": "policy"}, 400, "prompt", "required"),
    *(
        ({"model": "policy", "prompt": prompt}, 400, "prompt", KINDS_OF_PROMPT)
        for prompt in (None, 5, [1, "a"], [[1], "a"], [-1], [True], [[[1]]])
    ),
    *(({"model": "policy", "prompt": prompt}, 400, "prompt", "without tokens") for prompt in ("", [], ["a", ""], [[]])),
    ({"model": "policy", "prompt": [1, 320]}, 400, "prompt", "token 320.* ends at 319"),
    ({"model": "policy", "prompt": ["a", "x" * 300]}, 400, "prompt", "300 tokens.*256"),
    ({"model": "policy", "prompt": ["a"] * 9, "n": 128}, 400, "prompt", "9 prompts, with n 128 each; allowed: 1024"),
    ({"model": "policy", "prompt": "a", "logprobs": True}, 400, "logprobs", "integer"),
    ({"model": "policy", "prompt": "a", "logprobs": 21}, 400, "logprobs", "20"),
    ({"model": "policy", "prompt": "a", "max_tokens": 0}, 400, "max_tokens", "1"),
    ({"model": "policy", "prompt": "a", "prompt_logprobs": 1}, 400, "prompt_logprobs", "less than or equal to 0"),
    ({"model": "policy", "prompt": "a", "prompt_logprobs": 0, "stream": True}, 400, "prompt_logprobs", "omit stream"),
    ({"model": "policy", "prompt": "a", "echo": True}, 400, "echo", "not supported.*allowed: False"),
    ({"model": "policy", "prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
    ({"model": "policy", "prompt": "a", "best_of": 2}, 400, "best_of", "not supported"),
    ({"model": "policy", "prompt": "a", "messages": HELLO}, 400, "messages", "not supported"),
    ({"model": "policy@7", "prompt": "a"}, 404, "model", "known models: policy, policy@0"),
]


@pytest.mark.parametrize(("body", "status", "param", "message"), REFUSED_TEXTS)
def test_a_bad_text_completion_is_refused(served, body, status, param, message):
    got, answer, _ = post(served[0], body, path="/v1/completions")
    assert (got, answer["error"]["param"]) == (status, param)
    assert re.search(message, answer["error"]["message"])


@pytest.mark.parametrize(("body", "status", "param", "message"), REFUSED)
def test_bad_input_is_refused_with_a_sentence_and_the_server_goes_on(served, body, status, param, message):
    got, answer, _ = post(served[0], body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert re.search(message, answer["error"]["message"])
    assert post(served[0], {"model": "policy", "messages": HELLO, "max_tokens": 1})[0] == 200


def test_values_that_ask_for_nothing_are_taken(served):
    neutral = {"presence_penalty": 0, "logit_bias": {}, "top_k": -1, "response_format": {"type": "text"}, "store": True}
    neutral["chat_template_kwargs"] = {"enable_thinking": False}
    assert post(served[0], {"model": "policy", "messages": HELLO, "max_tokens": 1, **neutral})[0] == 200


@pytest.mark.parametrize("path", slow_after(1, ["/v1/chat/completions", "/v1/completions"]))
def test_parameters_that_shape_a_completion(served, path):
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "hello"}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

    def text(**more) -> tuple[str, str]:
        body = {"model": "policy", "max_tokens": 24, "seed": 3, **prompt, **more}
        status, answer, _ = post(served[0], body, path=path)
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]

    plain = text(ignore_eos=True)
    for shaping in (
        {"top_k": 2},
        {"min_p": 0.9},
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 3},
        {"logit_bias": {"65": 100}},
        {"bad_words": [letter for letter in {*plain[0]} if letter.isascii() and letter.isalpha()]},
    ):
        assert text(ignore_eos=True, **shaping) != plain
        assert text(ignore_eos=True, **shaping) == text(ignore_eos=True, **shaping)
    for structure in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
    ):
        answer, reason = text(**structure)
        assert (json.loads(answer)["a"] in (1, 2), reason) == (True, "stop")
    assert text(structured_outputs={"choice": ["left", "right"]})[0] in ("left", "right")
    assert text(response_format={"type": "json_object"}, max_tokens=2)[1] == "length"


def test_a_long_prompt_does_not_hold_up_others(served):
    body = {"model": "policy", "messages": [{"role": "user", "content": "x" * 600_000}]}
    with ThreadPoolExecutor(1) as other:
        refused = other.submit(post, served[0], body)
        for _ in range(5):
            assert post(served[0], {"model": "policy", "messages": HELLO, "max_tokens": 1})[0] == 200
        assert not refused.done()
        assert "may have 256" in refused.result()[1]["error"]["message"]


def test_other_paths_methods_and_tokens(served):
    address = served[0]
    assert post(address, None, path="/v1/nothing", method="GET")[0] == 404
    status, answer, _ = post(address, None, method="GET")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")
    status, answer, _ = post(address, {}, token="wrong")
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    status, answer, _ = post(address, None, token="", path="/health", method="GET")
    assert status == 200
    assert re.fullmatch(r"[0-9a-f]{16}", answer.pop("weights"))
    limits = {
        "vocab_size": 320,
        "max_length": 256,
        "logprob_tolerance": 0.005,
        "sampler": "embedded",
        "dtype": "float32",
    }
    formats = {"tool_format": "hermes", "reasoning_format": "none"}
    assert answer == {"status": "ok", "policy_version": 0, **limits, **formats}
    assert post(address, b"x" * (16 * 2**20 + 1))[0] == 413


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["policy", "policy@0"]
    assert client.models.retrieve("policy@0").id == "policy@0"
    with pytest.raises(openai.NotFoundError, match="known models: policy"):
        client.models.retrieve("gpt-4o")


def test_the_openapi_document_covers_every_route(served):
    status, document, _ = post(served[0], None, path="/openapi.json", method="GET")
    assert status == 200
    assert document["openapi"].startswith("3.1")
    operations = {(m.upper(), path): o for path, methods in document["paths"].items() for m, o in methods.items()}
    posted = {("POST", path) for path in ("/v1/train/jobs", "/_train_model", "/v1/messages", "/v1/responses")}
    assert {("GET", "/health"), *posted} <= set(operations)
    assert len(operations) == 42
    assert all(operation["summary"] for operation in operations.values())
    schemas = document["components"]["schemas"]
    referred = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert referred <= set(schemas)
    assert "temperature" in schemas["ChatRequest"]["properties"]


async def test_many_at_once_get_what_they_get_alone(served):
    async with openai.AsyncOpenAI(base_url=f"{served[0]}/v1", api_key=TOKEN, max_retries=0) as client:

        async def one(seed: int) -> list[int]:
            answer = await client.chat.completions.create(
                model="policy",
                messages=HELLO,
                seed=seed,
                max_tokens=seed % 17 + 1,
                extra_body={"return_token_ids": True},
            )
            return answer.choices[0].token_ids

        together = await asyncio.gather(*map(one, range(40)))
        assert [await one(seed) for seed in range(0, 40, 8)] == together[::8]


def test_completions_are_logged(served, client):
    answer = client.chat.completions.create(
        model="policy", messages=HELLO, seed=123456, max_tokens=3, logprobs=True, extra_body={"return_token_ids": True}
    )
    line = next(line for line in map(json.loads, served[1].read_text().splitlines()) if line["seed"] == 123456)
    assert line["token_ids"] == answer.choices[0].token_ids
    assert line["prompt_token_ids"] == answer.prompt_token_ids
    assert line["logprobs"] == [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert line["version"] == 0


async def test_clients_that_leave_free_their_slots(served):
    """Sixteen long requests fill every slot; once their clients are gone, another is served and they are not."""
    before = served[1].read_text().count("\n")
    async with openai.AsyncOpenAI(base_url=f"{served[0]}/v1", api_key=TOKEN, max_retries=0) as client:
        long = {"model": "policy", "messages": HELLO, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        tasks = [asyncio.create_task(client.chat.completions.create(**long, n=20)) for _ in range(20)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stream = await client.chat.completions.create(**long, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await client.chat.completions.create(model="policy", messages=HELLO, max_tokens=1, timeout=HANGS)
    assert served[1].read_text().count("\n") - before < 200, "of 400 that were cancelled"


@pytest.mark.parametrize("name", slow_after(1, ["SIGTERM", "SIGINT"]))
def test_it_stops_when_asked_to_even_while_it_streams(tmp_path, name):
    with backend(save_tiny_model(tmp_path)) as (process, address):
        body = {"model": "policy", "messages": HELLO, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as stream:
            stream.readline()
            process.send_signal(getattr(signal, name))
            assert process.wait(HANGS) == 0


def test_it_ends_when_nobody_reads_its_address(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [forked_python(), "-m", "insitu", "backend", "--port", "0", "--model", save_tiny_model(tmp_path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=HANGS, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert "insitu backend: cannot print the address: Broken pipe\n" in done.stderr


def test_it_ends_when_its_parent_has_been_killed(tmp_path):
    """The backend is a child of the process that is killed."""
    save_tiny_model(tmp_path)
    parent = f"""if True:
        import os, sys
        from insitu.cli import main
        if os.fork():
            os.wait()
        else:
            sys.argv[1:] = ["backend", "--port", "0", "--parent_pid", str(os.getppid()), "--model", {str(tmp_path)!r}]
            print(os.getpid(), flush=True)
            main()"""
    with subprocess.Popen([forked_python(), "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        backend = psutil.Process(int(process.stdout.readline()))
        assert " ready at http://" in process.stdout.readline()
        process.kill()  # and with it, by the fork server, the parent
        process.wait()
    backend.wait(HANGS)


def test_a_model_that_cannot_be_served_is_one_sentence_and_exit_code_1(tmp_path):
    done = run_command("backend", "--model", tmp_path / "missing", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("insitu backend: there is no folder")
    assert "Traceback" not in done.stderr


def _broken_adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{")
    return folder


def _broken_record(folder: Path) -> Path:
    (save_tiny_model(folder) / "training.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        (_broken_adapter, {}, "adapter_config.json cannot be read"),
        (_broken_record, {}, "training.json cannot be read"),
        (save_tiny_model, {"output_dir": Path("/dev/null/out")}, "--output_dir: cannot write to /dev/null/out: Not a"),
    ],
)
async def test_what_cannot_be_read_or_written_is_told_at_the_start(tmp_path, model, options, problem):
    with pytest.raises(InsituError, match=problem):
        await run(BackendOptions(model=str(model(tmp_path / "model")), port=0, threads=1, **options), print)


def test_an_output_dir_belongs_to_one_backend_and_the_next_continues_its_training(tmp_path):
    model, folder = save_tiny_model(tmp_path / "model"), tmp_path / "out"

    def train_once(address: str) -> str:
        row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0, -5, -5], "advantages": 1.0}
        head = {"settings": {"learning_rate": 0.01}, "num_rows": 1}
        body = "\n".join(map(json.dumps, (head, row))).encode()
        _, job, _ = post(address, body, path="/v1/train/jobs")
        with urllib.request.urlopen(f"{address}/v1/train/jobs/{job['id']}/events", timeout=HANGS) as events:
            states = [json.loads(line[6:]) for line in events if line.startswith(b"data: ")]
        return states[-1]["checkpoint"]

    def sample(address: str) -> str:
        body = {"model": "policy", "messages": HELLO, "max_tokens": 8, "seed": 1}
        return post(address, body)[1]["choices"][0]["message"]["content"]

    with backend(model, output_dir=folder) as (first, address):
        assert train_once(address) == str(folder / "checkpoints/step_000001")
        said = sample(address)
        second = run_command("backend", "--model", model, "--port", 0, "--output_dir", folder)
        assert second.returncode == 1
        used = f"insitu backend: --output_dir: {folder} is in use by process {first.pid} on "
        assert used in second.stderr
    with backend(model, output_dir=folder) as (_, address):
        assert post(address, None, path="/health", method="GET")[1]["policy_version"] == 1
        assert sample(address) == said
        assert train_once(address) == str(folder / "checkpoints/step_000002")
    other = run_command("backend", "--model", save_tiny_model(tmp_path / "other"), "--port", 0, "--output_dir", folder)
    assert (other.returncode, "load that model, or use another output_dir" in other.stderr) == (1, True)


def test_a_stream_with_tools_gives_the_text_of_the_whole():
    request = ChatRequest(model="policy", messages=HELLO, tools=[{"type": "function"}], stream=True)
    call = '<tool_call>{"name": "look"}</tool_call>'
    for text in (f"Let me see. \n {call}", "a \n <tool> b ", f" {call}", "open <tool_call>{", "  \n"):
        tokens = ChatTokenizer(byte_tokenizer())
        outputs = [OutputDelta(0, text, [], "stop")]
        whole = request.formatter(request, [[1]], tokens).response(outputs)["choices"][0]["message"]
        stream = request.formatter(request, [[1]], tokens)
        parts = [OutputDelta(0, letter, []) for letter in text] + [OutputDelta(0, "", [], "stop")]
        deltas = [stream.chunk(0, part)["choices"][0]["delta"] for part in parts]
        assert "".join(delta["content"] or "" for delta in deltas) == (whole["content"] or "")
        calls = [[call["function"] for call in each.get("tool_calls", [])] for each in (whole, deltas[-1])]
        assert calls[0] == calls[1]


async def test_the_end_of_a_turn_is_no_text_even_if_it_is_no_special_token(tmp_path):
    loaded = load_model(str(save_tiny_model(tmp_path / "model")))
    loaded.module.generation_config.eos_token_id = list(range(200))
    compute = ComputeThread()
    compute.start()
    engine = Engine(loaded, compute, lambda weights: loaded.module)
    try:
        await engine.start()
        asks = [GenerationRequest([1, 2, 3], SamplingParams(seed=1, max_tokens=50))]
        whole = (await engine.complete(asks))[0]
        streamed = "".join([piece.text async for _, piece in engine.stream(asks)])
    finally:
        compute.close()
    assert whole.finish_reason == "stop"
    assert engine.tokenizer.decode([whole.tokens[-1].id])
    assert whole.text == streamed


def test_prompts_are_those_of_apply_chat_template():
    tokenizer = byte_tokenizer()
    tokens = ChatTokenizer(tokenizer)
    tools = [{"type": "function", "function": {"name": "look", "description": "ünïcode"}}]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": [1, "é"]}}}
    for messages, given in [
        (HELLO, None),
        ([{"role": "system", "content": "Be brief. 🙂"}, *HELLO, {"role": "assistant", "content": "<|im_end|>"}], None),
        ([*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}], tools),
    ]:
        expected = tokenizer.apply_chat_template(
            messages, tools=given, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert tokens.render_prompt(messages, given) == expected


def test_streamed_text_never_splits_a_character():
    tokenizer = byte_tokenizer()
    tokens = ChatTokenizer(tokenizer)
    text = "naïve 🙂 日本 end"
    stream = CompletionText(tokens)
    parts = [stream.add(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(parts) == text
    assert "�" not in "".join(parts)
    assert stream.flush() == ""
    half = CompletionText(tokens)
    assert half.add(tokenizer.encode("🙂", add_special_tokens=False)[0]) == ""
    assert half.flush() == "�"
    assert tokens.decode_token(tokenizer.encode("é", add_special_tokens=False)[0]) == ("�", [0xC3])


def test_tokens_keep_the_space_that_a_decoder_drops_at_the_start_of_a_text():
    vocabulary = ["<unk>", "</s>", "▁Hello", "▁world", "!", "▁"]
    model = models.WordLevel({token: number for number, token in enumerate(vocabulary)}, unk_token="<unk>")
    fast = Tokenizer(model)  # with the decoder of Llama 2
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = {"eos_token": "</s>", "unk_token": "<unk>", "chat_template": "{{ messages }}"}
    tokens = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, **special))
    ids = [2, 3, 4, 5, 3]
    texts, raw = zip(*map(tokens.decode_token, ids), strict=True)
    assert ("".join(texts), bytes(itertools.chain(*raw))) == (" Hello world!  world", b" Hello world!  world")
    request = TextRequest(model="m", prompt=[2], logprobs=0)
    output = OutputDelta(0, tokens.decode(ids), SampledTokens(ids, [0.0] * 5, [None] * 5), "length")
    (choice,) = TextFormatter(request, [[2]], tokens).response([output])["choices"]
    assert [choice["text"][at:] for at in choice["logprobs"]["text_offset"]] == [
        "Hello world!  world",
        *(" world!  world", "!  world", "  world", " world"),
    ]


def test_tokens_without_text_are_not_decoded_again_and_again():
    tokenizer = byte_tokenizer()
    tokens, decoded = ChatTokenizer(tokenizer), []

    def decode(ids: list[int], **options: bool) -> str:
        decoded.append(len(ids))
        return tokens.decode(ids, **options)

    text = CompletionText(SimpleNamespace(decode=decode))
    first_byte, *_ = smile = tokenizer.encode("🙂", add_special_tokens=False)
    ids = [*smile, *[tokenizer.eos_token_id] * 300, *smile, *[first_byte] * 300, *smile]
    assert "".join(map(text.add, ids)) + text.flush() == tokens.decode(ids)
    assert max(decoded) < 100


def test_stop_strings_are_found_across_parts():
    parts = ["abc E", "N", "x\n", "y E", "ND more", "the EN"]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(parts[id] for id in ids))
    text = CompletionText(tokenizer, ["END", "\n\n"])
    assert [text.add(token) for token in range(5)] == ["abc ", "", "ENx", "\ny ", ""]
    assert text.stopped
    unfinished = CompletionText(tokenizer, ["END"])
    assert (unfinished.add(5), unfinished.flush()) == ("the ", "EN")


def test_arguments_of_past_calls_become_objects():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = Message(role="assistant", tool_calls=[call], name="bot")
    (plain,) = template_messages([message])
    assert plain["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert (plain["content"], plain["name"]) == ("", "bot")
