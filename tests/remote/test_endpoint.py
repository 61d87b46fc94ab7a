"""The workflow as a service: trajectories as in this process, clear failures, and plain requests."""

import asyncio
import gzip
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import openai
import processes
import psutil
import pytest
import served_plugin
import yaml
from aiohttp import web
from factories import read_lines
from fake_openai import FakeOpenAI
from marks import slow_after, slow_but
from tiny_models import save_tiny_model
from waiting import until

from insitu.collect.episodes import Attempt, EpisodeOptions, executor_of, open_workflow, run_episode
from insitu.collect.evaluation import EvaluationRun
from insitu.config import Config, load_config
from insitu.errors import BackendError, BackendUnavailable, ConfigError, RequestRefused
from insitu.plugin_api import Builder, PolicyEndpoint
from insitu.remote.attempt_records import ServedPolicy, read_result, request_fields
from insitu.remote.client import EPISODES, PROTOCOL, ServiceLost, ServiceSession
from insitu.remote.pool import RemoteService, ServicePool
from insitu.remote.service import WorkflowService
from insitu.schemas.episodes import Episode, EpisodeKey
from insitu.schemas.evaluation import EvalInputItem, EvaluationRunConfig
from insitu.wire.http_access import AccessPolicy
from insitu.wire.json_values import decode, encode
from insitu.wire.redaction import redact
from insitu.workflow.event_loop import loop_in_thread, run_in_loop

ROOT = Path(__file__).parents[2]
STRICT = {"PYTHONPATH": str(ROOT / "tests/support"), "PYTHONWARNINGS": "error"}
RULES = EpisodeOptions(seed=7, training=frozenset({"player"}))


def serve(file: str, folder: Path, port: str = "0") -> AbstractContextManager[tuple[processes.Process, str]]:
    """A service of the workflow of a file, and its address."""
    return processes.serving("serve", "--config_file", file, "--port", port, folder=folder, **STRICT)


def content(llm: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "general": {"seed": 7, "plugins": ["served_plugin"]},
        "llms": {"player": {"max_tokens": 12, "temperature": 1.0, "max_retries": 0, **llm}},
        "functions": {"inner": {"_type": "served", "llm": "player"}},
        "workflow": {"_type": "served", "llm": "player", "inner": "inner"},
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}, "output_dir": "out"},
            "evaluators": {"spelled": {"_type": "spelled"}},
        },
        **sections,
    }


def openai_at(url: str, **settings: Any) -> dict[str, Any]:
    return {"_type": "openai", "model_name": "policy", "base_url": url, **settings}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endpoint")


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[str]:
    """The address of a real model."""
    model = save_tiny_model(folder / "model")
    with processes.serving("backend", "--model", model, "--port", "0", "--threads", "1") as (_, address):
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def config(folder: Path, backend: str) -> Config:
    (folder / "config.yml").write_text(yaml.safe_dump(content(openai_at(backend))))
    rows = [{"id": i, "question": {"do": do}} for i, do in enumerate(("plain", "steps", "raise"))]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_config(folder / "config.yml")


@pytest.fixture(scope="module")
def served(folder: Path, config: Config) -> Iterator[str]:
    with serve("config.yml", folder) as (_, address):
        yield address


def key(row: Any, generation: int = 0) -> EpisodeKey:
    return EpisodeKey("r", 1, str(row), generation)


def asked(endpoint: str | None, **options: Any) -> EvaluationRunConfig:
    return EvaluationRunConfig(config_file=None, endpoint=endpoint, **options)


@asynccontextmanager
async def opened(config: Config, endpoint: str | None, **options: Any) -> AsyncIterator[Attempt]:
    async with Builder(config) as builder, open_workflow(builder, asked(endpoint, **options)) as attempt:
        yield attempt


async def episode(
    config: Config, endpoint: str | None, question: Any, rules: EpisodeOptions = RULES, **options: Any
) -> Episode:
    async with opened(config, endpoint, **options) as attempt:
        return await run_episode(attempt, EvalInputItem(id="x", input_obj=question), key("x"), rules)


