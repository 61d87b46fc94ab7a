"""Jobs whose rows come in parts: the weights of a job that is sent whole, whatever the order and time of the parts."""

import asyncio
import json
import random
import re
import signal
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import differences
from factories import digits_project, read_lines, write_rows
from marks import slow_but, slow_but_at
from processes import HANGS, run_project, start_project
from test_finetune import backend_of
from test_jobs import JOBS, lines, row, serving
from test_learner import LORA, make_rows, same, weights
from tiny_models import save_tiny_model

from insitu.backend.compute import PARKED
from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner, TrainedVersion
from insitu.backend.learner.parts import PartedRows
from insitu.backend.model import LoadedModel, load_model
from insitu.disk.model_files import OPTIMIZER_FILE
from insitu.errors import BackendError
from insitu.schemas.training_jobs import JobState, Retention, TrainingSettings
from insitu.training.native.backend_api import OpenJob


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")), "cpu")


def parts_of(rows: Sequence[Row], count: int = 4) -> list[list[Row]]:
    """Parts of different sizes, one of them empty; an episode's rows stay together."""
    parts: list[list[Row]] = [[] for _ in range(count + 1)]
    for index, each in enumerate(rows):
        parts[(index // 2) ** 2 % count].append(each)
    return parts


def train(learner: Learner, rows: PartedRows | Sequence[Row], arrivals: Any = (), **settings: Any) -> TrainedVersion:
    """Trains a job; `arrivals` is advanced each time the learner waits for rows."""
    steps = learner.run(TrainingSettings(**({"learning_rate": 1e-2} | settings)), rows)
    arrivals = iter(arrivals)
    while True:
        try:
            if next(steps) is PARKED:
                next(arrivals)
        except StopIteration as end:
            return end.value


def arriving(rows: PartedRows, parts: Sequence[Sequence[Row]], order: Sequence[int]) -> Any:
    for number in order:
        rows.add(number, parts[number], b"", 0)
        yield number
    rows.close()
    yield None


SETTINGS = [
    {},
    {"loss_agg_mode": "sequence", "kl": {"beta": 0.1}},
    {"loss_agg_mode": "constant", "loss_scale_factor": 40, "objective": "cispo"},
    {"importance_sampling_level": "sequence", "old_logprobs": "rollout"},
    {"truncated_importance": 2, "kl": {"beta": 0.1, "in_reward": True, "reference": "job_start"}},
    {"lora": LORA, "attention": "packed"},
    {"method": "sft", "gradient_checkpointing": True},
    {"mini_batch_size": 100},
    {"steps_per_iteration": 1, "mini_batch_size": 5, "attention": "packed"},
    {"mini_batch_size": 20},
    {"num_iterations": 2, "mini_batch_size": 10, "kl": {"beta": 0.1}, "logprobs_ahead": True},
    {"mini_batch_size": 10, "old_logprobs": "rollout", "kl": {"beta": 0.1}, "lora": LORA, "logprobs_ahead": True},
]


@pytest.mark.parametrize("settings", slow_but_at({0, 5, 9, 10}, SETTINGS), ids=str)
def test_an_open_job_trains_the_weights_of_one_that_is_sent_whole(
    loaded: LoadedModel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    parts = parts_of(make_rows(loaded.module, 16))
    ahead = {"logprobs_ahead": settings.get("logprobs_ahead", False)}
    settings = {key: value for key, value in settings.items() if key not in ahead}
    whole = train(Learner(loaded, tmp_path / "whole"), PartedRows.whole(parts, **ahead), **settings)
    single = train(Learner(loaded, tmp_path / "single"), [*chain(*parts)], **settings)
    assert whole.module is not None
    assert single.module is not None
    seconds = {"seconds": 0, "seconds_ahead": 0}
    for number in range(1 if settings else 3):
        rows, order = PartedRows(len(parts), **ahead), random.Random(number).sample(range(len(parts)), len(parts))
        trained = train(Learner(loaded, tmp_path / str(number)), rows, arriving(rows, parts, order), **settings)
        assert trained.module is not None
        assert same(weights(trained.module), weights(whole.module))
        assert {**trained.metrics, **seconds} == {**whole.metrics, **seconds}
    assert not same(weights(whole.module), weights(loaded.module))
    for key, value in single.metrics.items():
        if key not in ("seconds", "computed_tokens", "padding_tokens", "rows_without_gradient") and value is not None:
            assert whole.metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert distance(whole.module, single.module) <= 1e-5 * distance(single.module)


def distance(one: torch.nn.Module, other: torch.nn.Module | None = None) -> float:
    """The norm of the difference of their weights."""
    values, others = weights(one), weights(other) if other is not None else {}
    return sum(float((values[name] - others.get(name, 0)).double().square().sum()) for name in values) ** 0.5


# the protocol

OPEN = json.dumps({"settings": {"learning_rate": 0.01}, "num_parts": 3}).encode()
PARTS = [[row(episode=f"{part}/{number}") for number in range(4)] for part in range(3)]


def part_lines(number: int) -> bytes:
    return "\n".join(map(json.dumps, PARTS[number])).encode()


async def test_parts_come_in_any_order_and_twice(loaded: LoadedModel, tmp_path: Path) -> None:
    every = [*chain(*PARTS)]
    async with serving(loaded, tmp_path / "whole") as backend:
        _, whole = await backend.post(lines(every, {"learning_rate": 0.01}, parts=[4, 4, 4]), Idempotency_Key="run/1")
        [*_, final] = await backend.events(whole["id"])
    async with serving(loaded, tmp_path / "open") as backend:
        status, job = await backend.post(OPEN, Idempotency_Key="run/1")
        path = f"{JOBS}/{job['id']}"
        assert (status, job["open"]) == (200, True)
        status, problem = await backend.post(b"", f"{path}/close")
        assert (status, problem["error"]["code"]) == (409, "parts_missing")
        assert "lacks the parts [0, 1, 2]" in problem["error"]["message"]
        for number in (2, 0, 2, 1):
            assert (await backend.post(part_lines(number), f"{path}/parts/{number}"))[0] == 200
        status, problem = await backend.post(part_lines(1), f"{path}/parts/2")
        assert (status, problem["error"]["code"]) == (409, "part_differs")
        keep = json.dumps({"last": 2}).encode()
        assert (await backend.post(keep, f"{path}/close", Content_Type="application/json"))[1]["open"] is False
        [*_, closed] = await backend.events(job["id"])
        times = {"id": "", "checkpoint": "", "metrics": {}}
        assert {**closed, **times} == {**final, **times}
        for name in ("seconds", "seconds_ahead"):
            final["metrics"].pop(name, None)
            closed["metrics"].pop(name)
        assert closed["metrics"] == final["metrics"]
        assert (await backend.post(b"", f"{path}/close"))[1] == (await backend.get(path))[1]  # a lost response
        status, problem = await backend.post(part_lines(1), f"{path}/parts/1")
        assert (status, problem["error"]["code"]) == (409, "job_not_open")
        assert (await backend.post(OPEN, Idempotency_Key="run/1"))[1]["id"] == job["id"]
        _, again = await backend.post(lines(every, {"learning_rate": 0.01}), Idempotency_Key="run/1")
        assert (again["id"], again["body_differs"]) == (job["id"], False)


async def test_a_part_that_is_sent_again_takes_no_room(loaded: LoadedModel, tmp_path: Path) -> None:
    room = len(part_lines(0)) + len(part_lines(1)) + 10
    async with serving(loaded, tmp_path, max_bytes=room) as backend:
        _, job = await backend.post(OPEN)
        path = f"{JOBS}/{job['id']}/parts"
        for number in (0, 0, 1, 1, 0, 1):
            assert (await backend.post(part_lines(number), f"{path}/{number}"))[0] == 200
        for _ in range(2):
            status, answer = await backend.post(part_lines(2), f"{path}/2")
            assert (status, answer["error"]["param"]) == (413, "num_rows")
            assert f"have more than {room} bytes" in answer["error"]["message"]
        assert (await backend.post(b"", f"{path}/2"))[0] == 200
        assert (await backend.post(b"", f"{JOBS}/{job['id']}/close"))[1]["metrics"]["rows"] == 8


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"num_parts": 0}, "num_parts: Input should be greater than or equal to 1, not 0"),
        ({"num_parts": 2, "num_rows": 0}, "set either num_rows or, for an open job, num_parts"),
        ({}, "set either num_rows or, for an open job, num_parts"),
        ({"num_rows": 3, "parts": [1, 1]}, "parts: they have 2 rows, but num_rows is 3"),
        ({"num_parts": 2, "settings": {"method": "kto"}}, "method kto compares all rows; allowed: grpo, sft"),
    ],
)
async def test_wrong_headers_are_refused(
    loaded: LoadedModel, tmp_path: Path, header: dict[str, Any], problem: str
) -> None:
    async with serving(loaded, tmp_path) as backend:
        status, answer = await backend.post(json.dumps({"settings": {}} | header).encode())
        assert status == 400
        assert problem in answer["error"]["message"]


