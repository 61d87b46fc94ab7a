"""Generated requests to each of our servers: no 5xx, no hang, and no memory kept.

`make test` sends 40 to each, `make test WITH=hostile` sends 10,000. INSITU_HOSTILE_REQUESTS sets the number,
INSITU_HOSTILE_SEED the seed.
"""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import yaml
from hostile_requests import Route, Sent, hostile_requests, send_all
from processes import forked_python, serving
from test_art_protocol import groups
from test_endpoint import openai_at
from tiny_models import save_tiny_model

COUNT = int(os.environ.get("INSITU_HOSTILE_REQUESTS", "40"))
SEED = int(os.environ.get("INSITU_HOSTILE_SEED", "1"))
PER_EPISODE = 250
MEASURED = COUNT >= 1000
"""Whether memory is asserted: of a few hundred requests a single large one decides."""
KEPT_BYTES = 20 * 2**20
SETTLED_SECONDS = 10
TOKEN = "t"
BEARER = f"Authorization: Bearer {TOKEN}\r\n"
ROOT = Path(__file__).parents[3]

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "blue"},
]
SAMPLING = {"model": "policy", "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["x"]}
CHAT = {
    **SAMPLING,
    "messages": MESSAGES,
    "tools": [TOOL],
    "logprobs": True,
    "top_logprobs": 1,
    "return_token_ids": True,
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CLAUDE = {"model": "claude", "max_tokens": 2, "system": "Be brief.", "messages": [MESSAGES[1]], "stop_sequences": ["x"]}
CLAUDE_TOOL = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}
RESPONSES = {"model": "gpt", "input": [{"role": "user", "content": "hi"}], "instructions": "x", "max_output_tokens": 2}
AGENT = {"name": "agent", "project": "p", "base_model": "model", "base_path": ".art", "trainable": True}
TRAINING = {
    "trajectory_groups": groups()[:1],
    "config": {"learning_rate": 1e-9, "beta": 0.0},
    "dev_config": {"ppo": True},
}
ROW = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -1.0], "advantages": 1.0, "episode": "a"}
SETTINGS = {"learning_rate": 1e-9, "betas": [0.9, 0.99], "kl": {"beta": 0.0}, "lora": None, "clip_low": 0.2}
PAIR = [
    {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "pair": "p", "preferred": True},
    {"messages": [*MESSAGES, {"role": "assistant", "content": "Hi"}], "tools": [TOOL], "trained_messages": [4]}
    | {"pair": "p", "preferred": False},
]
PREFERENCES = {"method": "dpo", "learning_rate": 1e-9, "dpo": {"beta": 0.1, "loss_type": "sigmoid"}}
EPISODE = {
    "input": {"do": "echo", "say": "hi"},
    "row": {"id": 1, "question": {"do": "echo"}},
    "key": ["r", 1, "1", 0, 0],
    "options": {"seed": 1, "timeout": 5.0, "training": ["player"], "target_functions": ["<workflow>"]},
    "policy": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key": "none", "renamed": False},
}
COMPLETIONS = [
    Route("POST", "/v1/chat/completions", CHAT),
    Route("POST", "/v1/chat/completions", CHAT | STREAM),
    Route("POST", "/v1/completions", {**SAMPLING, "prompt": [[1, 2, 3], [4]], "logprobs": 1}),
    Route("POST", "/v1/completions", {**SAMPLING, "prompt": "Hi", **STREAM}),
]
ROUTES = {
    "openai": [
        *COMPLETIONS,
        *(Route("GET", path) for path in ("/v1/models", "/v1/models/policy", "/health", "/openapi.json", "/metrics")),
    ],
    "native": [
        *[Route("POST", "/v1/train/jobs", [{"settings": SETTINGS, "num_rows": 2}, ROW, ROW], lines=True)] * 4,
        *[Route("POST", "/v1/train/jobs", [{"settings": PREFERENCES, "num_rows": 2}, *PAIR], lines=True)] * 4,
        Route("GET", "/v1/train/jobs/x"),
        Route("GET", "/v1/train/jobs/x/events"),
        Route("POST", "/v1/train/jobs/x/cancel"),
    ],
    "art": [
        *(Route("POST", path, AGENT) for path in ("/register", "/_get_step", "/_delete_checkpoints", "/close")),
        Route("POST", "/_prepare_backend_for_training", {"model": AGENT, "config": {"server_args": {"api_key": "k"}}}),
        *[Route("POST", "/_train_model", {"model": AGENT, **TRAINING, "verbose": False})] * 3,
        Route("POST", "/_log", {"model": AGENT, **TRAINING, "split": "val"}),
        Route("POST", "/_delete_checkpoint_files", {"model": AGENT, "steps_to_keep": [1]}),
        Route("POST", "/_experimental_push_to_s3", {"model": AGENT}),
        Route("POST", "/v1/preview/models", {"entity": "e", **AGENT, "name": "other"}),
        Route("GET", "/v1/preview/models/x/checkpoints"),
        Route(
            "POST", "/v1/preview/training-jobs", {"model_id": "x", **TRAINING, "experimental_config": {"ppo": False}}
        ),
        Route("GET", "/v1/preview/training-jobs/x/events"),
        Route("GET", "/art/jobs"),
    ],
    "gateway": [
        *COMPLETIONS,
        Route("POST", "/v1/messages", {**CLAUDE, "tools": [CLAUDE_TOOL]}),
        Route("POST", "/v1/messages", {**CLAUDE, "stream": True}),
        Route("POST", "/v1/responses", {**RESPONSES, "tools": [{"type": "function", **TOOL["function"]}]}),  # type: ignore[dict-item]
        Route("POST", "/v1/responses", {**RESPONSES, "stream": True}),
        Route("GET", "/v1/models"),
    ],
    "serve": [
        *[Route("POST", "/v1/episodes", EPISODE)] * 3,
        *[Route("POST", "/generate", {"input": {"do": "echo", "say": "hi"}})] * 2,
        *(Route("GET", path) for path in ("/v1/episodes", "/v1/episodes?base_url=http://127.0.0.1:9/v1", "/health")),
    ],
}


