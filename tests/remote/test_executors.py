"""Where episodes run: the worker of an executor without a cluster, and what is refused without Ray."""

import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import served_plugin
import yaml
from fake_openai import FakeOpenAI
from marks import slow_but
from test_endpoint import RULES, content, key, known, openai_at

from insitu.builder import Builder
from insitu.collect.episodes import AttemptResult, EpisodeOptions, open_workflow, run_episode
from insitu.config import Config, load_config
from insitu.config.resolved import resolved_config
from insitu.errors import ConfigError, RequestRefused
from insitu.integrations.ray.cluster import RayExecutorConfig, connected
from insitu.integrations.ray.worker import EpisodeWorker, Opening, Target
from insitu.remote.attempt_records import ServedPolicy, read_result, request_fields
from insitu.remote.client import ServiceSession
from insitu.runs.resume import check_same_run
from insitu.schemas.episodes import Episode, EpisodeKey
from insitu.schemas.evaluation import EvalInputItem, EvaluationRunConfig
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.wire.json_values import encode

OPTIONS = EpisodeOptions(seed=7, training=frozenset({"player"}))
RAY = {"_type": "ray", "workers": 2}


def load(folder: Path, llm: dict[str, Any], **general: Any) -> Config:
    data = content(llm)
    data["general"] |= general
    (folder / "config.yml").write_text(yaml.safe_dump(data))
    return load_config(folder / "config.yml")


@pytest.fixture
def config(tmp_path: Path, server: FakeOpenAI) -> Config:
    return load(tmp_path, openai_at(server.base_url))


@asynccontextmanager
async def working() -> AsyncIterator[EpisodeWorker]:
    worker = EpisodeWorker()
    try:
        yield worker
    finally:
        await worker.close()


async def opened(worker: EpisodeWorker, opening: Opening) -> dict[str, Any]:
    return await worker.open(encode(opening))


async def attempt(token: str, url: str, question: Any, policy: ServedPolicy | None = None) -> Episode:
    """An episode that the service of a worker runs."""

    async def make(item: EvalInputItem, key: EpisodeKey, options: EpisodeOptions) -> AttemptResult:
        request = request_fields(item, key, options) | {"policy": policy}
        return read_result(key, await session.attempt(session.new_number(), request))

    async with ServiceSession(url.replace("//", f"//:{token}@")) as session:
        await session.connect()
        return await run_episode(make, EvalInputItem(id="x", input_obj=question), key("x"), OPTIONS)


@pytest.mark.parametrize(
    "do", slow_but(("plain", "nest", "raise", "model"), ["plain", "chain", "steps", "nest", "raise", "model"])
)
async def test_an_episode_of_a_worker_is_the_same_as_in_this_process(config: Config, do: str) -> None:
    question = {"do": do, "say": f"Tell: {do} é"}
    async with Builder(config) as builder, open_workflow(builder, None) as run:
        here = await run_episode(run, EvalInputItem(id="x", input_obj=question), key("x"), OPTIONS)
    async with working() as worker:
        about = await worker.start({})
        report = await opened(worker, Opening.of(config, None, None))
        with pytest.raises(RequestRefused, match="bearer token is missing or wrong"):
            await attempt("wrong-token", report["url"], question)
        there = await attempt(about["token"], report["url"], question)
    if do == "model":
        here.output = here.output.model_dump()  # as JSON
    assert known(there) == known(here)


async def test_a_file_that_was_changed_on_the_command_line(tmp_path: Path, server: FakeOpenAI) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVER", server.base_url)
        load(tmp_path, openai_at("${SERVER}"))
        config = load_config(tmp_path / "config.yml", [("llms.player.model_name", "other")])
    assert config.variables == {"SERVER"}
    opening = Opening.of(config, None, None)
    async with working() as worker:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("SERVER", raising=False)
            report = await opened(worker, opening)
            assert "the environment variable SERVER is not set" in report["error"]
            assert report["in_file"]
            about = await worker.start({"SERVER": server.base_url})
            report = await opened(worker, opening)
            episode = await attempt(about["token"], report["url"], {"do": "plain"})
            patch.delenv("SERVER")
    assert [call.model for call in episode.calls] == ["other"]


async def test_the_policy_of_a_worker(tmp_path: Path) -> None:
    """A policy's name may change with every version; a workflow is built for each policy, not for each name."""
    config = load(tmp_path, {"_type": "policy"})
    names = iter(["m@0", "m@1", "m@2"])
    with FakeOpenAI() as server:
        endpoint = PolicyEndpoint(server.base_url, "m", "key", current_model=lambda: next(names))
        async with working() as worker:
            about = await worker.start({})
            report = await opened(worker, Opening.of(config, ServedPolicy.of(endpoint), None))
            for expected in ("m@1", "m@2"):
                episode = await attempt(about["token"], report["url"], {"do": "plain"}, ServedPolicy.of(endpoint))
                assert [call.model for call in episode.calls] == [expected]
            assert len(served_plugin.built) == 2  # it and its inner function


