"""Completions by vLLM servers that fail, restart or have other weights, with a small server of vLLM's routes."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_vllm import FakeVllm, sampling
from processes import HANGS
from tiny_models import save_tiny_model
from waiting import turns, until

from insitu.backend.compute import ComputeThread
from insitu.backend.inference.sampler import LATEST, GenerationRequest, OutputDelta, SamplingParams, WeightVersion
from insitu.backend.learner.batches import Row
from insitu.backend.learner.jobs import TrainingQueue
from insitu.backend.learner.learner import Learner
from insitu.backend.model import LoadedModel, load_model
from insitu.backend.protocols import ServedModels
from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.integrations.vllm.sampler import MAX_ATTEMPTS, VllmSampler
from insitu.schemas.backend_processes import SamplerOptions
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import JobState, TrainingSettings

REQUEST = GenerationRequest([1, 2, 3], SamplingParams(seed=0, max_tokens=3, ignore_eos=True))
ADAPTERS, FULL = "adapter_config.json", "config.json"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("model"))), "cpu")


async def complete(sampler: VllmSampler, weights: WeightVersion = LATEST) -> OutputDelta:
    (output,) = await sampler.complete([REQUEST], weights)
    assert len(output.tokens) == 3
    return output


async def stream(sampler: VllmSampler, received: list[OutputDelta] | None = None) -> list[OutputDelta]:
    received = [] if received is None else received
    async for _, delta in sampler.stream([REQUEST]):
        received.append(delta)
    return received


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_transient_error_is_asked_again_of_the_same_server(
    loaded: LoadedModel, tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.faults.append({"status": status})
        await complete(parts.sampler)
        assert parts.vllm.asked == ["base", "base"]
        assert "left out" not in caplog.text
        parts.vllm.faults += [{"status": status}] * MAX_ATTEMPTS
        with pytest.raises(BackendUnavailable, match=f"answers /inference/v1/generate with {status}: a fault"):
            await complete(parts.sampler)


async def test_another_server_is_asked_if_one_has_too_much_to_do(loaded: LoadedModel, tmp_path: Path) -> None:
    async with sampling(loaded, tmp_path, servers=2) as parts:
        for vllm in parts.vllms:
            vllm.faults.append({"status": 429, "after": "3600" if vllm is parts.vllm else "0.01"})
        await asyncio.wait_for(asyncio.gather(*(complete(parts.sampler) for _ in range(2))), HANGS)
        assert sum(len(vllm.asked) for vllm in parts.vllms) == 4


async def test_a_request_that_vllm_refuses_is_not_repeated(loaded: LoadedModel, tmp_path: Path) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.faults.append({"status": 400})
        with pytest.raises(RequestRefused, match="answers /inference/v1/generate with 400"):
            await complete(parts.sampler)


async def test_log_probabilities_of_prompts_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    async with sampling(loaded, tmp_path) as parts:
        with pytest.raises(RequestRefused, match="prompt_logprobs is not supported with --sampler vllm"):
            await parts.sampler.prompt_logprobs([1, 2])


@pytest.mark.parametrize("body", [{}, {"model": "base", "choices": [{"token_ids": [1], "logprobs": {"content": [1]}}]}])
async def test_an_answer_of_an_unexpected_shape_is_an_error_of_the_server(
    loaded: LoadedModel, tmp_path: Path, body: Any
) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.faults += [{"body": body}] * MAX_ATTEMPTS
        with pytest.raises(BackendUnavailable, match=r"returned unexpected data|sampled from other weights"):
            await complete(parts.sampler)


@pytest.mark.parametrize(
    ("token", "logprob"),
    [(-1, -1.0), ("1", -1.0), (2**63, -1.0), (10**9, -1.0), (True, -1.0), (1.0, -1.0), (1, 0.5), (1, "-1"), (1, None)],
)
async def test_tokens_that_no_model_samples_are_never_returned(
    loaded: LoadedModel, tmp_path: Path, token: Any, logprob: Any
) -> None:
    entry = {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
    choice = {"token_ids": [token] * 3, "logprobs": {"content": [entry] * 3}, "finish_reason": "length"}
    body = {"model": "base", "choices": [{"index": 0, "weight_versions": [{"version": "default"}], **choice}]}
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.faults += [{"body": body}] * MAX_ATTEMPTS
        with pytest.raises(BackendUnavailable, match=r"vLLM returned the (token|log-probability)"):
            await complete(parts.sampler)


@pytest.mark.parametrize("tags", [["default", "insitu-1"], ["insitu-1"]], ids=["two versions", "another version"])
async def test_tokens_of_other_weights_are_never_returned(
    loaded: LoadedModel, tmp_path: Path, tags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.faults.append({"tags": tags})
        assert (await complete(parts.sampler)).version == 0
        assert "has sampled from other weights than asked for" in caplog.text
        parts.vllm.faults.append({"tags": tags})
        with pytest.raises(BackendUnavailable, match="has sampled from other weights"):  # its first tokens are out
            await stream(parts.sampler)


async def test_a_stream_is_repeated_only_before_its_first_token(loaded: LoadedModel, tmp_path: Path) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.faults.append({"cut": 0})
        deltas = await stream(parts.sampler)
        assert [len(delta.tokens) for delta in deltas] == [1, 1, 1]
        assert deltas[-1].finish_reason == "length"
        parts.vllm.faults.append({"cut": 2})
        received: list[OutputDelta] = []
        with pytest.raises(BackendUnavailable):
            await stream(parts.sampler, received)
        assert len(received) == 2


async def test_adapters_get_a_new_name_for_each_load_and_are_unloaded(loaded: LoadedModel, tmp_path: Path) -> None:
    async with sampling(loaded, tmp_path) as parts:
        for version in (1, 2):
            await parts.sampler.publish(parts.make(version, ADAPTERS))
            assert (await complete(parts.sampler)).version == version
        assert parts.vllm.loaded == [str(tmp_path / "1"), str(tmp_path / "2")]
        assert list(parts.vllm.adapters.values()) == [str(tmp_path / "2")]
        assert (await complete(parts.sampler, WeightVersion(1))).version == 1
        assert (await complete(parts.sampler, WeightVersion(0))).version == 0
        first, second, again, base = parts.vllm.asked
        assert len({first, second, again}) == 3
        assert base == "base"
        assert parts.vllm.loaded[2:] == [str(tmp_path / "1")]


@pytest.mark.parametrize("kind", [ADAPTERS, FULL])
async def test_a_server_that_was_started_again_gets_the_weights_before_any_completion(
    loaded: LoadedModel, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it was away for so short a time that no health check has seen it."""
    async with sampling(loaded, tmp_path) as parts:
        await parts.sampler.publish(parts.make(1, kind))
        assert (await complete(parts.sampler)).version == 1
        await parts.vllm.stop()
        parts.vllm.loaded.clear()
        await parts.vllm.start()
        outputs = await asyncio.gather(*(complete(parts.sampler) for _ in range(3)))
        assert {output.version for output in outputs} == {1}
        assert set(parts.vllm.loaded) == {str(tmp_path / "1")}
        assert "is left out" in caplog.text
        assert "is used again" in caplog.text


