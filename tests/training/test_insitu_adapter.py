"""The native adapter against a scripted server: what crosses the wire, and what is lost on it."""

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from aiohttp import web
from factories import MODEL
from processes import HANGS
from tiny_backend import tiny_backend
from waiting import hang, until

from insitu.backend import BackendOptions
from insitu.cli.backend import command as backend_command
from insitu.config import load_config
from insitu.errors import BackendError, BackendUnavailable, ConfigError, JobFailed, TrajectoryError
from insitu.plugin_api import Builder
from insitu.schemas.episodes import ModelCall, TrainingRow
from insitu.schemas.finetuning import TrainingJobRef, TrainingStatusEnum, Trajectory, TrajectoryCollection
from insitu.schemas.kinds import TRAINER_ADAPTER
from insitu.schemas.training_jobs import DPOSettings, KTOSettings, LossSettings, TrainingOptions
from insitu.training.native.backend_api import Checkpoints
from insitu.training.native.config import InsituAdapterConfig
from insitu.training.native.trainer_adapter import InsituTrainerAdapter

OPTIONS: dict[str, Any] = {
    "objective": "cispo",
    "importance_sampling_level": "sequence",
    "old_logprobs": "recomputed",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "cispo_cap": 3.0,
    "cispo_floor": 0.5,
    "dual_clip": None,
    "truncated_importance": 2.5,
    "token_mask": [0.5, 2.5],
    "sequence_mask": [0.25, 1.5],
    "kl": {"beta": 0.013, "estimator": "k1", "in_reward": True},
    "loss_agg_mode": "constant",
    "loss_scale_factor": 17.0,
    "kl_rows": 7,
    "method": "grpo",
    "optimizer": "adamw",
    "learning_rate": 3e-4,
    "schedule": "cosine",
    "warmup": 0.25,
    "weight_decay": 0.014,
    "betas": [0.7, 0.8],
    "max_grad_norm": 0.5,
    "mini_batch_size": 15,
    "num_iterations": 3,
    "micro_batch_tokens": 999,
    "attention": "packed",
    "gradient_checkpointing": True,
    "compile": False,
    "lora": {
        "rank": 3,
        "alpha": 5.0,
        "rslora": True,
        "init": "gaussian",
        "dropout": 0.0,
        "target_modules": ["q_proj"],
        "modules_to_save": ["norm"],
    },
    "dpo": None,
    "kto": None,
}
UNCORRECTED = dict.fromkeys(("truncated_importance", "token_mask", "sequence_mask"))
OTHERS = {**OPTIONS, "objective": "clip", "dual_clip": 4.0, "old_logprobs": "rollout", **UNCORRECTED}
OTHERS |= {"gradient_checkpointing": False, "compile": True}
OTHERS |= {"clip_low": 0.11, "clip_high": 0.12, "cispo_floor": 0.0, "cispo_cap": 5.0}
DPO: dict[str, Any] = {
    "method": "dpo",
    "dpo": {
        "beta": 0.2,
        "loss_type": "robust",
        "label_smoothing": 0.15,
        "average_logprobs": True,
        "preference_loss_weight": 0.5,
        "sft_loss_weight": 0.25,
        "reference": "job_start",
    },
}
KTO: dict[str, Any] = {
    "method": "kto",
    "kto": {"beta": 0.3, "desirable_weight": 0.5, "undesirable_weight": 0.75, "reference": "job_start"},
}
OPTIMIZER = {key: OPTIONS[key] for key in TrainingOptions.model_fields.keys() - LossSettings.model_fields} | {
    "method": "sft"
}


ROUTES = (
    "GET /health",
    "GET /v1/models",
    "POST /v1/train/jobs",
    "GET /v1/train/jobs/j1/events",
    "GET /v1/train/jobs/j1",
)
FAULTS = ("429", "500", "503", "cut", "half", "garbage", "wrong shape")


