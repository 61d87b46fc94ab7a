"""Episodes on a Ray cluster of two nodes: the same results, whatever ends while they run, and nothing left behind."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from conftest import RayCluster, project
from factories import read_lines, write_rows
from test_resume import EPOCHS, METHODS, VALIDATION, Outcome, is_exercised, outcome

ROWS: list[dict[str, Any]] = [{"say": f"Row {i}"} for i in range(5)]


def weights(folder: Path) -> dict[str, str]:
    files = sorted((folder / "backend/checkpoints").glob("step_*/*.safetensors"))
    assert files
    return {f"{f.parent.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def episodes(folder: Path) -> dict[tuple[int, str, int], dict[str, Any]]:
    """What is known of each, but times and the name of the run; no episode is there twice."""
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    for record in read_lines(folder / "run/episodes.jsonl.gz")[1:]:
        key = record["epoch"], record["row_id"], record["generation"]
        assert key not in found
        record["episode"] = record["episode"].partition("/")[2]
        if record["error"] is not None:
            record["error"] = record["error"].replace(str(folder), "FOLDER")
        found[key] = {name: value for name, value in record.items() if name != "seconds"}
    return found


def calls_per_episode(folder: Path) -> dict[str, int]:
    names = [r["episode"].partition("/")[2] for r in read_lines(folder / "run/calls.jsonl.gz") if "episode" in r]
    return {name: names.count(name) for name in names}


def check_equal(ended: Outcome, expected: Outcome) -> None:
    for name, value in expected._asdict().items():
        assert getattr(ended, name) == value, name


def trained(cluster: RayCluster, folder: Path, rows: list[dict[str, Any]], *options: Any) -> Path:
    with project(folder):
        write_rows(folder, rows)
        write_rows(folder, [{"say": f"Held out {i}"} for i in range(4)], "validation.jsonl")
        code, out = cluster.run(folder, *options)
        assert code == 0, out
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_the_files_of_a_run_are_those_of_the_local_executor(cluster: RayCluster, tmp_path: Path, method: str) -> None:
    rows = [*ROWS, {"say": "Fail", "raise": "on purpose", "earn": 0.5}]
    options = (*VALIDATION, *EPOCHS, *METHODS[method])
    here = trained(cluster, tmp_path / "here", rows, *options)
    there = trained(cluster, tmp_path / "there", rows, *options, *cluster.executor())
    expected = outcome(here / "run")
    assert is_exercised(method, expected)
    check_equal(outcome(there / "run"), expected)
    assert weights(there) == weights(here)
    assert episodes(there) == episodes(here)
    assert not cluster.workers()
