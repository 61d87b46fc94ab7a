"""What our HTTP servers accept, and from whom: the backend and the workflow service, as attackers would ask them."""

import asyncio
import contextlib
import gc
import http.client
import json
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import processes
import pytest
import yaml
from processes import HANGS, forked_python
from test_art_protocol import MODEL
from test_endpoint import key, openai_at
from waiting import until

from insitu.backend import BackendOptions, server
from insitu.backend.model import load_model
from insitu.backend.server import _stop_event
from insitu.config import Config, load_config
from insitu.errors import RequestRefused
from insitu.remote.client import EPISODES, ServiceSession
from insitu.remote.service import WorkflowService
from insitu.wire.addresses import http_url, is_loopback
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_server import MAX_DEPTH, MAX_VALUES, listening, parse_json

HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
PLUGINS = {"PYTHONPATH": str(Path(__file__).parents[2] / "support")}
LOADED = MODEL | {"base_model": "tiny"}
DEEP = b"[" * 900 + b"]" * 900


@pytest.fixture(scope="module")
def backend(model: Path) -> Iterator[str]:
    """A backend without a token, reached also as `gpu.local`."""
    options = ("--model", model, "--port", 0, "--threads", 1, "--allowed_host", "GPU.local")
    with processes.serving("backend", *options) as (_, address):
        yield address


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("service") / "config.yml"
    function = {"_type": "served", "llm": "player"}
    path.write_text(
        yaml.safe_dump(
            {
                "general": {"plugins": ["served_plugin"]},
                "llms": {"player": openai_at("http://h/v1")},
                "workflow": function,
            }
        )
    )
    return load_config(path)


@pytest.fixture(scope="module")
def service(config: Config) -> Iterator[str]:
    """The address of a workflow service without a token."""
    options = ("--config_file", config.source, "--port", "0")
    with processes.serving("serve", *options, **PLUGINS) as (_, address):
        yield address


def ask(
    address: str, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST"
) -> tuple[int, Any, Any]:
    """Status, JSON and headers of a response; `headers` may replace Host."""
    where = urlsplit(address)
    assert where.hostname
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=HANGS)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, content, JSON | (headers or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null"), answer.headers
    finally:
        connection.close()


# who may ask


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--token", ""], "--token (or {variable}) is empty"),
        (["{variable}="], "--token (or {variable}) is empty"),
        (["--token", "two words"], "not made of printable ASCII"),
        (["--host", "0.0.0.0"], "set --token (or {variable}), or give --insecure_no_auth"),
        (["--host", "::"], "--host is '::', which other machines can connect to"),
        (["--host", ""], "which other machines can connect to"),
    ],
)
@pytest.mark.parametrize("command", ["backend", "serve", "view"])
def test_a_server_that_everyone_could_use_is_not_started(
    model: Path, config: Config, command: str, options: list[str], said: str
) -> None:
    variable = f"INSITU_{command.upper()}_TOKEN"
    source = {"backend": ["--model", model], "serve": ["--config_file", config.source], "view": [model]}[command]
    options = [part.format(variable=variable) for part in options]
    variables = PLUGINS | dict(part.split("=") for part in options if part.endswith("="))
    arguments = [part for part in options if not part.endswith("=")]
    done = processes.run(command, *source, "--port", 0, *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert said.format(variable=variable) in done.stderr
    assert done.stderr.count("\n") == 1


def test_everyone_may_be_served_if_one_says_so() -> None:
    assert not is_loopback("0.0.0.0")
    policy = AccessPolicy.of("0.0.0.0", None, variable="X", allow_anyone=True)
    policy.check({"host": "10.0.0.7:8700", **JSON})
    assert AccessPolicy.of("0.0.0.0", "secret", variable="X").token == "secret"
    for host in ("127.0.0.1", "localhost", "::1", "127.8.9.1"):
        assert is_loopback(host)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "192.168.1.7"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["backend", "serve"])