class Backend:
    """What was asked of it (method and path, token, job), and how it answers.

    `faults` are what it does to the next requests of a route instead; one of `hanging` never gets an answer.
    """

    def __init__(self) -> None:
        self.address = ""
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.jobs: dict[str, list[dict[str, Any]]] = {}
        self.health = self.check = 200
        self.version = 0
        self.events: list[dict[str, Any]] = []
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        self.hanging: set[str] = set()
        self.arrives = asyncio.Event()
        """When an answer comes of a request whose fault is `late`."""
        self.lost_jobs = False

    def state(self, key: str = "r/3", **other: Any) -> dict[str, Any]:
        return {"id": "j1", "key": key, "status": "completed", "progress": 100.0, "policy_version": 1, **other}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        route = f"{request.method} {request.path}"
        self.asked.append(route)
        if route in self.hanging:
            await hang()
        fault = self.faults[route].pop(0) if self.faults[route] else ""
        is_stream = request.path.endswith("/events")
        answer = web.json_response(self.state()) if fault and is_stream else await self.usual_answer(request)
        if fault == "late":
            await self.arrives.wait()
            return answer
        if fault.isdigit():
            return web.json_response({"error": {"message": "later"}}, status=int(fault), headers={"Retry-After": "0"})
        if fault == "garbage":
            return web.Response(body=b"data: \xff\xfe\x00\n", content_type="application/json")
        if fault == "wrong shape":
            return web.json_response([{"data": None}])
        if fault:
            assert request.transport is not None
            if fault == "half" and isinstance(answer, web.Response):
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {answer.content_length}\r\n\r\n".encode()
                assert isinstance(answer.body, bytes)
                request.transport.write(head + answer.body[:5])
            request.transport.close()
        return answer

    async def usual_answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers.get("Authorization"))
        if request.path == "/health":
            return web.json_response({"policy_version": self.version}, status=self.health)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "policy"}]})
        if request.path == "/v1/train/check":
            return web.json_response({}, status=self.check)
        if request.method == "POST":
            key = request.headers["Idempotency-Key"]
            assert request.headers["Content-Encoding"] == "gzip"
            self.jobs[key] = [json.loads(line) for line in (await request.read()).splitlines()]
            return web.json_response(self.state(key, status="running"))
        if request.path.endswith("/events"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            for state in self.events:
                await stream.write(b"data: " + json.dumps(state).encode() + b"\n\n")
            return stream
        if self.lost_jobs:
            error = {"message": "no such job: 'j1'", "code": "job_not_found"}
            return web.json_response({"error": error}, status=404)
        return web.json_response(self.state(metrics={"loss": 0.5, "tokens": 7}))


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    backend = Backend()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", backend.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    backend.address = "http://{}:{}".format(*runner.addresses[0][:2])
    yield backend
    await runner.cleanup()


@asynccontextmanager
async def adapter_to(
    backend: Backend, write: Any, limits: dict[str, float] | None = None, **training: Any
) -> AsyncIterator[InsituTrainerAdapter]:
    block = {"_type": "insitu_trainer_adapter", "url": backend.address, "api_key": "long-s3cret", "training": training}
    block |= limits or {}
    settings = {"general": {"seed": 11}, "trainer_adapters": {"a": block}, "finetuning": {"num_epochs": 10}}
    config = load_config(write(settings))
    async with Builder(config) as builder:
        adapter = await builder.get(TRAINER_ADAPTER, "a")
        await adapter.initialize(config.finetuning)
        yield adapter


def collection(epoch: int = 3) -> TrajectoryCollection:
    row = TrainingRow(
        token_ids=[1, 2], loss_mask=[0, 1], logprobs=[0, -0.5], advantages=[0, 1.5], episode="e", calls=[0]
    )
    return TrajectoryCollection(trajectories=[[Trajectory(reward=1, rows=[row])]], run_id="r", epoch=epoch)


def test_all_options_are_tried_with_other_values_than_their_defaults() -> None:
    usual = TrainingOptions().model_dump(mode="json")
    assert OPTIONS.keys() == OTHERS.keys() == usual.keys()
    assert [n for n in usual if usual[n] == OPTIONS[n] and usual[n] == OTHERS[n]] == ["method", "dpo", "kto"]
    for options, block in ((DPO["dpo"], DPOSettings()), (KTO["kto"], KTOSettings())):
        usual = block.model_dump(mode="json")
        assert options.keys() == usual.keys()
        assert not [n for n in usual if usual[n] == options[n]]


@pytest.mark.parametrize(
    "options",
    [OPTIONS, OTHERS, OPTIMIZER, OPTIMIZER | DPO, OPTIMIZER | KTO],
    ids=["cispo", "clip", "sft", "dpo", "kto"],
)
async def test_every_option_of_training_arrives(backend: Backend, write: Any, options: dict[str, Any]) -> None:
    async with adapter_to(backend, write, **options) as adapter:
        ref = await adapter.submit(collection())
    (head, *rows) = backend.jobs["r/3"]
    sent = {**options, "seed": 11, "schedule_range": [0.2, 0.3]}
    assert head["settings"] == {key: value for key, value in sent.items() if value is not None}
    assert head["num_rows"] == len(rows) == 1
    assert rows[0] == collection().trajectories[0][0].rows[0].model_dump(exclude_unset=True)
    assert (ref.run_id, ref.backend, ref.metadata) == ("r", "insitu", {"job_id": "j1", "key": "r/3", "epoch": 3})
    assert backend.tokens == {"Bearer long-s3cret"}


async def test_preference_rows_arrive_as_they_are(backend: Backend, write: Any) -> None:
    sampled = {"token_ids": [1, 2], "loss_mask": [0, 1], "pair": "p", "preferred": True}
    text = {"messages": [{"role": "assistant", "content": "a"}], "pair": "p", "preferred": False}
    rows = [TrainingRow.model_validate(row) for row in (sampled, text)]
    async with adapter_to(backend, write, **DPO) as adapter:
        await adapter.submit(TrajectoryCollection(trajectories=[[Trajectory(reward=1, rows=rows)]], run_id="r"))
    assert backend.jobs["r/submission 1"][1:] == [sampled, text]


async def test_a_backend_trains_preferences(tmp_path: Path, write: Any) -> None:
    """Two jobs through the adapter: the second continues, with the starting weights as its reference."""
    rows = [
        TrainingRow(
            messages=[{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer}],
            pair=str(number),
            preferred=answer == "yes",
        )
        for number in range(4)
        for answer in ("yes", "no")
    ]
    group = [Trajectory(reward=1, rows=rows)]
    with tiny_backend(tmp_path) as served:
        block = {"_type": "insitu_trainer_adapter", "url": served.address, "api_key": served.token}
        block["training"] = {"method": "dpo", "dpo": {"beta": 0.5}, "learning_rate": 3e-3, "num_iterations": 4}
        async with Builder(load_config(write({"trainer_adapters": {"a": block}}))) as builder:
            adapter = await builder.get(TRAINER_ADAPTER, "a")
            await adapter.initialize(builder.config.finetuning)
            await adapter.check_settings()
            margins = []
            for epoch in (1, 2):
                ref = await adapter.submit(TrajectoryCollection(trajectories=[group], run_id="r", epoch=epoch))
                status = await adapter.wait_until_complete(ref)
                assert (status.status, status.metadata["policy_version"]) == ("completed", epoch)
                margins.append(status.metadata["rewards/margins"])
            assert 0 < margins[0] < margins[1]
            assert (await adapter.policy_endpoint()).version == 2


async def test_a_run_stops_if_its_job_was_trained_with_other_rows_or_settings(tmp_path: Path, write: Any) -> None:
    """Each adapter is one of a process that continues the run. A longer run is the same run."""

    async def submit(submitted: TrajectoryCollection, epochs: int = 10, **training: Any) -> TrainingJobRef:
        block = {"_type": "insitu_trainer_adapter", "url": served.address, "api_key": served.token}
        sections = {"trainer_adapters": {"a": block | {"training": training}}, "finetuning": {"num_epochs": epochs}}
        async with Builder(load_config(write(sections))) as builder:
            adapter = await builder.get(TRAINER_ADAPTER, "a")
            await adapter.initialize(builder.config.finetuning)
            ref = await adapter.submit(submitted)
            await adapter.wait_until_complete(ref)
            return ref

    changed = collection()
    changed.trajectories[0][0].rows[0].advantages = [0, 2.5]
    with tiny_backend(tmp_path) as served:
        first = await submit(collection())
        assert await submit(collection(), epochs=20) == first
        for other, training in ((changed, {}), (collection(), {"learning_rate": 0.5})):
            with pytest.raises(BackendError, match=r"has a job with the key 'r/3' and other rows or settings \(job-"):
                await submit(other, **training)


async def test_a_job_whose_reply_was_lost_is_sent_again_under_its_key(backend: Backend, write: Any) -> None:
    async with adapter_to(backend, write) as adapter:
        backend.faults["POST /v1/train/jobs"] = ["cut", "cut"]
        await adapter.submit(collection())
    assert backend.asked.count("POST /v1/train/jobs") == 3
    assert list(backend.jobs) == ["r/3"]


async def test_what_a_trainer_has_not_weighed_gets_the_default_advantages(backend: Backend, write: Any) -> None:
    def trajectory(reward: float) -> Trajectory:
        call = ModelCall(
            index=0, model="m", messages=[], prompt_token_ids=[1], token_ids=[2, 3], logprobs=[-0.5, -0.25]
        )
        return Trajectory(reward=reward, calls=[call], trained_calls=[0])

    async with adapter_to(backend, write) as adapter:
        for _ in range(2):
            group = [trajectory(1.0), trajectory(0.0)]
            await adapter.submit(TrajectoryCollection(trajectories=[group], run_id="r"))
            _, *rows = list(backend.jobs.values())[-1]
            assert [row["token_ids"] for row in rows] == [[1, 2, 3]] * 2
            assert rows[0]["advantages"][1] == -rows[1]["advantages"][1] > 0
        with pytest.raises(
            TrajectoryError, match="1 of 1 trajectories cannot be trained; the first one: none of its calls"
        ):
            await adapter.submit(TrajectoryCollection(trajectories=[[Trajectory(reward=1)]], run_id="r"))
    assert list(backend.jobs) == ["r/submission 1", "r/submission 2"]


async def test_a_finished_job_can_be_asked_for_its_metrics(backend: Backend, write: Any) -> None:
    async with adapter_to(backend, write) as adapter:
        ref = await adapter.submit(collection())
        for _ in range(2):
            status = await adapter.status(ref)
            assert (status.status, status.progress) == ("completed", 100)
            assert status.metadata == {"policy_version": 1, "checkpoint": None, "loss": 0.5, "tokens": 7}


async def test_a_lost_stream_of_events_is_made_up_for_by_asking(backend: Backend, write: Any) -> None:
    async with adapter_to(backend, write) as adapter:
        ref = await adapter.submit(collection())
        backend.events = [backend.state(status="running", progress=10.0)]  # and then the stream ends
        assert (await adapter.wait_until_complete(ref, poll_interval=0.01)).status == "completed"
        assert backend.asked[-2:] == ["GET /v1/train/jobs/j1/events", "GET /v1/train/jobs/j1"]
        backend.events.append(backend.state(status="failed", message="out of memory"))
        ended = await adapter.wait_until_complete(ref)
        assert (ended.status, ended.message) == ("failed", "out of memory")


@pytest.mark.parametrize("status", [401, 404, 500, 503])
async def test_health_is_asked_of_the_configured_address_and_its_status_counts(
    backend: Backend, write: Any, status: int
) -> None:
    async with adapter_to(backend, write) as adapter:
        assert await adapter.is_healthy()
        backend.health = status
        assert not await adapter.is_healthy()
        assert backend.asked[-1] == "GET /health"
    with pytest.raises(BackendError, match=f"{backend.address}|/health"):
        async with adapter_to(backend, write, {"retry_timeout": 0}):
            pass


async def test_checkpoints_of_an_earlier_run_are_moved_aside(
    write: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For trainers of plugins; ours have moved the whole run."""
    block = {"_type": "insitu_trainer_adapter", "model": str(MODEL)}
    path = write({"trainer_adapters": {"a": block}, "finetuning": {"output_dir": str(write("", "run/notes").parent)}})
    weights = write("weights", "run/backend/checkpoints/step_000001/model.safetensors")
    config = load_config(path)
    async with Builder(config) as builder:
        adapter = await builder.get(TRAINER_ADAPTER, "a")
        monkeypatch.setattr(sys, "executable", "/bin/false")  # not worth the time of a real one
        with pytest.raises(BackendUnavailable, match="insitu backend ended with exit code 1"):
            await adapter.initialize(config.finetuning)
    moved = path.parent / "run/backend.1/checkpoints/step_000001/model.safetensors"
    assert moved.read_text() == "weights"
    assert f"{path.parent}/run/backend held the checkpoints of an earlier run" in caplog.text
    assert config.find_path(weights, "key", builder.moved) == moved


@pytest.mark.parametrize("status", [404, 405])
async def test_an_older_backend_that_checks_no_settings_can_be_used(backend: Backend, write: Any, status: int) -> None:
    async with adapter_to(backend, write) as adapter:
        backend.check = status
        await adapter.check_settings()
        backend.check = 409
        with pytest.raises(ConfigError, match="the trainer adapter's settings are refused by the backend: "):
            await adapter.check_settings()


async def test_a_server_that_is_no_backend(backend: Backend, write: Any) -> None:
    backend.address += "/elsewhere"
    with pytest.raises(BackendError):
        async with adapter_to(backend, write):
            pass
    backend.address = "http://127.0.0.1:9"
    with pytest.raises(BackendUnavailable, match=r"no answer from the backend at http://127.0.0.1:9"):
        async with adapter_to(backend, write):
            pass


async def whole_epoch(adapter: InsituTrainerAdapter) -> TrainingStatusEnum:
    """What a run asks of its backend, but for the first requests, which `initialize` makes."""
    assert (await adapter.policy_endpoint()).model == "policy"
    ref = await adapter.submit(collection())
    return (await adapter.wait_until_complete(ref)).status


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("route", ROUTES)
async def test_a_transient_error_of_any_request_is_retried(
    backend: Backend, write: Any, route: str, fault: str
) -> None:
    at_start = route in ROUTES[:2] and fault not in ("garbage", "wrong shape")
    if at_start:
        backend.faults[route] = [fault, fault]
    async with adapter_to(backend, write) as adapter:
        backend.faults[ROUTES[3]] = ["cut"]  # so that the state is asked for
        backend.faults[route] = [fault] if route == ROUTES[3] else [fault, fault]
        assert await whole_epoch(adapter) == "completed"
    assert list(backend.jobs) == ["r/3"]
    assert not backend.faults[route]


async def test_a_first_answer_of_something_else_is_named(backend: Backend, write: Any) -> None:
    for fault in ("garbage", "wrong shape"):
        backend.faults["GET /health"] = [fault]
        with pytest.raises(
            BackendError, match=rf"the backend at {backend.address} returned unexpected data for GET /health: b.*right"
        ):
            async with adapter_to(backend, write):
                pass


LIMITS = {"read_timeout": 0.2, "retry_timeout": 0.7}


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("route", ROUTES)
async def test_silence_is_reported_and_ends(
    backend: Backend, write: Any, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    if route == ROUTES[3]:
        backend.hanging.add(ROUTES[4])
    elif route == ROUTES[4]:
        backend.faults[ROUTES[3]] = ["cut"]
    asked = ROUTES[4] if route == ROUTES[3] else route
    silent = rf"^{asked}: no answer from the backend at {backend.address}: no data for 0.2 s \(read_timeout\); gave up"
    async with adapter_to(backend, write, LIMITS) as adapter:
        backend.hanging.add(route)
        with pytest.raises(BackendUnavailable, match=silent):
            await whole_epoch(adapter)
    (reported,) = caplog.messages
    assert reported.endswith("no data for 0.2 s (read_timeout); retrying for up to 0.7 s")


async def test_a_hanging_stream_is_no_hanging_job(backend: Backend, write: Any) -> None:
    async with adapter_to(backend, write, LIMITS) as adapter:
        backend.hanging.add(ROUTES[3])
        assert await whole_epoch(adapter) == "completed"


async def test_a_backend_that_lost_the_weights_or_the_job_is_noticed(backend: Backend, write: Any) -> None:
    async with adapter_to(backend, write, {"read_timeout": 0.05}) as adapter:
        backend.version = 3
        assert (await adapter.policy_endpoint()).version == 3
        watching = asyncio.create_task(adapter.watch())
        backend.version = 1
        lost = "serves policy version 1, but was at version 3: it was restarted without the weights of this run"
        with pytest.raises(BackendError, match=lost):
            await watching
        with pytest.raises(BackendError, match=lost):
            await adapter.policy_endpoint()
        ref = await adapter.submit(collection())
        backend.lost_jobs = True
        with pytest.raises(BackendError, match=lost):
            await adapter.wait_until_complete(ref)


async def test_answers_that_come_in_another_order_are_no_lost_weights(backend: Backend, write: Any) -> None:
    async with adapter_to(backend, write) as adapter:
        backend.version, backend.faults["GET /health"] = 3, ["late"]
        asked = len(backend.asked)
        earlier = asyncio.create_task(adapter.policy_endpoint())
        await until(lambda: len(backend.asked) > asked)
        backend.version = 4
        assert (await adapter.policy_endpoint()).version == 4
        backend.arrives.set()
        assert (await earlier).version == 4


async def test_an_outage_that_has_ended_is_known_to_those_who_ask_later(backend: Backend, write: Any) -> None:
    async with adapter_to(backend, write) as adapter:
        before = time.monotonic()
        assert not await adapter.wait_until_reachable(before)
        backend.faults["GET /health"] = ["500"]
        await adapter.policy_endpoint()  # another request notices it, and waits
        assert await adapter.wait_until_reachable(before)
        assert not await adapter.wait_until_reachable(between := time.monotonic())
        backend.faults["GET /health"] = ["500"]
        for _ in range(2):  # the first notices it itself
            assert await adapter.wait_until_reachable(between)


async def test_a_lost_job_is_submitted_again_but_not_forever(backend: Backend, write: Any) -> None:
    async with adapter_to(backend, write) as adapter:
        ref = await adapter.submit(collection())
        backend.lost_jobs = True
        with pytest.raises(JobFailed, match=r"was restarted and lost the job: .*no such job: 'j"):
            await adapter.wait_until_complete(ref)
        assert backend.asked.count("POST /v1/train/jobs") == 3


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({}, "set exactly one of model .* and url"),
        ({"url": "http://h", "model": "m"}, "set exactly one of model .* and url"),
        ({"url": "h:1"}, "it must begin with http:// or https://"),
        ({"url": "http://h", "read_timeout": 0}, "read_timeout"),
        ({"url": "http://h", "retry_timeout": -1}, "retry_timeout"),
        ({"url": "http://h", "device": "cpu", "dtype": "auto"}, "device, dtype: allowed with model only"),
        ({"url": "http://h", "startup_timeout": 5}, "startup_timeout: allowed with model only"),
        ({"model": "m", "api_key": "k"}, "api_key: allowed with url only"),
        ({"model": "m", "quantization": "int4"}, r"quantization: .*'int8' or 'nf4' \(got 'int4'\)"),
        (
            {"model": "m", "quantization": "nf4"},
            r"only adapters can be trained over quantized weights; set training\.lora",
        ),
        (
            {"model": "m", "quantization": "nf4", "training": {"lora": {}}, "sampler": {"_type": "vllm"}},
            "vLLM would sample from other weights than are trained; allowed: sampler embedded",
        ),
        ({"url": "http://h", "quantization": "nf4", "training": {"lora": {}}}, "quantization: allowed with model only"),
        ({"url": "http://h", "kv_memory": "2GB", "threads": 1}, "kv_memory, threads: allowed with model only"),
        ({"model": "m", "kv_memory": "much"}, "kv_memory: .*allowed: a number of bytes, or a size such as 2GB"),
        ({"model": "m", "kv_memory": "0GB"}, "kv_memory: .*'0GB' is not a size of memory"),
        ({"model": "m", "kv_memory": True}, "kv_memory: .*True is not a size of memory"),
        ({"model": "m", "max_batch": 0}, "max_batch"),
        (
            {"model": "m", "max_batch": 8, "kv_memory": 10**9, "sampler": {"_type": "vllm"}},
            "max_batch, kv_memory: allowed with sampler embedded",
        ),
    ],
)
def test_settings_that_nobody_would_read_are_refused(write: Any, block: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(write({"trainer_adapters": {"a": {"_type": "insitu_trainer_adapter", **block}}}))


def test_limits_reach_the_backend(write: Any) -> None:
    limits = {"threads": 2, "max_length": 512, "max_batch": 16, "kv_memory": "1.5 GiB"}
    path = write({"trainer_adapters": {"a": {"_type": "insitu_trainer_adapter", "model": "m", **limits}}})
    config = load_config(path)
    block = config.block(TRAINER_ADAPTER, "a")
    assert isinstance(block, InsituAdapterConfig)
    chosen = backend_options(block.backend_arguments(config, model="m"))
    assert (chosen.threads, chosen.max_length, chosen.max_batch) == (2, 512, 16)
    assert chosen.kv_memory == 3 * 2**29
    assert backend_options(["--model", "m"]).kv_memory is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("2000", 2000), ("1KB", 1000), ("1 kib", 1024), ("2.5MB", 2_500_000), ("1TiB", 2**40), ("3gb", 3 * 10**9)],
)
def test_sizes_of_memory(text: str, size: int) -> None:
    assert backend_options(["--model", "m", "--kv_memory", text]).kv_memory == size


@pytest.mark.parametrize("text", ["2G", "-1", "1.5", "B", "0", "2 GB or so", ""])
def test_other_sizes_are_refused_by_the_command(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size of memory; allowed: a number of") as refused:
        backend_options(["--model", "m", "--kv_memory", text])
    assert "'--kv_memory'" in refused.value.format_message()


def backend_options(arguments: list[str]) -> BackendOptions:
    """The options as the command `insitu backend` reads them."""
    names = {each.name for each in fields(BackendOptions)}
    values = backend_command.make_context("backend", arguments).params
    return BackendOptions(**{name: value for name, value in values.items() if name in names})


async def test_a_run_ends_at_once_if_its_backend_is_away_though_versions_are_to_be_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def request(*_: Any, retried: bool = True, **__: Any) -> None:
        if retried:
            await hang()
        raise BackendUnavailable("no answer")

    checkpoints = Checkpoints(request)
    checkpoints.start()
    checkpoints.begin(2)
    await asyncio.wait_for(checkpoints.finish(3), HANGS)
    assert [message.partition(" may")[0] for message in caplog.messages] == ["version 3", "version 2"]