def known(episode: Episode) -> dict[str, Any]:
    """All of an episode but the time it took and what is drawn anew each time."""
    numbers: dict[str, str] = {}
    calls = [{k: v for k, v in asdict(call).items() if k not in ("started", "ended")} for call in episode.calls]
    text = encode(asdict(replace(episode, calls=calls, seconds=0.0))).decode()
    text = re.sub(r'"(span_)?event_timestamp":[^,]+,', "", text)
    unique = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|\b[0-9a-f]{32}\b|chatcmpl-\w+"
    return decode(re.sub(unique, lambda m: numbers.setdefault(m[0], f"<{len(numbers)}>"), text).encode())


# the same trajectories


@pytest.mark.parametrize("do", slow_but(("plain", "nest", "raise"), ["plain", "chain", "steps", "nest", "raise"]))
async def test_an_episode_is_the_same_as_in_this_process(config: Config, served: str, do: str) -> None:
    question = {"do": do, "say": f"Tell: {do} é"}
    here, there = [await episode(config, url, question) for url in (None, served)]
    assert len(there.calls) == {"steps": 2, "nest": 3}.get(do, 1)
    assert all(len(call.token_ids or ()) == len(call.logprobs or ()) > 0 for call in there.calls)
    assert known(there) == known(here)
    for mine, theirs in zip(here.steps, there.steps, strict=True):
        assert type(mine.metadata) is type(theirs.metadata)
        assert type(mine.data) is type(theirs.data)
    assert (there.step_rewards == [0.5, 0.0]) is (do == "steps")
    assert (there.reason == "workflow_error") is (do == "raise")
    assert there.seconds > 0


async def test_a_workflow_that_streams(folder: Path, backend: str, config: Config) -> None:
    data = content(openai_at(backend), workflow={"_type": "streamed", "llm": "player"})
    (folder / "streamed.yml").write_text(yaml.safe_dump(data))
    loaded = load_config(folder / "streamed.yml")
    async with serving(loaded) as (_, address):
        here, there = [await episode(loaded, url, "hi") for url in (None, address)]
    assert known(there) == known(here)
    assert there.output
    assert there.calls[0].token_ids


async def test_an_evaluation_is_the_same_whoever_runs_the_workflow(config: Config, served: str) -> None:
    outputs = [
        await EvaluationRun(
            EvaluationRunConfig(config_file=config, endpoint=url, reps=2, write_output=False)
        ).run_and_evaluate()
        for url in (None, served)
    ]
    here, there = [
        [(i.id, i.rep, i.output_obj, i.error, i.reason, len(i.trajectory)) for i in o.eval_input.eval_input_items]
        for o in outputs
    ]
    assert there == here
    assert [reason for *_, reason, _ in there] == [None] * 4 + ["workflow_error"] * 2
    assert outputs[0].evaluation_results == outputs[1].evaluation_results


async def test_an_answer_that_is_an_object_arrives_as_json(config: Config, served: str) -> None:
    answer = await episode(config, served, {"do": "model"})
    assert answer.output["parts"] == ["a", "b"]


async def test_what_has_no_form_in_json_fails_the_episode_and_says_so(config: Config, served: str) -> None:
    there = await episode(config, served, {"do": "deep"})
    assert (there.outcome, there.reason) == ("failed", "workflow_error")
    assert "cannot be serialized as JSON" in str(there.error)


# failures


async def test_time_outs(config: Config, served: str) -> None:
    rules = replace(RULES, timeout=0.3, retries=1)
    here, there = [await episode(config, url, {"do": "hang"}, rules) for url in (None, served)]
    assert known(there) == known(here)
    assert (there.reason, there.key.attempt) == ("timeout", 1)
    late = await episode(config, served, {"do": "hang"}, endpoint_timeout=1)
    problem = "EpisodeTimeout: no answer within 1 s (general.executor.timeout, or --endpoint_timeout)"
    assert (late.reason, late.error) == ("timeout", problem)


