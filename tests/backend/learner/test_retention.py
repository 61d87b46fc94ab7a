"""Which checkpoints a backend keeps: by the policy of a job, by its own, and never the one in use."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import slow_after
from tiny_models import save_tiny_model
from waiting import turns

from insitu.backend import BackendOptions
from insitu.backend.inference.sampler import GenerationRequest, SamplingParams, WeightVersion
from insitu.backend.learner.batches import Row
from insitu.backend.model import LoadedModel, load_model
from insitu.backend.server import Backend, create_backend
from insitu.disk.model_files import expired
from insitu.schemas.training_jobs import Retention, TrainingSettings
from insitu.wire.addresses import http_url
from insitu.wire.http_server import listening

ROW = {"token_ids": [1, 5, 7, 2], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -1], "advantages": 1}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("model") / "llama")), "cpu")


@contextlib.asynccontextmanager
async def running(
    loaded: LoadedModel, folder: Path, **options: Any
) -> AsyncIterator[tuple[Backend, httpx.AsyncClient]]:
    backend = create_backend(loaded, BackendOptions(model="m", threads=1, **options), folder)
    await backend.start()
    try:
        async with (
            listening(backend.app, ("127.0.0.1", 0)) as address,
            httpx.AsyncClient(base_url=http_url(*address)) as client,
        ):
            yield backend, client
    finally:
        await backend.close()


async def train(client: httpx.AsyncClient, **header: Any) -> None:
    """One job over HTTP."""
    lines = [{"settings": {"learning_rate": 0.01}, "num_rows": 1, **header}, ROW]
    body = "\n".join(map(json.dumps, lines))
    job = (await client.post("/v1/train/jobs", content=body, headers={"Content-Type": "application/x-ndjson"})).json()
    await client.get(f"/v1/train/jobs/{job['id']}/events")
    assert (await client.get(f"/v1/train/jobs/{job['id']}")).json()["status"] == "completed"


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"last": 12}, []),
        ({"last": 40}, []),
        ({"last": 1, "every": 5}, [1, 2, 3, 4, 6, 7, 8, 9, 11]),
        ({"every": 1}, []),
        ({"versions": [4, 99]}, [1, 2, 3, 5, 6, 7, 8, 9]),
        ({"after": 7}, [8, 9]),
        ({"after": 12}, []),
    ],
)
def test_a_policy_names_what_expires(policy: dict[str, Any], deleted: list[int]) -> None:
    assert expired(range(1, 13), Retention(**policy)) == deleted


@given(
    st.sets(st.integers(1, 50), min_size=1),
    st.integers(1, 9),
    st.none() | st.integers(1, 9),
    st.lists(st.integers(0, 50)),
    st.integers(0, 50),
)
def test_no_policy_deletes_the_latest_or_what_it_names(
    versions: set[int], last: int, every: int | None, named: list[int], after: int
) -> None:
    deleted = expired(versions, Retention(last=last, every=every, versions=named, after=after))
    assert max(versions) not in deleted
    assert not {*deleted} & {*named}
    assert all(version > after for version in deleted)
    assert expired(versions - {*deleted}, Retention(last=last, every=every, versions=named, after=after)) == []


@pytest.mark.slow
async def test_a_backend_without_further_instructions_does_not_fill_the_disk(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "insitu")
    async with running(loaded, tmp_path) as (backend, client):
        for _ in range(5):
            await train(client)
        assert kept(tmp_path) == [3, 4, 5]
        assert f"deleted {tmp_path}/checkpoints/step_000002" in caplog.text
        for name, status in (("policy@2", 404), ("policy@3", 200)):
            body = {"model": name, "prompt": "Hi", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == status
    async with running(loaded, tmp_path, keep_last=1, keep_every=2) as (backend, client):
        assert backend.learner.versions == [0, 3, 4, 5]
        await train(client)
        assert kept(tmp_path) == [4, 6]


@pytest.mark.slow
async def test_a_job_says_what_is_kept_of_its_run(loaded: LoadedModel, tmp_path: Path) -> None:
    async with running(loaded, tmp_path, keep_every=1) as (_, client):
        for _ in range(3):
            await train(client)
        for best in (None, 4, 4, 4):
            await train(client, keep={"last": 1, "after": 2, "versions": [best] if best else []})
        assert kept(tmp_path) == [1, 2, 4, 7]
        await train(client)
        assert kept(tmp_path) == [1, 2, 4, 7, 8]


@pytest.mark.parametrize(("keep", "with_optimizer"), slow_after(1, [({}, [4, 5]), ({"optimizer": 3}, [3, 4, 5])]))
async def test_a_job_says_how_many_optimizer_states_are_kept(
    loaded: LoadedModel, tmp_path: Path, keep: dict[str, int], with_optimizer: list[int]
) -> None:
    async with running(loaded, tmp_path) as (_, client):
        for _ in range(5):
            await train(client, keep={"last": 4, **keep})
    assert kept(tmp_path) == [2, 3, 4, 5]
    states = (tmp_path / "checkpoints").glob("step_*/optimizer.safetensors")
    assert sorted(int(path.parent.name.removeprefix("step_")) for path in states) == with_optimizer


async def test_a_version_in_use_is_not_deleted(loaded: LoadedModel, tmp_path: Path) -> None:
    """A job takes a few of the compute thread's turns, and waits for the disk; each turn samples one of 200 tokens of
    64 texts."""
    settings, keep = TrainingSettings(learning_rate=0.01), Retention(last=1)
    row = Row(np.array([1, 5, 7, 2], np.int32), np.array([2, 3]), np.full(2, -1.0), np.ones(2), "e")
    async with running(loaded, tmp_path) as (backend, client):
        for _ in range(2):
            await train(client)
        request = GenerationRequest([1, 2, 3], SamplingParams(seed=0, max_tokens=200, ignore_eos=True))
        sampling = asyncio.create_task(backend.sampler.complete([request] * 64, WeightVersion(1)))
        await turns(1)
        job = backend.jobs.submit(None, settings, [row], keep=keep)
        assert job.task is not None
        await job.task
        assert not sampling.done()
        assert kept(tmp_path) == [1, 3]
        assert {len(output.tokens) for output in await sampling} == {200}
        job = backend.jobs.submit(None, settings, [row], keep=keep)
        assert job.task is not None
        await job.task
        assert kept(tmp_path) == [4]


async def test_a_checkpoint_that_cannot_be_deleted_does_not_fail_the_job(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(loaded, tmp_path) as (_, client):
        await train(client)
        (tmp_path / "checkpoints/.step_000001.draft").write_text("in the way")  # of the folder on its way out
        await train(client, keep={"last": 1})
        assert "an old checkpoint cannot be deleted: " in caplog.text
        (tmp_path / "checkpoints/.step_000001.draft").unlink()
        await train(client, keep={"last": 1})
        assert kept(tmp_path) == [3]
