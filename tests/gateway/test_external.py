"""Agents that are no Python of ours: programs and services, run for real, and trained through the gateway."""

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
from aiohttp import web
from factories import MODEL, ROOT, digits_project, read_lines
from fake_openai import FakeOpenAI, encode
from marks import slow_after, slow_but
from processes import FORK_SERVER, HANGS, forked_python, run_project, serving
from waiting import hang, until

from insitu.collect.datasets import load_dataset
from insitu.config import load_config
from insitu.disk.json_files import write_json
from insitu.errors import BackendUnavailable, ConfigError, EpisodeTimeout, WorkflowError
from insitu.plugin_api import Builder
from insitu.schemas.episodes import EpisodeKey
from insitu.wire.redaction import redact
from insitu.workflow import programs
from insitu.workflow.context import EpisodeScope

AGENT = """
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": "gpt-4o", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["question"]["say"]}]
messages += [ask(messages), {"role": "user", "content": "again"}]
print("|" + ask(messages)["content"])
"""


@asynccontextmanager
async def workflow(folder: Path, base_url: str, block: dict[str, Any]) -> AsyncIterator[Any]:
    model = {"_type": "openai", "model_name": "fake", "base_url": base_url}
    (folder / "config.yml").write_text(json.dumps({"llms": {"player": model}, "workflow": {"llm": "player", **block}}))
    async with Builder(load_config(folder / "config.yml")) as builder:
        yield await builder.get_workflow()


async def output(folder: Path, server: FakeOpenAI, code: str, value: Any = "hi", **block: Any) -> Any:
    """What a program of this Python code answers, in an episode of row 7."""
    (folder / "agent.py").write_text(code)
    block = {"_type": "command", "command": [sys.executable, "agent.py"], **block}
    async with workflow(folder, server.base_url, block) as program:
        with EpisodeScope(key=EpisodeKey("r", 0, "7", 0), training=True) as scope:
            scope.row = {"id": 7, "question": value, "level": 3}
            return await program.ainvoke(value)


async def test_a_program_is_given_the_row_and_the_model(tmp_path: Path, server: FakeOpenAI) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    block = {"_type": "command", "command": [sys.executable, "agent.py"]}
    async with workflow(tmp_path, server.base_url, block) as program:
        with EpisodeScope(training=True, seed=3) as scope:
            scope.row = {"question": {"say": "hi"}}
            assert await program.ainvoke({"say": "hi"}) == "|echo: again"
    first, second = scope.calls
    assert first.token_ids == encode("echo: hi")
    assert [m["content"] for m in second.messages] == ["hi", "echo: hi", "again"]
    assert first.functions == ("<workflow>",)


@pytest.mark.parametrize("stream", slow_after(1, [False, True]))
@pytest.mark.parametrize("release", slow_but([3], [2, 3]))
async def test_both_releases_of_the_official_client(
    tmp_path: Path, server: FakeOpenAI, release: int, stream: bool
) -> None:
    if release == 3 and openai.__version__ < "3":
        pytest.skip(f"openai {openai.__version__} is installed")
    code = f"""
import openai
assert openai.__version__.startswith("{release}.")
with openai.OpenAI().responses.stream(model="x", input="hi") as events:
    assert events.get_final_response().output_text == "echo: hi"
asked = dict(model="x", messages=[dict(role="user", content="hi")])
if {stream}:
    chunks = openai.OpenAI().chat.completions.create(stream=True, **asked)
    print("".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices))
else:
    print(openai.OpenAI().chat.completions.create(**asked).choices[0].message.content)
"""
    block: dict[str, Any] = {"command": [forked_python(), "agent.py"], "pass_env": [FORK_SERVER]}
    if release == 2:
        block = {"env": {"PYTHONPATH": str(Path(sys.prefix) / "openai2")}}
    assert await output(tmp_path, server, code, **block) == "echo: hi"