@contextlib.contextmanager
def server(*arguments: Any, **variables: str) -> Iterator[tuple[Any, str]]:
    """A server and its address; in a fresh interpreter if its memory is measured.

    A forked one shares pages with the fork server, which count as its own from when it first touches them.
    """
    if not MEASURED:
        with serving(*arguments, **variables) as served:
            yield served
        return
    command = [sys.executable, "-m", "insitu", *map(str, arguments)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **variables}
        ) as process,
    ):
        assert process.stdout
        try:
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The pid and the address of a backend."""
    folder = tmp_path_factory.mktemp("hostile")
    options = {"model": save_tiny_model(folder / "model"), "port": 0, "token": TOKEN, "output_dir": folder / "out"}
    with server("backend", *(part for k, v in options.items() for part in (f"--{k}", v))) as (process, address):
        yield process.pid, address


async def resident(pid: int, enough: int = 0) -> int:
    """The lowest resident memory within some seconds in which a server returns memory, or the first up to `enough`.

    Of the last requests, jobs may still run.
    """
    lowest = sys.maxsize
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLED_SECONDS if MEASURED else 0):
            while (lowest := min(lowest, psutil.Process(pid).memory_info().rss)) > enough:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)
    return lowest


async def attack(
    pid: int, address: str, kind: str, requests: Iterator[Sent], end_episode: Callable[[], None] = lambda: None
) -> None:
    """The server takes the requests and then has the memory it had after the first third, both times without work."""
    statuses = await send_all(address, requests, COUNT // 3)
    end_episode()
    before = await resident(pid)
    statuses += await send_all(address, requests, COUNT - COUNT // 3)
    end_episode()
    kept = await resident(pid, before + KEPT_BYTES - 1) - before
    print(f"{kind}: {dict(sorted(statuses.items()))}, {kept / 2**20:+.1f} MiB of {before / 2**20:.0f} MiB")
    if MEASURED:
        assert kept < KEPT_BYTES
    assert statuses[200] > COUNT // 50
    assert statuses[400] > COUNT // 50


@pytest.mark.parametrize("kind", ["openai", "native", "art"])
async def test_the_backend(backend: tuple[int, str], kind: str) -> None:
    await attack(*backend, kind, hostile_requests(random.Random(SEED), ROUTES[kind], BEARER))


def test_the_gateway(backend: tuple[int, str]) -> None:
    command = [
        sys.executable if MEASURED else forked_python(),
        str(ROOT / "tests/support/hostile_gateway.py"),
        f"{backend[1]}/v1",
        TOKEN,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        pid, address = process.stdout.readline().split()

        addresses = [address]

        def end_episode() -> None:
            assert process.stdout
            print(file=process.stdin, flush=True)
            addresses.append(process.stdout.readline().split()[1])

        def requests() -> Iterator[Sent]:
            rng = random.Random(SEED)
            while True:
                episode, prefix = len(addresses), urlsplit(addresses[-1]).path
                routes = [route._replace(path=prefix + route.path) for route in ROUTES["gateway"]]
                for sent in islice(hostile_requests(rng, routes), PER_EPISODE):
                    if len(addresses) > episode:  # it was ended from outside
                        break
                    yield sent
                else:
                    end_episode()

        asyncio.run(attack(int(pid), address, "gateway", requests(), end_episode))
        process.stdin.close()


async def test_the_workflow_service(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "general": {"plugins": ["served_plugin"]},
        "llms": {"player": openai_at("http://127.0.0.1:9/v1")},
        "workflow": {"_type": "echoed"},
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    options = ("--config_file", tmp_path / "config.yml", "--port", 0)
    with server("serve", *options, PYTHONPATH=str(ROOT / "tests/support")) as (process, address):
        await attack(process.pid, address, "serve", hostile_requests(random.Random(SEED), ROUTES["serve"]))
