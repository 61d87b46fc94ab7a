"""Runs on NeMo Customizer as processes: what they print, Ctrl-C, and kill -9 at any point."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories import customizer_project
from fake_nemo import FakeNeMo
from marks import slow_but
from processes import run_project, start_project


@pytest.fixture
def nemo() -> Iterator[FakeNeMo]:
    with FakeNeMo() as nemo:
        yield nemo


def test_a_run_from_the_command_line(tmp_path: Path, nemo: FakeNeMo) -> None:
    customizer_project(tmp_path, nemo, adapter={"hf_token": "hf_secret"})
    code, out, err = run_project(tmp_path)
    assert code == 0, err
    assert "job cust-0 is completed: model games/nat-dpo-" in out
    assert out.endswith("1 training job completed\n")
    everything = "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert "hf_secret" not in out + err + everything

    code, out, err = run_project(tmp_path, "-o", "trainers.trainer.wait_for_completion", "false")
    assert (code, out.splitlines()[-1]) == (0, "0 training jobs completed, 1 submitted and not ended")


@pytest.mark.slow
def test_a_job_that_fails_fails_the_command(tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.script = ["failed"]
    customizer_project(tmp_path, nemo)
    code, out, err = run_project(tmp_path)
    assert code == 1
    assert "job cust-0 ended as failed: Failed: out of memory" in err
    assert "Traceback" not in err
    assert "the run did not complete; results so far are in" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", slow_but([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_cancels_the_job(tmp_path: Path, nemo: FakeNeMo, number: signal.Signals) -> None:
    nemo.script = ["running"]
    customizer_project(tmp_path, nemo)
    with start_project(tmp_path) as process:
        process.wait_until(lambda: nemo.requested("GET .*jobs/cust-0"))
        process.send_signal(number)
        _, err = process.communicate(60)
        assert process.wait() == 130
    assert "interrupted: job cust-0 is canceled" in err
    assert nemo.jobs["cust-0"]["script"][-1] == "cancelled"
    assert json.loads((tmp_path / "run/final_metrics.json").read_text())["status"] == "canceled"


@pytest.mark.parametrize(
    ("pattern", "jobs_at_death", "options"),
    slow_but(
        [("POST .*jobs$", 1, ("--resume", "run"))],
        [
            ("POST .*/commit/", 0, ("--resume",)),  # while the records are uploaded
            ("POST .*jobs$", 1, ("--resume", "run")),  # when the job is submitted, but the run does not know it
            ("GET .*jobs/", 1, ("--resume",)),  # while it is waited for
        ],
    ),
)
def test_a_run_that_was_killed_goes_on_with_the_same_job(
    tmp_path: Path, nemo: FakeNeMo, pattern: str, jobs_at_death: int, options: tuple[str, ...]
) -> None:
    nemo.script = ["running"]
    nemo.hold(pattern)
    customizer_project(tmp_path, nemo)
    with start_project(tmp_path) as process:
        process.wait_until(lambda: nemo.held)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    nemo.release()
    assert len(nemo.jobs) == jobs_at_death
    pairs = (tmp_path / "run/pairs.jsonl").read_text()

    nemo.script = ["completed"]
    for job in nemo.jobs.values():
        job["script"] = ["running", "completed"]
    code, out, err = run_project(tmp_path, *options)
    assert code == 0, err
    assert len(nemo.jobs) == len(nemo.datasets) == len(nemo.repositories) == 1
    assert "continues: " in out
    assert "collection 1/1" not in out
    assert (tmp_path / "run/pairs.jsonl").read_text() == pairs
    assert json.loads((tmp_path / "run/final_metrics.json").read_text())["job"]["job_id"] == "cust-0"
    assert not (tmp_path / "run.1").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_collected_collects_again(tmp_path: Path, nemo: FakeNeMo) -> None:
    customizer_project(tmp_path, nemo, builder={"waits_for": str(tmp_path / "go")})
    with start_project(tmp_path) as process:
        process.wait_until(lambda: (tmp_path / "run/progress.json").exists())
        process.kill()
        process.wait()
    (tmp_path / "go").touch()
    code, out, err = run_project(tmp_path, "--resume", "run")
    assert code == 0, err
    assert "collection 1/1: " in out
    assert len(nemo.jobs) == 1
    assert not (tmp_path / "run.1").exists()


@pytest.mark.slow
def test_a_completed_run_is_not_trained_again(tmp_path: Path, nemo: FakeNeMo) -> None:
    customizer_project(tmp_path, nemo)
    code, _, err = run_project(tmp_path)
    assert code == 0, err
    files = ("progress.json", "final_metrics.json", "pairs.jsonl", "episodes.jsonl.gz")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files if (tmp_path / "run" / name).exists()}
    for options in (("--resume",), ("--resume", "run")):
        code, out, err = run_project(tmp_path, *options)
        assert code == 0, err
        assert "is complete: job cust-0 has trained its pairs" in out
        assert out.endswith("1 training job completed\n")
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
    assert len(nemo.jobs) == 1
    assert not (tmp_path / "run.1").exists()


@pytest.mark.slow
def test_the_pairs_of_a_job_that_failed_are_submitted_again(tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.script = ["failed"]
    customizer_project(tmp_path, nemo)
    assert run_project(tmp_path)[0] == 1
    nemo.script = ["completed"]
    code, _, err = run_project(tmp_path, "--resume", "run")
    assert code == 0, err
    assert len(nemo.jobs) == 2
    assert not (tmp_path / "run.1").exists()