async def test_arguments_environment_and_forms_of_answer(tmp_path: Path, server: FakeOpenAI) -> None:
    code = (
        "import json, os, sys; n = os.environ; print(json.dumps([sys.argv[1:], sys.stdin.read(), n['INSITU_ROW_ID'],"
        " n['MORE'], n['OPENAI_BASE_URL'][:17], n['ANTHROPIC_BASE_URL'].count('/v1'), os.getcwd()]))"
    )
    command = [sys.executable, str(tmp_path / "agent.py"), "--level={level}", "{input} {row_id}", "{ other } {}"]
    (tmp_path / "below").mkdir()
    options = {"env": {"MORE": "yes"}, "stdin": "input", "answer": "json", "command": command, "cwd": "below"}
    arguments, given, *others = await output(tmp_path, server, code, "a {level} \u00fc", **options)
    assert arguments == ["--level=3", "a {level} \u00fc 7", "{ other } {}"]
    assert given == "a {level} \u00fc"
    assert others == ["7", "yes", "http://127.0.0.1:", 0, str(tmp_path / "below")]
    with pytest.raises(WorkflowError, match="row '7': input is null, which no text can hold"):
        await output(tmp_path, server, code, None, **options)
    assert await output(tmp_path, server, "print(' plain\\n')") == "plain"
    with pytest.raises(WorkflowError, match="not JSON"):
        await output(tmp_path, server, "print('plain')", answer="json")
    with pytest.raises(WorkflowError, match=r"row '7': the placeholder 'levle' does not exist .did you mean 'level'"):
        await output(tmp_path, server, code, "", command=[*command, "{levle}"])