def test_web_pages_are_kept_out(backend: str, service: str, command: str, headers: dict[str, str], status: int) -> None:
    address, path = (backend, "/v1/completions") if command == "backend" else (service, "/generate")
    body = {"model": "policy", "prompt": "Hi", "max_tokens": 1} if command == "backend" else {"input": {"do": "echo"}}
    found, answer, _ = ask(address, path, body, headers)
    assert found == status, answer
    if status != 200:
        assert answer["error"]["code"] in ("unknown_host", "foreign_origin", "unsupported_media_type")
    if "Content-Type" not in headers:  # the same where nothing is sent
        assert (ask(address, "/health", None, headers, "GET")[0] == 200) == (status == 200)


def test_a_page_cannot_delete_or_train(backend: str) -> None:
    """What a form or a `fetch` without preflight sends, to the routes that change something."""
    form = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    for path in ("/v1/train/jobs", "/_train_model", "/_delete_checkpoints", "/v1/preview/models", "/close"):
        assert ask(backend, path, MODEL, form)[0] == 403
        assert ask(backend, path, MODEL, form | {"Origin": f"http://{urlsplit(backend).netloc}"})[0] == 415


def test_other_names_are_allowed_by_an_option(backend: str) -> None:
    assert ask(backend, "/v1/models", headers={"Host": "gpu.LOCAL:8700"}, method="GET")[0] == 200
    assert ask(backend, "/v1/models", headers={"Host": "cpu.local"}, method="GET")[0] == 403


def test_only_a_bearer_token_lets_pages_in() -> None:
    """A browser attaches the credentials of `http://any:TOKEN@host` to what other pages send."""
    policy = AccessPolicy.of("0.0.0.0", "secret", variable="X")
    page = {"host": "gpu:8700", "origin": "https://app.example", **{k.lower(): v for k, v in JSON.items()}}
    policy.check(page | {"authorization": "Bearer secret"})
    basic = {"authorization": "Basic YW55OnNlY3JldA=="}
    policy.check({"host": "gpu:8700"} | basic)
    with pytest.raises(RequestRefused, match=r"Origin is 'https://app\.example'"):
        policy.check(page | basic)
    for wrong in ("", "Bearer", "Bearer secre", "Basic secret", "Basic !", "secret", "Digest secret"):
        with pytest.raises(RequestRefused, match="missing or wrong"):
            policy.check(page | {"authorization": wrong})
    policy.check(page, is_public=True)


@contextlib.asynccontextmanager
async def serving(config: Config, **options: Any) -> AsyncIterator[str]:
    made = WorkflowService(config, lambda _: contextlib.nullcontext(), **options)  # type: ignore[arg-type,return-value]
    async with made.listening("127.0.0.1", 0) as address:
        yield address


async def episode(address: str, base_url: str) -> tuple[int, str]:
    body = {"input": {"do": "plain"}, "key": key("x"), "policy": {"base_url": base_url, "model": "m"}}
    async with aiohttp.ClientSession() as session, session.post(address + EPISODES, json=body) as answer:
        return answer.status, await answer.text()


async def test_a_service_posts_only_where_it_may(config: Config) -> None:
    local = "http://127.0.0.1:9/v1"
    async with serving(config) as address:
        assert (await episode(address, local))[0] == 200
        for url in (
            "http://10.0.0.1:9/v1",
            "http://metadata.internal/",
            "http://127.1/",
            "http://localhost.evil.example",
        ):
            status, text = await episode(address, url)
            assert status == 403
            assert f"policy.base_url is '{url}', which this service may not send requests to" in text
            assert "--policy_url" in text
        for url in (
            "file:///etc/passwd",
            "http://127.0.0.1:9@evil.example/",
            "http://127.0.0.1\\@evil.example",
            "",
            "x",
        ):
            status, text = await episode(address, url)
            assert (status, "expected http://host:port/path" in text) == (400, True)
    async with serving(config, policy_urls=["http://gpu:8700"]) as address:
        assert (await episode(address, "http://gpu:8700/v1"))[0] == 200
        for url in (local, "http://gpu:8701/v1", "https://gpu:8700/v1"):
            status, text = await episode(address, url)
            assert (status, "allowed: http://gpu:8700 (--policy_url)" in text) == (403, True)


async def test_the_policy_is_refused_before_the_first_episode(config: Config) -> None:
    async with serving(config) as address, ServiceSession(address) as session:
        with pytest.raises(RequestRefused, match=r"policy\.base_url is 'http://gpu:8700/v1'"):
            await session.check(policy_url="http://gpu:8700/v1")


