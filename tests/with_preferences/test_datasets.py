"""Rows by the package `datasets`: from a folder as from the Hub, and its tables in Python."""

import hashlib
import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from insitu.api.settings import Project
from insitu.collect.datasets import find_dataset, load_dataset
from insitu.config import load_config
from insitu.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # of datasets, on itself
ROWS = [{"prompt": f"{n} + {n}?", "solution": str(2 * n), "level": n, "tags": ["sum"]} for n in range(6)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def config(folder: Path, rows: list[dict[str, Any]] = ROWS, **block: Any) -> Any:
    (folder / "sums").mkdir()
    Dataset.from_list(rows).to_parquet(folder / "sums/train.parquet")
    columns = {"question": "prompt", "answer": "solution"}
    dataset = {"_type": "huggingface", "path": "sums", "columns": columns, **block}
    file = folder / "config.yml"
    file.write_text(json.dumps({"eval": {"general": {"dataset": dataset}}}))
    return load_config(file)


@pytest.mark.parametrize(("limit", "split", "count"), [(None, "train", 6), (2, "train", 2), (None, "train[1:4]", 3)])
def test_rows_of_a_split(tmp_path: Path, limit: int | None, split: str, count: int) -> None:
    checked = config(tmp_path, limit=limit, split=split)
    items, first = load_dataset(checked), int(split != "train")
    assert len(items) == count
    expected = {"question": f"{first} + {first}?", "answer": str(2 * first), "level": first, "tags": ["sum"]}
    assert items[0].full_dataset_entry == expected
    assert (items[0].input_obj, items[0].expected_output_obj) == (expected["question"], expected["answer"])
    record = find_dataset(checked).record()
    lines = (json.dumps(item.full_dataset_entry, sort_keys=True) for item in items)
    assert record["sha256"] == hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
    assert (record["path"], record["split"]) == (str(tmp_path / "sums"), split)


@pytest.mark.parametrize(
    ("block", "rows", "problem"),
    [
        ({"split": "test"}, ROWS, 'sums cannot be read: ValueError: Unknown split "test"'),
        ({"columns": {"question": "promt"}}, ROWS, r"columns.question: the column 'promt'.* prompt"),
        ({"path": "nobody/nothing"}, ROWS, "nobody/nothing cannot be read: "),
        ({}, [{"prompt": "a", "solution": float("nan")}], "row 1 cannot be written as JSON: it has nan"),
        ({}, [{"prompt": "a", "solution": b"x"}], "row 1 cannot be written as JSON: it has b'x'"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, block: dict[str, Any], rows: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=problem):
        load_dataset(config(tmp_path, rows, **block))


def test_dates_are_text(tmp_path: Path) -> None:
    (item,) = load_dataset(config(tmp_path, [{"prompt": "when?", "solution": date(2026, 11, 27)}]))
    assert item.expected_output_obj == "2026-11-27"


def test_a_table_in_python(tmp_path: Path) -> None:
    project = Project.of(None, {})
    project.output = tmp_path
    assert project.rows(Dataset.from_list(ROWS), "rows", "train") == tmp_path / "rows.jsonl"
    assert [json.loads(line) for line in project.files["rows.jsonl"].splitlines()] == ROWS
