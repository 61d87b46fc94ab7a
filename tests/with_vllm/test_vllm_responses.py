"""What a backend answers if vLLM samples is what it answers if it samples itself."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import wait_until
from tiny_models import save_tiny_model
from vllm_server import CPU, PROCESSED, VllmServer

TOLERANCE = 1e-4
GREEDY = {"temperature": 0, "logprobs": True, "return_token_ids": True, "max_tokens": 12}
MOVE = [{"role": "user", "content": "Board: X.. .O. ...\nYour move?"}]


@contextmanager
def backend(model: Path, *options: str, **variables: str) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "insitu", "backend", "--model", str(model), "--port", "0", *options]
    environment = {**os.environ, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " ready at " in line, process.wait()
        try:
            with httpx.Client(base_url=line.split()[-1], timeout=300) as client:
                yield client
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def both(player: Path, servers: list[VllmServer]) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """By vLLM, and embedded."""
    addresses = ",".join(server.address for server in servers[1:])
    with backend(player, "--sampler", "vllm", "--sampler_addresses", addresses) as by_vllm:
        with backend(player) as embedded:
            yield by_vllm, embedded


def chat(client: httpx.Client, **options: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"model": "policy", "messages": MOVE, **options})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(client: httpx.Client, **options: Any) -> tuple[str, list[int], list[float], str, set[int]]:
    """Text, token ids, log-probabilities, finish reason and versions of a stream."""
    text, ids, logprobs, finish, versions = "", [], [], "", set()
    body = {"model": "policy", "messages": MOVE, "stream": True, **options}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                choice = event["choices"][0]
                text += choice["delta"].get("content") or ""
                ids += choice["token_ids"]
                logprobs += [each["logprob"] for each in choice["logprobs"]["content"]]
                finish = choice["finish_reason"] or finish
                versions.add(event["policy_version"])
    return text, ids, logprobs, finish, versions


def essence(body: dict[str, Any]) -> tuple[Any, ...]:
    (choice,) = body["choices"]
    content = choice["logprobs"]["content"]
    return (
        *(choice["message"]["content"], choice["token_ids"], choice["finish_reason"]),
        *(body["prompt_token_ids"], body["policy_version"], body["usage"], [each["token"] for each in content]),
    )


def logprobs_of(body: dict[str, Any]) -> list[float]:
    return [each["logprob"] for each in body["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_eos": True},
        {"min_tokens": 6},
        {"stop": ["zz", "e"], "ignore_eos": True, "max_tokens": 40},
        {"max_tokens": 1},
    ],
    ids=["plain", "ignore_eos", "min_tokens", "stop", "one token"],
)
def test_a_greedy_completion_is_that_of_the_embedded_sampler(
    both: tuple[httpx.Client, httpx.Client], options: dict[str, Any]
) -> None:
    by_vllm, embedded = (chat(client, **GREEDY | options) for client in both)
    assert essence(by_vllm) == essence(embedded)
    expected = logprobs_of(by_vllm if "min_tokens" in options else embedded)  # vLLM's are without the forbidden tokens
    assert logprobs_of(by_vllm) == pytest.approx(expected, abs=TOLERANCE)
    text, ids, logprobs, finish, versions = streamed(both[0], **GREEDY | options)
    choice = by_vllm["choices"][0]
    assert (text, ids, finish) == (choice["message"]["content"], choice["token_ids"], choice["finish_reason"])
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert versions == {0}


def test_log_probabilities_are_those_after_temperature(both: tuple[httpx.Client, httpx.Client]) -> None:
    hot = chat(both[0], **GREEDY | {"temperature": 1.9, "seed": 5, "ignore_eos": True})
    prompt, ids, compared = hot["prompt_token_ids"], hot["choices"][0]["token_ids"], 0
    for index, sampled in enumerate(logprobs_of(hot)):
        body = {"model": "policy", "prompt": prompt + ids[:index], "max_tokens": 1, "logprobs": 20, "temperature": 1.9}
        top = both[1].post("/v1/completions", json={**body, "return_tokens_as_token_ids": True}).json()
        of_token = top["choices"][0]["logprobs"]["top_logprobs"][0].get(f"token_id:{ids[index]}")
        compared += of_token is not None
        assert of_token is None or of_token == pytest.approx(sampled, abs=TOLERANCE)
    assert compared > 0


def test_top_logprobs(both: tuple[httpx.Client, httpx.Client]) -> None:
    bodies = [chat(client, **GREEDY | {"top_logprobs": 20, "max_tokens": 4, "ignore_eos": True}) for client in both]
    ours, theirs = ([each["top_logprobs"] for each in b["choices"][0]["logprobs"]["content"]] for b in bodies)
    for one, other in zip(ours, theirs, strict=True):
        assert len(one) == 20
        assert [each["logprob"] for each in one] == pytest.approx([each["logprob"] for each in other], abs=TOLERANCE)
        assert one[0]["token"] == other[0]["token"]


def test_seeds_and_choices(both: tuple[httpx.Client, httpx.Client]) -> None:
    options = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 10, "return_token_ids": True, "n": 4}

    def ids(seed: int) -> list[list[int]]:
        return [choice["token_ids"] for choice in chat(both[0], **options, seed=seed)["choices"]]

    first = ids(1)
    assert len({tuple(each) for each in first}) == 4
    assert ids(1) == first
    assert ids(2) != first


def test_what_the_version_names_select(both: tuple[httpx.Client, httpx.Client]) -> None:
    client = both[0]
    assert chat(client, model="policy@0", max_tokens=1)["policy_version"] == 0
    missing = client.post("/v1/chat/completions", json={"model": "policy@3", "messages": MOVE})
    assert missing.status_code == 404
    assert client.get("/health").json()["policy_version"] == 0


def test_a_client_that_leaves_aborts_its_completions(
    both: tuple[httpx.Client, httpx.Client], servers: list[VllmServer]
) -> None:
    def running() -> float:
        with urllib.request.urlopen(f"{servers[1].address}/metrics") as response:
            found = re.search(r"^vllm:num_requests_running\{.*\} ([\d.]+)$", response.read().decode(), re.M)
        assert found is not None
        return float(found[1])

    options = {"n": 32, "max_tokens": 200, "ignore_eos": True, "temperature": 1.0}
    with pytest.raises(httpx.ReadTimeout):
        both[0].post("/v1/chat/completions", json={"model": "policy", "messages": MOVE, **options}, timeout=1.0)
    wait_until(lambda: running() == 0)
    assert chat(both[0], max_tokens=2)["choices"][0]["finish_reason"] in ("stop", "length")


# Refusals


def refusal(model: Path, address: str, *options: str, **variables: str) -> str:
    command = [sys.executable, "-m", "insitu", "backend", "--model", str(model), "--port", "0", "--sampler", "vllm"]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [*command, "--sampler_addresses", address, *options], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_another_model(tmp_path: Path, player: Path, servers: list[VllmServer]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(player)
    model.model.layers[0].mlp.up_proj.weight.data *= 1.5
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(player).save_pretrained(tmp_path / "other")
    message = refusal(tmp_path / "other", servers[1].address)
    assert message.startswith(f"insitu backend: sampler: the server at {servers[1].address} has another model than ")


def test_another_vocabulary(tmp_path: Path, player: Path, servers: list[VllmServer]) -> None:
    from transformers import AutoTokenizer

    size = len(AutoTokenizer.from_pretrained(player)) + 100
    save_tiny_model(tmp_path, vocab_size=size)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens([f"<extra {index}>" for index in range(size - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path)
    message = refusal(tmp_path, servers[1].address)
    assert f"the server at {servers[1].address} has another vocabulary or model than {tmp_path}" in message


def test_a_server_for_shorter_completions(tmp_path: Path, servers: list[VllmServer]) -> None:
    save_tiny_model(tmp_path, max_position_embeddings=512)
    message = refusal(tmp_path, servers[1].address)
    assert (
        "allows 256 tokens of prompt and completion, but this model 512: start it with --max-model-len 512" in message
    )


@pytest.fixture(scope="module")
def lesser(tmp_path_factory: pytest.TempPathFactory, player: Path) -> Iterator[list[VllmServer]]:
    """Without what training needs: one without token ids, one that does not temper, and one with fixed weights."""
    folder, returns_ids = tmp_path_factory.mktemp("lesser"), (*CPU, "--enable-scale-out")
    flags = [(*CPU, "--api-key", "secret"), returns_ids, (*returns_ids, *PROCESSED)]
    started = [VllmServer(folder, player, each, {}) for each in flags]
    try:
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.kill()


def test_servers_that_lack_what_sampling_needs(player: Path, lesser: list[VllmServer]) -> None:
    closed, tempering, _ = (server.address for server in lesser)
    assert "needs its API key: set api_key, or INSITU_SAMPLER_API_KEY" in refusal(player, closed)
    message = refusal(player, closed, INSITU_SAMPLER_API_KEY="secret")
    assert message.endswith("cannot return token ids: start it with --enable-scale-out")
    message = refusal(player, tempering)
    assert "returns log-probabilities before temperature: start it with --logprobs-mode processed_logprobs" in message


def test_a_server_that_takes_no_new_weights_samples_and_does_not_train(player: Path, lesser: list[VllmServer]) -> None:
    """The check is made when a run begins."""
    fixed = lesser[2].address
    problems: list[tuple[dict[str, Any], str]] = [
        ({}, f"all weights are trained, but the server at {fixed} cannot load new ones: start it with VLLM_SERVER_"),
        ({"lora": {"rank": 4}}, f"lora is set, but the server at {fixed} cannot load adapters: start it with --ena"),
    ]
    with backend(player, "--sampler", "vllm", "--sampler_addresses", fixed) as client:
        assert chat(client, max_tokens=2)["policy_version"] == 0
        for settings, problem in problems:
            answer = client.post("/v1/train/check", json={"method": "grpo", **settings})
            assert answer.status_code == 400, answer.text
            assert problem in answer.json()["error"]["message"]