# how much


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" + b"[]," * (MAX_VALUES // 2) + b"[]]", "commas and brackets; allowed: 1048576"),
        (DEEP, f"nested more than {MAX_DEPTH} levels"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": "\\ud800"}', "is not JSON"),
        (b"{" + b" " * 70_000, "is not JSON"),
    ],
    ids=["values", "deep", "deeper", "surrogate", "large"],
)
def test_json_is_measured_before_it_is_parsed(body: bytes, said: str) -> None:
    with pytest.raises(RequestRefused, match=said):
        parse_json(body)
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert parse_json(b"[" + b"{}," * 9999 + b"1]", max_values=30_000)[-1] == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/register", b"[" + b"[]," * 2**20 + b"1]", 413, "larger than 1048576 bytes"),
        ("/register", b'{"a": [' + b"[]," * 2**16 + b"1]}", 413, "commas and brackets; allowed: 65536"),
        ("/register", MODEL | {"name": "x" * 300}, 422, "the model's name is 'xxx"),
        ("/_get_step", MODEL | {"project": "\u00e9" * 40}, 422, "allowed: 200 bytes"),
        ("/_train_model", b'{"model": ' + DEEP + b"}", 400, "nested more than"),
        ("/v1/chat/completions", b'{"messages": ' + DEEP + b"}", 400, "nested more than"),
        ("/v1/chat/completions", b'{"messages": [' + b"[]," * 2**20 + b"1]}", 413, "commas and brackets"),
        ("/v1/completions", b'{"model": "policy", "prompt": [' + b"[]," * 2**18 + b"1]}", 400, "prompt"),
        ("/v1/train/jobs", b'{"settings": {}, "num_rows": 1000000}', 400, "num_rows"),
        ("/v1/train/jobs", b'{"settings": {"kl_penalty_coef": 0.1}, "num_rows": 1}', 400, "use kl.beta"),
        (
            "/_train_model",
            {"model": LOADED, "trajectory_groups": [], "config": {"kimi_k2_tau": 0.1}},
            422,
            "kimi_k2_tau is 0.1",
        ),
    ],
)
def test_large_and_odd_bodies(backend: str, path: str, body: Any, status: int, said: str) -> None:
    found, answer, _ = ask(backend, path, body)
    assert (found, said in answer["error"]["message"]) == (status, True), answer


@pytest.mark.parametrize("path", ["/generate", EPISODES])
def test_large_and_odd_inputs(service: str, path: str) -> None:
    rest = b', "key": ["r", 1, "2", 0, 0]}' if path == EPISODES else b"}"
    for value, status in ((DEEP, 400), (b"[" + b"[]," * 2**20 + b"1]", 413), (b"nope", 400)):
        found, answer, _ = ask(service, path, b'{"input": ' + value + rest)
        assert found == status, answer
    assert ask(service, path, b'"' + b"x" * 2**26 + b'"')[0] == 413


def test_an_input_with_half_a_character_is_an_input(service: str) -> None:
    """As JavaScript writes a text that was cut within an emoji."""
    status, answer, _ = ask(service, "/generate", b'{"input": {"do": "echo", "say": "\\ud83d"}}')
    assert status == 200, answer
    status, answer, _ = ask(service, EPISODES, b'{"input": 1, "key": ["r", 1, "\\ud83d", 0, 0]}')
    assert (status, answer["error"]["param"]) == (400, "key")


# threads, connections and files


