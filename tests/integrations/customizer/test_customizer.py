"""Training on NeMo Customizer, through the official SDKs against a local implementation of the services."""

import asyncio
import io
import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import customizer_project, read_lines
from fake_nemo import CONFIG, FakeNeMo
from marks import slow_after, slow_but, slow_but_at
from pairs_plugin import pairs_of
from rich.console import Console
from waiting import until

from insitu.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    InsituError,
    JobFailed,
    PluginError,
    RequestRefused,
    TrajectoryError,
)
from insitu.integrations.customizer import services as services_module
from insitu.integrations.customizer.components import (
    NeMoCustomizerTrainer,
    NeMoCustomizerTrainerAdapter,
    NeMoCustomizerTrainerAdapterConfig,
    NeMoCustomizerTrainerConfig,
)
from insitu.plugin_api import TrainingJobRef, TrainingJobStatus, TrajectoryBuilder, TrajectoryCollection
from insitu.schemas.finetuning import FinetuneConfig, FinetuneRunConfig, TrainingStatusEnum
from insitu.training.interfaces import SingleJobTrainer
from insitu.training.preference_builders import DPOTrajectoryBuilderConfig
from insitu.training.runtime import finetuning_main

TOKEN = "hf_very_secret"


pytestmark = pytest.mark.usefixtures("pauses")


@pytest.fixture(scope="module")
def services() -> Iterator[FakeNeMo]:
    with FakeNeMo() as nemo:
        yield nemo


@pytest.fixture
def nemo(services: FakeNeMo) -> FakeNeMo:
    services.clear()
    return services


class Run:
    """One run: its statuses, what it has printed, and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.console = Console(file=io.StringIO(), width=200)
        self.statuses: list[TrainingJobStatus] = []

    async def finish(self, file: Path, **options: bool) -> "Run":
        self.statuses = await finetuning_main(FinetuneRunConfig(config_file=file, **options), self.console)
        return self

    @property
    def printed(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


async def run(folder: Path, nemo: FakeNeMo, **blocks: Any) -> Run:
    return await Run(folder).finish(customizer_project(folder, nemo, **blocks))


async def resume(folder: Path, nemo: FakeNeMo, force: bool = False, **blocks: Any) -> Run:
    return await Run(folder).finish(customizer_project(folder, nemo, **blocks), resume=True, force=force)


def adapter_of(nemo: FakeNeMo, **options: Any) -> NeMoCustomizerTrainerAdapter:
    """An adapter as a plugin's trainer would use it."""
    hosts = {"entity_host": nemo.entity_host, "datastore_host": nemo.datastore_host}
    config = {"namespace": "games", "customization_config": CONFIG, "poll_interval_seconds": 0.02, **hosts, **options}
    return NeMoCustomizerTrainerAdapter(NeMoCustomizerTrainerAdapterConfig(**config))


def pairs(rows: int = 5, epoch: int | None = 1, run_id: str = "r1") -> TrajectoryCollection:
    groups = [pairs_of({"id": n, "question": f"{n}?", "answers": ["a", "b"]}) for n in range(rows)]
    return TrajectoryCollection(trajectories=groups, run_id=run_id, epoch=epoch)


async def test_a_run_collects_uploads_trains_and_reports(tmp_path: Path, nemo: FakeNeMo) -> None:
    done = await run(tmp_path, nemo, adapter={"hf_token": TOKEN}, trainer={"num_runs": 2})
    [status] = done.statuses
    assert (status.backend, status.status, status.progress) == ("nemo-customizer", TrainingStatusEnum.COMPLETED, 100.0)

    [job] = nemo.jobs.values()
    assert job["hyperparameters"] == {
        "training_type": "dpo",
        "finetuning_type": "all_weights",
        "epochs": 3,
        "batch_size": 4,
        "learning_rate": 5e-5,
        "seed": 3,
        "dpo": {
            "ref_policy_kl_penalty": 0.1,
            "preference_loss_weight": 1.0,
            "preference_average_log_probs": False,
            "sft_loss_weight": 0.0,
        },
    }
    [(dataset, repository)] = nemo.repositories.items()
    assert dataset == "games/nat-dpo"
    assert nemo.datasets[dataset]["files_url"] == f"hf://datasets/{dataset}"
    assert len(repository.commits) == 1
    training, validation = nemo.records(dataset, "training"), nemo.records(dataset, "validation")
    assert (len(training), len(validation)) == (12, 3)  # three pairs of each of five turns, once
    assert {"prompt": "0 + 1 =", "chosen_response": "1", "rejected_response": "0"} in [*training, *validation]
    local = done.folder / "dataset" / dataset.partition("/")[2]
    assert (local / "training/training_file.jsonl").read_bytes() == repository.files["training/training_file.jsonl"]
    assert nemo.authorizations == {("entities", None), ("datastore", f"Bearer {TOKEN}")}

    history = done.json("collection_history.json")
    assert [(r["run"], r["num_trajectories"], r["num_groups"]) for r in history] == [(1, 15, 5), (2, 15, 5)]
    assert read_lines(done.folder / "data_collection_progress.jsonl") == history
    final = done.json("final_metrics.json")
    assert (final["status"], final["error"], final["collections_failed"]) == ("completed", None, 0)
    assert final["pairs"] == {"collected": 30, "trained": 15}
    assert final["dropped"] == {"duplicate_pair": 15}
    assert final["job"]["output_model"] == job["output_model"]
    assert re.fullmatch(rf"{dataset}-[0-9a-f]{{12}}@cust-0", job["output_model"])
    assert (final["job"]["train_loss"], final["job"]["val_loss"]) == (0.25, 0.5)
    assert "training on 15 of 30 pairs; left out: 15 duplicate_pair" in done.printed
    said = [line for line in done.printed.splitlines() if line.startswith("job cust-0: ")]
    states = ["pending", "running", "running, 50 %"]
    assert said == [f"job cust-0: {state}" for state in states]


