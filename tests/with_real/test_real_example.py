"""The files of examples/real_model, with the model that its make_model.py gets."""

import json
import shutil
from pathlib import Path

import pytest
from factories import read_lines
from processes import run
from real_model import real_model
from transformers import AutoTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/real_model"
SHORT = {"finetuning.num_epochs": 1, "trajectory_builders.episodes.rows_per_epoch": 4, "finetuning.output_dir": "run"}


@pytest.fixture
def example(tmp_path: Path) -> Path:
    folder = tmp_path / "real_model"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("model", "runs"))
    (folder / "model").symlink_to(real_model())
    return folder


def test_the_files_are_valid(example: Path) -> None:
    for file in sorted(example.glob("*.yml")):
        done = run("validate", file)
        assert (done.returncode, done.stderr) == (0, ""), file
        assert "keys and values of" in done.stdout


def test_the_agent_with_a_tool_trains(example: Path) -> None:
    overrides = [part for key, value in SHORT.items() for part in ("--override", key, value)]
    rows = read_lines(example / "held_out.jsonl")[:4]
    (example / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("finetune", example / "tools.yml", *overrides, folder=example)
    assert done.returncode == 0, done.stderr
    (metrics,) = read_lines(example / "run/training_metrics.jsonl")
    assert metrics["num_trajectories"] == 4 * 8
    calls = read_lines(example / "run/calls.jsonl.gz")[1:]
    using = [call["message"]["tool_calls"][0]["function"] for call in calls if call["message"].get("tool_calls")]
    assert using, "no episode has called the tool"
    assert "find_order" in {function["name"] for function in using}
    tokenizer = AutoTokenizer.from_pretrained(real_model())
    assert all("<tools>\n{" in tokenizer.decode(call["prompt_token_ids"]) for call in calls)
