"""What trackers are given of a run, and that a tracker that fails or hangs does not matter to it."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from factories import digits_project, read_lines, write_rows
from marks import slow_after, slow_but
from processes import HANGS, run, start
from waiting import until

from insitu.integrations.trackers.processes import reported
from insitu.integrations.trackers.stream import TrackedFiles, training_metrics, validation_metrics

PLUGIN = """
import json, os, select, time
from insitu.plugin_api import Tracker


class Recording(Tracker):
    def start(self, run, continued):
        self.path = run.folder / f"{type(self).__name__}.jsonl"
        self.write(started=run.settings["finetuning.num_epochs"], continued=continued, run=run.run_id)
        return "an id"

    def log(self, step):
        self.write(epoch=step.epoch, metrics=step.metrics, tables=step.tables)

    def finish(self, status):
        self.write(finished=status)

    def write(self, **line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\\n")


class Raising(Recording):
    def log(self, step):
        raise ValueError("the password is hunter2hunter2")


class Offline(Recording):
    package, extra = "no_such_package", "wandb"


class Hanging(Recording):
    def start(self, run, continued):
        (run.folder / "hangs").touch()
        time.sleep(3600)


class Stalling(Recording):
    def log(self, step):  # the first process stalls until there is a file
        if not (stalled := self.path.with_name("stalled")).exists():
            stalled.write_text(str(os.getpid()))
            while not self.path.with_name("released").exists():
                select.select([], [], [], 0.01)
        super().log(step)


class Killed(Recording):
    def log(self, step):
        print("about to log", flush=True)
        os.kill(os.getpid(), 9)


class Remote(Recording):
    @classmethod
    def server(cls):
        return os.environ["REMOTE_TRACKER"]


class HangingAtTheEnd(Recording):
    def finish(self, status):
        time.sleep(3600)
"""
NAMES = {"recording": "Recording", "raising": "Raising", "offline": "Offline", "hanging": "Hanging"}
NAMES |= {"stalling": "Stalling", "killed": "Killed", "remote": "Remote"}
NAMES |= {"hanging_at_the_end": "HangingAtTheEnd", "nothing": "json"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed package with trackers."""
    site = tmp_path_factory.mktemp("site")
    (site / "odd_trackers.py").write_text(PLUGIN)
    info = site / "odd_trackers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd_trackers\nVersion: 1.0\n")
    points = "\n".join(f"{name} = odd_trackers:{value}" for name, value in NAMES.items())
    (info / "entry_points.txt").write_text(f"[insitu.trackers]\n{points}\n")
    return site


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_project(tmp_path_factory.mktemp("project"), rows=3)