async def test_each_run_has_its_own_dataset_job_and_model(tmp_path: Path, nemo: FakeNeMo) -> None:
    for _ in range(2):
        await run(tmp_path, nemo, adapter={"dataset_name": "moves"})
        (tmp_path / "run/progress.json").write_text("{")  # damaged, which does not matter to a new run
    assert len(nemo.jobs) == len(nemo.repositories) == len(nemo.datasets) == 2
    assert len({job["output_model"].split("@")[0] for job in nemo.jobs.values()}) == 2
    first, second = nemo.datasets
    assert first == "games/moves"
    assert re.fullmatch(r"games/moves-[0-9a-f]{12}", second)
    assert (tmp_path / "run.1/final_metrics.json").exists()


async def test_sft_sends_prompts_and_completions(tmp_path: Path, nemo: FakeNeMo) -> None:
    options = {"hyperparameters": {"training_type": "sft", "finetuning_type": "lora", "epochs": 1}}
    await run(tmp_path, nemo, adapter=options)
    [job] = nemo.jobs.values()
    assert "dpo" not in job["hyperparameters"]
    [dataset] = nemo.repositories
    records = [*nemo.records(dataset, "training"), *nemo.records(dataset, "validation")]
    assert {"prompt": "4 + 1 =", "completion": "5"} in records
    assert len(records) == 10  # the best answer of each turn is chosen twice, and sent once


async def test_full_history_and_a_folder_for_the_files(tmp_path: Path, nemo: FakeNeMo) -> None:
    await run(tmp_path, nemo, adapter={"use_full_message_history": True, "dataset_output_dir": str(tmp_path / "files")})
    [dataset] = nemo.repositories
    assert nemo.records(dataset, "training")[0]["prompt"][0] == {"role": "system", "content": "Add."}
    written = sorted(path.name for path in (tmp_path / "files").glob("*/*/*"))
    assert written == ["training_file.jsonl", "validation_file.jsonl"]


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # of huggingface-hub
async def test_files_that_the_data_store_keeps_in_lfs(tmp_path: Path) -> None:
    with FakeNeMo(lfs_bytes=1) as nemo:
        await run(tmp_path, nemo)
        assert len(nemo.objects) == 2
        assert [job["problem"] for job in nemo.jobs.values()] == [None]


async def test_a_sample_of_the_pairs_with_their_duplicates(tmp_path: Path, nemo: FakeNeMo) -> None:
    done = await run(tmp_path, nemo, trainer={"num_runs": 2, "deduplicate_pairs": False, "max_pairs": 20})
    final = done.json("final_metrics.json")
    assert (final["pairs"], final["dropped"]) == ({"collected": 30, "trained": 20}, {"max_pairs": 10})


async def test_a_collection_that_fails(tmp_path: Path, nemo: FakeNeMo) -> None:
    failing = {"failing_runs": [2]}
    with pytest.raises(PluginError, match="the game server is gone"):
        await run(tmp_path, nemo, trainer={"num_runs": 3}, builder=failing)
    assert not nemo.jobs
    final = json.loads((tmp_path / "run/final_metrics.json").read_text())
    assert final["status"] is None
    assert "the game server is gone" in final["error"]
    assert (final["collections"], final["collections_failed"]) == (2, 1)

    done = await run(tmp_path, nemo, trainer={"num_runs": 3, "continue_on_collection_error": True}, builder=failing)
    assert done.json("final_metrics.json")["collections_failed"] == 1
    assert "collection 2/3 FAILED: ValueError: the game server is gone" in done.printed
    trainer = {"num_runs": 2, "continue_on_collection_error": True}
    with pytest.raises(TrajectoryError, match="all 2 collections failed; the last: the game server is gone"):
        await run(tmp_path, nemo, trainer=trainer, builder={"failing_runs": [1, 2]})