async def test_a_server_that_workers_cannot_reach(config: Config, server: FakeOpenAI) -> None:
    opening = Opening.of(config, None, None)
    async with working() as worker:
        for url, problem in (("http://127.0.0.1:9/v1", "ClientConnectorError"), (f"{server.base_url}/not/there", "")):
            opening.targets = [Target(key="trainer_adapters.a", base_url=url)]
            report = await opened(worker, opening)
            if problem:
                assert report["error"].startswith(
                    f"trainer_adapters.a: the model is served at {url}, which is out of reach"
                )
                assert problem in report["error"]
            else:
                assert "error" not in report  # it is another route of a server that answers
        opening.targets[0].base_url = "http://localhost:8700/v1"
        opening.check_host(socket.gethostname())
        with pytest.raises(ConfigError, match="that is another machine's address of itself"):
            opening.check_host("elsewhere")


async def test_ray_is_not_installed(tmp_path: Path, server: FakeOpenAI) -> None:
    config = load(tmp_path, openai_at(server.base_url), executor=RAY)
    async with Builder(config) as builder:
        with pytest.raises(
            ConfigError,
            match=r"general.executor: _type ray needs the extra ray \(pip install -e .* No module named 'ray'",
        ) as error:
            async with open_workflow(builder, None):
                pass
    assert ".[ray]" in str(error.value)


async def test_what_only_ray_init_takes_is_refused_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="10.0.0.5:6379")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    config = load(tmp_path, {"_type": "policy"})
    for settings, message in (
        ({"address": "10.0.0.6:6379"}, "executor.address is '10.0.0.6:6379', but .* connected to 10.0.0.5:6379"),
        ({"runtime_env": {"pip": ["chess"]}}, "executor.runtime_env.pip: this process has called ray.init"),
        ({"runtime_env": {"env_vars": {"LEVEL": "3"}}}, "executor.runtime_env.env_vars: this process has called"),
    ):
        with pytest.raises(ConfigError, match=message):
            async with connected(RayExecutorConfig(workers=1, **settings), config):
                pass
    secret = {"MY_PAT": "pat-of-the-worker-1"}
    usable = {"address": "10.0.0.5:6379", "runtime_env": {"env_vars": secret, "working_dir": str(tmp_path)}}
    async with connected(RayExecutorConfig(workers=1, **usable), config) as cluster:
        assert cluster.working_dir == str(tmp_path)
        assert cluster.environment["MY_PAT"] == "pat-of-the-worker-1"


async def test_two_keys_say_where_episodes_run(tmp_path: Path, server: FakeOpenAI) -> None:
    config = load(tmp_path, openai_at(server.base_url), executor=RAY)
    service = EvaluationRunConfig(config_file=config, endpoint="http://127.0.0.1:9")
    async with Builder(config) as builder:
        with pytest.raises(ConfigError, match=r"endpoint is 'http://127.0.0.1:9', .* but general.executor is ray"):
            async with open_workflow(builder, service):
                pass


async def test_the_local_executor_may_be_named(tmp_path: Path, server: FakeOpenAI) -> None:
    config = load(tmp_path, openai_at(server.base_url), executor={"_type": "local"})
    async with Builder(config) as builder, open_workflow(builder, None) as run:
        episode = await run_episode(run, EvalInputItem(id="x", input_obj={"do": "plain"}), key("x"), RULES)
    assert episode.outcome == "ok"


def test_a_run_may_be_resumed_elsewhere(tmp_path: Path) -> None:
    before, now = load(tmp_path, {"_type": "policy"}), load(tmp_path, {"_type": "policy"}, executor=RAY)
    (tmp_path / "run.json").write_text(json.dumps({"config": resolved_config(before)}))
    changes = check_same_run(tmp_path, now, {}, force=False)
    assert changes
    assert all(change.startswith("general.executor") for change in changes)


def test_secrets_of_the_workers_are_shown_nowhere(tmp_path: Path) -> None:
    variables = {"MY_PAT": "pat-of-the-worker-1", "LEVEL": 3}
    config = load(tmp_path, {"_type": "policy"}, executor={**RAY, "runtime_env": {"env_vars": variables}})
    assert resolved_config(config)["general"]["executor"]["runtime_env"]["env_vars"] == dict.fromkeys(variables, "***")
    assert " data=" not in repr(config)


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        ({"_type": "rai"}, "general.executor: _type 'rai' does not exist (did you mean 'ray'?); available: local, ray"),
        ({"_type": "ray"}, "general.executor.workers is missing"),
        (
            {"_type": "ray", "workers": 0},
            "general.executor.workers: Input should be greater than or equal to 1 (got 0)",
        ),
        ({**RAY, "runtime_env": {"env": {}}}, "general.executor.runtime_env: key 'env' does not exist"),
        ("ray", "general.executor must be a mapping with the key _type"),
    ],
)
def test_wrong_executors(tmp_path: Path, executor: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, {"_type": "policy"}, executor=executor)
    assert message in str(raised.value)


def test_a_run_without_ray_ends_before_it_begins(tmp_path: Path) -> None:
    from factories import digits_project, write_rows

    write_rows(digits_project(tmp_path), [{"say": "Row"}])
    code, _, err = processes.run_project(tmp_path, "-o", "general.executor", "{_type: ray, workers: 2}")
    assert code == 2
    assert (
        "general.executor: _type ray needs the extra ray (pip install -e '.[ray]' in the clone of insitu): No module"
        in err
    )
    assert not (tmp_path / "run").exists()
