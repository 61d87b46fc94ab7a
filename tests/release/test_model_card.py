"""The card of an exported model: what its scores are compared with."""

import json
from pathlib import Path
from typing import Any

import pytest

from insitu.disk.model_files import TrainingRecord
from insitu.release.model_card import CardSubject, model_card
from insitu.runs.summary import read_summary

BEFORE, AFTER = "| before training | ", "| these weights (epoch 2) | "


def validation(epoch: int, score: float | None, scored_by: str = "exact, rows a") -> dict[str, Any]:
    scored = {"avg_reward": score, "num_examples": 8, "ci95": [None, None], "scored_by": scored_by}
    return {"epoch": epoch, "policy_version": epoch, **({"error": "away"} if score is None else scored)}


@pytest.mark.parametrize(
    ("validations", "shown", "first"),
    [
        ([validation(0, 0.2), validation(2, 0.6)], [BEFORE + "0.200", AFTER + "0.600"], 0.2),
        ([validation(1, 0.4), validation(2, 0.6)], [AFTER + "0.600"], 0.4),  # validation was added later
        ([validation(0, 0.2), validation(2, 0.9, "exact, rows b")], [AFTER + "0.900"], 0.9),
        ([validation(0, 0.2), validation(2, 0.6), validation(3, 0.7)], [BEFORE + "0.200", AFTER + "0.600"], 0.2),
        ([validation(0, 0.2), validation(2, None)], ["These weights were not scored on held-out rows."], 0.2),
    ],
)
def test_scores_are_those_of_the_weights_and_of_the_same_rows(
    tmp_path: Path, validations: list[dict[str, Any]], shown: list[str], first: float
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "source": "a.yml", "config": {}}))
    (tmp_path / "validation_history.json").write_text(json.dumps(validations))
    card = model_card(tmp_path, CardSubject("me/m", TrainingRecord(step=2, version=2, started_from="org/m"), False))
    evaluation = card.partition("## Evaluation")[2]
    for text in (BEFORE, AFTER, "not scored"):
        assert (text in evaluation) == any(text in each for each in shown)
    assert all(text in evaluation for text in shown)
    assert ("model-index" in card) == (AFTER in evaluation)
    assert read_summary(tmp_path).first_score == first


def test_changes_name_files_but_no_folders_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "source": "a.yml", "config": {}}))
    changes = {
        "the dataset /home/me/my rows/train.jsonl has changed": "the dataset train.jsonl has changed",
        "the dataset was /home/me/a.jsonl and is /home/me/b.jsonl": "the dataset was a.jsonl and is b.jsonl",
        "llms.x.model was '/home/me/a' and is 'org/b'": "llms.x.model was 'a' and is 'org/b'",
        "x was ['/a/b', 'yes / no / maybe', '/c/d e/f'] and is 1": "x was ['b', 'yes / no / maybe', 'f'] and is 1",
        "x was ['/me/a.py', 'http://h/v1/x'] and is 1": "x was ['a.py', 'http://h/v1/x'] and is 1",
        "llms.x.base_url was 'http://host/v1' and is None": "llms.x.base_url was 'http://host/v1' and is None",
    }
    events = [{"format": 2}, {"time": "", "event": "resumed", "epoch": 1, "changes": [*changes]}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    card = model_card(tmp_path, CardSubject("me/m", TrainingRecord(step=2, version=2, started_from="org/m"), False))
    listed = [line.removeprefix("- after epoch 1: ") for line in card.splitlines() if line.startswith("- after epoch")]
    assert listed == [*changes.values()]