# faults of the services

EVERYWHERE = [
    "GET /v1/namespaces/",
    "GET /v1/datastore/namespaces/",
    "POST /v1/namespaces",
    "POST /v1/datastore/namespaces",
    "GET /v1/customization/configs/",
    "GET /v1/customization/jobs$",
    "POST /v1/datasets",
    "POST /v1/hf/api/repos/create",
    "POST .*/preupload/",
    "POST .*/commit/",
    "POST /v1/customization/jobs$",
    "GET /v1/customization/jobs/",
    "POST /v1/deployment/",
    "GET /v1/deployment/",
]


@pytest.mark.parametrize("request_pattern", slow_after(4, EVERYWHERE))
async def test_a_transient_failure_of_any_request_is_survived(
    tmp_path: Path, nemo: FakeNeMo, request_pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    nemo.fail(request_pattern, 503, times=2)
    done = await run(tmp_path, nemo, adapter={"deploy_on_completion": True})
    assert done.json("final_metrics.json")["status"] == "completed"
    assert len(nemo.jobs) == len(nemo.deployments) == 1
    assert all(fault.times == 0 for fault in nemo.faults)


CREATIONS = ["POST /v1/namespaces", "POST /v1/datastore/", "POST /v1/datasets", "repos/create", "commit"]


@pytest.mark.parametrize(
    "request_pattern",
    slow_but(["POST /v1/datastore/", "POST .*jobs$"], [*CREATIONS, "POST .*jobs$", "POST .*deployments"]),
)
async def test_a_lost_reply_creates_nothing_twice(
    tmp_path: Path, nemo: FakeNeMo, request_pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    nemo.fail(request_pattern, lost=True)
    await run(tmp_path, nemo, adapter={"deploy_on_completion": True})
    assert len(nemo.jobs) == len(nemo.datasets) == len(nemo.repositories) == len(nemo.deployments) == 1
    assert nemo.faults[0].times == 0


@pytest.mark.parametrize(
    ("request_pattern", "status", "error", "message"),
    slow_after(
        7,
        [
            ("GET /v1/namespaces/", 401, RequestRefused, "namespace games at HOST: made to fail with 401 .status 401."),
            ("GET /v1/datastore/", 401, RequestRefused, "made to fail with 401 .status 401.; check hf_token"),
            ("repos/create", 403, RequestRefused, r"dataset games/nat-dpo at .*status 403.; check hf_token"),
            (
                "GET /v1/customization/configs",
                404,
                ConfigError,
                "customization_config 'meta/llama.*' does not exist at",
            ),
            (
                "POST .*jobs$",
                422,
                RequestRefused,
                r"customization job games/nat-dpo-\w+ at HOST: made to fail with 422",
            ),
            (
                "GET .*jobs/",
                401,
                RequestRefused,
                "customization job cust-0 at HOST: made to fail with 401 .status 401.$",
            ),
            ("GET .*jobs/", 404, JobFailed, "job cust-0 no longer exists at HOST"),
        ],
    ),
)
async def test_a_refusal_ends_the_run_with_its_reason(
    tmp_path: Path, nemo: FakeNeMo, request_pattern: str, status: int, error: type[Exception], message: str
) -> None:
    nemo.fail(request_pattern, status, times=100)
    with pytest.raises(error, match=message.replace("HOST", nemo.entity_host)) as raised:
        await run(tmp_path, nemo, adapter={"hf_token": TOKEN})
    assert TOKEN not in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_the_status_may_fail_a_number_of_times_in_a_row(
    tmp_path: Path, nemo: FakeNeMo, caplog: pytest.LogCaptureFixture
) -> None:
    nemo.script = ["running", "running", "running", "completed"]
    nemo.fail("GET .*jobs/", 429, times=2, **{"Retry-After": "0.01"})
    await run(tmp_path, nemo, adapter={"max_consecutive_status_failures": 3})
    nemo.fail("GET .*jobs/", 500, times=3)
    expected = r"job cust-1: 3 status requests in a row failed .*; it continues at .*; the last error: .*status 500"
    with pytest.raises(BackendUnavailable, match=expected):
        await run(tmp_path, nemo, adapter={"max_consecutive_status_failures": 3})
    assert nemo.requested("cancel") == 0
    done = await resume(tmp_path, nemo, adapter={"max_consecutive_status_failures": 4})
    assert len(nemo.jobs) == 2
    assert "continues: its pairs have been collected" in done.printed
    assert done.json("final_metrics.json")["status"] == "completed"


@pytest.mark.parametrize(
    "pattern", slow_but_at({3}, ["GET /v1/namespaces", "GET /v1/datastore/", "GET .*/configs/", "repos/create"])
)
async def test_a_web_server_of_another_kind_is_not_taken_for_the_services(
    tmp_path: Path, nemo: FakeNeMo, pattern: str
) -> None:
    nemo.fail(pattern, 200, times=100, page="<html>Welcome!</html>")
    with pytest.raises(BackendError, match=r"at http://127.0.0.1:\d+: .*; is it the right server\?$"):
        await run(tmp_path, nemo)
    assert not nemo.jobs


@pytest.mark.parametrize(
    ("script", "message"),
    slow_after(
        1,
        [
            (["created", "running", "failed"], "job cust-0 ended as failed: Failed: out of memory"),
            (["running", "cancelling", "cancelled"], "job cust-0 ended as canceled: no reason given"),
        ],
    ),
)
async def test_a_job_that_does_not_complete(tmp_path: Path, nemo: FakeNeMo, script: list[Any], message: str) -> None:
    nemo.script = script
    with pytest.raises(JobFailed, match=message):
        await run(tmp_path, nemo)
    final = json.loads((tmp_path / "run/final_metrics.json").read_text())
    assert final["status"] == script[-1].replace("cancelled", "canceled")
    assert message in final["error"]
    nemo.script = ["completed"]
    done = await run(tmp_path, nemo)  # a new run, which collects again
    assert done.json("final_metrics.json")["job"]["job_id"] == "cust-1"


async def test_progress_is_unknown_until_the_service_says_it(tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.script = ["created", ("running", None), ("running", 12.5), ("running", 140), "unknown", "completed"]
    adapter = adapter_of(nemo)
    await adapter.initialize(FinetuneConfig(output_dir=tmp_path))
    ref = await adapter.submit(pairs())
    seen = [await adapter.status(ref) for _ in nemo.jobs["cust-0"]["script"][:]]
    names = [(status.status.value, status.progress) for status in seen]
    running = [("running", None), ("running", 12.5), ("running", 100.0), ("running", None)]
    assert names == [("pending", None), *running, ("completed", 100.0)]
    assert await adapter.wait_until_complete(ref, poll_interval=0.01) == seen[-1]
    await adapter.close()


async def test_a_token_that_expires_while_the_records_are_uploaded(
    tmp_path: Path, nemo: FakeNeMo, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    nemo.token = TOKEN
    adapter = adapter_of(nemo, hf_token=TOKEN)
    try:
        await adapter.initialize(FinetuneConfig(output_dir=tmp_path))
        assert await adapter.is_healthy()
        nemo.token = "another"
        assert not await adapter.is_healthy()
        with pytest.raises(RequestRefused, match=r"the token has expired.*check hf_token") as raised:
            await adapter.submit(pairs())
        assert TOKEN not in f"{raised.value!r} {adapter.config!r} {adapter.training_settings()}"
        assert TOKEN not in "".join(
            record.getMessage() for record in caplog.records if record.name.startswith("insitu")
        )
        nemo.token = TOKEN
        await adapter.submit(pairs())  # continues with the dataset that is registered already
        assert len(nemo.datasets) == len(nemo.jobs) == 1
    finally:
        nemo.token = ""
        await adapter.close()


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # of huggingface-hub
@pytest.mark.parametrize("lfs_bytes", slow_after(1, [1, 10_000_000]), ids=["large files", "small files"])
async def test_the_login_of_the_user_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lfs_bytes: int
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_login")
    with FakeNeMo(lfs_bytes=lfs_bytes) as nemo:
        await run(tmp_path, nemo)
        assert bool(nemo.objects) == (lfs_bytes == 1)
    assert {store for store, _ in nemo.authorizations} == {"entities", "datastore"}
    assert {value for _, value in nemo.authorizations} <= {None, ""}


async def test_health_asks_both_services(tmp_path: Path, nemo: FakeNeMo) -> None:
    adapter = adapter_of(nemo)
    assert not await adapter.is_healthy()  # the namespace is missing
    await adapter.initialize(FinetuneConfig(output_dir=tmp_path))
    for pattern in ("GET /v1/namespaces", "GET /v1/datastore", "GET /v1/customization/configs"):
        assert await adapter.is_healthy()
        nemo.fail(pattern, 500)
        assert not await adapter.is_healthy()
    await adapter.close()
    for wrong in ({"entity_host": "http://127.0.0.1:1"}, {"datastore_host": "http://127.0.0.1:1"}):
        unreachable = NeMoCustomizerTrainerAdapter(adapter.config.model_copy(update=wrong))
        assert not await unreachable.is_healthy()
        with pytest.raises(BackendUnavailable, match=r"127.0.0.1:1: .*refused"):  # at once: nothing has been reached
            await unreachable.initialize(FinetuneConfig(output_dir=tmp_path))
        await unreachable.close()


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # of huggingface-hub
@pytest.mark.parametrize("lfs_bytes", slow_after(1, [1, 10_000_000]))
async def test_an_upload_that_is_never_answered_ends(tmp_path: Path, lfs_bytes: int) -> None:
    with FakeNeMo(lfs_bytes=lfs_bytes) as nemo:
        adapter = adapter_of(nemo, request_timeout=0.5, retry_timeout=0)
        await adapter.initialize(FinetuneConfig(output_dir=tmp_path))
        nemo.hold("/hf/lfs/" if lfs_bytes == 1 else "/commit/")
        try:
            with pytest.raises(
                BackendUnavailable, match=r"dataset games/nat-dpo at .*: no answer for 0.5 s .request_time"
            ):
                await adapter.submit(pairs())
        finally:
            nemo.release()
        assert not nemo.jobs
        await adapter.close()


@pytest.mark.parametrize("state", slow_after(1, [None, "unknown", "reticulating"]))
async def test_a_status_that_is_not_known_is_a_warning(
    tmp_path: Path, nemo: FakeNeMo, caplog: pytest.LogCaptureFixture, state: Any
) -> None:
    nemo.script = ["created", state, state, "completed"]
    done = await run(tmp_path, nemo)
    assert done.json("final_metrics.json")["status"] == "completed"
    warnings = [record.getMessage() for record in caplog.records if "taken to be running" in record.getMessage()]
    assert warnings == [f"job cust-0 has the status {state!r}, which is unknown: it is taken to be running"]


async def test_a_text_that_no_file_can_hold_is_named(tmp_path: Path, nemo: FakeNeMo) -> None:
    collection = pairs(2)
    collection.trajectories[1][0].episode[0].chosen_response = "\ud800"
    adapter = adapter_of(nemo)
    await adapter.initialize(FinetuneConfig(output_dir=tmp_path))
    with pytest.raises(TrajectoryError, match=r"a trajectory of group 1 .row '1'. has a lone surrogate in its text"):
        await adapter.submit(collection)
    await adapter.close()


async def test_a_job_that_was_canceled_at_the_service_is_submitted_again_only_by_force(
    tmp_path: Path, nemo: FakeNeMo
) -> None:
    nemo.script = ["running", "cancelling", "cancelled"]
    with pytest.raises(JobFailed, match="job cust-0 ended as canceled"):
        await run(tmp_path, nemo)
    nemo.script = ["completed"]
    with pytest.raises(
        JobFailed, match=r"job cust-0 ended as canceled: .*; --resume with --force submits its pairs ag"
    ):
        await resume(tmp_path, nemo)
    assert len(nemo.jobs) == 1
    done = await resume(tmp_path, nemo, force=True)
    assert [status.status for status in done.statuses] == [TrainingStatusEnum.COMPLETED]
    assert len(nemo.jobs) == 2


async def test_the_token_is_text_that_is_shown_nowhere(tmp_path: Path, nemo: FakeNeMo) -> None:
    adapter = adapter_of(nemo, hf_token=TOKEN)
    assert f"Bearer {adapter.config.hf_token}" == f"Bearer {TOKEN}"
    assert TOKEN not in f"{adapter.config!r} {adapter.config} {adapter.training_settings()}"
    await adapter.close()


class PairsAsMade(TrajectoryBuilder):
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        pass

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        return pairs(run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


async def test_a_trainer_is_used_outside_a_run(tmp_path: Path, nemo: FakeNeMo) -> None:
    trainer, adapter = NeMoCustomizerTrainer(trainer_config=NeMoCustomizerTrainerConfig()), adapter_of(nemo)
    await trainer.bind_components(PairsAsMade(DPOTrajectoryBuilderConfig()), adapter)
    await trainer.initialize(FinetuneConfig(output_dir=tmp_path / "run"))
    [status] = await trainer.run(1)
    assert status.status is TrainingStatusEnum.COMPLETED
    await trainer.cleanup()
    await adapter.close()


async def test_the_status_of_a_job_without_an_id(nemo: FakeNeMo) -> None:
    adapter = adapter_of(nemo)
    with pytest.raises(JobFailed, match=r"a job of run 'r9' without metadata\['job_id'\] cannot be found"):
        await adapter.status(TrainingJobRef(run_id="r9", backend="nemo-customizer"))
    await adapter.close()


# one job per run and epoch


async def test_an_epoch_is_submitted_once(tmp_path: Path, nemo: FakeNeMo) -> None:
    adapter, other = adapter_of(nemo), adapter_of(nemo)
    for each in (adapter, other):
        await each.initialize(FinetuneConfig(output_dir=tmp_path))
    first = await adapter.submit(pairs())
    assert (await adapter.submit(pairs())).metadata == first.metadata
    assert (await other.submit(pairs())).metadata == first.metadata
    assert len(nemo.jobs) == 1
    for different in (pairs(epoch=2), pairs(run_id="r2")):
        await adapter.submit(different)
    assert len(nemo.jobs) == len(nemo.datasets) == 3
    await adapter.close()
    await other.close()


async def test_a_dataset_of_another_run_is_not_overwritten(tmp_path: Path, nemo: FakeNeMo) -> None:
    adapter = adapter_of(nemo)
    await adapter.initialize(FinetuneConfig(output_dir=tmp_path))
    ref = await adapter.submit(pairs())
    nemo.jobs.clear()
    name = (ref.metadata or {})["dataset"]
    for _ in range(2):  # `dataset_name`, then the name of the run
        list(nemo.datasets.values())[-1]["custom_fields"] = {"insitu_job": "somebody else's"}
        if len(nemo.datasets) == 1:
            other = (await adapter.submit(pairs(6))).metadata or {}
            nemo.jobs.clear()
    assert other["dataset"].startswith(f"{name}-")
    expected = r"dataset_name: the datasets nat-dpo and nat-dpo-\w+ of namespace games exist and belong to other runs"
    with pytest.raises(ConfigError, match=expected):
        await adapter.submit(pairs(6))
    assert [len(repository.commits) for repository in nemo.repositories.values()] == [1, 1]
    await adapter.close()


# settings


@pytest.mark.parametrize(
    ("blocks", "message"),
    slow_after(
        11,
        [
            (
                {"adapter": {"create_namespace_if_missing": False}},
                "namespace 'games' does not exist in the Entity Store",
            ),
            ({"adapter": {"customization_config": "meta/huge"}}, "customization_config 'meta/huge' does not exist at"),
            (
                {"adapter": {"hyperparameters": {"finetuning_type": "lora"}}},
                "does not offer training_type dpo with finetuning_type lora; it offers dpo with all_weights, sft with",
            ),
            (
                {"adapter": {"entity_host": "nemo.test"}},
                "entity_host.*'nemo.test'; it must begin with http:// or https://",
            ),
            ({"adapter": {"namespace": "a/b"}}, "namespace"),
            ({"adapter": {"dataset_name": "../x"}}, "dataset_name"),
            ({"adapter": {"max_consecutive_status_failures": 11}}, "max_consecutive_status_failures"),
            ({"adapter": {"hyperparameters": {"learning_rate": math.inf}}}, "learning_rate.* finite number"),
            ({"adapter": {"request_timeout": math.inf}}, "request_timeout.* finite number"),
            (
                {"finetuning": {"curriculum_learning": {"enabled": True}}},
                "curriculum_learning: nemo_customizer_trainer",
            ),
            (
                {"trainer": {"wait_for_completion": False}, "adapter": {"deploy_on_completion": True}},
                "trainers.trainer.wait_for_completion is false, but the adapter's deploy_on_completion is true",
            ),
        ],
    ),
)
async def test_settings_are_refused_before_the_collection(
    tmp_path: Path, nemo: FakeNeMo, blocks: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await run(tmp_path, nemo, **blocks)
    assert not (tmp_path / "run/collection_history.json").exists()
    assert not nemo.repositories


async def test_the_libraries_are_named_if_they_are_missing(
    tmp_path: Path, nemo: FakeNeMo, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("nemo_microservices", "huggingface_hub"):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, module, None)
            with pytest.raises(
                ConfigError, match=rf"needs the extra customizer \(pip install -e '.\[customizer\]' .*{module}"
            ):
                await run(tmp_path, nemo)


async def test_one_turn_has_no_validation_records(tmp_path: Path, nemo: FakeNeMo) -> None:
    with pytest.raises(TrajectoryError, match="all 3 preference pairs are of one turn, so the validation records"):
        await run(tmp_path, nemo, rows=1)
    assert not nemo.repositories


# waiting and deployment


async def test_a_run_need_not_wait_for_its_job(tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.fail("GET .*jobs/", 503, times=2)
    done = await run(tmp_path, nemo, trainer={"wait_for_completion": False})
    assert [status.status for status in done.statuses] == [TrainingStatusEnum.PENDING]
    assert done.json("final_metrics.json")["status"] == "pending"
    nemo.fail("GET .*namespaces", 403, times=1)
    with pytest.raises(BackendError, match="403"):
        await resume(tmp_path, nemo)
    progress = done.json("progress.json")
    assert (progress["status"], "403" in progress["error"]) == ("failed", True)
    again = await resume(tmp_path, nemo)  # waits
    assert len(nemo.jobs) == 1
    assert again.json("final_metrics.json")["status"] == "completed"
    assert again.json("final_metrics.json")["pairs"] == done.json("final_metrics.json")["pairs"]


async def test_the_pairs_of_a_job_that_has_failed_meanwhile_are_submitted_again(tmp_path: Path, nemo: FakeNeMo) -> None:
    first = await run(tmp_path, nemo, trainer={"wait_for_completion": False})
    before = first.json("final_metrics.json")
    nemo.jobs["cust-0"]["script"] = ["failed"]
    final = (await resume(tmp_path, nemo)).json("final_metrics.json")
    assert (final["status"], final["job"]["job_id"]) == ("completed", "cust-1")
    assert (final["run_id"], final["pairs"]) == (before["run_id"], before["pairs"])
    assert len(nemo.datasets) == len({job["dataset"]["name"] for job in nemo.jobs.values()}) == 1


async def test_the_model_is_deployed(tmp_path: Path, nemo: FakeNeMo) -> None:
    options = {"deploy_on_completion": True, "deployment_config": {"image_tag": "1.8", "gpu": 2}}
    done = await run(tmp_path, nemo, adapter=options)
    [(name, deployment)] = nemo.deployments.items()
    model = nemo.jobs["cust-0"]["output_model"]
    assert name == model.split("@")[0]
    image = {"image_name": "nvcr.io/nim/meta/llama-3.1-8b-instruct", "image_tag": "1.8", "gpu": 2}
    assert deployment["config"] == {"model": model, "nim_deployment": image}
    assert deployment["description"] == "Fine-tuned model deployment"
    assert done.json("final_metrics.json")["job"]["deployment"] == {"name": name, "model": model, "status": "ready"}


@pytest.mark.parametrize(
    ("script", "message", "gpu"),
    slow_but_at(
        {1},
        [
            (
                ["pending", "failed"],
                r"job cust-0 is completed \(model games/.*\), but deployment .* is failed: pulling",
                1,
            ),
            (["pending"], r"job cust-0 is completed .*, but deployment games/bot is not ready after 0.1 s", 2),
        ],
    ),
)
async def test_a_deployment_that_fails_is_a_failure_and_is_tried_again(
    tmp_path: Path, nemo: FakeNeMo, script: list[str], message: str, gpu: int
) -> None:
    options = {
        "deploy_on_completion": True,
        "deployment_timeout_seconds": 0.1,
        "deployment_config": {"deployment_name": "bot"},
    }
    nemo.deployment_script = script
    with pytest.raises(BackendError, match=message):
        await run(tmp_path, nemo, adapter=options)
    assert message.split(" is completed")[0] in json.loads((tmp_path / "run/final_metrics.json").read_text())["error"]
    nemo.deployment_script = ["pending", "ready"]
    options |= {"deployment_timeout_seconds": 30, "deployment_config": {"deployment_name": "bot", "gpu": gpu}}
    done = await resume(tmp_path, nemo, adapter=options)
    assert (len(nemo.jobs), done.json("final_metrics.json")["status"]) == (1, "completed")
    assert nemo.deployments["games/bot"]["config"]["nim_deployment"]["gpu"] == gpu
    assert nemo.requested("DELETE") == 1


async def test_a_deployment_that_another_has_made_of_the_model_is_not_replaced(tmp_path: Path, nemo: FakeNeMo) -> None:
    options: dict[str, Any] = {"deploy_on_completion": True, "deployment_timeout_seconds": 0.1}
    nemo.deployment_script = ["pending"]
    with pytest.raises(BackendError, match="is not ready after"):
        await run(tmp_path, nemo, adapter=options)
    [deployment] = nemo.deployments.values()
    deployment |= {"custom_fields": {}, "script": ["ready"]}
    options["deployment_config"] = {"image_tag": "1.8"}
    expected = r"exists already, serves games/.*, and is completed, with .*'image_tag': 'latest'.*; delete it or choose"
    with pytest.raises(RequestRefused, match=expected):
        await resume(tmp_path, nemo, adapter=options)
    await resume(tmp_path, nemo, adapter={"deploy_on_completion": True})  # as it is
    assert nemo.requested("DELETE") == 0


async def test_a_deployment_of_another_model_is_not_replaced(tmp_path: Path, nemo: FakeNeMo) -> None:
    options = {"deploy_on_completion": True, "deployment_config": {"deployment_name": "bot"}}
    await run(tmp_path, nemo, adapter=options)
    with pytest.raises(
        ConfigError, match=r"the deployment games/bot exists and serves games/nat-dpo-\w+@cust-0; delete"
    ):
        await run(tmp_path, nemo, adapter=options)
    assert len(nemo.jobs) == 1  # nothing was trained in vain
    options["deployment_config"] = {"deployment_name": "bot-2"}
    done = await resume(tmp_path, nemo, adapter=options)  # with the pairs that were collected
    assert "continues: its pairs have been collected" in done.printed
    assert done.json("final_metrics.json")["job"]["deployment"]["name"] == "games/bot-2"


# interruptions; those of whole processes are in test_customizer_processes.py


async def interrupted(file: Path, nemo: FakeNeMo, pattern: str) -> None:
    """Starts a run and cancels it when the services have received such a request."""
    task = asyncio.create_task(Run(file.parent).finish(file))
    await until(lambda: nemo.requested(pattern))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("pattern", slow_but_at({1}, ["GET .*jobs/", "POST .*jobs$"]))
async def test_an_interrupted_run_cancels_its_job(tmp_path: Path, nemo: FakeNeMo, pattern: str) -> None:
    nemo.script = ["running"]
    await interrupted(customizer_project(tmp_path, nemo), nemo, pattern)
    assert nemo.requested("POST .*/cancel") == 1
    final = json.loads((tmp_path / "run/final_metrics.json").read_text())
    assert final["status"] == "canceled" or (final["status"] is None and pattern.startswith("POST"))
    nemo.script = ["running", "cancelled"]
    for refused in ("GET .*namespaces", "POST .*jobs$"):
        nemo.fail(refused, 403, times=1)
        with pytest.raises(BackendError, match="403"):
            await resume(tmp_path, nemo)
    for _ in range(2):  # the new job was canceled by others
        with pytest.raises(JobFailed, match="job cust-1 ended as canceled"):
            await resume(tmp_path, nemo)


async def test_a_job_that_could_not_be_canceled_is_waited_for(
    tmp_path: Path, nemo: FakeNeMo, caplog: pytest.LogCaptureFixture
) -> None:
    nemo.script = ["running"]
    nemo.fail("POST .*/cancel", 500)
    await interrupted(customizer_project(tmp_path, nemo), nemo, "GET .*jobs/")
    assert "job cust-0 could not be canceled, and continues at" in caplog.text
    nemo.jobs["cust-0"]["script"] = ["completed"]
    await resume(tmp_path, nemo)
    assert len(nemo.jobs) == 1


async def test_other_settings_do_not_take_over_an_unfinished_run(tmp_path: Path, nemo: FakeNeMo) -> None:
    await run(tmp_path, nemo, trainer={"wait_for_completion": False})
    with pytest.raises(
        ConfigError, match=r"other settings: trainer_adapters.\w+.hyperparameters.epochs was 3 and is 1"
    ):
        await resume(tmp_path, nemo, adapter={"hyperparameters": {"epochs": 1}})


def test_one_module_knows_the_libraries() -> None:
    package = Path(services_module.__file__).parent
    naming = [
        file.name
        for file in package.glob("*.py")
        if re.search(r"import_module\(|(import|from) (nemo_microservices|huggingface_hub)", file.read_text())
    ]
    assert naming == ["services.py"]


async def test_collected_pairs_are_submitted_with_other_training_settings(tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.fail("POST .*jobs$", 422)
    with pytest.raises(RequestRefused, match="made to fail with 422"):
        await run(tmp_path, nemo)
    first = json.loads((tmp_path / "run/final_metrics.json").read_text())
    done = await resume(tmp_path, nemo, force=True, adapter={"hyperparameters": {"epochs": 1}})
    assert "continues: its pairs have been collected" in done.printed
    final = done.json("final_metrics.json")
    assert (final["run_id"], final["collections"], final["pairs"]) == (first["run_id"], 1, first["pairs"])
    assert [job["hyperparameters"]["epochs"] for job in nemo.jobs.values()] == [1]


async def test_pairs_that_cannot_be_trained_are_collected_again(tmp_path: Path, nemo: FakeNeMo) -> None:
    with pytest.raises(TrajectoryError, match="of one turn"):
        await run(tmp_path, nemo, rows=1)
    done = await run(tmp_path, nemo, rows=2)
    assert done.json("final_metrics.json")["pairs"]["collected"] == 6


async def test_the_trainer_as_the_interfaces_document_it(tmp_path: Path, nemo: FakeNeMo) -> None:
    assert issubclass(NeMoCustomizerTrainer, SingleJobTrainer)
    adapter = adapter_of(nemo)
    await adapter.initialize(FinetuneConfig(output_dir=tmp_path))
    ref = await adapter.submit(pairs(epoch=None))
    assert ref.backend == "nemo-customizer"
    adapter.log_progress(ref, {"loss": 1.0})
    await adapter.cancel(ref)
    assert (await adapter.wait_until_complete(ref)).status is TrainingStatusEnum.CANCELED
    gone = TrainingJobRef(run_id="r1", backend=ref.backend, metadata={"job_id": "cust-9"})
    with pytest.raises(JobFailed, match="job cust-9 no longer exists"):
        await adapter.status(gone)
    await adapter.close()
    assert isinstance(JobFailed("x"), InsituError)