@pytest.mark.slow
async def test_a_service_that_is_stopped_or_killed_fails_the_episodes_it_has(folder: Path, config: Config) -> None:
    with serve("config.yml", folder) as (running, address):
        blocked = await episode(config, address, {"do": "block"}, endpoint_timeout=1)
        assert blocked.reason == "timeout"  # the service itself is not silent
        async with opened(config, address, endpoint_timeout=6) as attempt:
            await run_episode(attempt, EvalInputItem(id="x", input_obj={"do": "plain"}), key("x"), RULES)
            running.send_signal(signal.SIGSTOP)
            silent = await run_episode(attempt, EvalInputItem(id="x", input_obj={"do": "plain"}), key("x"), RULES)
            running.send_signal(signal.SIGCONT)
        assert (silent.reason, "is silent" in str(silent.error)) == ("backend_error", True)
        async with opened(config, address, endpoint_timeout=3) as attempt:
            item = EvalInputItem(id="x", input_obj={"do": "hang"})
            rules = replace(RULES, retries=1)
            tasks = [asyncio.create_task(run_episode(attempt, item, key("x", g), rules)) for g in range(3)]
            await until_health(address, lambda health: health["episodes"] == 3)
            running.send_signal(signal.SIGKILL)
            episodes = await asyncio.gather(*tasks)
        assert [(e.outcome, e.reason, e.reward, e.key.attempt) for e in episodes] == [
            ("failed", "backend_error", None, 1)
        ] * 3
        assert all("waits for a workflow service: 0 of 1 run" in str(e.error) for e in episodes)
        with pytest.raises(BackendUnavailable, match="no answer from the workflow service"):
            await episode(config, address, {"do": "plain"})


@pytest.mark.slow
async def test_episodes_of_a_lost_service_are_made_again_by_another_one(config: Config, folder: Path) -> None:
    """Without retries; the lost one is used again once it is back."""
    with serve("config.yml", folder) as (lost, first), serve("config.yml", folder) as (_, second):
        block = {"_type": "service", "url": [first, second]}
        loaded = load_config(folder / "config.yml", [("general.executor", json.dumps(block))])
        tasks: list[asyncio.Task[Episode]] = []
        async with opened(loaded, None) as attempt:

            def begin() -> None:
                item = EvalInputItem(id="x", input_obj={"do": "hang"})
                tasks.append(asyncio.create_task(run_episode(attempt, item, key("x", len(tasks)), RULES)))

            async def both_run() -> bool:
                begin()
                return bool(await running(first) and await running(second))  # each has the fewest in turn

            await until(both_run, every=0.2)
            lost.send_signal(signal.SIGKILL)
            await until_health(second, lambda health: health["episodes"] == len(tasks))
            async with serving(config, port=int(first.rpartition(":")[2])) as (service, _):

                def runs() -> bool:
                    begin()
                    return service.hosted.episodes > 0

                await until(runs, every=0.2)
                assert not any(task.done() for task in tasks)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await until_health(second, lambda health: health["episodes"] == 0)


