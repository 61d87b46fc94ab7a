"""Tasksets of verifiers in its own environment: trained, scored as verifiers scores them, and exported."""

import json
import os
import resource
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, STARTER, Project, backend, last_json, training
from factories import read_lines
from fake_openai import FakeOpenAI
from processes import ONE_THREAD

from insitu.runs.records import restore_calls

TASKSETS = HERE / "tasksets"
DIGITS, DESK, SEVERAL = "digits_taskset", "desk_taskset", "several_taskset"
CALLS = {DIGITS: 1, DESK: 2, SEVERAL: 1}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project("verifiers", tmp_path, TASKSETS)


def settings(taskset: dict[str, Any], dataset: dict[str, Any] | None = None, **llm: Any) -> dict[str, Any]:
    student = {"_type": "policy", "max_tokens": 24, **llm}
    return {
        "llms": {"student": student},
        "workflow": {"_type": "verifiers", "taskset": taskset, "model": "student"},
        "eval": {
            "general": {"max_concurrency": 64, "dataset": {"_type": "verifiers", **(dataset or {})}},
            "evaluators": {"reward": {"_type": "verifiers"}},
        },
    }


def episodes_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_lines(run / "episodes.jsonl.gz") if "episode" in record]


def calls_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_lines(run / "calls.jsonl.gz") if "episode" in record]


def check_run(folder: Path, run: Path, taskset: str, calls_each: int) -> list[dict[str, Any]]:
    """Every completion that the backend sampled is a call of an episode, token by token, and every episode scored."""
    episodes, calls = episodes_of(run), calls_of(run)
    sampled = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    captured, log = (Counter(tuple(each["token_ids"]) for each in those) for those in (calls, sampled))
    assert not captured - log
    assert (log - captured).total() <= calls_each, "the run begins with an episode that is not trained"
    per_episode = Counter(call["episode"] for call in calls)
    assert per_episode.keys() == {episode["episode"] for episode in episodes}
    assert max(per_episode.values()) >= calls_each
    assert {episode["outcome"] for episode in episodes} == {"ok"}
    dataset = json.loads((run / "run.json").read_text())["dataset"]
    assert (dataset["source"], dataset["taskset"], len(dataset["sha256"])) == ("verifiers", taskset, 64)
    assert dataset["packages"]["verifiers"].startswith("0.4")
    assert not [*folder.rglob("uv")], "the harness downloads nothing"
    return episodes


@pytest.mark.parametrize("taskset", CALLS)
def test_a_taskset_trains(project: Project, tiny_model: Path, taskset: str) -> None:
    with backend(STARTER if taskset == DESK else tiny_model, project.folder) as address:
        file = settings({"id": taskset}, {"limit": 4})
        if taskset == SEVERAL:
            file["eval"]["evaluators"]["letters"] = {"_type": "verifiers", "part": "letters"}
            file["eval"]["evaluators"]["spaces"] = {"_type": "verifiers", "part": "spaces"}
        sections = training(address, learning_rate=1e-3)
        sections["trainers"]["grpo"]["credit"] = "step" if taskset == SEVERAL else "episode"
        project.write(file | sections)
        project.run("-m", "insitu", "finetune", "config.yml")
    episodes = check_run(project.folder, project.folder / "run", taskset, CALLS[taskset])
    assert len(episodes) == 16
    if taskset == SEVERAL:
        for episode in episodes:
            output = episode["output"]
            assert output["rewards"].keys() == {"short", "letters"}
            assert episode["reward"] == pytest.approx(sum(output["rewards"].values()))
            assert episode["scores"]["letters"] == output["rewards"]["letters"]
            assert episode["scores"]["spaces"] == output["metrics"]["spaces"]
            (step,) = episode["step_rewards"]
            assert step >= len(output["answer"]), "the answer is stripped"


@pytest.mark.parametrize("taskset", CALLS)
def test_a_project_of_a_taskset_trains(project: Project, tiny_model: Path, taskset: str) -> None:
    model = STARTER if taskset == DESK else tiny_model
    said = project.run("-m", "insitu", "init", "new", "--environment", f"verifiers:{taskset}", "--model", model)
    assert "pip install -e '.[verifiers]'" in (project.folder / "new/README.md").read_text()
    assert "next: cd new && insitu finetune config.yml" in said
    with backend(model, project.folder) as address:
        adapter = training(address, learning_rate=1e-3)["trainer_adapters"]["backend"]
        changed = {"trainer_adapters.backend": adapter, "finetuning.num_epochs": 1, "eval.general.dataset.limit": 4}
        options = [part for key, value in changed.items() for part in ("-o", key, json.dumps(value))]
        project.folder /= "new"
        project.run("-m", "insitu", "finetune", "config.yml", *options)
    assert len(check_run(project.folder.parent, project.folder / "runs/new", taskset, CALLS[taskset])) == 32


