"""Batches ahead of training: the versions that they are sampled from, how old these are, and what stays loaded."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import MODEL, ROOT, digits_project, read_lines, write_rows
from fake_vllm import FakeVllm
from processes import run_project, serving
from tiny_models import save_tiny_model

from insitu.backend.compute import ComputeThread
from insitu.backend.inference.engine import Engine
from insitu.backend.inference.sampler import GenerationRequest, SamplingParams, ServedVersions, WeightVersion
from insitu.backend.model import load_model
from insitu.capture.ledger import Activity, CallLedger
from insitu.errors import BackendError
from insitu.integrations.trackers.stream import training_metrics
from insitu.runs.reader import RunReader
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import PolicyEndpoint, Trajectory, TrajectoryCollection
from insitu.training.schedule import check_sampled
from insitu.view.run_pages import one_run

CONVERSE = {"_type": "converse"}
LATEST = ("-o", "trainers.grpo.versions", "latest")


def stale(staleness: int, epochs: int, *more: str) -> tuple[str, ...]:
    key = ("-o", "trainers.grpo.staleness", str(staleness), "-o", "finetuning.num_epochs", str(epochs))
    return (*key, "-o", "trainer_adapters.backend.training.old_logprobs", "rollout", *more)


def project(folder: Path, pause: float = 0.05, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    digits_project(folder, **settings)
    write_rows(folder, [{"say": f"Row {number}", "pause": pause} for number in range(4)])
    return folder


def whole_run(folder: Path, *options: str) -> tuple[Path, str]:
    code, out, err = run_project(folder, *options)
    assert code == 0, err
    return folder / "run", out


def versions_by_epoch(run: Path) -> dict[int, list[list[int]]]:
    """For each epoch the versions of each episode's calls, in their order."""
    episodes: dict[str, list[int]] = {}
    for call in sorted(read_lines(run / "calls.jsonl.gz")[1:], key=lambda call: call["index"]):
        episodes.setdefault(call["episode"], []).append(call["policy_version"])
    by_epoch: dict[int, list[list[int]]] = {}
    for episode, versions in episodes.items():
        by_epoch.setdefault(int(episode.split("/")[1]), []).append(versions)
    return by_epoch


def check_latest(run: Path, staleness: int, epochs: int) -> None:
    """Calls are of the newest weights at their time, epochs in order, and ages as the calls say."""
    metrics = read_lines(run / "training_metrics.jsonl")
    assert [line["policy_version"] for line in metrics] == [*range(1, epochs + 1)]
    by_epoch = versions_by_epoch(run)
    for line in metrics:
        epoch = line["epoch"]
        for versions in by_epoch[epoch]:
            assert versions == sorted(versions), "a later call is of newer weights, or of the same"
            assert max(epoch - 1 - staleness, 0) <= versions[0]
            assert versions[-1] <= epoch - 1
        ages = Counter(epoch - 1 - versions[0] for versions in by_epoch[epoch])
        assert line["age"] == {str(age): count for age, count in sorted(ages.items())}
        assert line["sampled_version"] == epoch - 1 - max(ages)
    groups = [group["epoch"] for group in read_lines(run / "groups.jsonl") if "epoch" in group]
    assert groups == [epoch for epoch in range(1, epochs + 1) for _ in range(4)], "none is lost, none out of order"
    assert any(len({*versions}) > 1 for epoch in by_epoch.values() for versions in epoch), "weights changed in episodes"