async def test_wrong_parts_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    async with serving(loaded, tmp_path) as backend:
        _, job = await backend.post(OPEN)
        path = f"{JOBS}/{job['id']}/parts"
        for number, body, status, problem in (
            ("3", part_lines(0), 404, "part '3' does not exist; allowed: 0 to 2"),
            ("-1", part_lines(0), 404, "part '-1' does not exist"),
            ("0", b"[]", 400, "row 1"),
            ("0", json.dumps(row(token_ids=[1])).encode(), 400, "row 1: loss_mask has 5 entries, token_ids has 1"),
        ):
            found, answer = await backend.post(body, f"{path}/{number}")
            assert (found, problem in answer["error"]["message"]) == (status, True), answer
        status, answer = await backend.post(OPEN + b"\n" + part_lines(0))
        assert (status, answer["error"]["param"]) == (400, "num_parts")
        status, answer = await backend.post(lines([row(), row()], parts=[1, 1]))
        assert (status, answer["error"]["param"]) == (400, "parts")  # an episode in two parts
        for number in range(3):
            assert (await backend.post(b"", f"{path}/{number}"))[0] == 200
        status, answer = await backend.post(b"", f"{JOBS}/{job['id']}/close")
        assert (status, answer["error"]["code"]) == (400, "empty_job")
        _, answer = await backend.post(b"", f"{JOBS}/{job['id']}/cancel")
        assert (answer["status"], answer["open"], backend.learner.version) == ("canceled", False, 0)