def finetune(folder: Path, site: Path, *options: str) -> Any:
    command = ["finetune", "--config_file", "config.yml", "--validation_dataset", "rows.jsonl", *options]
    return run(
        *command, "--validation_interval", 2, folder=folder, PYTHONPATH=str(site), SOME_PASSWORD="hunter2hunter2"
    )


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The complete lines: the last one may be being written."""
    lines = (folder / "run/trackers/Recording.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.fixture(scope="module")
def tracked(project: Path, site: Path) -> str:
    """What a run and its continuation print, which are followed by a tracker that works and one that fails."""
    errors = ""
    names = ("-o", "finetuning.report_to", "[recording, raising]")
    for options in (names, (*names, "-o", "finetuning.num_epochs", "3", "--resume")):
        done = finetune(project, site, *options)
        assert done.returncode == 0, done.stderr
        errors += done.stderr
    return errors


def test_each_epoch_is_logged_once_also_by_a_run_that_continues(project: Path, tracked: str) -> None:
    lines = recorded(project)
    run_id = json.loads((project / "run/run.json").read_text())["run_id"]
    assert [line for line in lines if "epoch" not in line] == [
        {"started": 2, "continued": None, "run": run_id},
        {"finished": "completed"},
        {"started": 3, "continued": "an id", "run": run_id},
        {"finished": "completed"},
    ]
    assert [line["epoch"] for line in lines if "epoch" in line] == [0, 1, 2, 3]


def test_what_is_logged_is_what_the_files_have(project: Path, tracked: str) -> None:
    steps = {line["epoch"]: line for line in recorded(project) if "epoch" in line}
    files = {line["epoch"]: line for line in read_lines(project / "run/training_metrics.jsonl")}
    validations = {each["epoch"]: each for each in json.loads((project / "run/validation_history.json").read_text())}
    for epoch in (1, 2, 3):
        metrics, line = steps[epoch]["metrics"], files[epoch]
        assert metrics["train/reward"] == line["avg_reward"]
        assert metrics["train/loss"] == line["loss"]
        assert metrics["train/grad_norm"] == line["grad_norm"]
        assert metrics["train/score/score"] == line["scores"]["score"]
        assert metrics["time/collect"] == line["seconds"]["collect"]
        assert all(isinstance(value, float) for value in metrics.values())
        assert metrics["train/episodes"] == line["num_trajectories"]
        assert metrics["train/job/episodes"] == line["episodes"]
        assert not metrics.keys() & steps[epoch]["tables"].keys(), "a tracker would keep one of both"
        columns, rows = steps[epoch]["tables"]["train/transcripts"]
        assert len(rows) == 8
        assert rows[0][columns.index("prompt")].startswith("user: Row ")
    for epoch in (0, 2, 3):
        assert steps[epoch]["metrics"]["validation/score"] == validations[epoch]["avg_reward"]
        columns, rows = steps[epoch]["tables"]["validation/scores"]
        assert (columns, [row[0] for row in rows]) == (["row", "score"], ["0", "1", "2"])
    assert "validation/score" not in steps[1]["metrics"]


def test_a_tracker_that_fails_is_one_warning(project: Path, tracked: str) -> None:
    assert tracked.count("finetuning.report_to: raising has failed: ValueError: the password is ***") == 2, tracked
    assert sum("report_to" in line for line in tracked.splitlines()) == 2
    assert "the files of the run have everything" in tracked
    assert "hunter2" not in (project / "run/trackers/raising.log").read_text()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            "[tensorbord]",
            "report_to: the tracker 'tensorbord' does not exist (did you mean 'tensorboard'?); available:",
        ),
        ("[wandb, wandb]", "finetuning.report_to: names wandb twice"),
        ("offline", "finetuning.report_to: offline needs the package 'no_such_package': pip install -e '.[wandb]'"),
        ("nothing", "finetuning.report_to: nothing"),
    ],
)
def test_trackers_that_cannot_be_used_are_refused_before_anything_starts(
    tmp_path: Path, site: Path, names: str, problem: str
) -> None:
    write_rows(digits_project(tmp_path), [{"say": "Row"}])
    (tmp_path / "wandb").mkdir()  # as W&B makes it
    done = finetune(tmp_path, site, "-o", "finetuning.report_to", names)
    assert done.returncode in (1, 2)
    assert problem in done.stderr
    assert not (tmp_path / "run").exists()


def made_up(folder: Path, epoch: int, status: str = "running") -> Path:
    (folder / "run.json").write_text(json.dumps({"run_id": "r1", "config": {"finetuning": {"num_epochs": 5}}}))
    (folder / "progress.json").write_text(json.dumps({"epoch": epoch, "status": status}))
    lines = [json.dumps({"epoch": each, "avg_reward": each / 10}) for each in range(1, epoch + 2)]
    (folder / "training_metrics.jsonl").write_text("\n".join([*lines, '{"torn']))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(1, ["hanging", "hanging_at_the_end"]))
async def test_a_tracker_that_hangs_is_ended_with_the_run(
    tmp_path: Path, site: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(site)
    made_up(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(HANGS), reported([name], tmp_path, end_seconds=0.3):
            sign = tmp_path / "trackers" / ("hangs" if name == "hanging" else "HangingAtTheEnd.jsonl")
            await until(lambda: sign.exists())
    (record,) = caplog.records
    assert f"finetuning.report_to: {name} did not end within 0.3 s after the run" in record.getMessage()


@pytest.mark.slow
async def test_a_run_that_cannot_be_followed_is_a_warning(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as that of the NeMo Customizer trainer, or of a plugin's."""
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(site)
    (made_up(tmp_path, 2) / "progress.json").unlink()
    with caplog.at_level(logging.WARNING):
        async with reported(["recording"], tmp_path):
            await until(lambda: (tmp_path / "trackers/Recording.jsonl").exists())
    (record,) = caplog.records
    assert "recording has failed: InsituError: nothing was logged: the trainer of this run writes no progress.json" in (
        record.getMessage()
    )


def test_epochs_that_may_be_run_again_are_not_logged(tmp_path: Path) -> None:
    """The line of an epoch is written before the run can continue from it."""
    files = TrackedFiles(made_up(tmp_path, 2))
    assert [(step.epoch, step.metrics) for step in files.steps(-1)] == [
        (1, {"train/reward": 0.1}),
        (2, {"train/reward": 0.2}),
    ]
    assert [*files.steps(2)] == []
    assert files.run.settings == {"finetuning.num_epochs": 5}