def test_a_service_runs_the_episodes(project: Project, tiny_model: Path) -> None:
    """Those of verifiers cross to another process and back, with their calls and step rewards."""
    with backend(tiny_model, project.folder) as address:
        sections = training(address, learning_rate=1e-3)
        sections["trainers"]["grpo"]["credit"] = "step"
        project.write(settings({"id": SEVERAL}, {"limit": 4}) | sections)
        with subprocess.Popen(
            [project.python, "-m", "insitu", "serve", "config.yml", "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=project.folder,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(TASKSETS)},
        ) as service:
            try:
                assert service.stdout is not None
                url = service.stdout.readline().split()[-1]
                block = json.dumps({"_type": "service", "url": url})
                project.run("-m", "insitu", "finetune", "config.yml", "-o", "general.executor", block)
            finally:
                service.terminate()
    episodes = check_run(project.folder, project.folder / "run", SEVERAL, 1)
    assert len(episodes) == 16
    for episode in episodes:
        output = episode["output"]
        assert output["metrics"]["process"] == service.pid
        assert episode["reward"] == pytest.approx(sum(output["rewards"].values()))
        assert episode["step_rewards"][0] >= len(output["answer"])


def test_the_reward_rises(project: Project, tiny_model: Path) -> None:
    """In two minutes of two cores: here CPU seconds of all processes, as others use the cores too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with backend(tiny_model, project.folder) as address:
        file = settings({"id": DIGITS}, max_tokens=8)
        project.write(file | training(address, epochs=7, generations=8, learning_rate=3e-2, mini_batch_size=64))
        project.run("-m", "insitu", "finetune", "config.yml")
    rewards = [epoch["avg_reward"] for epoch in read_lines(project.folder / "run/training_metrics.jsonl")]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{cpu:.0f} s of CPU, rewards:", [round(reward, 3) for reward in rewards])
    assert rewards[-1] > rewards[0] + 0.2
    assert cpu < 120


def test_500_episodes_at_once_are_attributed(project: Project, tiny_model: Path) -> None:
    with backend(tiny_model, project.folder) as address:
        file = settings({"id": DIGITS, "count": 250}, max_tokens=4)
        project.write(file | training(address, generations=2, learning_rate=1e-3))
        project.run("-m", "insitu", "finetune", "config.yml")
    assert len(check_run(project.folder, project.folder / "run", DIGITS, 1)) == 500
    calls = calls_of(project.folder / "run")
    assert len(calls) == 500
    for record in calls:
        (call,) = restore_calls([record])
        assert call.messages[-1]["content"] == f"Count to {record['episode'].split('/')[2]}"
    (epoch,) = read_lines(project.folder / "run/training_metrics.jsonl")
    assert epoch["num_trajectories"] == 500 == epoch["episodes"] + sum(epoch["dropped"].values())


def test_rewards_and_cost_are_those_of_verifiers(project: Project) -> None:
    """The same completions get the same rewards; an episode costs at most 50 ms more than verifiers' own."""
    with FakeOpenAI() as server:
        taskset = {"id": DIGITS, "count": 128, "prompt": "{0} of 7"}
        file = settings(taskset, temperature=0)
        file["llms"]["student"] = {
            "_type": "openai",
            "model_name": "policy",
            "base_url": server.base_url,
            "api_key": "k",
        }
        file["eval"]["general"]["max_concurrency"] = 16
        project.write(file)
        own = last_json(project.run(HERE / "own_evaluation.py", json.dumps(taskset), server.base_url, "128", "16"))
        ours = last_json(project.run(HERE / "our_evaluation.py", "config.yml", "128"))
    assert ours["rewards"] == own["rewards"]
    assert len({*own["rewards"].values()}) > 1
    above = 1000 * (ours["cpu"] - own["cpu"])
    print(f"CPU of an episode: verifiers {1000 * own['cpu']:.1f} ms, insitu {1000 * ours['cpu']:.1f} ms")
    assert above < 50


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("status 400", "refused: status 400"), ("status 503", "answered with status 503"), ("hang up", "no answer from")],
)
def test_a_provider_error_is_a_failed_episode(project: Project, prompt: str, said: str) -> None:
    """verifiers gives such an episode the reward 0."""
    with FakeOpenAI() as server:
        file = settings({"id": DIGITS, "count": 1, "prompt": prompt})
        student = {"_type": "openai", "model_name": "policy", "base_url": server.base_url, "api_key": "k"}
        file["llms"]["student"] = {**student, "max_retries": 1}
        file["eval"]["general"]["output_dir"] = "out"
        project.write(file)
        project.run("-m", "insitu", "eval", "config.yml", code=1)
        assert len(server.requests) == (1 if prompt == "status 400" else 2)
    (record,) = json.loads((project.folder / "out/workflow_output.json").read_text())
    assert said in record["error"]
    assert json.loads((project.folder / "out/reward_output.json").read_text())["average_score"] is None