@pytest.mark.slow
def test_calls_take_the_newest_weights_which_may_change_between_them(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", 0.4, workflow=CONVERSE)
    run, out = whole_run(folder, *stale(2, 8, *LATEST))
    check_latest(run, 2, 8)
    assert "versions: latest" in out
    assert "repeats: no" in out
    assert json.loads((run / "run.json").read_text())["versions"] == "latest"


@pytest.mark.slow
async def test_vllm_with_one_version_of_all_weights(tmp_path: Path) -> None:
    loaded = load_model(str(MODEL), "cpu")
    async with FakeVllm(loaded.module) as vllm:
        vllm.samples = vllm.reads_weights = True
        sampler = {"_type": "vllm", "addresses": [vllm.address]}
        folder = project(tmp_path / "project", 0.4, workflow=CONVERSE, model=str(MODEL), sampler=sampler)
        code, _, err = await asyncio.to_thread(run_project, folder, *stale(1, 5))
        assert code == 2
        assert "trainers.grpo.staleness is 1 and versions is pinned, but insitu_trainer_adapter serves" in err
        assert "set trainers.grpo.versions to latest" in err
        code, _, err = await asyncio.to_thread(run_project, folder, *stale(1, 5, *LATEST))
        assert code == 0, err
    run = folder / "run"
    check_latest(run, 1, 5)
    modules, checked, reader = {0: loaded.module}, 0, RunReader(run)
    for call in [call for group in reader.groups() for calls in reader.calls(group).values() for call in calls]:
        version, prompt, tokens = call.policy_version, call.prompt_token_ids or [], call.token_ids or []
        checkpoint = run / f"backend/checkpoints/step_{version:06d}"
        if version is None or (version and not checkpoint.exists()):
            continue
        if version not in modules:
            modules[version] = load_model(str(checkpoint), "cpu").module
        with torch.inference_mode():
            logits = modules[version](input_ids=torch.tensor([prompt + tokens])).logits[0].float()
        scores = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        expected = [float(of_token[token]) for of_token, token in zip(scores, tokens, strict=True)]
        assert call.logprobs == pytest.approx(expected, abs=1e-4), "all its tokens are of the version that it states"
        checked += 1
    assert len(modules) > 2
    assert checked > 50


def test_pinned_versions_are_refused_of_a_running_backend_whose_vllm_has_one(tmp_path: Path) -> None:
    async def train() -> tuple[int, str, str]:
        async with FakeVllm(load_model(str(MODEL), "cpu").module) as vllm:
            options = ("--model", MODEL, "--port", 0, "--sampler", "vllm", "--sampler_addresses", vllm.address)

            def on_backend() -> tuple[int, str, str]:
                with serving("backend", *options, INSITU_BACKEND_TOKEN="t") as (_, address):
                    return run_project(project(tmp_path / "project", url=address, api_key="t"), *stale(1, 3))

            return await asyncio.to_thread(on_backend)

    code, _, err = asyncio.run(train())
    assert code == 2
    assert "set trainers.grpo.versions to latest" in err


def call_of(version: int | None, model: str = "policy") -> ModelCall:
    return ModelCall(index=0, model=model, messages=[], policy_version=version, token_ids=[1], prompt_token_ids=[1])


@pytest.mark.parametrize(
    ("version", "model", "allowed"),
    [
        *((2, "policy", True), (4, "policy", True), (1, "policy", False), (5, "policy", False)),
        *((None, "policy@3", True), (None, "policy@1", False), (None, "other", False)),
    ],
)
def test_what_is_sampled_is_what_is_trained(version: int | None, model: str, allowed: bool) -> None:
    calls = [call_of(4), call_of(version, model)]
    trajectory = Trajectory(episode=[], reward=0.0, calls=calls, trained_calls=[0, 1])
    collection = TrajectoryCollection(trajectories=[[trajectory]], run_id="r")
    trainer: Any = SimpleNamespace(trajectory_builder=SimpleNamespace(stored=None))
    served = PolicyEndpoint("http://h/v1", "policy", version=4)
    if allowed:
        check_sampled(trainer, collection, served, 2)
    else:
        with pytest.raises(BackendError, match=r"is at version 4 \(allowed: from 2\); use an llm of _type: policy"):
            check_sampled(trainer, collection, served, 2)


@pytest.mark.slow
def test_metrics_of_what_overlaps(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    plain = read_lines(whole_run(folder, *stale(0, 2))[0] / "training_metrics.jsonl")
    assert {"age", "sampled_version", "groups_in_flight"}.isdisjoint(plain[0])
    assert plain[0]["seconds"].keys() == {"collect", "train", "validate"}
    run, out = whole_run(folder, *stale(1, 4))
    lines = read_lines(run / "training_metrics.jsonl")
    assert [line["age"] for line in lines] == [{"0": 16}, {"1": 16}, {"1": 16}, {"1": 16}]
    for line in lines:
        seconds = line["seconds"]
        assert seconds["idle"]["learner"] >= seconds["collect"]
        assert seconds["idle"]["sampler"] >= 0
        assert 0 <= seconds["groups_in_flight"] <= 4
    assert lines[-1]["seconds"]["groups_in_flight"] == 0, "the last epoch has none after it"
    assert "  age 1  idle: sampler " in out
    page = one_run("run", run)
    assert [line["age"] for line in page["epochs"]] == [line["age"] for line in lines]
    assert page["epochs"][1]["seconds"] == lines[1]["seconds"]
    phases = sum(line["seconds"][phase] for line in lines for phase in ("collect", "train", "validate"))
    assert page["summary"]["seconds"] == pytest.approx(phases)
    tracked = training_metrics(lines[1])
    assert tracked["train/age/1"] == 16
    assert tracked["time/idle/sampler"] == lines[1]["seconds"]["idle"]["sampler"]
    assert tracked["time/groups_in_flight"] == lines[1]["seconds"]["groups_in_flight"]


@pytest.mark.slow
def test_attempts_in_another_process_count_as_calls(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", 0.5)
    here, _ = whole_run(folder, *stale(1, 2))
    arguments = ("serve", "--config_file", "config.yml", "--port", 0)
    with serving(*arguments, folder=folder, PYTHONPATH=str(ROOT / "tests/support")) as (_, address):
        there, _ = whole_run(folder, *stale(1, 2), "-o", "finetuning.output_dir", "there", "--endpoint", address)
    there = there.with_name("there")
    assert sampled_versions(there) == sampled_versions(here) == [0, 0]
    seconds = read_lines(there / "training_metrics.jsonl")[0]["seconds"]
    assert seconds["idle"]["sampler"] < (seconds["collect"] + seconds["train"]) / 2


@pytest.mark.slow
def test_groups_in_flight_are_those_that_have_begun_and_are_not_complete(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    write_rows(folder, [{"say": "Row 0"}, {"say": "Row 1"}, {"say": "Row 2", "hang": True}])
    # row 2 hangs until it times out, in the last epoch too: that of epoch 2 is in flight while epoch 1 trains
    run, _ = whole_run(folder, *stale(1, 2), "-o", "eval.general.episode_timeout", "3")
    seconds = [line["seconds"] for line in read_lines(run / "training_metrics.jsonl")]
    assert [each["groups_in_flight"] for each in seconds] == [1, 0]


def test_seconds_with_a_call_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    calls = Activity()
    ledgers = [CallLedger(in_flight=calls) for _ in range(2)]
    site: Any = SimpleNamespace(is_explicit=True)
    first = ledgers[0].begin_call(b"a", 1, "s")
    now = 1.0
    second = ledgers[1].begin_call(b"b", 1, "s")
    now = 3.0
    assert calls.seconds == 3
    ledgers[0].record([call_of(0)], site, first)
    now = 4.0
    ledgers[1].abandon(second, "http 500", by_server=True)
    now = 10.0
    assert calls.seconds == 4
    ledgers[1].begin_call(b"b", 1, "s")
    now = 12.0
    ledgers[1].close()  # an episode that was cancelled
    ledgers[1].begin_call(b"late", 1, "s")
    now = 20.0
    assert calls.seconds == 6


def test_the_last_versions_requested_by_number_stay() -> None:
    versions = ServedVersions(kept=2)
    versions.keep_loaded(3)
    for latest in range(8):
        versions.publish(WeightVersion(latest))
        for asked in range(max(latest - 2, 0), latest + 1):
            versions.request(WeightVersion(asked))
        loaded = [version for version in range(8) if versions.stays(WeightVersion(version))]
        assert loaded == [*range(max(latest - 3, 0), latest + 1)]
    versions.keep_loaded(None)
    versions.publish(WeightVersion(8))
    versions.publish(WeightVersion(9))
    assert [version for version in range(10) if versions.stays(WeightVersion(version))] == [6, 7, 9]
    versions.request(WeightVersion(9))  # the latest: it need not stay
    versions.publish(WeightVersion(10))
    assert not versions.stays(WeightVersion(9))


async def test_a_version_in_use_is_not_read_again(tmp_path: Path) -> None:
    def load_version(weights: WeightVersion) -> Any:
        raise AssertionError(f"version {weights.version} was loaded again")

    loaded, compute = load_model(str(save_tiny_model(tmp_path / "model")), "cpu"), ComputeThread()
    engine = Engine(loaded, compute, load_version)
    compute.start()
    try:
        await engine.start()
        engine.keep_loaded(2)
        request = [GenerationRequest([1, 2], SamplingParams(seed=0, max_tokens=2))]
        for latest in range(1, 6):
            await engine.complete(request, WeightVersion(latest - 1))
            await engine.publish(WeightVersion(latest), loaded.module)
            for older in range(max(latest - 2, 0), latest):  # none is in flight when another is published
                await engine.complete(request, WeightVersion(older))
        assert len(engine.schedulers) == 3
    finally:
        compute.close()


def test_versions_that_do_not_fit_into_memory_are_refused(tmp_path: Path) -> None:
    code, _, err = run_project(project(tmp_path / "project"), *stale(10**7, 2))
    assert code == 2
    assert "each of these alone makes it fit: staleness: 0 (" in err
    lora = ("-o", "trainer_adapters.backend.training.lora", "{rank: 1}")
    code, _, err = run_project(project(tmp_path / "project"), *stale(10**9, 2, *lora))
    assert code == 2
    assert "each of these alone makes it fit: staleness: 0 (" in err


@pytest.mark.slow
def test_the_checkpoints_of_the_last_versions_are_kept(tmp_path: Path) -> None:
    run, _ = whole_run(project(tmp_path / "project"), *stale(3, 8))
    names = sorted(path.name for path in (run / "backend/checkpoints").iterdir())
    assert names == [f"step_{version:06d}" for version in range(4, 9)]


def sampled_versions(run: Path) -> list[int]:
    return [line["sampled_version"] for line in read_lines(run / "training_metrics.jsonl")]


def test_after_a_warm_up_its_version_is_the_first(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    shown = {"messages": [{"role": "user", "content": "Row 1"}, {"role": "assistant", "content": "99"}]}
    (folder / "shown.jsonl").write_text(json.dumps(shown))
    warm_up = ("-o", "trainers.grpo.sft", "{rows: shown.jsonl, epochs: 2}")
    run, _ = whole_run(folder, *stale(2, 4, *warm_up))
    assert sampled_versions(run) == [1, 1, 1, 2]
    assert [line["age"] for line in read_lines(run / "training_metrics.jsonl")] == [{str(n): 16} for n in (0, 1, 2, 2)]


@pytest.mark.slow
def test_a_running_backend_may_have_been_trained_before(tmp_path: Path) -> None:
    options = {"model": MODEL, "port": 0, "output_dir": tmp_path / "backend"}
    arguments = [text for key, value in options.items() for text in (f"--{key}", value)]
    with serving("backend", *arguments, INSITU_BACKEND_TOKEN="t") as (_, address):
        folder = project(tmp_path / "project", url=address, api_key="t")
        whole_run(folder, *stale(0, 2))
        run, _ = whole_run(folder, *stale(1, 4))
        assert sampled_versions(run) == [2, 2, 3, 4]
        assert {version for each in versions_by_epoch(run)[1] for version in each} == {2}
        whole_run(folder, *stale(1, 6), "--resume")
        assert sampled_versions(run) == [2, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_more_epochs_when_the_run_is_continued(tmp_path: Path) -> None:
    whole, _ = whole_run(project(tmp_path / "whole"), *stale(2, 6))
    folder = project(tmp_path / "continued")
    whole_run(folder, *stale(2, 3))
    run, _ = whole_run(folder, *stale(2, 6), "--resume")
    keys = ("epoch", "sampled_version", "policy_version", "avg_reward", "loss", "grad_norm", "age")
    lines = [
        [[line[key] for key in keys] for line in read_lines(each / "training_metrics.jsonl")] for each in (whole, run)
    ]
    assert lines[0] == lines[1]
