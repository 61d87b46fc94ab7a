"""Rewards of an environment: a workflow's `Outcome`, read by the evaluator `outcome`, with its parts and steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import MODEL, read_lines
from processes import run

GAME = '''
import insitu
from insitu.plugin_api import Outcome


async def play(question: str, model: insitu.Model):
    """Two turns; what the row's question names is returned."""
    for turn in range(2):
        await model.ask(f"{question} {turn}")
    if question == "text":
        return "1.0"
    if question == "broken":
        return {"answer": "x", "reward": float("nan")}
    if question == "unknown":
        return {"answer": "x", "reward": 1.0, "score": 2.0}
    if question == "fails":
        raise RuntimeError("the server is gone")
    rewards, metrics = {"right": 0.5, "short": 0.25}, {"turns": 2}
    return Outcome(
        answer="x", reward=0.75, rewards=rewards, metrics=metrics, step_rewards=[0.25, 0.5]
    ).model_dump()
'''


def project(folder: Path, questions: list[str], part: str | None = None, **sections: Any) -> Path:
    (folder / "game.py").write_text(GAME)
    rows = [json.dumps({"id": name, "question": name}) for name in questions]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    evaluators = {"score": {"_type": "outcome"}, "part": {"_type": "outcome", "part": part or "right"}}
    config = {
        "llms": {"player": {"_type": "policy", "max_tokens": 2}},
        "workflow": {"_type": "python", "function": "game.py:play", "model": "player"},
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}, "output_dir": "out"},
            "evaluators": evaluators,
        },
        "trajectory_builders": {"groups": {"_type": "insitu_traj_builder", "num_generations": 2}},
        "trainer_adapters": {"backend": {"_type": "insitu_trainer_adapter", "model": str(MODEL)}},
        "trainers": {"grpo": {"_type": "insitu_trainer", "credit": "step"}},
        "finetuning": {
            "enabled": True,
            "trainer": "grpo",
            "trajectory_builder": "groups",
            "trainer_adapter": "backend",
            "reward_function": {"name": "score"},
            "num_epochs": 1,
            "output_dir": "run",
        },
    }
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config | sections))
    return path


def evaluated(folder: Path) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The finished command, and by evaluator and row id what was scored."""
    done = run("eval", "--config_file", "config.yml", folder=folder)
    scores = {
        name: {
            item["id"]: item
            for item in json.loads((folder / f"out/{name}_output.json").read_text())["eval_output_items"]
        }
        for name in ("score", "part")
        if (folder / f"out/{name}_output.json").exists()
    }
    return done, scores


def test_an_outcome_has_a_reward_and_parts_by_name(tmp_path: Path) -> None:
    project(tmp_path, ["fine"], part="turns")
    done, scores = evaluated(tmp_path)
    assert done.returncode == 0, done.stderr
    assert scores["score"]["fine"]["score"] == 0.75
    assert scores["part"]["fine"]["score"] == 2
    assert scores["score"]["fine"]["reasoning"] == {"right": 0.5, "short": 0.25, "turns": 2}


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ("text", "the workflow's output is a str, not the outcome of an environment"),
        ("broken", "reward: Input should be a finite number"),
        ("unknown", "score: Extra inputs are not permitted"),
    ],
)
def test_other_outputs_have_no_score(tmp_path: Path, question: str, problem: str) -> None:
    project(tmp_path, ["fine", question])
    done, scores = evaluated(tmp_path)
    assert done.returncode == 0, done.stderr  # as for any score that is missing
    failed = scores["score"][question]
    assert failed["score"] is None
    assert problem in failed["error"]
    assert "\n" not in failed["error"]


def test_a_part_that_does_not_exist_names_those_that_do(tmp_path: Path) -> None:
    project(tmp_path, ["fine"], part="rigth")
    _, scores = evaluated(tmp_path)
    assert "'rigth' does not exist (did you mean 'right'?)" in scores["part"]["fine"]["error"]


@pytest.mark.slow
def test_step_rewards_are_credited_to_calls_and_failures_are_never_zero(tmp_path: Path) -> None:
    project(tmp_path, ["fine", "fails"])
    done = run("finetune", "--config_file", "config.yml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    episodes = read_lines(tmp_path / "run/episodes.jsonl.gz")[1:]
    rewards = {(each["row_id"], each["reward"], tuple(each["step_rewards"] or ())) for each in episodes}
    assert rewards == {("fine", 0.75, (0.25, 0.5)), ("fails", None, ())}
