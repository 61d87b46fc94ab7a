"""Episodes on a Ray cluster of two nodes: the same results, whatever ends while they run, and nothing left behind."""

import hashlib
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import RayCluster, project, ray_cluster, wait_for
from factories import read_lines, write_rows
from processes import wait_until
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


def marks(folder: Path) -> int:
    """How many episodes have asked their model, and wait."""
    file = folder / "marks"
    return len(file.read_text()) if file.exists() else 0


WAITING = [{"say": f"Row {i}", "wait": True, "earn": 0.1 * i} for i in range(4)]
ONE_EPOCH = (*VALIDATION, "-o", "finetuning.num_epochs", "1", "-o", "eval.general.episode_timeout", "null")


@pytest.fixture(scope="module")
def undisturbed(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process whose episodes do not wait."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with project(folder, "worker"):
        write_rows(folder, WAITING)
        write_rows(folder, [{"say": "Held out"}], "validation.jsonl")
        (folder / "released").touch()
        code, out = cluster.run(folder, *ONE_EPOCH)
        assert code == 0, out
    return folder


@pytest.mark.parametrize("lost", ["worker", "node"])
def test_episodes_of_a_lost_worker_or_node_are_run_again(undisturbed: Path, tmp_path: Path, lost: str) -> None:
    """All 16 episodes are in flight when it ends; no file shows that half of them were run twice."""
    with ray_cluster() as cluster, project(tmp_path / "there", "worker") as folder:
        write_rows(folder, WAITING)
        write_rows(folder, [{"say": "Held out"}], "validation.jsonl")
        with cluster.start(folder, *ONE_EPOCH, *cluster.executor()) as process:
            wait_for(lambda: marks(folder) == 1 + 16, process)
            if lost == "node":
                cluster.tell("remove")
                cluster.tell("add")
            else:
                cluster.workers()[0].kill()
            wait_for(lambda: marks(folder) == 1 + 16 + 8, process)
            (folder / "released").touch()
            out, _ = process.communicate()
        assert process.returncode == 0, out
        assert "has ended; its 8 episodes are run again by others" in out
    assert [record["unknown_completions"] for record in read_lines(folder / "run/training_metrics.jsonl")] == [None]
    check_equal(outcome(folder / "run"), outcome(undisturbed / "run"))
    assert weights(folder) == weights(undisturbed)
    assert episodes(folder) == episodes(undisturbed)


def test_an_agent_that_ends_its_process_every_time_fails_only_its_own_episodes(
    cluster: RayCluster, tmp_path: Path
) -> None:
    with project(tmp_path / "there", "worker") as folder:
        rows = [{"say": f"Row {i}"} for i in range(3)]
        write_rows(folder, [*rows, {"say": "Die", "exit": True}])
        options = ("-o", "trajectory_builders.episodes.num_generations", "2", *EPOCHS[:2], "1")
        code, out = cluster.run(folder, *options, *cluster.executor(max_losses=2))
        assert code == 0, out
    found = episodes(folder)
    assert len(found) == 4 * 2
    for (_, row, _), episode in found.items():
        if row == "3":
            assert (episode["outcome"], episode["reason"]) == ("failed", "workflow_error")
            assert "its worker has ended 3 times while it ran (max_losses)" in episode["error"]
        else:
            assert (episode["outcome"], episode["attempt"], episode["calls"]) == ("ok", 0, 1)
    assert set(calls_per_episode(folder).values()) == {1}
    assert not cluster.workers()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_worker_behind(cluster: RayCluster, tmp_path: Path, number: int) -> None:
    with project(tmp_path / "there", "worker") as folder:
        write_rows(folder, WAITING)
        write_rows(folder, [{"say": "Held out"}], "validation.jsonl")
        with cluster.start(folder, *ONE_EPOCH, *cluster.executor()) as process:
            wait_for(lambda: marks(folder) == 1 + 16, process)
            process.send_signal(number)
            out, _ = process.communicate()
        assert process.returncode == 130, out
    wait_until(lambda: not cluster.workers())
