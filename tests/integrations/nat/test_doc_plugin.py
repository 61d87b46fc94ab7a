"""The extending guide's components as an installed package, driven by the command line against a training service."""

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from factories import pip_install, sampled
from processes import run
from training_service import TrainingService

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "tests/support/doc_plugin"
KEY = "the key of the service"
LEGS = {"snail": 1, "hen": 2, "cow": 4, "ant": 6, "spider": 8, "snake": 0}
"""The examples, the easiest for the starting model first."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the plugin."""
    return pip_install(PLUGIN, tmp_path_factory.mktemp("doc_plugin"))


@pytest.fixture
def service() -> Iterator[TrainingService]:
    with TrainingService(KEY) as server:
        for place, (animal, legs) in enumerate(LEGS.items()):
            server.start_with(question(animal), [-abs(digit - legs) / (1 + place) for digit in range(10)])
        yield server


class Project:
    """A folder with the guide's file, run as the command line runs it."""

    def __init__(self, folder: Path, site: Path, service: TrainingService) -> None:
        self.folder, self.site = folder, site
        root = service.base_url.removesuffix("/v1")
        text = (PLUGIN / "config.yml").read_text()
        text = text.replace("http://localhost:8000", root).replace("http://training-server:8080", root)
        (folder / "config.yml").write_text(text)
        (folder / "data").mkdir()
        self.write("train", LEGS)

    def write(self, name: str, legs: dict[str, Any]) -> None:
        rows = [{"id": animal, "question": question(animal), "answer": str(n)} for animal, n in legs.items()]
        (self.folder / "data" / f"{name}.json").write_text(json.dumps(rows))

    def finetune(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        others = {"PYTHONPATH": str(self.site), "PYTHONWARNINGS": "error", "TRAINING_API_KEY": KEY}
        return run("finetune", "--config_file", "config.yml", *arguments, folder=self.folder, **(others | variables))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.folder / ".tmp/finetuning/output/training_metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def project(tmp_path: Path, installed: Path, service: TrainingService) -> Project:
    return Project(tmp_path, installed, service)


def question(animal: str) -> str:
    return f"How many legs has a {animal}?"


@pytest.mark.slow
def test_twenty_epochs_with_curriculum_learning(project: Project, service: TrainingService) -> None:
    project.write("held_out", {"cow": 4, "ant": 6})
    ended = project.finetune("--validation_dataset", "data/held_out.json")
    assert ended.returncode == 0, ended.stderr
    metrics = project.metrics
    assert [m["epoch"] for m in metrics] == [*range(1, 21)]
    assert all(len(m["rewards"]) == 6 and {len(r) for r in m["rewards"].values()} == {4} for m in metrics)
    assert service.refused == []

    jobs = iter(service.jobs)
    included: set[str] = set()
    means: dict[str, list[float]] = {}
    for m in metrics:
        for animal, rewards in m["rewards"].items():
            means.setdefault(animal, []).append(fmean(rewards))
        if (m["epoch"] - 1) % 5 == 0:
            size = math.ceil(6 * (0.3 + 0.2 * ((m["epoch"] - 1) // 5)))
            easiest = sorted(means.keys() - included, key=lambda a: (-fmean(means[a]), a))
            included |= {*easiest[: size - len(included)]}
        assert set(m["curriculum_state"]["included_groups"]) == included
        trained = {a for a in included if max(m["rewards"][a]) - min(m["rewards"][a]) > 0.1}
        assert ("job" in m) == bool(trained)
        if trained:
            job = next(jobs)
            assert {g["example_id"]: [e["reward"] for e in g["episodes"]] for g in job["groups"]} == {
                a: m["rewards"][a] for a in trained
            }
            assert (m["job"], job["learning_rate"], job["batch_size"]) == ("completed", 1e-5, 8)
    assert next(jobs, None) is None
    assert len(included) == 6

    assert metrics[-1]["avg_reward"] > metrics[0]["avg_reward"] + 0.1
    assert [m["epoch"] for m in metrics if m["validation"]] == [5, 10, 15, 20]
    assert all(m["validation"]["num_examples"] == 2 for m in metrics if m["validation"])
    assert len(list((project.folder / ".tmp/finetuning/eval").glob("generation_*/my_reward_output.json"))) == 80
    assert 4 < service.most <= 8  # max_concurrency, of four evaluations at once


def test_an_episode_arrives_as_it_was_sampled(project: Project, service: TrainingService) -> None:
    few = ("-o", "finetuning.num_epochs", "3", "-o", "finetuning.curriculum_learning.enabled", "false")
    ended = project.finetune(*few, "-o", "trainer_adapters.my_adapter.backend.learning_rate", "0.5e-5")
    assert ended.returncode == 0, ended.stderr
    assert [m["epoch"] for m in project.metrics] == [1, 2, 3]
    assert [job["learning_rate"] for job in service.jobs] == [5e-6] * 3
    group = service.jobs[0]["groups"][0]
    system, user, call, seen, answer = group["episodes"][0]["messages"]
    assert (system["role"], user["role"], user["content"]) == ("system", "user", question(group["example_id"]))
    (tool_call,) = call["tool_calls"]
    assert (call["role"], sampled(call["logprobs"]), tool_call["function"]["name"]) == ("assistant", [0.0], "look")
    assert (seen["role"], seen["tool_call_id"]) == ("tool", "call_1")
    assert seen["content"] == f"A {group['example_id']} that stands in the grass."
    assert answer["role"] == "assistant"
    assert len({e["messages"][-1]["content"] for e in group["episodes"]}) > 1
    assert all(len(sampled(e["messages"][-1]["logprobs"])) == 1 for e in group["episodes"])
    assert all(request["logprobs"] for request in service.requests)


@pytest.mark.slow
def test_tool_messages_are_left_out_where_the_file_says_so(project: Project, service: TrainingService) -> None:
    block = "trajectory_builders.my_builder"
    ended = project.finetune("-o", f"{block}.include_tool_calls", "false", "-o", "finetuning.num_epochs", "1")
    assert ended.returncode == 0, ended.stderr
    episodes = [e for job in service.jobs for group in job["groups"] for e in group["episodes"]]
    assert {tuple(m["role"] for m in e["messages"]) for e in episodes} == {("system", "user", "assistant")}


@pytest.mark.slow
def test_a_failed_job_fails_the_run_and_is_named(project: Project, service: TrainingService) -> None:
    service.fails = 1
    ended = project.finetune("-o", "finetuning.curriculum_learning.min_reward_diff", "0")
    assert ended.returncode == 1
    assert "failed: training job 2 of 2" in ended.stderr
    assert "my-backend" in ended.stderr
    assert "out of memory" in ended.stderr
    assert [m["job"] for m in project.metrics] == ["completed", "failed"]


@pytest.mark.slow
def test_what_the_service_refuses_fails_the_run(project: Project, service: TrainingService) -> None:
    ended = project.finetune(TRAINING_API_KEY="another key")
    assert ended.returncode == 1
    assert "failed: trainers.my_trainer: HTTPStatusError" in ended.stderr
    assert "401" in ended.stderr
    assert set(service.refused) == {"Bearer another key"}


@pytest.mark.slow
def test_a_validation_that_cannot_be_scored_fails_the_run(project: Project) -> None:
    project.write("held_out", {"cow": "four"})
    ended = project.finetune(
        *("--validation_dataset", "data/held_out.json", "--validation_interval", "1"),
        *("-o", "finetuning.num_epochs", "2"),
    )
    assert ended.returncode == 1
    assert "2 validation(s) failed; the first, at epoch 1: no example could be scored" in ended.stderr
    assert [m["validation"]["dropped"] for m in project.metrics] == [{"evaluator_error": 1}] * 2


@pytest.mark.slow
def test_episodes_shorter_than_the_file_asks_for_are_left_out(project: Project, service: TrainingService) -> None:
    """Episodes without tool messages have three messages."""
    block = "trajectory_builders.my_builder"
    short = ("-o", f"{block}.include_tool_calls", "false", "-o", f"{block}.min_episode_length", "4")
    ended = project.finetune(*short, "-o", "finetuning.num_epochs", "1")
    assert ended.returncode == 1
    assert "epoch 1 has gathered no trajectory" in ended.stderr
    assert (service.jobs, service.refused) == ([], [])
