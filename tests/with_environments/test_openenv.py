"""OpenEnv's package in its environment: insitu plays and trains on its servers, and its client plays on ours.

The backend, which needs torch, runs in our environment.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import MODEL, read_lines
from processes import ONE_THREAD

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BIN = ROOT / ".venv-environments/openenv/bin"
sys.path.append(str(ROOT / "tests/with_frameworks"))  # has the model that calls a tool


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with backend_of(MODEL, tmp_path_factory.mktemp("backend")) as url:
        yield url


@contextmanager
def backend_of(model: Path, folder: Path) -> Iterator[str]:
    """A backend in our environment."""
    command = [
        sys.executable,
        "-m",
        "insitu",
        "backend",
        "--model",
        model,
        "--port",
        "0",
        "--output_dir",
        folder / "out",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def run(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of insitu in OpenEnv's environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
    return subprocess.run(
        [BIN / "python", "-m", "insitu", command, "config.yml", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        env=kept | {"COLUMNS": "200"},
    )


def project(folder: Path, url: str, workflow: dict[str, Any], rows: list[dict[str, Any]], **others: Any) -> Path:
    config = {
        "general": {"seed": 3},
        "llms": {"student": {"_type": "policy", "max_tokens": 6, "temperature": 1.0}},
        "workflow": {"_type": "openenv", "model": "student", **workflow},
        "eval": {
            "general": {
                "max_concurrency": 32,
                "episode_timeout": 120,
                "output_dir": "out",
                "dataset": {"_type": "jsonl", "file_path": "rows.jsonl"},
            },
            "evaluators": {"reward": {"_type": "openenv"}},
        },
        "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder", "num_generations": 8}},
        "trainer_adapters": {
            "backend": {
                "_type": "insitu_trainer_adapter",
                "url": url,
                "training": {"learning_rate": 1e-3, "mini_batch_size": 32},
            }
        },
        "trainers": {"grpo": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "grpo",
            "trajectory_builder": "episodes",
            "trainer_adapter": "backend",
            "reward_function": {"name": "reward"},
            "num_epochs": 6,
            "output_dir": "run",
            **others,
        },
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "openenv_games.py").write_text((HERE / "openenv_games.py").read_text())
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    return [record for record in read_lines(file) if "format" not in record]


def test_a_class_trains(backend: str, tmp_path: Path) -> None:
    """From the file alone; the reward rises, and each group has one task."""
    rows = [{"question": "", "seed": i} for i in range(8)]
    project(tmp_path, backend, {"class": "openenv_games:Digits"}, rows)
    done = run(tmp_path, "finetune")
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = lines(tmp_path / "run/training_metrics.jsonl")
    assert epochs[-1]["avg_reward"] > epochs[0]["avg_reward"] + 0.1, [each["avg_reward"] for each in epochs]
    episodes = lines(tmp_path / "run/episodes.jsonl.gz")
    assert Counter(episode["outcome"] for episode in episodes) == {"ok": 6 * 8 * 8}
    asked: dict[str, set[str]] = {}
    for call in lines(tmp_path / "run/calls.jsonl.gz"):
        asked.setdefault(call["episode"].split("/")[2], set()).add(json.dumps(call.get("messages", call)))
    assert len(asked) == 8


def test_many_episodes(backend: str, tmp_path: Path) -> None:
    """100 episodes at 32 at once: all are counted, with their calls."""
    rows = [{"question": "", "seed": i} for i in range(100)]
    project(tmp_path, backend, {"class": "openenv_games:Digits"}, rows)
    done = run(tmp_path, "eval")
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads((tmp_path / "out/workflow_output.json").read_text())
    assert len(answers) == 100
    outcomes = [answer["generated_answer"] for answer in answers]
    assert all(outcome["metrics"] == {"turns": 1.0, "steps": 1.0, "done": 1.0} for outcome in outcomes)
    scores = json.loads((tmp_path / "out/reward_output.json").read_text())
    rewards = [outcome["reward"] for outcome in outcomes]
    assert [item["score"] for item in scores["eval_output_items"]] == rewards
    assert scores["average_score"] == pytest.approx(sum(rewards) / 100)


def test_tools_of_mcp(tmp_path: Path) -> None:
    """A model that has learnt to call a tool looks with that of the environment, and is rewarded for it."""
    from looker import save_looker

    folder = ROOT / ".venv-environments/looker"
    if not (folder / "model.safetensors").exists():
        save_looker(folder)
    rows = [{"id": thing, "question": f"What colour is the {thing}?"} for thing in ("sky", "grass", "night")]
    with backend_of(folder, tmp_path) as url:
        project(tmp_path, url, {"class": "openenv_games:Window"}, rows)
        player = "{_type: policy, max_tokens: 100, temperature: 0.01}"
        done = run(tmp_path, "eval", "-o", "llms.student", player)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        row["id"]: row["generated_answer"] for row in json.loads((tmp_path / "out/workflow_output.json").read_text())
    }
    assert found["sky"]["answer"] == "It is blue."
    assert {name: outcome["reward"] for name, outcome in found.items()} == {"sky": 1.0, "grass": 1.0, "night": 0.0}
    assert found["grass"]["step_rewards"] == [1.0, 0.0]


def test_a_server_of_theirs(backend: str, tmp_path: Path) -> None:
    """What `openenv init` writes: it has one session, an action of one text, and is never done."""
    done = subprocess.run(
        [BIN / "openenv", "init", "parrot", "--output-dir", tmp_path], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    command = [str(BIN / "python"), "-m", "uvicorn", "parrot.server.app:app", "--port", "{port}"]
    rows = [{"question": "Talk."} for _ in range(6)]
    project(tmp_path, backend, {"command": command, "max_turns": 3, "reward": "last"}, rows)
    done = run(tmp_path, "eval")
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [row["generated_answer"] for row in json.loads((tmp_path / "out/workflow_output.json").read_text())]
    assert all(outcome["metrics"] == {"turns": 3.0, "steps": 3.0, "done": 0.0} for outcome in outcomes)
    assert all(len(outcome["step_rewards"]) == 3 for outcome in outcomes)
    assert all(outcome["reward"] == min(0.1 * len(outcome["answer"]), 1.0) for outcome in outcomes)


def test_their_client_plays_a_file(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "question": f"Say {i}.", "answer": str(i)} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"_type": "jsonl", "file_path": "rows.jsonl"}
    config = {"eval": {"general": {"dataset": dataset}, "evaluators": {"right": {"_type": "exact_match"}}}}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "insitu", "serve", "config.yml", "--as", "openenv", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            client = [BIN / "python", HERE / "openenv_client.py", url, "0", "nothing", "2", "0"]
            done = subprocess.run(client, capture_output=True, text=True, timeout=120)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["Say 0.", {"row_id": "r0"}, False, 1.0, True, 1],
        ["Say 1.", {"row_id": "r1"}, False, 0.0, True, 1],
        ["Say 2.", {"row_id": "r2"}, False, 1.0, True, 1],
        ["Say 0.", {"row_id": "r0"}, False, 1.0, True, 1],
    ]


def test_mistakes(backend: str, tmp_path: Path) -> None:
    """A class that is not there is said by its process, at once."""
    project(tmp_path, backend, {"class": "openenv_games:Dice"}, [{"question": ""}])
    done = run(tmp_path, "eval")
    assert done.returncode == 1
    assert "workflow.class: in openenv_games, 'Dice' does not exist" in done.stderr.replace("\n", " ")