@pytest.mark.slow
def test_a_tracker_ends_when_the_run_is_killed(project: Path, site: Path, tmp_path: Path) -> None:
    write_rows(digits_project(tmp_path), [{"say": "Row"}])
    command = ["finetune", "--config_file", "config.yml", "-o", "finetuning.report_to", "recording"]
    with start(*command, "-o", "finetuning.num_epochs", "500", folder=tmp_path, PYTHONPATH=str(site)) as process:
        file = tmp_path / "run/trackers/Recording.jsonl"
        process.wait_until(lambda: file.exists() and '"epoch"' in file.read_text())
        process.kill()
        process.wait()
    while "finished" not in (last := recorded(tmp_path)[-1]):
        os.sched_yield()
    assert last == {"finished": "running"}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_tracker_that_outlives_its_run_logs_nothing_beside_the_next_one(site: Path, tmp_path: Path) -> None:
    write_rows(digits_project(tmp_path), [{"say": "Row"}])
    options = ("-o", "finetuning.report_to", "stalling")
    trackers = tmp_path / "run/trackers"
    command = ("finetune", "--config_file", "config.yml", *options)
    with start(*command, "-o", "finetuning.num_epochs", "500", folder=tmp_path, PYTHONPATH=str(site)) as process:
        process.wait_until(lambda: (trackers / "stalled").exists() and (trackers / "stalled").read_text())
        process.kill()
        process.wait()
    pid = int((trackers / "stalled").read_text())
    assert is_alive(pid)
    epochs = json.loads((tmp_path / "run/progress.json").read_text())["epoch"] + 30
    done = run(*command, "-o", "finetuning.num_epochs", epochs, "--resume", folder=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    (trackers / "released").touch()
    while is_alive(pid):
        os.sched_yield()
    logged = [json.loads(line) for line in (trackers / "Stalling.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in logged if "epoch" in line] == [*range(1, epochs + 1)]


async def test_a_tracker_that_was_killed_says_why(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(site)
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(HANGS), reported(["killed"], made_up(tmp_path, 2)):
            await until(lambda: caplog.records)
    (record,) = caplog.records
    log = tmp_path / "trackers/killed.log"
    said = f"killed was ended by SIGKILL (as when memory runs out): about to log ({log}); "
    assert said in record.getMessage()


@pytest.mark.parametrize("reached", slow_but([False], [True, False]))
async def test_a_server_that_cannot_be_reached_is_named_at_the_start(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reached: bool
) -> None:
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        if not reached:
            server.close()
        monkeypatch.setenv("PYTHONPATH", str(site))
        monkeypatch.syspath_prepend(site)
        monkeypatch.setenv("REMOTE_TRACKER", f"http://me:password@127.0.0.1:{port}/api")
        log = tmp_path / "trackers/Remote.jsonl"
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(HANGS), reported(["remote"], made_up(tmp_path, 2)):
                await until(lambda: log.exists() and (reached or caplog.records))
    address = f"http://me:***@127.0.0.1:{port}/api"
    problem = f"finetuning.report_to: remote cannot reach {address}: Connection refused; the files"
    said = [record.getMessage() for record in caplog.records]
    assert [message[: len(problem)] for message in said] == ([] if reached else [problem])


def test_names_of_metrics() -> None:
    line = {
        "epoch": 3,
        "timestamp": "2026-11-22",
        "job": "completed",
        "avg_reward": 0.5,
        "kl": 0.01,
        "episodes": 8,
        "num_trajectories": 12,
        "rewards/chosen": 1,
        "scores": {"exact": 0.25, "style": None},
        "dropped": {"timeout": 2},
        "seconds": {"train": 1.5},
        "loss": float("nan"),
    }
    assert training_metrics(line) == {
        "train/reward": 0.5,
        "train/kl": 0.01,
        "train/job/episodes": 8,
        "train/episodes": 12,
        "train/rewards/chosen": 1,
        "train/score/exact": 0.25,
        "dropped/timeout": 2,
        "time/train": 1.5,
    }
    record = {"epoch": 3, "avg_reward": 0.5, "ci95": [0.25, None], "dropped": {"timeout": 1}, "seconds": 2.0}
    assert validation_metrics(record) == {
        "validation/score": 0.5,
        "validation/score_low": 0.25,
        "validation/dropped/timeout": 1,
        "time/validate": 2.0,
    }
    assert validation_metrics({"epoch": 3, "error": "no example could be scored", "dropped": {"timeout": 1}}) == {}
