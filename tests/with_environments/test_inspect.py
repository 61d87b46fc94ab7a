"""Tasks of inspect_ai, with the real package in its environment: evaluated, trained on, and in trouble."""

import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import STARTER, backend, python_of
from factories import read_lines
from fake_openai import FakeOpenAI

HERE = Path(__file__).parent
PYTHON = python_of("inspect")
READ_LOG = """
import json, sys
from pathlib import Path
from inspect_ai.log import read_eval_log
from inspect_ai.scorer import value_to_float
def numbers(scores):
    for name, score in (scores or {}).items():
        of = score.value.items() if isinstance(score.value, dict) else [(None, score.value)]
        yield from ((name if key is None else f"{name}/{key}", value_to_float()(value)) for key, value in of)
logs = [read_eval_log(str(path)) for path in sorted(Path(sys.argv[1]).glob("*.eval"))]
print(json.dumps([{
    "status": log.status,
    "samples": [{"id": str(s.id), "scores": dict(numbers(s.scores))} for s in log.samples or []],
    "metrics": {f"{score.name}/{name}": metric.value for score in log.results.scores
                for name, metric in score.metrics.items()},
} for log in logs]))
"""


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as running:
        yield running


def insitu(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "INSPECT_"))}
    return subprocess.run(
        [PYTHON, "-m", "insitu", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
        env={**kept, "MARKERS": str(folder)},
    )


def write(folder: Path, url: str, task: str, *, workers: int = 1, general: str = "", **others: Any) -> Path:
    (folder / "inspect_tasks.py").write_text((HERE / "inspect_tasks.py").read_text())
    block = {"_type": "inspect", "task": f"inspect_tasks.py@{task}", "model": "student", "workers": workers, **others}
    file = folder / "task.yml"
    file.write_text(f"""
llms:
  student: {{_type: openai, model_name: m, base_url: "{url}", api_key: k, temperature: 0.7, max_tokens: 31}}
  judge: {{_type: openai, model_name: judge, base_url: "{url}", api_key: k}}
workflow: {json.dumps(block)}
eval:
  general:
    output_dir: out
    dataset: {{_type: inspect}}
    {general}
  evaluators:
    reward: {{_type: inspect}}
""")
    return file


def logs_of(folder: Path) -> list[dict[str, Any]]:
    """Inspect's own logs in a folder."""
    done = subprocess.run([PYTHON, "-c", READ_LOG, folder], capture_output=True, text=True, check=True)
    logs: list[dict[str, Any]] = json.loads(done.stdout)
    return logs


def scores(folder: Path, name: str) -> list[tuple[str, Any]]:
    """Scores of an evaluator by row, in the order of the file."""
    result = json.loads((folder / "out" / f"{name}_output.json").read_text())
    return [(str(item["id"]), item["score"]) for item in result["eval_output_items"]]


def items_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {item["question"]: item for item in json.loads((folder / "out/workflow_output.json").read_text())}


@pytest.mark.parametrize("task", ["words", "looking"])
def test_scores_are_those_of_inspects_own_log(task: str, tmp_path: Path, server: FakeOpenAI) -> None:
    file = write(tmp_path, server.base_url, "unruly")
    done = insitu(tmp_path, "eval", file, "--task", f"inspect_tasks.py@{task}", "--llm", "student")
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = logs_of(tmp_path / "out/inspect")
    name = {"words": "includes", "looking": "looks"}[task]
    assert sorted(scores(tmp_path, name)) == sorted((each["id"], each["scores"][name]) for each in log["samples"])
    assert sorted(value for _, value in scores(tmp_path, name)) == (
        [0, 0, 0, 0, 1, 1] if task == "words" else [0, 0.25]
    )
    mean = log["metrics"][f"{name}/{'accuracy' if task == 'words' else 'mean'}"]
    assert f" {mean:.4f} " in done.stdout
    (linked,) = (line for line in done.stdout.splitlines() if line.endswith(".eval"))
    assert (tmp_path / linked).is_file()
    assert all((body["temperature"], body["max_tokens"]) == (0.7, 31) for body in server.requests)
    if task == "looking":
        assert server.requests[0]["tools"][0]["function"]["name"] == "look"


def test_scorers_are_evaluators_epochs_are_repetitions_and_roles_are_models(tmp_path: Path, server: FakeOpenAI) -> None:
    file = write(tmp_path, server.base_url, "words", roles={"grader": "judge"})
    task = ["--task", "inspect_tasks/several", "--task_arg", "count", "3", "--llm", "student"]
    done = insitu(tmp_path, "eval", file, *task)
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = logs_of(tmp_path / "out/inspect")
    assert len(log["samples"]) == 6
    for name in ("graded", "parts/length", "parts/first", "includes"):
        ours = scores(tmp_path, name.replace("/", "_"))
        assert sorted(ours) == sorted((each["id"], each["scores"][name]) for each in log["samples"])
    assert Counter(body["model"] for body in server.requests) == {"m": 6, "judge": 6}
    again = insitu(tmp_path, "eval", file, *task, "--reps", "1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(scores(tmp_path, "graded")) == 3


def test_what_goes_wrong_is_a_failed_episode_with_a_reason(tmp_path: Path, server: FakeOpenAI) -> None:
    inputs = ["fine", "raise", "unscorable", "talk", "maybe", "nan", "status 500"]
    file = write(tmp_path, server.base_url, "unruly", args={"inputs": inputs}, logs="logs")
    done = insitu(tmp_path, "eval", file)
    assert done.returncode == 0, done.stdout + done.stderr
    items = items_of(tmp_path)
    assert items["fine"]["error"] is None
    expected = {
        "raise": "the solver has failed",
        "unscorable": "the scorer has failed",
        "talk": "sample '3': it reached its limit of message: 2",
        "maybe": "the value of the score odd is not a number",
        "nan": "the value of the score odd is not a number",
        "status 500": "BackendUnavailable",
    }
    for text, problem in expected.items():
        assert problem in items[text]["error"], text
    assert scores(tmp_path, "reward") == [("0", 1.0)]
    assert re.search(r"reward .* 1 +│ 7 +│ 6 +│ 0 ", done.stdout)
    (log,) = logs_of(tmp_path / "logs")
    assert len(log["samples"]) == 7
    scored = insitu(tmp_path, "eval", file, "-o", "workflow.on_limit", "score")
    assert items_of(tmp_path)["talk"]["error"] is None, scored.stderr


def test_a_sample_that_waits_too_long_ends_at_the_time_limit_of_its_episode(tmp_path: Path, server: FakeOpenAI) -> None:
    file = write(
        tmp_path, server.base_url, "unruly", args={"inputs": ["wait"]}, general="episode_timeout: 10", logs="logs"
    )
    done = insitu(tmp_path, "eval", file)
    assert done.returncode == 1
    assert "EpisodeTimeout" in items_of(tmp_path)["wait"]["error"]
    (log,) = logs_of(tmp_path / "logs")
    assert (log["status"], len(log["samples"])) == ("success", 1)


@pytest.mark.parametrize("trouble", ["die", "block"])
def test_a_worker_that_dies_or_hangs_is_replaced_and_its_episodes_run_again(
    trouble: str, tmp_path: Path, server: FakeOpenAI
) -> None:
    inputs = [trouble, *(f"word {n}" for n in range(5))]
    general = "{ep}retries: 2".format(ep="episode_timeout: 40\n    " * (trouble == "block"))
    file = write(tmp_path, server.base_url, "unruly", args={"inputs": inputs}, general=general, workers=2)
    done = insitu(tmp_path, "eval", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(scores(tmp_path, "reward")) == [(str(n), 1.0) for n in range(6)]
    assert (tmp_path / "0").exists()


def test_a_worker_that_dies_is_noticed_while_a_program_of_its_task_goes_on(tmp_path: Path, server: FakeOpenAI) -> None:
    file = write(tmp_path, server.base_url, "unruly", args={"inputs": ["leave", "word"]}, general="retries: 2")
    try:
        done = insitu(tmp_path, "eval", file)
    finally:
        os.kill(int((tmp_path / "0").read_text()), signal.SIGKILL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(scores(tmp_path, "reward")) == [("0", 1.0), ("1", 1.0)]


def test_an_episode_of_a_lost_worker_has_a_reason(tmp_path: Path, server: FakeOpenAI) -> None:
    done = insitu(tmp_path, "eval", write(tmp_path, server.base_url, "unruly", args={"inputs": ["die"]}))
    assert done.returncode == 1
    assert "a worker of inspect ended with exit code 3" in items_of(tmp_path)["die"]["error"]


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("inspect_tasks.py@nothing", "has no task 'nothing'; it has: words, looking, several, unruly"),
        ("missing.py@words", "the file missing.py of the task exists neither here nor in"),
        ("no_such_package/words", "No module named 'no_such_package'"),
        ("words", "expected FILE.py@TASK or MODULE_OR_PACKAGE/TASK"),
        ("inspect_tasks.py@unruly", "missing 1 required positional argument: 'inputs'"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_refused(task: str, problem: str, tmp_path: Path, server: FakeOpenAI) -> None:
    file = write(tmp_path, server.base_url, "words")
    done = insitu(tmp_path, "eval", file, "--task", task, "--llm", "student")
    assert done.returncode == 2
    assert problem in " ".join(done.stderr.split())
    assert not server.requests


def write_training(folder: Path, address: str, task: str, epochs: int) -> Path:
    (folder / "inspect_tasks.py").write_text((HERE / "inspect_tasks.py").read_text())
    file = folder / "train.yml"
    file.write_text(f"""
llms:
  student: {{_type: policy, temperature: 1.0, max_tokens: 12}}
workflow: {{_type: inspect, task: "inspect_tasks.py@{task}", model: student, workers: 4, logs: logs}}
eval:
  general:
    max_concurrency: 32
    dataset: {{_type: inspect}}
  evaluators:
    reward: {{_type: inspect}}
trajectory_builders:
  episodes: {{_type: insitu_traj_builder, num_generations: 8}}
trainer_adapters:
  backend: {{_type: insitu_trainer_adapter, url: "{address}", training: {{learning_rate: 1.0e-2, mini_batch_size: 64}}}}
trainers:
  grpo: {{_type: insitu_trainer}}
finetuning:
  enabled: true
  trainer: grpo
  trajectory_builder: episodes
  trainer_adapter: backend
  reward_function: {{name: reward}}
  num_epochs: {epochs}
  output_dir: out
""")
    return file


def test_a_model_is_trained_with_four_workers(tmp_path: Path, tiny_model: Path) -> None:
    """Every call is recorded as it was sampled, rewards are those of inspect's logs, and they rise."""
    with backend(tiny_model, tmp_path) as address:
        done = insitu(tmp_path, "finetune", write_training(tmp_path, address, "letters", 6))
        assert done.returncode == 0, done.stdout + done.stderr
    metrics = [line for line in read_lines(tmp_path / "out/training_metrics.jsonl") if "format" not in line]
    episodes = [line for line in read_lines(tmp_path / "out/episodes.jsonl.gz") if "format" not in line]
    calls = [line for line in read_lines(tmp_path / "out/calls.jsonl.gz") if "format" not in line]
    sampled = read_lines(tmp_path / "samples.jsonl")
    assert len(episodes) == len(calls) == 6 * 64
    sampled_tokens = Counter(tuple(line["token_ids"]) for line in sampled)  # a line more: the check before the run
    assert Counter(tuple(call["token_ids"]) for call in calls) < sampled_tokens
    assert sampled_tokens.total() == 6 * 64 + 1
    assert {episode["outcome"] for episode in episodes} == {"ok"}
    assert len({call["episode"] for call in calls}) == 6 * 64
    logs = logs_of(tmp_path / "logs")
    assert len(logs) == 4
    assert {log["status"] for log in logs} == {"success"}
    own = Counter((each["id"], each["scores"]["small_letters"]) for log in logs for each in log["samples"])
    assert own > Counter((str(each["row_id"]), each["output"]["reward"]) for each in episodes)
    assert own.total() == 6 * 64 + 1
    assert metrics[-1]["avg_reward"] > metrics[0]["avg_reward"] + 0.1
    recorded = json.loads((tmp_path / "out/run.json").read_text())["dataset"]
    assert recorded["task"] == "inspect_tasks.py@letters"
    assert recorded["inspect_ai"].startswith("0.3.")
    assert len(recorded["sha256"]) == 64


def test_a_task_does_not_train_a_model_to_grade_itself(tmp_path: Path, tiny_model: Path) -> None:
    with backend(tiny_model, tmp_path) as address:
        file = write_training(tmp_path, address, "self_graded", 1)
        done = insitu(tmp_path, "finetune", file)
        assert done.returncode == 1
        episodes = [line for line in read_lines(tmp_path / "out/episodes.jsonl.gz") if "format" not in line]
        assert all("a scorer of the task calls student, the model under training" in e["error"] for e in episodes)
        evaluated = insitu(tmp_path, "eval", file, "--task", "inspect_tasks/self_graded")
        assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr


def test_a_new_project_trains(tmp_path: Path) -> None:
    (tmp_path / "inspect_tasks.py").write_text((HERE / "inspect_tasks.py").read_text())
    task = "inspect:inspect_tasks.py@letters"
    written = insitu(tmp_path, "init", "project", "--environment", task, "--model", STARTER)
    assert written.returncode == 0, written.stdout + written.stderr
    readme = (tmp_path / "project/README.md").read_text()
    assert "The task has 8 samples" in readme
    assert "`small_letters`" in readme
    with backend(STARTER, tmp_path) as address:
        adapter = {"_type": "insitu_trainer_adapter", "url": address, "training": {"learning_rate": 1e-3}}
        changed = {"trainer_adapters.backend": adapter, "finetuning.num_epochs": 1}
        overrides = [part for key, value in changed.items() for part in ("-o", key, json.dumps(value))]
        done = insitu(tmp_path / "project", "finetune", "config.yml", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    (epoch,) = (
        line for line in read_lines(tmp_path / "project/runs/project/training_metrics.jsonl") if "epoch" in line
    )
    assert epoch["job"] == "completed"


def test_a_wrong_option_or_limit_is_refused(tmp_path: Path, server: FakeOpenAI) -> None:
    file = write(tmp_path, server.base_url, "words", options={"mesage_limit": 1})
    done = insitu(tmp_path, "eval", file)
    assert done.returncode == 2
    assert "  File " not in done.stderr
    assert "Unknown GenerateConfig field(s): mesage_limit" in done.stderr
    for limit in ("-1", "0", "[2, 1]"):
        file = write(tmp_path, server.base_url, "words")
        dataset = f"dataset: {{_type: inspect, limit: {limit}}}"
        file.write_text(file.read_text().replace("dataset: {_type: inspect}", dataset))
        done = insitu(tmp_path, "validate", file)
        assert done.returncode == 2
        assert "eval.general.dataset.limit" in done.stderr
    done = insitu(tmp_path, "eval", write(tmp_path, server.base_url, "words", logs="task.yml"))
    assert done.returncode == 2
    assert f"workflow.logs: {tmp_path}/task.yml is a file, not a folder" in done.stderr