async def test_full_weights_are_replaced_when_completions_have_ended(loaded: LoadedModel, tmp_path: Path) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.gate.clear()
        running = asyncio.create_task(complete(parts.sampler))
        await until(lambda: parts.vllm.asked)
        publishing = asyncio.create_task(parts.sampler.publish(parts.make(1, FULL)))
        await until(lambda: parts.sampler.version == 1)
        later = asyncio.create_task(complete(parts.sampler))
        await turns(100)
        assert not parts.vllm.loaded
        assert await parts.sampler.versions_in_use("") == {0, 1}
        parts.vllm.gate.set()
        await publishing
        assert ((await running).version, (await later).version) == (0, 1)
        assert parts.vllm.loaded == [str(tmp_path / "1")]
        for old in (WeightVersion(0), parts.make(2, FULL)):
            with pytest.raises(RequestRefused, match="is not served: vLLM has one version of all weights, the latest"):
                await complete(parts.sampler, old)


async def test_a_request_for_the_latest_weights_that_has_not_begun_gets_newer_ones(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    async with sampling(loaded, tmp_path) as parts:
        await parts.sampler.publish(parts.make(1, FULL))
        parts.vllm.health_gate.clear()
        await parts.sampler.fleet.replicas[0].leave_out("a fault")
        asked = [REQUEST, REQUEST]
        waiting = asyncio.create_task(parts.sampler.complete(asked))
        by_number = asyncio.create_task(parts.sampler.complete(asked, WeightVersion(1)))
        await turns(20)
        publishing = asyncio.create_task(parts.sampler.publish(parts.make(2, FULL)))
        await until(lambda: parts.sampler.version == 2)
        parts.vllm.health_gate.set()
        await publishing
        assert [output.version for output in await waiting] == [2, 2]
        with pytest.raises(BackendUnavailable, match="version 1 was replaced before the completion began"):
            await by_number
        assert await parts.sampler.versions_in_use("") == set()


async def test_another_server_takes_over_and_the_lost_one_is_taken_back(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sampling(loaded, tmp_path, servers=2) as parts:
        one, two = parts.vllms
        await one.stop()
        await parts.sampler.publish(parts.make(1, ADAPTERS))
        assert {output.version for output in [await complete(parts.sampler) for _ in range(4)]} == {1}
        assert (len(one.asked), len(two.asked)) == (0, 4)
        await one.start()
        await until(lambda: "is used again" in caplog.text)
        outputs = await asyncio.gather(*(complete(parts.sampler) for _ in range(20)))
        assert {output.version for output in outputs} == {1}
        assert set(one.asked) == set(one.adapters) | {"base"}


@pytest.mark.parametrize("kind", [ADAPTERS, FULL])
async def test_a_server_that_computes_with_other_weights_than_it_says_is_not_used(
    loaded: LoadedModel, tmp_path: Path, kind: str
) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.wrong = 1.01
        with pytest.raises(BackendError, match="computes with other weights than it was given: log-probabilities diff"):
            await parts.sampler.publish(parts.make(1, kind))
        asked = len(parts.vllm.asked)
        waiting = asyncio.create_task(complete(parts.sampler))
        if kind == FULL:
            await asyncio.sleep(0.1)
            assert len(parts.vllm.asked) == asked
            parts.vllm.wrong = 1.0
        assert (await waiting).version == (1 if kind == FULL else 0)


async def test_a_version_that_no_server_takes_fails_its_job(loaded: LoadedModel, tmp_path: Path) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.refuses_weights = True
        with pytest.raises(BackendError, match=r"no vLLM server takes version 1: .*LoRA rank 4"):
            await parts.sampler.publish(parts.make(1, ADAPTERS))
        assert (await complete(parts.sampler)).version == 0


async def test_a_server_that_refuses_a_version_while_its_health_is_checked_responds(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """Otherwise the version would be the latest, and its job would wait for a server that takes it."""
    async with sampling(loaded, tmp_path) as parts:
        (replica,) = parts.sampler.fleet.replicas
        parts.vllm.health_gate.clear()
        before = parts.vllm.num_health_checks
        checks = [asyncio.create_task(replica.responds()) for _ in range(2)]
        await until(lambda: parts.vllm.num_health_checks >= before + 2)
        await replica.leave_out("a test")
        parts.vllm.health_gate.set()
        assert await asyncio.gather(*checks) == [True, True]


async def test_an_older_version_that_cannot_be_loaded_fails_its_own_call_only(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sampling(loaded, tmp_path, servers=2) as parts:
        for version in (1, 2):
            await parts.sampler.publish(parts.make(version, ADAPTERS))
        for vllm in parts.vllms:
            vllm.refuses_weights = True
        with pytest.raises(BackendUnavailable, match=r"answers /v1/load_lora_adapter with 500: LoRA rank 4"):
            await complete(parts.sampler, WeightVersion(1))
        running = [asyncio.create_task(complete(parts.sampler, WeightVersion(1))) for _ in range(3)]
        assert {(await complete(parts.sampler)).version for _ in range(3)} == {2}
        await asyncio.gather(*running, return_exceptions=True)
        assert "is left out" not in caplog.text


async def test_a_version_that_is_deleted_while_it_is_loaded_fails_its_own_call_only(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sampling(loaded, tmp_path) as parts:
        for version in (1, 2):
            await parts.sampler.publish(parts.make(version, ADAPTERS))
        deleted, folder_of = False, parts.folder_of

        def without_first(weights: WeightVersion) -> Path:
            if deleted and weights.version == 1:
                raise RequestRefused("version 1 was deleted", status=404)
            return folder_of(weights)

        parts.folder_of = without_first
        async with parts.sampler.fleet.replicas[0].lock:
            asked = asyncio.create_task(complete(parts.sampler, WeightVersion(1)))
            await turns(10)
            deleted = True
        with pytest.raises(RequestRefused, match="version 1 was deleted"):
            await asked
        assert (await complete(parts.sampler)).version == 2
        assert "is left out" not in caplog.text


@asynccontextmanager
async def training(parts: Any, loaded: LoadedModel) -> AsyncIterator[Any]:
    """A queue of jobs, each of one row and LoRA; `train(key)` gives the final state of one."""
    learner = Learner(loaded, parts.folder, served_here=False)
    parts.folder_of = lambda weights: learner.folder(weights.version) if weights.version else Path(loaded.source)
    queue = TrainingQueue(learner, parts.compute, parts.sampler, parts.folder)
    row = Row(np.array([1, 5, 9]), np.array([1, 2]), np.array([-1.0, -2.0]), np.array([1.0, 1.0]), "e")

    async def train(key: str) -> JobState:
        job = queue.submit(key, TrainingSettings(learning_rate=1e-6, lora=LoRASettings(rank=4)), [row])
        assert job.task is not None
        await job.task
        return job.state

    try:
        yield SimpleNamespace(train=train, learner=learner)
    finally:
        await queue.close()


async def test_a_job_whose_version_was_not_served_is_served_and_not_trained_again_if_it_is_sent_again(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    async with sampling(loaded, tmp_path) as parts, training(parts, loaded) as jobs:
        parts.vllm.refuses_weights = True
        failed = await jobs.train("run/1")
        assert failed.status == "failed"
        assert re.fullmatch(
            r"version 1 is trained and saved, but not served: no vLLM server takes version 1: .*LoRA rank 4.*; "
            "send the job again to serve it, which does not train it again",
            failed.message,
        )
        assert ((await complete(parts.sampler)).version, parts.sampler.version, jobs.learner.version) == (0, 0, 1)
        names = ServedModels("policy", jobs.learner, parts.sampler)
        assert [model and model.version for model in map(names.find, ("policy", "policy@1"))] == [0, 1]
        again = await jobs.train("run/1")
        assert (again.status, again.id != failed.id, jobs.learner.version) == ("failed", True, 1)
        parts.vllm.refuses_weights = False
        done = await jobs.train("run/1")
        assert (done.status, done.policy_version, done.metrics["rows"], jobs.learner.version) == ("completed", 1, 1, 1)
        assert (await complete(parts.sampler)).version == 1
        assert (await jobs.train("run/1")).id == done.id


async def test_a_job_that_was_sent_again_serves_the_latest_version_not_its_own(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    async with sampling(loaded, tmp_path) as parts, training(parts, loaded) as jobs:
        parts.vllm.refuses_weights = True
        assert (await jobs.train("run/1")).status == "failed"
        parts.vllm.refuses_weights = False
        assert (await jobs.train("run/2")).policy_version == 2
        assert (await jobs.train("run/1")).policy_version == 1
        assert (await complete(parts.sampler)).version == 2


@pytest.mark.parametrize("kind", [ADAPTERS, FULL])
async def test_a_version_fails_its_job_if_no_server_responds_in_time(
    loaded: LoadedModel, tmp_path: Path, kind: str
) -> None:
    async with sampling(loaded, tmp_path, for_a_server=0.1) as parts:
        await parts.vllm.stop()
        weights = parts.make(1, kind)
        with pytest.raises(
            BackendError, match=r"no vLLM server takes version 1: no vLLM server is ready within 0\.1 s: no an"
        ):
            await parts.sampler.publish(weights)
        parts.waits.for_a_server = HANGS
        await parts.vllm.start()
        await parts.sampler.publish(weights)
        assert (await complete(parts.sampler)).version == 1


async def test_a_server_that_answers_nonsense_is_taken_back_when_it_recovers(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    async with sampling(loaded, tmp_path) as parts:
        parts.vllm.lists_no_models = True
        await parts.sampler.fleet.replicas[0].leave_out("a test")
        await until(lambda: parts.vllm.asked.count("models") > 1)
        parts.vllm.lists_no_models = False
        await complete(parts.sampler)


async def test_a_server_is_taken_back_however_often_it_could_not_be_used(loaded: LoadedModel, tmp_path: Path) -> None:
    async with sampling(loaded, tmp_path) as parts:
        (replica,) = parts.sampler.fleet.replicas
        replica.failures = 2000
        await replica.leave_out("a test")
        assert (await complete(parts.sampler)).version == 0
        assert (replica.failures, replica.retry_at) == (0, 0.0), "the delay after earlier failures has ended with them"


async def test_servers_get_absolute_paths(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs may be another working directory."""
    monkeypatch.chdir(tmp_path)
    async with sampling(loaded, tmp_path) as parts:
        for version, kind in ((1, ADAPTERS), (2, FULL)):
            parts.make(version, kind)
            parts.folder_of = lambda weights: Path(str(weights.version)) if weights.version else Path(loaded.source)
            await parts.sampler.publish(WeightVersion(version))
        assert parts.vllm.loaded == [str(tmp_path / "1"), str(tmp_path / "2")]


async def test_a_start_that_fails_leaves_no_check_of_another_server_behind(loaded: LoadedModel, tmp_path: Path) -> None:
    async with FakeVllm(loaded.module) as slow:
        slow.gate.clear()
        options = SamplerOptions.model_validate({"_type": "vllm", "addresses": [slow.address, "http://127.0.0.1:9"]})
        compute = ComputeThread()
        files, load = lambda weights: Path(loaded.source), lambda weights: loaded.module
        sampler = VllmSampler(options, loaded, compute, files, load, 256, None, tmp_path)
        before = asyncio.all_tasks()
        with pytest.raises(BackendError, match=r"sampler: no answer from the server at http://127\.0\.0\.1:9"):
            await sampler.start()
        await sampler.close()
        left = [task for task in asyncio.all_tasks() - before if "_first_check" in repr(task.get_coro())]
        assert not left


async def test_weights_that_cannot_be_checked_are_not_trained(tmp_path: Path) -> None:
    """vLLM 0.32 keeps the output layer of a model with tied embeddings; in 16 bits that is within rounding."""
    model = load_model(str(save_tiny_model(tmp_path / "model", tie_word_embeddings=True)), "cpu", "bfloat16")
    options = SamplerOptions.model_validate({"_type": "vllm", "addresses": ["http://127.0.0.1:1"]})
    parts = (ComputeThread(), lambda weights: tmp_path, lambda weights: model.module, 256, None, tmp_path)
    with pytest.raises(RequestRefused, match=r"embeddings are tied.* cannot be seen in bfloat16: train with lora"):
        VllmSampler(options, model, *parts).check(None)
