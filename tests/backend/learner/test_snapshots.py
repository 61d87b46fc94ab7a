"""Versions between two snapshots: their jobs are logged, and trained again to the same bits where they are needed."""

import asyncio
import gzip
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from marks import slow_after
from test_learner import LORA, make_rows, same, weights
from test_open_jobs import parts_of
from test_retention import ROW, kept, running
from tiny_models import save_tiny_model
from torch.optim.optimizer import register_optimizer_step_post_hook

from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner, Learners, TrainedVersion
from insitu.backend.learner.parts import PartedRows
from insitu.backend.model import LoadedModel, load_model
from insitu.disk.model_files import OPTIMIZER_FILE
from insitu.errors import BackendError
from insitu.runs.checkpoints import checkpoint_of_run
from insitu.schemas.training_jobs import KLSettings, Retention, TrainingSettings

THIRD = Retention(last=3, snapshots=3)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("model") / "llama")), "cpu")


def train(learner: Learner, rows: Sequence[Row] | PartedRows, steps: int | None = None, **settings: Any) -> Any:
    """Trains a job and returns its version; None if it is closed after so many steps."""
    job = learner.run(TrainingSettings(**({"learning_rate": 1e-2, "mini_batch_size": 4} | settings)), rows, key="k")
    try:
        while steps is None or steps > 0:
            next(job)
            steps = steps and steps - 1
    except StopIteration as end:
        return end.value
    job.close()
    return None


def opened(loaded: LoadedModel, folder: Path, keep: Retention = THIRD) -> Learner:
    learner = Learners(Learner(loaded, folder)).default
    learner.keep = keep
    return learner


