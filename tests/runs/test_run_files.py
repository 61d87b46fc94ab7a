"""Every file of a run has one name in the source, and its description."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_view import write_run

from insitu.errors import InsituError
from insitu.runs import files
from insitu.runs.files import FILES, Format
from insitu.runs.reader import RunReader

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/insitu"
MODULES = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "runs/files.py"]


def texts(path: Path) -> Iterator[str]:
    """The texts in a module that are no docstrings, also those in f-strings."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("validation_history.json", [{"epoch": None}], "0.epoch is None: Input should be a valid integer"),
        ("validation_history.json", {}, "its content is {}: Input should be a valid list"),
        ("validation_history.json", [3], "0 is 3: Input should be a JSON object"),
        ("reward_history.json", [{"epoch": "1"}], "0.epoch is '1': Input should be a valid integer"),
        ("best.json", {"epoch": 1, "policy_version": 1}, "avg_reward is missing"),
        ("run.json", {"dataset": ["x"]}, "dataset is ['x']: Input should be a JSON object"),
        ("run.json", {"dataset": {"file": None}}, "dataset.file is None: Input should be a valid string"),
        ("warm_up.json", {"checkpoint": 1}, "checkpoint is 1: Input should be a valid string"),
        ("backend/started_from.json", {"model": None}, "model is None: Input should be a valid string"),
        ("backend/jobs/job-1.json", {"policy_version": "1"}, "policy_version is '1': Input should be a valid integer"),
        ("validation_scores.jsonl", {"epoch": 1}, "policy_version is missing"),
        ("groups.jsonl", {"epoch": 1, "num_episodes": 8, "blocks": {}}, "row_id is missing"),
        (
            "groups.jsonl",
            {"epoch": 1, "row_id": "r", "num_episodes": 8, "blocks": {}},
            "blocks is {}: episodes.jsonl.gz is missing",
        ),
        ("progress.json", {"run_id": "r"}, "epoch is missing"),
        ("rescores.jsonl", {"episode": 1}, "episode is 1: Input should be a valid string"),
    ],
)
def test_a_file_of_another_form_is_refused_by_its_name(tmp_path: Path, name: str, content: Any, problem: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.suffix == ".jsonl"
    path.write_text('{"format": 2}\n' * lines + json.dumps(content) + "\n" * lines)
    reader = RunReader(tmp_path)
    read = {
        "validation_history.json": reader.validations,
        "reward_history.json": lambda: reader.rewards(1),
        "run.json": reader.settings,
        "backend/started_from.json": reader.started_from,
        "backend/jobs/job-1.json": reader.jobs,
        "validation_scores.jsonl": reader.scores,
        "groups.jsonl": lambda: [*reader.groups()],
        "rescores.jsonl": reader.rescores,
        "progress.json": reader.progress,
    }.get(name, lambda: reader.object(name))
    with pytest.raises(InsituError) as error:
        read()
    assert str(error.value) == f"{path}{', line 2' * lines} is damaged: {problem}"


def test_settings_are_missed_where_they_are_needed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InsituError, match=r"run\.json is damaged: config is missing"):
        RunReader(tmp_path).config()


def test_no_other_module_names_a_file_of_a_run() -> None:
    names = "|".join(re.escape(name) for name in (*FILES, files.STARTED_FILE) if name != ".lock")
    literal = re.compile(rf"(?<![\w.])({names})(?![\w.]\w)")
    named = [path for path in MODULES if literal.search(path.read_text())]
    found = {str(path.relative_to(ROOT)): [*filter(literal.search, texts(path))] for path in named}
    assert not {path: texts for path, texts in found.items() if texts}


@pytest.mark.parametrize("name", FILES)
def test_the_reference_describes_every_file(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs/reference/files.md").read_text()


def test_files_have_the_format_that_they_are_declared_with(tmp_path: Path) -> None:
    made = write_run(tmp_path)
    made.store.record_event("started")
    made.store.close()
    for name, file in FILES.items():
        path = tmp_path / name
        if not path.exists():
            continue
        if file.format in (Format.LINES, Format.PLAIN_LINES):
            first, *_ = map(json.loads, path.read_text().splitlines())
            assert (first == {"format": 2}) == (file.format is Format.LINES), name
        elif file.format is Format.BLOCKS:
            assert path.read_bytes().startswith(b"\x1f\x8b"), name
        elif file.format is Format.OBJECT:
            assert isinstance(json.loads(path.read_text()), dict), name
