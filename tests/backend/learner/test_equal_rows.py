"""ART's builder with one generation, as in the documents' example: rows that repeat are the generations of a group."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from factories import digits_project, read_lines, write_rows
from processes import run, run_project, serving, start_project, wait_until

from insitu.collect.datasets import equal_rows
from insitu.schemas.evaluation import EvalInputItem

X, O = ({"question": {"say": side}, "answer": side} for side in "XO")  # noqa: E741 (the documents' names)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """24 rows of either side, in turns, with ids that differ."""
    digits_project(tmp_path)
    config = yaml.safe_load((tmp_path / "config.yml").read_text())
    config["eval"]["general"]["dataset"] = {"_type": "json", "file_path": "rows.json"}
    config["trajectory_builders"]["episodes"] = {"_type": "openpipe_art_traj_builder", "num_generations": 1}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    rows = [{"id": number, **(X, O)[number % 2]} for number in range(48)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return tmp_path


def groups_of(folder: Path, epoch: int) -> dict[str, list[int]]:
    """For each group its row ids."""
    found: dict[str, list[int]] = {}
    for line in read_lines(folder / "run/groups.jsonl"):
        if line.get("epoch") == epoch:
            found[line["row_id"]] = sorted(map(int, line["rows"]))
    return found


@pytest.mark.slow
def test_rows_that_are_equal_are_a_group_in_every_epoch_and_after_a_kill(project: Path) -> None:
    """Each episode keeps its own row, and the curriculum and a resumed run know the groups."""
    curriculum = {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 1, "min_reward_diff": 0.0}
    options = ["-o", "finetuning.num_epochs", "3", "-o", "finetuning.curriculum_learning", json.dumps(curriculum)]
    with start_project(project, *options) as process:
        wait_until((project / "run/training_metrics.jsonl").exists)
        process.kill()
    code, _, err = run_project(project, *options, "--resume")
    assert code == 0, err
    sides = {"0": [*range(0, 48, 2)], "1": [*range(1, 48, 2)]}
    for epoch in (1, 2, 3):
        assert groups_of(project, epoch) == sides
    episodes = [line for line in read_lines(project / "run/episodes.jsonl.gz") if "outcome" in line]
    assert Counter((e["epoch"], e["row_id"], e["generation"]) for e in episodes) == {
        (epoch, str(row), 0): 1 for epoch in (1, 2, 3) for row in range(48)
    }
    metrics = read_lines(project / "run/training_metrics.jsonl")
    assert [(m["num_groups"], m["num_trajectories"], m["filtered_groups"]) for m in metrics] == [
        (2, 48, 1),
        (2, 48, 2),
        (2, 48, 2),
    ]
    assert all(m["job"] == "completed" for m in metrics)
    state = json.loads((project / "run/curriculum_state.json").read_text())
    assert (state["total_groups"], sorted(state["included_groups"])) == (2, ["0", "1"])
    header = json.loads((project / "run/run.json").read_text())
    assert header["groups"] == "2, of the 48 rows those with equal question and answer"
    shown = run("trajectories", "show", "run", "--row", "17", folder=project)
    assert shown.returncode == 0, shown.stderr
    assert "1/17/0" in shown.stdout


@pytest.mark.slow
def test_the_header_says_so_and_a_group_can_be_looked_at_by_each_of_its_rows(project: Path) -> None:
    code, out, err = run_project(project, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    assert "groups: 2, of the 48 rows those with equal question and answer" in out
    with serving("view", project / "run") as (process, address):
        for row, own in (("0", 0), ("5", 1), ("1", 1)):
            answer = httpx.get(f"{address}/api/group", params={"epoch": 1, "row": row}, timeout=60)
            assert answer.status_code == 200, answer.text
            episodes = answer.json()["episodes"]
            assert {episode["row_id"] for episode in episodes} == {str(n) for n in range(own, 48, 2)}
            assert {episode["status"] for episode in episodes} == {"trained"}, sorted(episodes[0])
        process.terminate()


def test_rows_that_do_not_repeat_are_refused_before_anything_starts(project: Path) -> None:
    write_rows(project, [{"say": f"row {i}"} for i in range(3)], "rows.jsonl")
    dataset = ["-o", "eval.general.dataset", json.dumps({"_type": "jsonl", "file_path": "rows.jsonl"})]
    for command in ("validate", "finetune"):
        code, _, err = run_project(project, *dataset, command=command)
        assert code == 2, err
        assert (
            "trajectory_builders.episodes.num_generations is 1, and no two of the 3 rows have the same question and "
            "answer, but insitu_trainer compares episodes with one another; allowed: 2 or more" in err
        )
    assert not (project / "run").exists()


def test_rows_that_are_alone_are_said_and_a_choice_of_rows_is_refused(project: Path) -> None:
    rows = [{"id": number, **(X if number < 4 else {"question": {"say": str(number)}})} for number in range(6)]
    (project / "rows.json").write_text(json.dumps(rows))
    code, out, err = run_project(project, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    assert (
        "groups: 3, of the 6 rows those with equal question and answer; 2 rows equal no other and teach nothing" in out
    )
    assert "dropped: 2 single_member" in out
    code, _, err = run_project(project, "-o", "trajectory_builders.episodes.rows_per_epoch", "3")
    assert code == 2
    assert "rows_per_epoch is 3, which would split the groups of equal rows that num_generations: 1 makes" in err


def test_question_and_answer_decide() -> None:
    def row(name: str, question: Any, answer: Any = None) -> EvalInputItem:
        return EvalInputItem(
            id=name, input_obj=question, expected_output_obj=answer, full_dataset_entry={"other": name}
        )

    rows = [row("a", {"x": 1, "y": 2}), row("b", {"y": 2, "x": 1}), row("c", {"x": 1}), row("d", {"x": 1}, "4")]
    assert equal_rows([*rows, row("e", {"x": 1}, "4")]) == {"a": "a", "b": "a", "c": "c", "d": "d", "e": "d"}
    elsewhere = [row(name, question) for name, question in (("1", ""), ("2", ""), ("3", None), ("4", {}))]
    assert equal_rows(elsewhere) == {name: name for name in "1234"}
    odd = [row("a", {1: "x", "y": 2}), row("b", {1: "x", "y": 2}), row("c", 2**70), row("d", 2**70)]
    assert equal_rows(odd) == {"a": "a", "b": "a", "c": "c", "d": "c"}