def logged(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "job_log").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("lora", slow_after(1, [None, LORA]))
def test_training_goes_on_from_a_snapshot_and_the_jobs_since(
    loaded: LoadedModel, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    """To the same bits, in another process or after a job that failed, and of jobs in parts."""
    rows = make_rows(loaded.module)
    jobs = [rows, rows[4:], PartedRows.whole(parts_of(rows)), rows[:6], rows[2:]]
    settings = [{"lora": lora, "mini_batch_size": None if number == 2 else 4, "seed": number} for number in range(5)]
    every, third = (
        opened(loaded, tmp_path / name, keep) for name, keep in (("a", Retention(snapshots=1)), ("b", THIRD))
    )
    expected: list[TrainedVersion] = []
    for job, chosen in zip(jobs, settings, strict=True):
        expected.append(train(every, job, **chosen))
        trained = train(third, job, **chosen)
        assert same(weights(trained.module), weights(expected[-1].module))
        assert trained.module is third.load_version(trained.version), "it is served from memory"
        del trained
    third.saved.wait()
    assert (kept(tmp_path / "b"), logged(tmp_path / "b")) == ([3], [1, 2, 4, 5])
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    (tmp_path / "c/job_log/.step_000006.draft").mkdir()  # of a process that was killed
    again = opened(loaded, tmp_path / "c")
    assert again.versions == [0, 1, 2, 3, 4, 5]
    assert [job.job.key for job in again.earlier_jobs] == ["k"] * 5
    for version in (4, 5, 1):
        assert same(weights(again.load_version(version)), weights(expected[version - 1].module))
    assert train(third, rows, steps=2, lora=lora) is None
    last = train(every, rows, lora=lora).module
    for learner, folder in ((third, "b"), (again, "c")):
        assert same(weights(train(learner, rows, lora=lora).module), weights(last))
        learner.saved.wait()
        learner.saved.delete(1)
        learner.saved.delete(2)
        assert learner.saved.expired(Retention(last=2)) == [4], "version 5 is trained again from 3"
        learner.saved.delete(4)
        learner.saved.prune(2)
        assert (kept(tmp_path / folder), logged(tmp_path / folder)) == ([3, 6], [4, 5])


def test_the_next_step_waits_until_the_snapshot_is_written(loaded: LoadedModel, tmp_path: Path) -> None:
    rows, stepped, early = make_rows(loaded.module), threading.Event(), list[bool]()
    every, learner = (
        opened(loaded, tmp_path / name, Retention(snapshots=n, every=1)) for name, n in (("a", 1), ("b", 2))
    )
    for job in range(2):
        assert same(weights(train(learner, rows).module), weights(train(every, rows).module))
        if not job:
            hook = register_optimizer_step_post_hook(lambda *_: stepped.set())
            learner.saved.begin(1, lambda: early.append(stepped.wait(0.3)), is_snapshot=False)
    hook.remove()
    assert early == [False]
    learner.saved.wait()
    for version in (1, 2):
        name = f"checkpoints/step_00000{version}/{OPTIMIZER_FILE}"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_damaged_job_is_named(loaded: LoadedModel, tmp_path: Path) -> None:
    train(opened(loaded, tmp_path), make_rows(loaded.module))
    path = tmp_path / "job_log/step_000001/rows.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(BackendError, match=r"job_log/step_000001/rows\.safetensors is damaged"):
        opened(loaded, tmp_path).load_version(1)


def test_a_job_that_is_trained_again_to_other_weights_is_named(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with another processor. A reference of a package may be any version, so its jobs are not logged."""
    train(opened(loaded, tmp_path), make_rows(loaded.module))
    opened(loaded, tmp_path).load_version(1)
    assert "other weights" not in caplog.text
    path = tmp_path / "job_log/step_000001/training.json"
    record = json.loads(path.read_text())
    record["job"]["weights"] = "0" * 16
    path.write_text(json.dumps(record))
    learner = opened(loaded, tmp_path)
    learner.load_version(1)
    assert "version 1, trained again, has other weights than it had" in caplog.text
    for reference, is_logged in (("initial", True), ("job_start", True), ("two_versions_ago", False)):
        kl = KLSettings().model_copy(update={"beta": 0.1, "reference": reference})
        assert learner.snapshots.log_jobs(TrainingSettings().model_copy(update={"kl": kl}), THIRD) is is_logged


def test_a_version_is_deleted_while_it_is_written(loaded: LoadedModel, tmp_path: Path) -> None:
    learner, begin = opened(loaded, tmp_path), threading.Event()
    for _ in range(2):
        train(learner, make_rows(loaded.module))
    learner.saved.begin(2, lambda: begin.wait(0.3), is_snapshot=False)
    learner.write(1)
    learner.saved.delete(1)
    learner.saved.wait()
    again = opened(loaded, tmp_path)
    assert (kept(tmp_path), again.versions, len(again.earlier_jobs)) == ([], [0, 2], 1), "it stays deleted"
    assert same(weights(again.load_version(2)), weights(learner.load_version(2)))


@pytest.mark.slow
def test_snapshots_follow_from_bytes_and_tokens(loaded: LoadedModel, tmp_path: Path) -> None:
    """Equal runs have equal ones, also one that was killed."""
    rows, settings, written = make_rows(loaded.module), TrainingSettings(), dict[str, list[int]]()
    for name in ("a", "b"):
        learner = opened(loaded, tmp_path / name, Retention())
        assert learner.snapshots.size == 12 * sum(parameter.numel() for parameter in loaded.module.parameters())
        assert learner.snapshots.tokens_between == 16_000, "12 bytes a parameter, 400 operations a byte, a twentieth"
        assert not learner.snapshots.log_jobs(settings, Retention()), "it is small"
        assert learner.snapshots.log_jobs(settings, THIRD)
        for job in range(8):
            if not job or (name == "b" and job in (2, 6)):
                learner = opened(loaded, tmp_path / name, Retention())
                learner.snapshots.small, learner.snapshots.tokens_between = 0, 800
                assert learner.snapshots.log_jobs(settings, Retention())
                assert not learner.snapshots.log_jobs(TrainingSettings(lora=LORA), Retention())
            trained = train(learner, rows)
        learner.saved.wait()
        written[name] = kept(tmp_path / name)
    total = json.loads((tmp_path / "a/job_log/step_000008/training.json").read_text())["tokens"]
    assert total == 8 * trained.metrics["computed_tokens"]
    assert 0 < len(written["a"]) == total // 800 < 8
    assert written["a"] == written["b"]


async def submit(client: httpx.AsyncClient, key: str, **keep: Any) -> dict[str, Any]:
    lines = [{"settings": {"learning_rate": 0.01}, "num_rows": 1, "keep": {"snapshots": 3, **keep}}, ROW]
    body = gzip.compress("\n".join(map(json.dumps, lines)).encode())
    headers = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip", "Idempotency-Key": key}
    job = (await client.post("/v1/train/jobs", content=body, headers=headers)).json()
    await client.get(f"/v1/train/jobs/{job['id']}/events")
    state: dict[str, Any] = (await client.get(f"/v1/train/jobs/{job['id']}")).json()
    assert state["status"] == "completed"
    return state


async def complete(client: httpx.AsyncClient, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": "Hi", "max_tokens": 8, "seed": 1, "logprobs": 1}
    answer = (await client.post("/v1/completions", json=body)).json()
    return answer.get("policy_version"), answer["choices"] if "choices" in answer else answer["error"]["message"]


async def test_a_backend_that_was_killed_serves_what_it_had(loaded: LoadedModel, tmp_path: Path) -> None:
    async with running(loaded, tmp_path / "a") as (backend, client):
        states = [await submit(client, f"run/{number}") for number in range(1, 6)]
        answers = {model: await complete(client, model) for model in ("policy", "policy@3", "policy@4")}
        assert answers["policy"][0] == 5
        backend.learner.saved.wait()
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # as a process that is killed leaves it
        assert kept(tmp_path / "b") == [3]
    assert kept(tmp_path / "a") == [3, 5], "the last version is written when the backend is closed"
    assert (tmp_path / "a/checkpoints/step_000005" / OPTIMIZER_FILE).exists()
    for folder in (tmp_path / "b", tmp_path / "a"):
        async with running(loaded, folder) as (backend, client):
            for model, answer in answers.items():
                assert await complete(client, model) == answer
            again = await submit(client, "run/5")
            changed = {"checkpoint": str(folder / "checkpoints/step_000005")}
            assert (again, backend.learner.version) == (states[4] | changed, 5)
            assert (await submit(client, "run/6"))["policy_version"] == 6
            backend.learner.saved.wait()
            assert 6 in kept(folder)
            assert (await complete(client, "policy@2"))[1].startswith("no such model: 'policy@2'; known models: ")


async def test_a_checkpoint_is_written_on_request(loaded: LoadedModel, tmp_path: Path) -> None:
    write = "/v1/train/versions/{}/write"
    async with running(loaded, tmp_path) as (backend, client):
        for number in (1, 2):
            await submit(client, f"run/{number}")
        served = {number: weights(backend.learner.load_version(number)) for number in (1, 2)}
        assert (await client.post(write.format(1))).json() == {
            "version": 1,
            "checkpoint": str(tmp_path / "checkpoints/step_000001"),
        }
        assert kept(tmp_path) == [1]
        assert not (tmp_path / "checkpoints/step_000001" / OPTIMIZER_FILE).exists()
        both = (client.post(write.format(2), params={"complete": value}) for value in ("false", "true"))
        await asyncio.gather(*both)
        assert (tmp_path / "checkpoints/step_000002" / OPTIMIZER_FILE).exists()
        for number, expected in served.items():
            assert same(weights(load_model(str(tmp_path / f"checkpoints/step_00000{number}"), "cpu").module), expected)
        for number, says in ((7, "version 7 does not exist; available: 0, 1, 2"), ("x", "a version is a number")):
            answer = await client.post(write.format(number))
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, says)


def test_a_version_without_a_checkpoint_is_refused_by_name(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    learner = opened(loaded, tmp_path / "backend", Retention(snapshots=2))
    for _ in range(3):
        train(learner, make_rows(loaded.module))
    learner.saved.wait()
    best = {"epoch": 3, "avg_reward": 1.0, "checkpoint": "backend/checkpoints/step_000003"}
    (tmp_path / "best.json").write_text(json.dumps(best))
    says = "step_000003 was not written: only its job is logged; checkpoints there: step_000002 "
    for name in ("step_000003", "best"):
        with pytest.raises(Exception, match=says):
            checkpoint_of_run(tmp_path, name, "--checkpoint")
    assert checkpoint_of_run(tmp_path, "latest", "--checkpoint").name == "step_000002"


def test_a_canceled_open_job_leaves_nothing_to_the_next_one(loaded: LoadedModel, tmp_path: Path) -> None:
    """Which has other settings: its weights are those of a learner that has never seen the canceled one."""
    rows = make_rows(loaded.module, 8)
    canceled, fresh = (opened(loaded, tmp_path / name, Retention()) for name in ("canceled", "fresh"))
    part = PartedRows(2)
    part.add(0, rows[:4], b"", 0)
    assert train(canceled, part, steps=20, lora=LORA) is None
    first, second = (train(learner, rows) for learner in (canceled, fresh))
    assert same(weights(first.module), weights(second.module))
    assert {path.name for path in first.checkpoint.iterdir()} == {path.name for path in second.checkpoint.iterdir()}