def test_a_harness_by_name_runs_in_a_subprocess(project: Project) -> None:
    with FakeOpenAI() as server:
        file = settings({"id": DIGITS, "count": 2, "prompt": "7{}"})
        student = {"_type": "openai", "model_name": "policy", "base_url": server.base_url, "api_key": "k"}
        file["llms"]["student"] = student
        file["workflow"]["harness"] = "program_harness"
        file["eval"]["general"]["output_dir"] = "out"
        project.write(file)
        project.run("-m", "insitu", "eval", "config.yml")
    outputs = json.loads((project.folder / "out/workflow_output.json").read_text())
    assert [record["generated_answer"]["answer"] for record in outputs] == ["echo: 70", "echo: 71"]


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        ({"taskset": {"id": SEVERAL}}, f"taskset '{SEVERAL}' has no end: set eval.general.dataset.limit"),
        ({"taskset": {"id": "old_package"}}, "has load_environment, which verifiers 0.4 has removed"),
        ({"taskset": {"id": "nowhere"}}, "taskset 'nowhere' cannot be loaded"),
        ({"taskset": {"id": DIGITS, "cuont": 3}}, f"taskset '{DIGITS}': cuont: Extra inputs are not permitted\n"),
        ({"taskset": {}}, "id is missing"),
    ],
)
def test_what_cannot_run_is_said(project: Project, workflow: dict[str, Any], said: str) -> None:
    file = settings({"id": DIGITS})
    file["workflow"].update(workflow)
    project.write(file)
    assert said in project.run("-m", "insitu", "validate", "config.yml", code=2)


def test_a_project_needs_an_installed_taskset(project: Project) -> None:
    """One beside the project is not found from inside it."""
    (project.folder / "beside.py").write_text((TASKSETS / f"{DIGITS}.py").read_text())
    said = project.run("-P", "-m", "insitu", "init", "desk", "--environment", "verifiers:beside", code=2)
    assert "taskset 'beside' not found" in said
    assert not (project.folder / "desk").exists()


def test_a_coding_harness_needs_a_container(project: Project) -> None:
    """verifiers refuses it in a subprocess, and the episode fails with its sentence."""
    with FakeOpenAI() as server:
        file = settings({"id": DIGITS, "count": 1})
        file["llms"]["student"] = {"_type": "openai", "model_name": "p", "base_url": server.base_url, "api_key": "k"}
        file["workflow"]["harness"] = "claude_code"
        file["eval"]["general"]["output_dir"] = "out"
        project.write(file)
        project.run("-m", "insitu", "eval", "config.yml", code=1)
    (record,) = json.loads((project.folder / "out/workflow_output.json").read_text())
    assert "needs a container runtime" in record["error"]


def test_an_exported_file_is_a_taskset(project: Project) -> None:
    """verifiers itself runs the rows of a project and scores them with its evaluators."""
    project.run("-m", "insitu", "init", "desk")
    said = project.run("-m", "insitu", "export", "desk/config.yml", "my_desk", "--as", "verifiers")
    assert "taskset my_desk of 21 rows" in said
    project.paths = (project.folder / "my_desk",)
    with backend(STARTER, project.folder) as address:
        done = last_json(project.run(HERE / "own_evaluation.py", '{"id": "my_desk"}', f"{address}/v1", "21", "8"))
    assert len(done["rewards"]) == 21
    assert set(done["rewards"].values()) <= {0.0, 1.0}
