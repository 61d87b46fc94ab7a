"""verifiers' own reader of OpenEnv, the taskset `openenv`: insitu trains on a server that OpenEnv's package runs."""

import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import HERE, Project, backend, python_of, training
from factories import read_lines
from fake_openai import FakeOpenAI
from test_verifiers import calls_of, check_run, settings
from tiny_models import save_tiny_model

from insitu.runs.records import restore_calls

ROWS = 4


@contextmanager
def server(kind: str, folder: Path, sessions: int = 64) -> Iterator[str]:
    """An environment of reader_server.py in OpenEnv's environment; `folder/steps.jsonl` gets its rewards."""
    command = [python_of("openenv"), HERE / "reader_server.py", kind, folder / "steps.jsonl", str(sessions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()  # a step that hangs would hold it


def rewards_of_server(folder: Path) -> Counter[tuple[int, float]]:
    """How often an episode of a seed ended with a reward."""
    totals: dict[tuple[int, str], float] = defaultdict(float)
    for line in (folder / "steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        totals[step["seed"], step["episode"]] += step["reward"]
    return Counter((seed, total) for (seed, _), total in totals.items())


@pytest.mark.parametrize("kind", ["Twice", "Look"])
def test_it_trains(tmp_path: Path, kind: str) -> None:
    """Each reward is the sum of what the server gave in that episode, whose calls are all recorded."""
    project = Project("verifiers", tmp_path)
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    with server(kind, tmp_path) as url, backend(model, tmp_path) as address:
        taskset = {"id": "openenv", "base_url": url, "resets": [{"seed": seed} for seed in range(ROWS)]}
        file = settings(taskset, max_tokens=12)
        if kind == "Look":  # what its model says is a call of the tool
            calls = [
                {"type": "call_tool", "tool_name": "look", "arguments": {"at": thing}} for thing in ("sky", "night")
            ]
            choice = [json.dumps(call) for call in calls]
            file["llms"]["student"] |= {"max_tokens": 100, "structured_outputs": {"choice": choice}}
        project.write(file | training(address, epochs=2, learning_rate=1e-3))
        project.run("-m", "insitu", "finetune", "config.yml")
    run = tmp_path / "run"
    episodes = check_run(tmp_path, run, "openenv", 2 if kind == "Twice" else 1)
    assert len(episodes) == 2 * ROWS * 4
    rewards = Counter((int(episode["episode"].split("/")[2]), episode["reward"]) for episode in episodes)
    given = rewards_of_server(tmp_path)
    assert not rewards - given
    assert (given - rewards).total() <= 1, "the run begins with an episode that is not trained"
    assert len({reward for _, reward in rewards}) > 1
    for epoch in read_lines(run / "training_metrics.jsonl"):
        assert epoch["num_trajectories"] == ROWS * 4 == epoch["episodes"] + sum(epoch["dropped"].values())
    for record in calls_of(run):
        (call,) = restore_calls([record])
        first, *others = [json.loads(message["content"]) for message in call.messages if message["role"] == "user"]
        if kind == "Twice":
            assert first["observation"]["prompt"] == f"Row {record['episode'].split('/')[2]}"
            assert [each["observation"]["prompt"] for each in others] in ([], ["More"])
        else:
            assert [tool["name"] for tool in first["action_schema"]["available_tools"]] == ["look"]


def test_a_project_of_it_trains(tmp_path: Path) -> None:
    """`init` does not know the server: the file needs its address."""
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    project = Project("verifiers", tmp_path)
    project.run("-m", "insitu", "init", "new", "--environment", "verifiers:openenv", "--model", model)
    project.folder /= "new"
    assert "pass `env` or `base_url`" in project.run("-m", "insitu", "validate", "config.yml", code=2)
    with server("Twice", tmp_path) as url, backend(model, tmp_path) as address:
        taskset = {"id": "openenv", "base_url": url, "resets": [{"seed": seed} for seed in range(ROWS)]}
        adapter = training(address, learning_rate=1e-3)["trainer_adapters"]["backend"]
        changed = {"workflow.taskset": taskset, "trainer_adapters.backend": adapter, "finetuning.num_epochs": 1}
        options = [part for key, value in changed.items() for part in ("-o", key, json.dumps(value))]
        project.run("-m", "insitu", "finetune", "config.yml", *options)
    assert len(check_run(tmp_path, project.folder / "runs/new", "openenv", 2)) == ROWS * 8


@pytest.mark.parametrize(
    ("fault", "attempts", "said"),
    [
        ("dies", 2, "BackendUnavailable: EnvError: OpenEnvEnv.run(): ConnectionError: Failed to connect"),
        ("hangs", 1, "EpisodeTimeout: no answer within episode_timeout: 12 s"),
        ("raises", 1, "WorkflowError: EnvError: OpenEnvEnv.run(): RuntimeError: Server error: out of paper"),
    ],
)
def test_a_server_that_fails_gives_no_reward(tmp_path: Path, fault: str, attempts: int, said: str) -> None:
    """One that is lost is tried again."""
    project = Project("verifiers", tmp_path)
    with server("Twice", tmp_path) as url, FakeOpenAI() as model:
        file = settings({"id": "openenv", "base_url": url, "resets": [{"fault": fault}]})
        file["llms"]["student"] = {"_type": "openai", "model_name": "p", "base_url": model.base_url, "api_key": "k"}
        file["eval"]["general"] |= {"output_dir": "out", "episode_timeout": 12, "retries": attempts - 1}
        project.write(file)
        project.run("-m", "insitu", "eval", "config.yml", code=1)
        assert len(model.requests) == 2, "its second answer is what the server fails at"
    (record,) = json.loads((tmp_path / "out/workflow_output.json").read_text())
    assert said in record["error"]
    assert json.loads((tmp_path / "out/reward_output.json").read_text())["average_score"] is None


def test_a_session_that_is_refused_gives_no_reward(tmp_path: Path) -> None:
    """The other episode keeps the only session until its timeout."""
    project = Project("verifiers", tmp_path)
    with server("Twice", tmp_path, sessions=1) as url, FakeOpenAI() as model:
        file = settings({"id": "openenv", "base_url": url, "resets": [{"fault": "hangs"}] * 2})
        file["llms"]["student"] = {"_type": "openai", "model_name": "p", "base_url": model.base_url, "api_key": "k"}
        file["eval"]["general"] |= {"output_dir": "out", "episode_timeout": 12, "retries": 0, "max_concurrency": 2}
        project.write(file)
        project.run("-m", "insitu", "eval", "config.yml", code=1)
    errors = sorted(record["error"] for record in json.loads((tmp_path / "out/workflow_output.json").read_text()))
    refused = r"BackendUnavailable: EnvError: OpenEnvEnv.run\(\): (ConnectionClosedOK|.*\(code: CAPACITY_REACHED\))"
    assert re.match(refused, errors[0]), "the reader may see the end of the connection before the refusal"
    assert "EpisodeTimeout: no answer within episode_timeout: 12 s" in errors[1]
    assert json.loads((tmp_path / "out/reward_output.json").read_text())["average_score"] is None
