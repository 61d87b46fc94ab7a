"""Runs in which nothing completes any more say what they wait for, give up if asked to, and can continue."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import digits_project, read_lines, write_rows
from fake_openai import FakeOpenAI
from processes import HANGS, run_project, start_project

from insitu.collect.watchdog import Watchdog
from insitu.errors import Stalled
from insitu.schemas.finetuning import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from insitu.training.jobs import wait_for_job


def general(**limits: float | None) -> list[str]:
    """Options for `eval.general`."""
    given = {"episode_timeout": None, "evaluator_timeout": None, **limits}
    return [text for key, value in given.items() for text in ("-o", f"eval.general.{key}", json.dumps(value))]


ONE_EPOCH = ("-o", "finetuning.num_epochs", "1")
GIVES_UP = general(stall_warning=None, stall_timeout=5)
SECONDS = r"\d+(\.\d)? s"
QUIET = rf"nothing has completed for {SECONDS}, waiting for "
GAVE_UP = r"; gave up after eval.general.stall_timeout: 5 s"
OWN_CODE = rf"\(started {SECONDS} ago; no model call in flight: its own code or a tool\)"
EVALUATOR = rf"\(started {SECONDS} ago; its evaluator score has run for {SECONDS}\)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "doing"),
    [
        ({"say": "b", "hang": True}, OWN_CODE),
        pytest.param({"say": "b", "score": "hang"}, EVALUATOR, marks=pytest.mark.slow),
    ],
    ids=["episode", "evaluator"],
)
def test_a_run_that_hangs_gives_up_and_can_continue(tmp_path: Path, question: dict[str, Any], doing: str) -> None:
    digits_project(tmp_path)
    write_rows(tmp_path, [question, {"say": "a"}])  # row 1 is rehearsed
    released = tmp_path / "released"
    options = (*ONE_EPOCH, "-o", "trajectory_builders.episodes.num_generations", "3")
    code, out, err = run_project(tmp_path, *options, *GIVES_UP)
    assert code == 1, out + err
    waits = "; ".join(rf"row '0', generation {n} of epoch 1 {doing}" for n in range(3))
    (failed,) = err.splitlines()
    assert re.fullmatch(f"failed: {QUIET}{waits}{GAVE_UP}", failed), failed
    progress = json.loads((tmp_path / "run/progress.json").read_text())
    assert (progress["status"], progress["epoch"]) == ("failed", 0)
    assert progress["error"].startswith("Stalled: nothing has completed")
    assert [e["event"] for e in read_lines(tmp_path / "run/events.jsonl")[1:]][-1] == "failed"

    released.touch()
    code, out, err = run_project(tmp_path, *options, *general(stall_timeout=60), "--resume")
    assert code == 0, out + err
    assert "continues after epoch 0 and 3 episodes of epoch 1" in out
    assert "eval.general.stall_timeout was 5.0 and is 60.0" in out
    assert len(read_lines(tmp_path / "run/episodes.jsonl.gz")) == 1 + 6


@pytest.mark.slow
def test_what_is_waited_for_is_said_again_and_again_until_it_ends(tmp_path: Path) -> None:
    digits_project(tmp_path)
    write_rows(tmp_path, [*[{"say": "b", "hang": True}] * 2, {"say": "a"}])  # row 2 is rehearsed
    waits = rf"{QUIET}(row '[01]', generation \d of epoch 1 {OWN_CODE}; ){{5}}and 3 more\n"
    with start_project(tmp_path, *ONE_EPOCH, *general(stall_warning=0.5)) as process:
        process.wait_until(lambda: len(re.findall(waits, process.errors)) > 2)
        (tmp_path / "released").touch()
        out, err = process.communicate(HANGS)
        assert process.wait() == 0, out + err


@pytest.mark.slow
def test_a_rehearsal_that_hangs_gives_up(tmp_path: Path) -> None:
    digits_project(tmp_path)
    write_rows(tmp_path, [{"say": "a", "hang": True}])
    code, _, err = run_project(tmp_path, *GIVES_UP)
    assert code == 1
    said = rf"failed: {QUIET}row '0', generation 0, played before the first epoch {OWN_CODE}{GAVE_UP}\n"
    assert re.fullmatch(said, err), err


def test_a_run_whose_event_loop_is_blocked_gives_up_and_can_continue(tmp_path: Path) -> None:
    digits_project(tmp_path)
    write_rows(tmp_path, [{"say": "a", "block": True}, {"say": "b"}])  # row 1 is rehearsed
    limits = general(stall_warning=3, stall_timeout=5)
    code, out, err = run_project(tmp_path, *ONE_EPOCH, *limits)
    assert code == 1, out + err
    said = rf"the event loop, and so every episode, has been blocked for {SECONDS} by .*digits_plugin\.py, line \d+"
    *_, warning, failed = err.splitlines()
    assert re.search(f"{said}$", warning), warning
    assert re.fullmatch(f"failed: {said}{GAVE_UP}", failed), failed
    (tmp_path / "released").touch()
    code, out, err = run_project(tmp_path, *ONE_EPOCH, *limits, "--resume")
    assert code == 0, out + err


@pytest.mark.slow
def test_a_validation_that_hangs_gives_up(tmp_path: Path) -> None:
    """Unlike one that fails, after which training continues."""
    digits_project(tmp_path)
    write_rows(tmp_path, [{"say": "a"}])
    write_rows(tmp_path, [{"say": "b", "hang": True}], "validation.jsonl")
    options = ("--validation_dataset", "validation.jsonl", *ONE_EPOCH)
    code, _, err = run_project(tmp_path, *options, *GIVES_UP)
    assert code == 1
    assert re.fullmatch(rf"failed: {QUIET}row '0', generation 0 {OWN_CODE}{GAVE_UP}\n", err), err
    assert not (tmp_path / "run/training_metrics.jsonl").exists()
    (tmp_path / "released").touch()
    code, out, err = run_project(tmp_path, *options, *GIVES_UP, "--resume")
    assert code == 0, out + err


def openai_project(folder: Path, server: FakeOpenAI) -> None:
    """An evaluation of a model at another server."""
    config = yaml.safe_load((digits_project(folder) / "config.yml").read_text())
    model = {"_type": "openai", "base_url": server.base_url, "api_key": "k", "model_name": "fake", "max_retries": 1}
    config["llms"]["player"] = model
    (folder / "config.yml").write_text(yaml.safe_dump(config))


def test_an_evaluation_names_the_calls_in_flight(tmp_path: Path, server: FakeOpenAI) -> None:
    openai_project(tmp_path, server)
    write_rows(tmp_path, [*[{"say": "slow 600"}] * 7, {"say": "a"}])
    options = ("-o", "eval.general.output_dir", "results")
    code, out, err = run_project(tmp_path, *options, *general(stall_warning=1, stall_timeout=3), command="eval")
    assert code == 1, out + err
    warning, *_, failed = err.splitlines()
    host = server.base_url.removeprefix("http://").removesuffix("/v1")
    call = rf"\(started {SECONDS} ago; its call to llms.player at {host} has taken {SECONDS}\)"
    waits = "; ".join([*(rf"row '{n}', generation 0 {call}" for n in range(5)), "and 2 more"])
    assert re.search(f"{QUIET}{waits}$", warning), warning
    assert re.fullmatch(f"failed: {QUIET}{waits}; gave up after eval.general.stall_timeout: 3 s", failed), failed


def test_an_evaluation_names_the_evaluator(tmp_path: Path, server: FakeOpenAI) -> None:
    openai_project(tmp_path, server)
    write_rows(tmp_path, [{"say": "a"}, {"say": "b", "score": "hang"}])
    options = ("-o", "eval.general.output_dir", "results")
    code, _, err = run_project(tmp_path, *options, *GIVES_UP, command="eval")
    assert code == 1
    assert re.fullmatch(rf"failed: {QUIET}the scores of 2 answers {EVALUATOR}{GAVE_UP}\n", err), err


class Backend:
    """A plugin's adapter, whose job moves on for the first `moves` requests of its status."""

    def __init__(self, moves: int) -> None:
        self._moves = moves
        self._asked = 0
        self._ended = asyncio.Event()

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        self._asked += 1
        if self._asked == self._moves:
            self._ended.set()
        return TrainingJobStatus(
            run_id="r", backend="b", status=TrainingStatusEnum.RUNNING, progress=min(self._asked, 40)
        )

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        await self._ended.wait()
        return await self.status(ref)


async def test_a_job_that_makes_no_progress_gives_up() -> None:
    ref = TrainingJobRef(run_id="r", backend="b", metadata={"job_id": "job-7"})
    said = rf"^{QUIET}training job job-7 \(started {SECONDS} ago; running at 40 % for {SECONDS}\); gave up after"
    with pytest.raises(Stalled, match=said):
        await wait_for_job(Backend(moves=10**9), ref, Watchdog(None, 0.2))