@pytest.mark.parametrize("end", slow_but([signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]))
def test_no_episode_is_lost_when_the_service_restarts_during_its_model_calls(
    tmp_path: Path, end: signal.Signals
) -> None:
    """The model server is stopped meanwhile, so that all 24 episodes wait for it when the service ends."""
    model = save_tiny_model(tmp_path / "model")
    rows = [{"id": i, "question": {"do": "nest", "say": f"Row {i}"}} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with processes.serving("backend", "--model", model, "--port", "0", "--threads", "1") as (backend, url):
        blocks = content(openai_at(f"{url}/v1"))
        blocks["eval"]["general"] |= {"max_concurrency": 24, "retries": 1}
        (tmp_path / "config.yml").write_text(yaml.safe_dump(blocks))
        with serve("config.yml", tmp_path) as (service, address):
            backend.send_signal(signal.SIGSTOP)
            command = "eval", "--config_file", "config.yml", "--endpoint", address
            with processes.start(*command, folder=tmp_path, COLUMNS="200", **STRICT) as evaluation:
                evaluation.wait_until(lambda: asyncio.run(running(address)) == 24)
                service.send_signal(end)
                service.wait()
                with serve("config.yml", tmp_path, address.rpartition(":")[2]):
                    evaluation.wait_until(lambda: asyncio.run(running(address)) == 24)
                    backend.send_signal(signal.SIGCONT)
                    _, errors = evaluation.communicate(processes.HANGS)
    assert evaluation.returncode == 0, errors
    assert "its 24 episodes are run again" in errors
    outputs = json.loads((tmp_path / "out/workflow_output.json").read_text())
    assert [each["id"] for each in outputs if each["generated_answer"]] == list(range(24))


async def health_of(address: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{address}/health") as answer:
        return await answer.json()


async def running(address: str) -> int:
    """The number of episodes that a service runs."""
    return (await health_of(address))["episodes"]


async def until_health(address: str, holds: Any) -> None:
    async def is_so() -> Any:
        return holds(await health_of(address))

    await until(is_so, every=0.02)


async def test_other_servers_are_refused(config: Config) -> None:
    with FakeOpenAI() as other:
        with pytest.raises(ConfigError, match="is not a workflow service"):
            await episode(config, other.base_url, {"do": "plain"})


@pytest.mark.parametrize("path", ["", "/", "/generate", "/generate/", EPISODES])
async def test_the_endpoint_may_be_written_with_the_route(config: Config, served: str, path: str) -> None:
    assert (await episode(config, served + path, {"do": "plain"})).outcome == "ok"


@asynccontextmanager
async def describing(*statuses: int, protocol: int = PROTOCOL) -> AsyncIterator[str]:
    """A server that answers with these statuses, then describes itself as a workflow service."""
    waiting = [*statuses]

    async def answer(request: web.Request) -> web.Response:
        if waiting:
            return web.Response(status=waiting.pop(0))
        return web.json_response({"protocol": protocol, "source": "f", "llms": ["player"]})

    app = web.Application()
    app.router.add_get(EPISODES, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
    assert not waiting


async def test_a_service_of_another_release_is_refused(config: Config) -> None:
    async with describing(protocol=4) as address:
        with pytest.raises(ConfigError, match=r"speaks protocol 4, not 6: use one release on both sides"):
            await episode(config, address, {"do": "plain"})


async def test_a_service_that_is_busy_or_restarts_is_waited_for(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    async with describing(503, 429) as address, Builder(config) as builder:
        await (await executor_of(builder, asked(address))).check(builder)
    caplog.clear()
    port = int(address.rpartition(":")[2])
    async with Builder(config) as builder:
        executor = await executor_of(builder, asked(address))
        with pytest.raises(BackendUnavailable, match="no answer from the workflow service"):
            await executor.check(builder)
        async with asyncio.TaskGroup() as group:
            opened = executor.open(builder, reached=True)
            waiting = group.create_task(opened.__aenter__())
            await until(lambda: caplog.messages)
            async with serving(config, port=port):
                await waiting
                await opened.__aexit__(None, None, None)


async def test_the_llms_that_are_trained_must_be_the_services(config: Config, served: str) -> None:
    async with Builder(config) as builder:
        with pytest.raises(ConfigError, match=r"has no llm called judge; available: player"):
            async with open_workflow(builder, asked(served), {"player", "judge"}):
                pass


# the service, in this process


@asynccontextmanager
async def serving(
    config: Config, token: str | None = None, port: int = 0
) -> AsyncIterator[tuple[WorkflowService, str]]:
    access = AccessPolicy.of("127.0.0.1", token, variable="INSITU_SERVE_TOKEN")
    service = WorkflowService(config, lambda _: nullcontext(), access)  # type: ignore[arg-type,return-value]
    async with service.listening("127.0.0.1", port) as address:
        yield service, address


async def post(url: str, body: Any, **options: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_plain_requests(config: Config) -> None:
    async with serving(config) as (_, address):
        status, first = await post(f"{address}/generate", {"input": {"do": "plain"}})
        _, second = await post(f"{address}/generate", {"input": {"do": "plain"}})
        assert (status, list(first)) == (200, ["value"])
        assert first != second  # an ordinary request has no seed
        assert (await post(f"{address}/generate", {"input_message": {"do": "plain"}}))[0] == 200
        packed = gzip.compress(json.dumps({"input": {"do": "plain"}}).encode())
        assert (await post(f"{address}/generate", packed, headers={"Content-Encoding": "gzip"}))[0] == 200
        status, failed = await post(f"{address}/generate", {"input": {"do": "raise", "say": "oh no"}})
        assert (status, failed["error"]["code"]) == (500, "workflow_error")
        assert "RuntimeError: oh no (" in failed["error"]["message"]
        status, wrong = await post(f"{address}/generate", {"input": "no object"})
        assert (status, wrong["error"]["param"], wrong["error"]["code"]) == (400, "input", "invalid_input")
        assert "function <workflow> takes dict" in wrong["error"]["message"]


async def test_an_openai_client_asks_the_agent(config: Config) -> None:
    async with serving(config) as (_, address), openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        asked: Any = {
            "model": "any",
            "messages": [
                {"role": "user", "content": "before"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": [{"type": "text", "text": '{"do": "echo", "say": "hi"}'}]},
            ],
        }
        (choice,) = (await client.chat.completions.create(**asked)).choices
        assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
        chunks = [
            each.choices[0].delta.content async for each in await client.chat.completions.create(**asked, stream=True)
        ]
        assert "".join(filter(None, chunks)) == choice.message.content
        for messages in ([], [{"role": "system", "content": "x"}], [{"role": "user", "content": [{"type": "image"}]}]):
            with pytest.raises(openai.BadRequestError, match="messages has no user message") as refused:
                await client.chat.completions.create(model="any", messages=messages)
            assert refused.value.param == "messages"
        failing = [{"role": "user", "content": '{"do": "raise", "say": "oh no"}'}]
        with pytest.raises(openai.InternalServerError, match="oh no"):
            await client.with_options(max_retries=0).chat.completions.create(model="any", messages=failing)


async def test_wrong_requests(config: Config) -> None:
    async with serving(config) as (_, address):
        for path, body, headers, status, message in (
            ("/generate", {"inptu": 1}, {}, 400, "the key 'inptu' does not exist (did you mean 'input'?)"),
            ("/generate", {"input": 1, "\ud800": 1}, {}, 400, r"the key '\ud800' does not exist"),
            ("/generate", {}, {}, 400, "no input given; expected one of input and input_message"),
            ("/generate", {"input": 1, "input_message": 1}, {}, 400, "input and input_message given; expected one of"),
            ("/generate", {"input_message": None}, {}, 400, "input_message is null"),
            ("/generate", [], {}, 400, "the body is a JSON list; expected an object"),
            ("/generate", b"{", {}, 400, "the body is not JSON"),
            (EPISODES, {"key": ["r"]}, {}, 400, "key"),
            (EPISODES, {"key": ["r", 1, "2", 0, 0], "polcy": {}}, {}, 400, "polcy: Extra inputs"),
            (EPISODES, {"key": ["r", 1, "2", 0, 0], "options": {"sed": 1}}, {}, 400, "options.sed: Unexpected"),
            (
                "/generate",
                {"input": 1},
                {"Content-Type": "text/plain"},
                415,
                "is 'text/plain'; send JSON as application/json",
            ),
            ("/nothing", {}, {}, 404, "POST /nothing: "),
            ("/health", {}, {}, 405, "POST /health: "),
        ):
            given, answer = await post(address + path, body, headers=headers)
            assert (given, set(answer["error"])) == (status, {"message", "type", "param", "code"})
            assert message in answer["error"]["message"]


async def test_the_token(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(config, token="secret") as (_, address):
        assert (await post(f"{address}/generate", {"input": 1}))[0] == 401
        for token in (None, "wrong"):
            monkeypatch.setenv("INSITU_SERVE_TOKEN", token or "")
            with pytest.raises(RequestRefused, match="bearer token is missing or wrong"):
                await episode(config, address, {"do": "plain"})
        monkeypatch.setenv("INSITU_SERVE_TOKEN", "secret")
        assert (await episode(config, address, {"do": "plain"})).outcome == "ok"


async def test_a_client_that_leaves_ends_what_it_asked_for(config: Config) -> None:
    async with serving(config) as (_, address):
        for path, body in ((EPISODES, {"key": ["r", 1, "2", 0, 0]}), ("/generate", {})):
            asking = asyncio.create_task(post(address + path, {"input": {"do": "hang"}, **body}))
            await until_health(address, lambda health: health["episodes"] == 1)
            asking.cancel()
            await until_health(address, lambda health: health["episodes"] == 0)


async def test_a_service_says_what_its_attempts_are_doing(config: Config) -> None:
    body = {"attempt": 3, "input": {"do": "hang"}, "key": ["r", 1, "2", 0, 0], "options": {"timeout": 2.5}}
    async with serving(config) as (_, address), aiohttp.ClientSession() as session:
        async with session.post(address + EPISODES, json=body) as answer:
            *reports, end = [json.loads(line) for line in (await answer.read()).splitlines()]
    assert len(reports) >= 2
    assert all(set(report) == {"report"} for report in reports)
    assert set(reports[-1]["report"]["activities"]) == {"3"}
    assert (end["attempt"], end["episode"]["reason"], end["transient"]) == (3, "timeout", True)
    assert len(end["episode"]["steps"]) == 4


async def test_attempts_that_are_refused_leave_the_others_alone(config: Config) -> None:
    lines = [
        {"attempt": 1, "input": {"do": "echo", "say": "hi"}, "key": ["r", 1, "2", 0, 0]},
        {"attempt": 2, "key": ["r"]},
        {"attempt": 3, "key": ["r", 1, "2", 0, 0], "policy": {"base_url": "http://10.0.0.1/v1", "model": "m"}},
        {"attempt": 4, "key": ["r", 1, "2", 0, 0], "policy": {"base_url": "nothing", "model": "m"}},
    ]
    async with serving(config) as (_, address), aiohttp.ClientSession() as session:
        data, headers = "\n".join(map(json.dumps, lines)), {"Content-Type": "application/x-ndjson"}
        async with session.post(address + EPISODES, data=data, headers=headers) as answer:
            messages = {m.get("attempt"): m for m in map(json.loads, (await answer.read()).splitlines())}
    assert messages[1]["episode"]["output"] == "hi"
    refused = {number: (m["status"], m["error"]["param"]) for number, m in messages.items() if "error" in m}
    assert refused.pop(2) in [(400, "key.1"), (400, "key.epoch")]  # of pydantic 2.14, and of earlier ones
    assert refused == {3: (403, "policy.base_url"), 4: (400, "policy.base_url")}


@asynccontextmanager
async def session_with(address: str, **options: Any) -> AsyncIterator[ServiceSession]:
    async with ServiceSession(address, **options) as session:
        await session.connect()
        yield session


async def ask(session: ServiceSession, do: str, policy: ServedPolicy | None = None) -> Episode:
    request = request_fields(EvalInputItem(id="x", input_obj={"do": do, "say": f"Tell: {do} é"}), key("x"), RULES)
    return read_result(key("x"), await session.attempt(session.new_number(), request | {"policy": policy})).episode


async def test_an_attempt_is_cancelled_and_a_blocked_service_says_by_whom(config: Config) -> None:
    async with serving(config) as (service, address):
        loop = asyncio.new_event_loop()
        with loop_in_thread(loop, "client"):
            sessions = session_with(address)
            session = await run_in_loop(loop, sessions.__aenter__())
            attempts = [asyncio.run_coroutine_threadsafe(ask(session, "hang"), loop) for _ in range(2)]
            await until(lambda: service.hosted.episodes >= 2)
            attempts[0].cancel()
            await until(lambda: service.hosted.episodes <= 1)
            while "hang" in session.activity(2) or "blocked" not in session.activity(2):
                time.sleep(0.05)  # noqa: ASYNC251 (it is the mistake to be made)
            assert f"is blocked by {__file__}" in session.activity(2)
            await run_in_loop(loop, sessions.__aexit__(None, None, None))
            with pytest.raises(ServiceLost):
                await asyncio.wrap_future(attempts[1])


async def test_completions_outside_every_episode_are_counted(config: Config) -> None:
    counted: list[Any] = []
    async with serving(config) as (service, address):
        async with session_with(address) as other, session_with(address, on_counts=counted.append) as session:
            assert (await ask(session, "plain")).outcome == "ok"
            assert counted == []
            async with service.hosted.workflow() as workflow:
                await workflow.ainvoke({"do": "plain"})
            await ask(other, "echo")
            await ask(session, "echo")
    assert counted == [{"player": 1}]


async def test_they_are_counted_once_whatever_version_is_served(folder: Path) -> None:
    (folder / "policy.yml").write_text(yaml.safe_dump(content({"_type": "policy"})))
    config, counted = load_config(folder / "policy.yml"), list[Any]()
    with FakeOpenAI(policy_version=1) as server:
        async with serving(config) as (service, address), session_with(address, on_counts=counted.append) as session:
            versions = [ServedPolicy(base_url=server.base_url, model=f"m@{n}", renamed=True) for n in (1, 2)]
            for version in versions:
                assert (await ask(session, "plain", version)).outcome == "ok"
            async with service.hosted.workflow(versions[-1]) as workflow:
                await workflow.ainvoke({"do": "plain"})
            await ask(session, "echo", versions[-1])
    assert counted == [{"player": 1}]


async def test_each_trainer_has_its_model_behind_the_workflow(folder: Path) -> None:
    (folder / "policy.yml").write_text(yaml.safe_dump(content({"_type": "policy"})))
    config = load_config(folder / "policy.yml")
    with FakeOpenAI(policy_version=1) as one, FakeOpenAI(policy_version=2) as two:
        served_plugin.built.clear()
        async with serving(config) as (_, address), session_with(address) as session:
            for model, server, version in (("a", one, 1), ("b", two, 2), ("a", one, 1)):
                policy = ServedPolicy(base_url=server.base_url, model=model, api_key="a key of a trainer")
                (call,) = (await ask(session, "plain", policy)).calls
                assert (call.model, call.policy_version) == (model, version)
            assert len(served_plugin.built) == 4  # two workflows, each with its inner function
            assert redact("a key of a trainer") == "***", "what agents print does not show it"
            names = iter(["m@1", "m@2"])
            endpoint = PolicyEndpoint(one.base_url, "m@0", current_model=lambda: next(names))
            for name in ("m@1", "m@2"):
                (call,) = (await ask(session, "plain", ServedPolicy.of(endpoint))).calls
                assert call.model == name
            assert len(served_plugin.built) == 6  # one workflow for all names of a model
            for n in range(6):
                await ask(session, "plain", ServedPolicy(base_url=one.base_url, model=f"m{n}"))
            await until(lambda: len(served_plugin.built) == 2 * 4)
        assert served_plugin.built == []


async def test_a_workflow_that_cannot_be_built_is_told_and_tried_again(folder: Path) -> None:
    (folder / "lonely.yml").write_text(yaml.safe_dump(content({"_type": "policy"})))
    config = load_config(folder / "lonely.yml")
    async with serving(config) as (_, address), session_with(address) as session:
        for _ in range(2):
            failed = await ask(session, "plain")
            assert failed.reason == "backend_error"
            assert "finetuning.trainer_adapter names no adapter" in str(failed.error)
        with FakeOpenAI() as server:
            policy = ServedPolicy(base_url=server.base_url, model="m")
            assert (await ask(session, "plain", policy)).outcome == "ok"


@pytest.mark.parametrize("fails", ["cancel", "exit"])
async def test_a_workflow_that_ends_while_it_is_built_is_told(folder: Path, fails: str) -> None:
    workflow = {"_type": "served", "llm": "player", "fails": fails}
    (folder / "ends.yml").write_text(yaml.safe_dump(content(openai_at("http://127.0.0.1:9/v1"), workflow=workflow)))
    async with serving(load_config(folder / "ends.yml")) as (_, address):
        for _ in range(2):
            status, answer = await post(f"{address}/generate", {"input": {"do": "plain"}})
            assert status == 500
            assert "the workflow cannot be built: " in answer["error"]["message"]


async def test_attempts_end_when_the_last_service_is_lost_and_none_can_be_started() -> None:
    made: list[Any] = []

    class Mortal(RemoteService):
        def __init__(self) -> None:
            super().__init__(capacity=1)
            self.name, self.gone = f"service {len(made)}", asyncio.Event()
            made.append(self)

        async def start(self) -> None:
            if len(made) > 2:
                raise BackendUnavailable("there is no room")

        async def open(self, workflow: str, description: Any) -> None:
            self.sessions[workflow] = cast(ServiceSession, None)

        def lose(self) -> None:
            self.note_lost("it was killed")
            self.gone.set()

    async def attempt() -> None:
        while True:
            async with pool.service(alone=False) as service:
                await cast(Mortal, service).gone.wait()

    pool = ServicePool("service", 1)
    pool.starters = [Mortal] * 2
    await pool.open("workflow", None, 2, processes.HANGS)
    attempts = [asyncio.create_task(attempt()) for _ in range(4)]
    await until(lambda: sum(each.in_flight for each in made) == 2)
    made[0].lose()
    await until(lambda: len(made) == 3)
    made[1].lose()
    for each in attempts:
        with pytest.raises(BackendError, match="there is no room"):
            await asyncio.wait_for(each, processes.HANGS)
    await pool.close()


async def test_a_workflow_whose_backend_is_lost_is_built_again(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    served: list[asyncio.Timeout] = []

    @asynccontextmanager
    async def serve_policy(builder: Builder) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as loss:
            served.append(loss)
            yield

    service = WorkflowService(config, serve_policy)
    async with service.listening("127.0.0.1", 0) as address:
        status, _ = await post(f"{address}/generate", {"input": {"do": "plain"}})
        assert (status, len(served)) == (200, 1)
        served[0].reschedule(0)
        await until(lambda: caplog.messages)
        assert caplog.messages[0].startswith("a workflow has stopped, the next request builds it again: TimeoutError")
        status, _ = await post(f"{address}/generate", {"input": {"do": "plain"}})
        assert (status, len(served)) == (200, 2)


# whole runs


def recorded(folder: Path) -> list[Any]:
    """What was sampled, in the order of the episodes."""
    calls = read_lines(folder / "calls.jsonl.gz")[1:]
    return sorted([c["episode"].split("/", 1)[1], c["index"], c["token_ids"], c["functions"]] for c in calls)


@pytest.mark.parametrize("kind", slow_after(1, ["policy", "openai"]))
def test_training_and_validation_through_a_service(tmp_path: Path, folder: Path, backend: str, kind: str) -> None:
    """With a learning rate that moves no weight, so that a second run samples what the first one did.

    An llm of `_type: openai` names the model that training starts from, at an address where nothing is.
    """
    where = {"url": backend.removesuffix("/v1")} if kind == "policy" else {"model": str(folder / "model")}
    adapter = {**where, "training": {"learning_rate": 1e-15}}
    training = {
        "trajectory_builders": {"b": {"_type": "insitu_traj_builder", "num_generations": 3}},
        "trainer_adapters": {"a": {"_type": "insitu_trainer_adapter", **adapter}},
        "trainers": {"t": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "reward_function": {"name": "spelled"},
            "validation": {"dataset": "rows.jsonl"},
        },
    }
    base = openai_at("http://127.0.0.1:9/v1", model_name=str(folder / "model"), api_key="none")
    llm = {"_type": "policy"} if kind == "policy" else base
    (tmp_path / "train.yml").write_text(yaml.safe_dump(content(llm, **training)))
    rows = [{"id": i, "question": {"do": do, "say": "Row"}} for i, do in enumerate(("plain", "steps", "raise"))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    finetune = partial(
        processes.run, "finetune", "--config_file", "train.yml", folder=tmp_path, COLUMNS="200", **STRICT
    )
    refused = finetune("--endpoint", "http://127.0.0.1:9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "failed: no answer from the workflow service at http://127.0.0.1:9" in refused.stderr
    with serve("train.yml", tmp_path) as (running, address):
        for options in ([], ["--endpoint", address]):
            output = ["-o", "finetuning.output_dir", f"run{len(options)}"]
            done = finetune(*output, *options)
            assert done.returncode == 0, done.stderr
            assert not psutil.Process(running.pid).children()  # the trainer's model it is, not one of the service's own
    here, there = [recorded(tmp_path / name) for name in ("run0", "run2")]
    assert len(there) == 3 * (1 + 2 + 1)
    assert there == here
    metrics = [json.loads((tmp_path / name / "training_metrics.jsonl").read_text()) for name in ("run0", "run2")]
    for name in ("avg_reward", "dropped", "rows", "tokens", "num_trajectories", "num_groups"):
        assert metrics[0][name] == metrics[1][name]
    assert metrics[1]["dropped"]["workflow_error"] == 3
    first, second = [json.loads((tmp_path / name / "validation_history.json").read_text()) for name in ("run0", "run2")]
    assert [v["avg_reward"] for v in second] == [v["avg_reward"] for v in first]
    assert [v["policy_version"] for v in (*first, *second)] == ([0, 1, 1, 2] if kind == "policy" else [0, 1, 0, 1])