async def test_an_open_job_delays_no_other_policy_and_is_replaced_by_its_client(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    async with serving(loaded, tmp_path) as backend:
        _, job = await backend.post(OPEN, Idempotency_Key="run/1")
        other = Learner(loaded, tmp_path / "other", "other")
        settings = TrainingSettings(learning_rate=0.01)
        independent = backend.jobs.submit(None, settings, make_rows(loaded.module, 4), other)
        later = backend.jobs.submit(None, settings, make_rows(loaded.module, 4))
        await independent.task
        assert (independent.state.status, later.state.status) == ("completed", "pending")
        _, whole = await backend.post(lines(PARTS[0]), Idempotency_Key="run/1")
        assert whole["id"] != job["id"]
        assert (await backend.get(f"{JOBS}/{job['id']}"))[1]["status"] == "canceled"
        await later.task
        assert (await backend.events(whole["id"]))[-1]["policy_version"] == 2


async def test_what_is_kept_comes_with_the_end_of_the_upload(loaded: LoadedModel, tmp_path: Path) -> None:
    async with serving(loaded, tmp_path) as backend:
        for _ in range(4):
            _, job = await backend.post(OPEN)
            for number in range(3):
                await backend.post(part_lines(number), f"{JOBS}/{job['id']}/parts/{number}")
            keep = json.dumps({"last": 9, "optimizer": 9}).encode()
            await backend.post(keep, f"{JOBS}/{job['id']}/close", Content_Type="application/json")
            await backend.events(job["id"])
    checkpoints = await asyncio.to_thread(lambda: [*tmp_path.glob(f"checkpoints/*/{OPTIMIZER_FILE}")])
    assert len(checkpoints) == 4


async def test_parts_after_a_failed_one_wait_for_the_whole_job() -> None:
    sent: list[str] = []

    async def request(method: str, path: str, *_: Any, **__: Any) -> JobState:
        sent.append(path)
        if path.endswith("/parts/0"):
            raise BackendError("it was restarted")
        return JobState(id="j", status="running", open=True)

    job = OpenJob("run/1", 3, request)
    await job.open({}, logprobs_ahead=False)
    await asyncio.gather(*(job.add(number, []) for number in range(3)))
    assert await job.close("run/1", [0, 0, 0], Retention()) is None
    assert {*sent} <= {JOBS, *(f"{JOBS}/j/parts/{number}" for number in range(3))}


async def test_an_open_job_whose_client_is_gone_is_canceled(loaded: LoadedModel, tmp_path: Path) -> None:
    async with serving(loaded, tmp_path) as backend:
        backend.jobs.open_seconds = 0.5
        _, job = await backend.post(OPEN)
        await backend.post(part_lines(0), f"{JOBS}/{job['id']}/parts/0")
        rows = backend.jobs.get(job["id"]).rows
        heard_at = rows.heard_at
        assert (await backend.get(f"{JOBS}/{job['id']}"))[1]["open"]
        assert rows.heard_at > heard_at
        await asyncio.wait([backend.jobs.get(job["id"]).task])
        _, state = await backend.get(f"{JOBS}/{job['id']}")
        assert (state["status"], state["open"]) == ("canceled", False)
        assert "has not been heard of for 0.5 s" in state["message"]
        status, answer = await backend.post(b"", f"{JOBS}/{job['id']}/close")
        assert (status, answer["error"]["code"]) == (409, "job_not_open")


# runs

ONE_STEP = ("-o", "trainer_adapters.backend.training.mini_batch_size", "null")
STREAM = ("-o", "trainers.grpo.stream", "true")


def project(folder: Path, rows: int = 24) -> Path:
    """Episodes of very different lengths; an epoch has three parts."""
    folder.mkdir()
    digits_project(folder)
    write_rows(folder, [{"say": f"Row {number}", "pause": 0.2} for number in range(rows)])
    return folder


def whole_run(folder: Path, *options: str) -> Path:
    code, _, err = run_project(folder, *options)
    assert code == 0, err
    assert "sent whole" not in err
    return folder / "run"


def seconds_ahead(run: Path) -> list[float]:
    return [line["seconds"]["ahead"] for line in read_lines(run / "training_metrics.jsonl")]


@pytest.fixture(scope="module")
def unstreamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(project(tmp_path_factory.mktemp("unstreamed") / "project"), *ONE_STEP)


def differences_from(run: Path, other: Path, *expected: str) -> list[str]:
    lines = differences(
        run, other, {"stream", "digest", "override", "seconds_ahead"}
    )  # the digest of rows names the run
    return [line for line in lines if not line.startswith(("events.jsonl: event resumed", *expected))]


def test_a_streamed_run_is_an_unstreamed_run(tmp_path: Path) -> None:
    options = (*ONE_STEP, "-o", "finetuning.num_epochs", "1")
    unstreamed = whole_run(project(tmp_path / "unstreamed", rows=16), *options)
    run = whole_run(project(tmp_path / "project", rows=16), *options, *STREAM)
    assert differences_from(unstreamed, run) == []
    assert json.loads((run / "run.json").read_text())["stream"] is True
    assert min(seconds_ahead(run)) > 0


@pytest.mark.slow
def test_several_steps_differ_by_rounding_and_repeat(tmp_path: Path) -> None:
    first = whole_run(project(tmp_path / "a"))
    second = whole_run(project(tmp_path / "b"), *STREAM)
    assert min(seconds_ahead(second)) > 0
    one, two = ([line["loss"] for line in read_lines(run / "training_metrics.jsonl")] for run in (first, second))
    assert one == pytest.approx(two, rel=1e-3)
    killed = project(tmp_path / "c")
    with start_project(killed, *STREAM) as process:  # the job is submitted, so that it is sent whole later
        process.wait_until(lambda: progress_of(killed).get("submitted_epoch") == 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = whole_run(killed, *STREAM, "--resume")
    assert differences_from(second, again, "backend/jobs/") == []


def progress_of(folder: Path) -> dict[str, Any]:
    path = folder / "run/progress.json"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "reason"),
    slow_but(
        [("trajectory_builders.episodes.rows_per_epoch", "8", "an epoch of 32 episodes is trained in one part")],
        [
            ("finetuning.curriculum_learning.enabled", "true", "finetuning.curriculum_learning"),
            ("trajectory_builders.episodes.rows_per_epoch", "8", "an epoch of 32 episodes is trained in one part"),
            ("trainer_adapters.backend.training.old_logprobs", "rollout", "several optimizer steps, whose loss"),
            ("trajectory_builders.episodes.budget.replace", "1", "trajectory_builders.episodes.budget: which rows"),
        ],
    ),
)
def test_the_header_says_why_an_epoch_is_not_streamed(tmp_path: Path, option: str, value: str, reason: str) -> None:
    run = whole_run(project(tmp_path / "project"), *STREAM, "-o", option, value, "-o", "finetuning.num_epochs", "1")
    assert json.loads((run / "run.json").read_text())["stream"].startswith(f"no: {reason}")


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(0.2, marks=pytest.mark.slow),
        pytest.param(0.5, marks=pytest.mark.slow),
        pytest.param(0.8, marks=pytest.mark.slow),
    ],
)
def test_a_streamed_run_that_is_killed_is_resumed_to_the_bit(unstreamed: Path, tmp_path: Path, moment: float) -> None:
    folder = project(tmp_path / "project")
    journal = folder / "run/journal.jsonl"
    with start_project(folder, *ONE_STEP, *STREAM) as process:
        process.wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= moment * 24 * 4)
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = whole_run(folder, *ONE_STEP, *STREAM, "--resume")
    assert differences_from(unstreamed, run, "backend/jobs/") == []


@pytest.mark.slow
def test_a_backend_that_is_killed_while_a_job_is_open_gets_it_whole(unstreamed: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    log = folder / "run/journal.jsonl"
    with start_project(folder, *ONE_STEP, *STREAM) as process:
        process.wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 60)
        backend_of(process).kill()
        _, err = process.communicate(HANGS)
        assert process.wait() == 0, err
    assert re.search("the epoch is sent whole once it is collected: (GET|POST) /v1/train/jobs/job-", err), err
    weights = "backend/checkpoints/step_000002/model.safetensors"  # attempts that were cut off have other numbers
    assert (folder / "run" / weights).read_bytes() == (unstreamed / weights).read_bytes()