async def test_a_program_gets_only_the_variables_that_programs_need(
    tmp_path: Path, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are called: a secret is recognised neither by its name nor by its value."""
    withheld = {"DB_PASS", "JWT", "AZURE_STORAGE_CONNECTION_STRING", "HF_TOKEN", "DATABASE_URL", "MODE"}
    needed = {"PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "https_proxy", "SSL_CERT_FILE"}
    for name in withheld | (needed - {"PATH", "PYTHONPATH"}):
        monkeypatch.setenv(name, str(tmp_path) if name == "TMPDIR" else "C")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import json, os; print(json.dumps(sorted(os.environ)))"
    given = {*await output(tmp_path, server, code, answer="json")}
    assert (withheld | needed) & given == needed
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "INSITU_ROW_ID"} <= given
    more = {"pass_env": ["JWT", "DATABASE_URL"], "env": {"MY_TOKEN": "x"}}
    given = {*await output(tmp_path, server, code, answer="json", **more)}
    assert (withheld | {"MY_TOKEN"}) & given == {"JWT", "DATABASE_URL", "MY_TOKEN"}
    with pytest.raises(ConfigError, match="pass_env names NO_SUCH_KEY: no such environment variable"):
        await output(tmp_path, server, code, pass_env=["NO_SUCH_KEY"])
    with pytest.raises(WorkflowError, match=r"KeyError: 'JWT'\n\(it did not get .*pass_env can name: (.*)\)") as raised:
        await output(tmp_path, server, "import os; os.environ['JWT']", pass_env=["MODE"])
    named = {*str(raised.value).rpartition(": ")[2].rstrip(")").split(", ")}
    assert named & (withheld | needed) == withheld - {"MODE"}


async def test_a_program_is_found_from_the_file(tmp_path: Path, server: FakeOpenAI) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/agent").write_text("#!/bin/sh\ncat; pwd\n")
    (tmp_path / "bin/agent").chmod(0o755)
    assert await output(tmp_path, server, "", command=["bin/agent"], stdin="input", cwd="/") == "hi/"
    for missing in ("bin/other", "no-such-program"):
        with pytest.raises(WorkflowError, match=f"{missing}' cannot be started"):
            await output(tmp_path, server, "", command=[missing])
    with pytest.raises(WorkflowError, match="null byte"):
        await output(tmp_path, server, "", "a\0b", command=["bin/agent", "{input}"])


async def test_failures_are_told(tmp_path: Path, server: FakeOpenAI) -> None:
    with pytest.raises(WorkflowError, match=r"exit code 3: x{1985,1999}\nit went wrong\n\(it did not get"):
        await output(tmp_path, server, "import sys; sys.stderr.write('x' * 9000 + '\\nit went wrong'); sys.exit(3)")
    with pytest.raises(WorkflowError, match="was ended by SIGSEGV"):
        await output(tmp_path, server, "import os; os.kill(os.getpid(), 11)")
    for code in ("while True: print('x' * 99)", "print('x' * 2000)"):
        with pytest.raises(WorkflowError, match="printed more than max_output: 1000 bytes"):
            await output(tmp_path, server, code, max_output=1000)
    await output(tmp_path, server, "pass", "x" * 500_000)  # a program need not read what it is given
    with FakeOpenAI() as gone:
        pass
    with pytest.raises(BackendUnavailable, match=r"(?s)exit code 1: .*its model: no answer"):
        await output(tmp_path, gone, AGENT, {"say": "hi"})


@pytest.mark.parametrize("code", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
async def test_nothing_of_a_program_outlives_its_episode(
    tmp_path: Path, server: FakeOpenAI, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "GRACE_SECONDS", 0.5)
    child = "import subprocess, sys, time\nc = subprocess.Popen([sys.executable, '-c', {!r}])\n"
    child += "open({!r}, 'w').write(str(c.pid))"
    pid, up = tmp_path / "pid", tmp_path / "up"
    child_code = f"{code}\nprint('up', flush=True)\nopen({str(up)!r}, 'w')\nimport time; time.sleep({FOREVER})"
    left = child.format(child_code, str(pid)) + f"\nimport os\nwhile not os.path.exists({str(up)!r}): time.sleep(0.01)"
    answer = await output(tmp_path, server, f"{left}\nprint('done')")
    assert sorted(answer.split()) == ["done", "up"]
    await until(lambda: not running(pid))
    up.unlink()
    pid.write_text("")
    with pytest.raises(EpisodeTimeout, match="within timeout: 2 s"):
        await output(tmp_path, server, f"{left}\ntime.sleep({FOREVER})", timeout=2)
    await until(lambda: not running(pid))
    up.unlink(missing_ok=True)
    pid.write_text("")
    cancelled = asyncio.create_task(output(tmp_path, server, f"{left}\ntime.sleep({FOREVER})"))
    await until(lambda: up.exists() and running(pid))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await until(lambda: not running(pid))


FOREVER = 10 * HANGS


def running(pid: Path) -> bool:
    try:
        number = pid.read_text()
        return number != "" and psutil.Process(int(number)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def service(handler: Any, route: str = "/run") -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(route, handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/run"
    finally:
        await runner.cleanup()


async def test_a_redirect_of_a_service_gets_no_row(tmp_path: Path, server: FakeOpenAI) -> None:
    async def note(request: web.Request) -> web.Response:
        got.append(await request.text())
        return web.json_response({"output": "stolen"})

    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": elsewhere})

    got: list[str] = []
    async with service(note) as elsewhere, service(redirect) as url:
        async with workflow(tmp_path, server.base_url, {"_type": "http", "url": url}) as program:
            with pytest.raises(WorkflowError, match=f"redirects to {elsewhere}, which is not followed"):
                await program.ainvoke("hi")
    assert got == []


async def test_a_service_gets_no_cookies_of_another_episode(tmp_path: Path, server: FakeOpenAI) -> None:
    async def answer(request: web.Request) -> web.Response:
        response = web.json_response({"output": dict(request.cookies)})
        response.set_cookie("session", "1")
        return response

    async with service(answer) as url:
        url = url.replace("127.0.0.1", "localhost")  # clients keep no cookies of addresses
        async with workflow(tmp_path, server.base_url, {"_type": "http", "url": url}) as program:
            assert [await program.ainvoke("hi") for _ in range(2)] == [{}, {}]


async def test_an_echoed_key_of_an_episode_is_not_kept(tmp_path: Path, server: FakeOpenAI) -> None:
    """In what is printed and stored, also when its episode is over."""

    async def echo(request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        keys.append(model["api_key"])
        return web.json_response({"output": f"I use {model}"})

    keys: list[str] = []
    async with service(echo) as url:
        async with workflow(tmp_path, server.base_url, {"_type": "http", "url": url}) as program:
            answer = await program.ainvoke("hi")
    assert keys[0] in answer
    write_json(tmp_path / "stored.json", {"answer": answer})
    assert keys[0] not in redact(answer) + (tmp_path / "stored.json").read_text()
    assert "***" in redact(answer)


async def test_a_service_is_told_where_its_model_is(tmp_path: Path, server: FakeOpenAI) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        seen.append(asked)
        what = asked["row"]["level"]
        if what == "status":
            return web.Response(status=400, text="no such board")
        if what == "busy":
            return web.Response(status=503)
        if what == "slow":
            await hang()
        if what == "long":
            return web.Response(body=b"x" * 20_000)
        return web.json_response({"output": [what], "other": 1} if what != "empty" else {"other": 1})

    seen: list[dict[str, Any]] = []

    async def asked(level: str, **options: Any) -> Any:
        async with workflow(tmp_path, server.base_url, {"_type": "http", "url": url, **options}) as program:
            with EpisodeScope(key=EpisodeKey("r", 0, "7", 0)) as scope:
                scope.row = {"level": level}
                return await program.ainvoke("hi")

    async with service(answer) as url:
        assert await asked("x") == ["x"]
        assert await asked("x", answer="$") == {"output": ["x"], "other": 1}
        for level, kind, said in (
            ("status", WorkflowError, "answered 400: no such board"),
            ("busy", BackendUnavailable, "answered 503"),
            ("slow", EpisodeTimeout, "did not finish within timeout: 0.3 s"),
            ("long", WorkflowError, "more than max_output: 9000 bytes"),
            ("empty", WorkflowError, r"answer \$\.output matches 0 values of {'other'"),
        ):
            with pytest.raises(kind, match=said):
                await asked(level, timeout=0.3 if level == "slow" else 60, max_output=9000)
    with socket.socket() as silent:  # has the port, and does not listen
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(BackendUnavailable, match="no answer from"):
            await asked("x", url=f"http://127.0.0.1:{silent.getsockname()[1]}/run")
    request = seen[0]
    assert (request["input"], request["row_id"], request["row"]) == ("hi", "7", {"level": "x"})
    assert request["model"]["openai_base_url"].endswith(f"/e/{request['model']['api_key']}/v1")
    assert len({s["model"]["api_key"] for s in seen}) == len(seen)


TOLD = (
    "import json, os; print(json.dumps([os.environ[n] for n in ('OPENAI_BASE_URL', 'ANTHROPIC_BASE_URL', 'NO_PROXY')]))"
)


async def test_the_gateway_listens_and_is_told_as_configured(
    tmp_path: Path, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "corp")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    options: dict[str, Any] = {"gateway": {"host": "127.0.0.2"}}
    assert await output(tmp_path, server, AGENT, {"say": "hi"}, **options) == "|echo: again"
    openai_url, anthropic_url, direct = await output(tmp_path, server, TOLD, answer="json", **options)
    assert re.fullmatch(r"http://127\.0\.0\.2:\d+/e/insitu-ep-[\w-]{24}/v1", openai_url)
    assert anthropic_url == openai_url.removesuffix("/v1")
    assert direct == "corp,127.0.0.2"
    options = {"gateway": {"host": "127.0.0.2", "address": "http://localhost.localdomain:{port}/below/"}}
    openai_url, _, direct = await output(tmp_path, server, TOLD, answer="json", **options)
    assert re.fullmatch(r"http://localhost\.localdomain:\d+/below/e/insitu-ep-[\w-]{24}/v1", openai_url)
    assert direct == "corp,localhost.localdomain"
    options = {"gateway": {"host": "0.0.0.0", "address": "http://localhost:{port}"}}
    assert await output(tmp_path, server, AGENT, {"say": "hi"}, **options) == "|echo: again"


async def test_a_place_where_the_gateway_cannot_listen_is_told(tmp_path: Path, server: FakeOpenAI) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, where in (("127.0.0.1", rf"127\.0\.0\.1:{port}: "), ("192.0.2.1", rf"192\.0\.2\.1:{port}: ")):
            with pytest.raises(ConfigError, match=rf"gateway: cannot listen at {where}"):
                await output(tmp_path, server, "", gateway={"host": host, "port": port})


async def test_a_service_of_a_cancelled_episode_gets_no_more_answers(tmp_path: Path, server: FakeOpenAI) -> None:
    """It goes on, as services do whose client has left; what it asks then is refused, and belongs to no episode."""
    received = len(server.requests)
    answers: list[int] = []

    async def run_on(model: dict[str, str]) -> None:
        async with aiohttp.ClientSession() as session:
            for text in ("slow 0.3", "late"):
                asked = {"model": "x", "messages": [{"role": "user", "content": text}]}
                async with session.post(model["openai_base_url"] + "/chat/completions", json=asked) as answer:
                    answers.append(answer.status)

    async def answer(request: web.Request) -> web.Response:
        episode = await request.json()
        work = asyncio.create_task(run_on(episode["model"]))
        works.append(work)
        await asyncio.shield(work)
        return web.json_response({"output": "done"})

    works: list[asyncio.Task[None]] = []
    async with service(answer) as url, workflow(tmp_path, server.base_url, {"_type": "http", "url": url}) as program:
        with EpisodeScope(training=True) as scope:
            episode = asyncio.create_task(program.ainvoke("hi"))
            await until(lambda: server.requests[received:])
            episode.cancel()
            with pytest.raises(asyncio.CancelledError):
                await episode
        with EpisodeScope(training=True) as following:
            await works[0]
    assert answers == [200, 410]
    assert (scope.calls, scope.ledger.late_calls, following.calls) == ([], 2, [])


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"gateway": {"host": "0.0.0.0"}}, r"workflow.gateway: .*0\.0\.0\.0: set `address`"),
        ({"gateway": {"host": ""}}, r"workflow.gateway.host"),
        ({"gateway": {"port": 70000}}, r"workflow.gateway.port"),
        ({"gateway": {"address": "http://box"}}, r"workflow.gateway: .*port 0 is a different port"),
        ({"gateway": {"address": "box:80", "port": 80}}, r"workflow.gateway.address: .*'box:80' is not an HTTP URL"),
        (
            {"gateway": {"adress": "http://box"}},
            r"workflow.gateway: key 'adress' does not exist .did you mean 'address'",
        ),
        ({"elsewhere": {"base_url": "nowhere"}}, r"workflow.elsewhere.base_url: .*'nowhere' is not an HTTP URL"),
    ],
)
def test_a_wrong_gateway_is_told_before_anything_starts(tmp_path: Path, block: dict[str, Any], said: str) -> None:
    models = {"player": {"_type": "openai", "model_name": "fake", "base_url": "http://127.0.0.1:9/v1"}}
    workflow = {"_type": "command", "command": ["true"], "llm": "player", **block}
    (tmp_path / "config.yml").write_text(json.dumps({"llms": models, "workflow": workflow}))
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "config.yml")


def test_a_wrong_block_is_told_before_anything_starts(tmp_path: Path) -> None:
    block = {"_type": "command", "command": [], "llm": "player"}
    (tmp_path / "config.yml").write_text(json.dumps({"workflow": block}))
    with pytest.raises(ConfigError, match=r"workflow.command"):
        load_config(tmp_path / "config.yml")


def check_trained(folder: Path, episodes: int, calls_each: int) -> None:
    """Every call was recorded, in the episode of its row, and the last of them was made by trained weights."""
    metrics = read_lines(folder / "run/training_metrics.jsonl")
    assert [m["policy_version"] for m in metrics] == [1, 2]
    assert all(m["logprob_gap"] < 1e-3 and m["tokens"] > 0 and not m["dropped"].get("workflow_error") for m in metrics)
    calls = read_lines(folder / "run/calls.jsonl.gz")[1:]
    assert len(calls) == episodes * calls_each
    assert {c["policy_version"] for c in calls} == {0, 1}
    assert all(len(c["token_ids"]) == len(c["logprobs"]) > 0 for c in calls)


def test_a_command_is_trained(tmp_path: Path) -> None:
    digits_project(tmp_path, workflow={"_type": "command", "command": [sys.executable, "agent.py"]}, rows=2)
    (tmp_path / "agent.py").write_text(AGENT)
    code, _, err = run_project(tmp_path)
    assert code == 0, err
    check_trained(tmp_path, 16, 2)


@pytest.mark.slow
def test_a_service_is_trained(tmp_path: Path) -> None:
    code = AGENT.replace("json.load(sys.stdin)", "json.loads(sys.argv[1])")  # run by the service, as any program may be

    async def answer(request: web.Request) -> web.Response:
        asked = await request.json()
        model = asked["model"]
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, json.dumps(asked["row"])),
            env={**os.environ, "OPENAI_BASE_URL": model["openai_base_url"], "OPENAI_API_KEY": model["api_key"]},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await program.communicate()
        return web.json_response({"output": said.decode()})

    async def finetune() -> tuple[int, str, str]:
        async with service(answer) as url:
            digits_project(tmp_path, workflow={"_type": "http", "url": url}, rows=2)
            return await asyncio.to_thread(run_project, tmp_path)

    status, _, err = asyncio.run(finetune())
    assert status == 0, err
    check_trained(tmp_path, 16, 2)


BODY = {
    "messages": [{"role": "user", "content": "Level {level}: {input}"}],
    "options": {"level": "{level}", "user": "row-{row_id}", "format": "{{}}", "none": "{city}", "n": 1},
}


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"model_url": {"body": "options.model.base_url"}}, "body"),
        (
            {"model_url": {"header": "X-Model-Url", "api": "anthropic"}, "headers": {"X-Key": "of level {level}"}},
            "header",
        ),
        ({"model_url": {"query": "model"}}, "query"),
        ({"model_url": {"body": "messages[0].url"}}, "message"),
    ],
)
async def test_a_service_is_asked_as_it_expects(
    tmp_path: Path, server: FakeOpenAI, block: dict[str, Any], place: str
) -> None:
    async def reply(request: web.Request) -> web.Response:
        seen.append((request, await request.json()))
        return web.json_response({"choices": [{"text": "right"}, {"text": "other"}]})

    seen: list[tuple[web.Request, dict[str, Any]]] = []
    async with service(reply) as url:
        block = {"_type": "http", "url": f"{url}?v=2&q={{input}}", "body": BODY, "answer": "$.choices[0].text", **block}
        async with workflow(tmp_path, server.base_url, block) as program:
            with EpisodeScope(key=EpisodeKey("r", 0, "7", 0)) as scope:
                scope.row = {"id": 7, "level": 3, "city": None}
                assert await program.ainvoke("hi {level} & a=b/+%") == "right"
    ((request, body),) = seen
    sent = {
        "header": request.headers.get("X-Model-Url"),
        "query": request.query.get("model"),
        "body": body["options"].pop("model", {}).get("base_url"),
        "message": body["messages"][0].pop("url", None),
    }
    assert [name for name, model_url in sent.items() if model_url] == [place]
    end = "" if place == "header" else "/v1"
    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/e/insitu-ep-[\w-]{{24}}{end}", str(sent[place]))
    assert body == {
        "messages": [{"role": "user", "content": "Level 3: hi {level} & a=b/+%"}],
        "options": {"level": 3, "user": "row-7", "format": "{}", "none": None, "n": 1},
    }
    assert {**request.query, "model": None} == {"v": "2", "q": "hi {level} & a=b/+%", "model": None}
    assert request.headers.get("X-Key") == ("of level 3" if "headers" in block else None)


async def test_values_are_percent_encoded_in_the_path(tmp_path: Path, server: FakeOpenAI) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.json_response({"output": request.raw_path})

    async with service(reply, "/{path:.*}") as url:
        block = {"_type": "http", "url": f"{url}/{{city}}/x"}  # a path below /run
        async with workflow(tmp_path, server.base_url, block) as program:
            with EpisodeScope(key=EpisodeKey("r", 0, "7", 0)) as scope:
                scope.row = {"city": "a/../ü?#{id}"}
                assert await program.ainvoke("hi") == "/run/a%2F..%2F%C3%BC%3F%23%7Bid%7D/x"
                scope.row = {"city": ".."}
                with pytest.raises(WorkflowError, match=r"workflow.url: row '7': a value would lead to another path"):
                    await program.ainvoke("hi")


@pytest.mark.parametrize(
    ("block", "response", "said"),
    [
        (
            {"body": {"options": [{"text": "a {levle}"}]}},
            {},
            r"workflow.body.options\[0\].text: row '7': the placeholder 'levle' does not exist .did you mean "
            r"'level'\?.; available: id, level, city, lines, input, row_id \(write {{ for a brace\)",
        ),
        ({"body": {"text": "in {city}"}}, {}, r"workflow.body.text: row '7': city is null, which no text can hold"),
        ({"headers": {"X-City": "{city}"}}, {}, r"workflow.headers.X-City: row '7': city is null"),
        ({"headers": {"X-City": "a {lines}"}}, {}, r"workflow.headers.X-City: row '7': a value has a line break"),
        (
            {"answer": "$.reply"},
            {"answer": 1},
            r"/run, row '7': answer \$.reply matches 0 values of {'answer': 1}, not",
        ),
        ({"answer": "$.a[*]"}, {"a": [1, 2]}, r"/run, row '7': answer \$.a\[\*\] matches 2 values of "),
        ({"answer": "$.reply"}, "plain", r"/run, row '7': the answer is not JSON .*: 'plain'"),
        ({}, {"reply": 1}, r"answer \$\.output matches 0 values of {'reply': 1}"),
    ],
)
async def test_a_request_that_cannot_be_made_or_understood_is_named(
    tmp_path: Path, server: FakeOpenAI, block: dict[str, Any], response: Any, said: str
) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(text=response) if isinstance(response, str) else web.json_response(response)

    async with service(reply) as url:
        block = {"_type": "http", "url": url, "body": {}, "model_url": {"header": "X-Model"}, **block}
        async with workflow(tmp_path, server.base_url, block) as program:
            with EpisodeScope(key=EpisodeKey("r", 0, "7", 0)) as scope:
                scope.row = {"id": 7, "level": 3, "city": None, "lines": "a\r\nb"}
                with pytest.raises(WorkflowError, match=said):
                    await program.ainvoke("hi")


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            {"body": {"text": "{input}"}},
            "model_url must say where the service expects its model's URL: body, header or",
        ),
        ({"body": {}, "model_url": {"api": "anthropic"}}, "model_url must say where"),
        (
            {"body": {"a": ["x"]}, "model_url": {"body": "a.b"}},
            "model_url.body is 'a.b', which is in no mapping or list of body",
        ),
        (
            {"body": {"a": [{}]}, "model_url": {"body": "a[1].b"}},
            r"model_url.body is 'a\[1\].b', which is in no mapping or list of body",
        ),
        ({"body": {}, "model_url": {"body": "a..b"}}, "model_url.body is 'a..b', which is in no mapping"),
        ({"url": "http://{input}:80/run"}, "workflow: url has a placeholder in its host"),
        ({"url": "http://127.0.0.1:9/run/{input"}, "workflow: url has a brace without its counterpart .write {{"),
        ({"headers": {"X-A": "a\nb"}}, "workflow: headers.X-A has a line break"),
        ({"headers": {"X-A": "{input}}"}}, "workflow: headers.X-A has a brace without its counterpart .write {{"),
        ({"headers": {"X {input}": "a"}}, "workflow: 'X {input}' cannot be the name of a header"),
        (
            {"body": {"a": [{"{input}": 1}]}, "model_url": {"header": "X"}},
            r"workflow: body.a\[0\]: the key '{input}' has a placeholder, which only values may have",
        ),
        (
            {"body": {"a": ["a {b"]}, "model_url": {"header": "X"}},
            r"workflow: body.a\[0\] has a brace without its counterpart: 'a {b' .write {{ for a brace",
        ),
        ({"model_url": {"haeder": "X"}}, "key 'haeder' does not exist .did you mean 'header'"),
        ({"answer": "reply"}, r"workflow.answer: answer 'reply' is not a JSONPath such as \$.answer"),
    ],
)
def test_a_wrong_contract_of_a_service_is_told_before_anything_starts(
    tmp_path: Path, block: dict[str, Any], said: str
) -> None:
    models = {"player": {"_type": "openai", "model_name": "fake", "base_url": "http://127.0.0.1:9/v1"}}
    block = {"_type": "http", "url": "http://127.0.0.1:9/run", "llm": "player", **block}
    (tmp_path / "config.yml").write_text(json.dumps({"llms": models, "workflow": block}))
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "config.yml")


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"url": "http://127.0.0.1:9/run?q={citty}"}, "workflow.url"),
        ({"headers": {"X-City": "of {citty}"}}, "workflow.headers.X-City"),
        ({"body": {"a": [{"b": "in {citty}"}]}, "model_url": {"header": "X"}}, r"workflow.body.a\[0\].b"),
    ],
)
@pytest.mark.parametrize("command", slow_after(1, ["validate", "eval"]))
def test_a_placeholder_without_a_column_is_told_before_anything_starts(
    tmp_path: Path, block: dict[str, Any], key: str, command: str
) -> None:
    digits_project(tmp_path, workflow={"_type": "http", "url": "http://127.0.0.1:9/run", **block}, rows=1)
    (tmp_path / "rows.jsonl").write_text('{"id": 0, "question": "?", "city": "Rome"}\n')
    code, _, err = run_project(tmp_path, command=command)
    assert code == 2
    said = (
        r"the placeholder 'citty' does not exist \(did you mean 'city'\?\); available: .*city.*, input, row_id \(write"
    )
    assert re.search(f"^error: dataset .*rows.jsonl does not fit {key}: {said}", err), err


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"command": ["true", "--in={citty}"]}, r"command: the placeholder 'citty' .*available: id, question, ci"),
        ({"verify": ["true", "{verify_files}"]}, "verify: the placeholder 'verify_files' does not exist"),
        ({"command": ["awk", "{ print } {city} ${HOME} {{.ID}} {}", "-c", "{code}", "{row_id}"]}, None),
    ],
)
def test_a_placeholder_of_a_command_needs_a_column(tmp_path: Path, block: dict[str, Any], said: str | None) -> None:
    models = {"player": {"_type": "openai", "model_name": "fake", "base_url": "http://127.0.0.1:9/v1"}}
    block = {"_type": "command", "llm": "player", "command": ["true"], **block}
    if "verify" in block:
        block["workspace"] = {"copy": str(tmp_path), "result": ["."]}
    (tmp_path / "config.yml").write_text(json.dumps({"llms": models, "workflow": block}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 0, "question": "?", "city": "Rome"}\n')
    with pytest.raises(ConfigError, match=rf"does not fit workflow\.{said}") if said else nullcontext():
        load_dataset(load_config(tmp_path / "config.yml"), rows)


SCRIPT = """
import insitu
from digits_plugin import mean_digit

rows = [{"question": f"Row {i}", "city": f"City {i}"} for i in range(2)]
contract = {"body": {"prompt": "{question} {city}", "llm": {"url": ""}}, "answer": "$.reply.text",
    "model_url": {"body": "llm.url"}}

def score(answer: str) -> float:
    return mean_digit(answer)

before = insitu.evaluate(score=score, rows=rows, workflow=contract | {"_type": "http", "url": URL}, max_tokens=6,
    model=MODEL)
assert before.problems == [], before.problems
run = insitu.finetune(score=score, train=rows, url=URL, workflow=contract, epochs=2, generations=4, max_tokens=6,
    trainer_adapters={"backend": {"url": BACKEND, "training": {"learning_rate": 1e-3}}}, output_dir="run")
try:
    run.ask("hi")
except insitu.ConfigError as error:
    assert "a backend at a url keeps its own" in str(error), error
"""


@pytest.mark.slow
def test_a_service_is_trained_from_python_as_it_is(tmp_path: Path) -> None:
    """On a backend that runs already, whose model no argument names."""

    async def reply(request: web.Request) -> web.Response:
        body = await request.json()
        assert set(body) == {"prompt", "llm"}
        asked = {"model": "any", "messages": [{"role": "user", "content": body["prompt"]}]}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{body['llm']['url']}/chat/completions", json=asked) as answer:
                completion = await answer.json()
        return web.json_response({"reply": {"text": completion["choices"][0]["message"]["content"]}})

    async def finetune(backend: str) -> tuple[int, str]:
        async with service(reply) as url:
            values = f"URL, BACKEND, MODEL = {url!r}, {backend!r}, {str(MODEL)!r}\n"
            (tmp_path / "my_script.py").write_text(values + SCRIPT)
            command = [forked_python(), "my_script.py"]
            environment = {**os.environ, "PYTHONWARNINGS": "error"}
            pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
            script = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=environment, **pipes)
            printed, _ = await script.communicate()
            return script.returncode or 0, printed.decode()

    (tmp_path / "digits_plugin.py").write_text((ROOT / "tests/support/digits_plugin.py").read_text())
    with serving("backend", "--model", str(MODEL), "--port", "0", folder=tmp_path) as (_, url):
        status, printed = asyncio.run(finetune(url))
    assert status == 0, printed
    check_trained(tmp_path, 16, 1)