async def test_a_dead_compute_thread_is_reported(model: Path, tmp_path: Path) -> None:
    backend = server.create_backend(load_model(str(model), "cpu"), BackendOptions(model="m", threads=1), tmp_path)
    await backend.start()
    row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0, -1, -1], "advantages": 1}
    job = "\n".join(map(json.dumps, [{"settings": {"num_iterations": 999}, "num_rows": 1}, row]))
    headers = {"Content-Type": "application/x-ndjson"}

    sampling, all_wait = threading.Event(), threading.Event()

    def die() -> bool:
        sampling.set()
        all_wait.wait(HANGS)
        raise MemoryError("no memory left")

    backend.compute.sampling_step = die

    async with (
        listening(backend.app, ("127.0.0.1", 0)) as address,
        httpx.AsyncClient(base_url=http_url(*address), timeout=None) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        asked = [asyncio.create_task(client.post("/v1/chat/completions", json=HELLO)) for _ in range(2)]
        running = (await client.post("/v1/train/jobs", content=job, headers=headers)).json()["id"]
        async with asyncio.timeout(HANGS):
            await until(lambda: sum(backend.sampler.num_requests) >= 2)
            await asyncio.to_thread(sampling.wait)
            asked.append(asyncio.create_task(client.post("/_get_step", json=MODEL | {"base_model": "m"})))
            all_wait.set()
            answers = await asyncio.gather(*asked)
            answers.append(await client.post("/v1/chat/completions", json=HELLO))
            answers.append(await client.post("/_get_step", json=MODEL | {"base_model": "m"}))
            answers.append(await client.get("/health"))
            for id in (running, (await client.post("/v1/train/jobs", content=job, headers=headers)).json()["id"]):
                await asyncio.wait([backend.jobs.get(id).task])
                state = (await client.get(f"/v1/train/jobs/{id}")).json()
                assert (state["status"], "MemoryError: no memory left" in state["message"]) == ("failed", True)
    for answer in answers:
        assert answer.status_code == 503
        assert "the compute thread of the backend has failed (MemoryError: no mem" in answer.json()["error"]["message"]
    await backend.close()


async def test_idle_connections_are_closed(
    config: Config, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Connections that send nothing, and those that send half a request.

    A backend that listens collects garbage, which the command has put off until then.
    """
    gc.disable()
    monkeypatch.setattr("insitu.wire.http_server.IDLE_SECONDS", 0.2)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    options = BackendOptions(model=str(model), port=0, threads=1, output_dir=tmp_path)
    running = asyncio.create_task(server.run(options, ready.set_result))
    async with serving(config) as service:
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        collects = gc.isenabled()
        gc.enable()
        assert not running.done(), running.result()
        assert collects
        for address in (service, ready.result()):
            where = urlsplit(address)
            for sent in (
                b"",
                b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
                b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
            ):
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
                writer.write(sent)
                async with asyncio.timeout(HANGS):
                    received = await reader.read()
                assert (b"200 OK" in received) == (b"\r\n\r\n" in sent)
                writer.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_few_open_files_are_refused(config: Config) -> None:
    code = """if True:
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        sys.argv = ["insitu", *sys.argv[1:]]
        from insitu.cli import main
        main()"""
    for command, source in (("backend", ["--model", "m"]), ("serve", ["--config_file", config.source])):
        arguments = [forked_python(), "-c", code, command, *source, "--port", "0"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=HANGS, env={**os.environ, **PLUGINS})
        assert done.returncode == 2
        assert "this process may open 64 files (ulimit -n); a server needs at least 256" in done.stderr
        assert done.stderr.count("\n") == 1


async def test_a_parent_that_cannot_be_watched_ends_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    """No process has this number, and the system cannot even be asked."""
    async with _stop_event(2**40) as stopped, asyncio.timeout(HANGS):
        assert await stopped
    assert "cannot be watched; stopping" in caplog.text


def test_one_thread_alone_computes_with_several_cores(model: Path, tmp_path: Path) -> None:
    """Threads of libgomp stay with the thread whose operations they share, and slow down those of other threads."""
    code = """if True:
        import asyncio, contextlib, os, sys, threading
        from pathlib import Path
        import torch
        from insitu.backend import BackendOptions, server

        server.active_waiting = contextlib.nullcontext  # its idle team comes and goes with the load of the machine

        def others():
            return len(os.listdir("/proc/self/task")) - threading.active_count()

        def ready(address):
            print("more threads:", others() - before, flush=True)
            os._exit(0)

        torch.set_num_threads(4)  # of every thread, until it has a number of its own
        before = others()
        options = BackendOptions(model=sys.argv[1], port=0, output_dir=Path(sys.argv[2]), threads=1)
        asyncio.run(server.run(options, ready))"""
    command = [forked_python(), "-c", code, str(model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.stdout == "more threads: 0\n", done.stderr
