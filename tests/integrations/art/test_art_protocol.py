"""The protocols of ART over HTTP: recorded sessions of official clients, and what can go wrong on either side."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from factories import power_failures
from marks import slow_but
from processes import HANGS
from tiny_models import save_tiny_model
from waiting import until

from insitu.backend import BackendOptions
from insitu.backend.model import load_model
from insitu.backend.server import create_backend
from insitu.wire.addresses import http_url
from insitu.wire.http_server import listening

DATA = Path(__file__).parents[2] / "data/art"
MODEL = {"name": "agent", "project": "games", "base_model": "some-hub/llama", "base_path": ".art", "trainable": True}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / "llama", max_position_embeddings=1024)
    yield load_model(str(folder), "cpu")
    torch.set_num_threads(before)


@contextlib.asynccontextmanager
async def serving(loaded, folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the whole backend on a port."""
    backend_options = BackendOptions(model=loaded.source, threads=1, max_batch=8, **options)
    backend = create_backend(loaded, backend_options, folder)
    await backend.start()
    try:
        async with (
            listening(backend.app, ("127.0.0.1", 0)) as address,
            httpx.AsyncClient(base_url=http_url(*address), timeout=HANGS) as client,
        ):
            yield client
    finally:
        await backend.close()


def session(release: str) -> list[dict[str, Any]]:
    return json.loads((DATA / f"{release}.json").read_text())


def groups(release: str = "0.5.4") -> list[dict[str, Any]]:
    return next(e["body"]["trajectory_groups"] for e in session(release) if "trajectory_groups" in (e["body"] or {}))


def training(model: dict = MODEL, trained: list | None = None, config: dict | None = None, **dev_config: Any) -> dict:
    train_config = {"learning_rate": 1e-3} | (config or {})
    return {
        "model": model,
        "trajectory_groups": groups() if trained is None else trained,
        "config": train_config,
        "dev_config": dev_config,
        "verbose": False,
    }


async def train(client: httpx.AsyncClient, body: dict, **headers: str) -> list[dict]:
    reply = await client.post("/_train_model", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


async def step(client: httpx.AsyncClient, model: dict = MODEL) -> int:
    return (await client.post("/_get_step", json=model)).json()


async def say(client: httpx.AsyncClient, model: str, **more: Any) -> httpx.Response:
    asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1}
    return await client.post("/v1/chat/completions", json=asked | more)


async def logprobs(client: httpx.AsyncClient, model: str) -> list[float]:
    choice = (await say(client, model, logprobs=True)).json()["choices"][0]
    return [token["logprob"] for token in choice["logprobs"]["content"]]


async def test_a_request_that_is_sent_again_after_a_restart_is_not_trained_twice(loaded, tmp_path):
    key = {"Idempotency-Key": "epoch 1"}
    async with serving(loaded, tmp_path) as client:
        (first, *_) = await train(client, training(), **key)
    async with serving(loaded, tmp_path) as client:
        (again,) = await train(client, training(), **key)
        assert await step(client) == 1
        assert {name: again[name] for name in ("loss", "num_gradient_steps")} == {
            name: first[name] for name in ("loss", "num_gradient_steps")
        }


async def test_a_model_that_trains_is_not_deleted(loaded, tmp_path):
    """Also if a later job of it has been canceled."""
    async with serving(loaded, tmp_path) as client:

        async def jobs() -> list[dict]:
            return (await client.get("/art/jobs")).json()["jobs"]

        async def are_two() -> bool:
            return len(await jobs()) == 2

        await step(client)
        first = asyncio.create_task(train(client, training(trained=groups() * 40, packed_sequence_length=100)))
        await until(jobs)
        later = asyncio.create_task(client.post("/_train_model", json=training(config={"learning_rate": 2e-3})))
        await until(are_two)
        assert (await client.post(f"/v1/train/jobs/{(await jobs())[0]['id']}/cancel")).json()["status"] == "canceled"
        id = (await client.post("/v1/preview/models", json=MODEL)).json()["id"]
        refused = await client.delete(f"/v1/preview/models/{id}")
        assert refused.status_code == 409
        assert "cannot be deleted while a training job is pending or running" in refused.text
        await first
        await later
        assert (await client.delete(f"/v1/preview/models/{id}")).status_code == 200


async def test_a_recorded_session_of_0_5_4(loaded, tmp_path):
    """Every request gets an answer like the recorded one; what is sampled before training is the same."""
    async with serving(loaded, tmp_path) as client:
        trained = []
        for sent in session("0.5.4"):
            reply = await client.request(sent["method"], sent["path"], json=sent["body"], headers=sent["headers"])
            assert reply.status_code == sent["status"] == 200, reply.text
            if sent["path"] == "/_train_model":
                trained.append([json.loads(line) for line in reply.text.splitlines()])
                before = [json.loads(line) for line in sent["answer"].splitlines()]
                assert [line.keys() for line in trained[-1]] == [line.keys() for line in before]
                for line, recorded in zip(trained[-1], before, strict=True):
                    assert line == pytest.approx(recorded, rel=1e-3, abs=1e-5)
            elif sent["path"] == "/_prepare_backend_for_training":
                assert reply.json() == [f"{client.base_url}/v1", "default"]
            elif "chat" in sent["path"] and not trained:
                choice, before = reply.json()["choices"][0], json.loads(sent["answer"])["choices"][0]
                assert choice["message"]["content"] == before["message"]["content"]
                assert choice["prompt_token_ids"] == before["prompt_token_ids"]
            elif sent["path"] == "/_get_step":
                assert reply.json() == 2
        assert [line["num_gradient_steps"] for line in trained[0]] == [2, 2]
        assert trained[0][1]["kl_div"] > 0  # beta is 0.1
        assert trained[1] == [
            {"loss": 0, "grad_norm": 0, "entropy": 0, "num_gradient_steps": 0, "dropped_equal_rewards": 2}
        ]
        # Nothing was logged at step 1, so that is what _delete_checkpoints deleted.
        names = [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]]
        assert {"recorded-0.5.4", "recorded-0.5.4@0", "recorded-0.5.4@2", "tiny/llama"} <= {*names}
        assert (await say(client, "recorded-0.5.4@1")).status_code == 404
        assert [path.name for path in tmp_path.glob("art/insitu/tests/*/checkpoints/*")] == ["step_000002"]


async def test_a_recorded_session_of_0_5_18(loaded, tmp_path):
    """The serverless protocol; ids of jobs are new, everything else is as recorded."""
    async with serving(loaded, tmp_path) as client:
        jobs: dict[str, str] = {}
        for sent in session("0.5.18"):
            path = sent["path"]
            for recorded, ours in jobs.items():
                path = path.replace(recorded, ours)
            reply = await client.request(sent["method"], path, json=sent["body"], headers=sent["headers"])
            assert reply.status_code == sent["status"] == 200, reply.text
            answer, before = reply.json(), json.loads(sent["answer"])
            if path == "/v1/preview/training-jobs":
                jobs[before["id"]] = answer["id"]
            elif path.endswith("/events"):

                async def ended(path: str = path, answer: dict = answer) -> bool:
                    answer.update((await client.get(path)).json())
                    return answer["data"][-1]["type"] in ("training_ended", "training_failed")

                await until(ended)
                assert [event["type"] for event in answer["data"]] == [event["type"] for event in before["data"]]
                assert answer["data"][0] == before["data"][0]
                for event, recorded in zip(answer["data"][1:-1], before["data"][1:-1], strict=True):
                    assert event["data"] == pytest.approx(recorded["data"], rel=1e-3, abs=1e-5)
            elif "checkpoints" in path or path.endswith("/models"):
                assert answer == before
        artifact = "wandb-artifact:///insitu/tests/recorded-0.5.18"
        for name, status in ((artifact, 200), (f"{artifact}:step2", 200), (f"{artifact}:step1", 404)):
            assert (await say(client, name)).status_code == status
        id = session("0.5.18")[0]["answer"]
        id = json.loads(id)["id"]
        assert (await client.delete(f"/v1/preview/models/{id}")).status_code == 200
        assert (await say(client, artifact)).status_code == 404
        assert not list(tmp_path.glob("art/*/*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("together", slow_but([True], [False, True]), ids=["one after the other", "together"])
async def test_completions_end_while_their_model_is_deleted_registered_again_and_trained(loaded, tmp_path, together):
    """8 of 16 completions are sampled, the others wait. The new model is trained although its jobs are named alike."""
    model = MODEL | {"base_path": ""}

    async def register() -> str:
        reply = await client.post("/v1/preview/models", json=model)
        assert reply.status_code == 200, reply.text
        return reply.json()["id"]

    async def is_sampling() -> bool:
        return "num_requests_running 0\n" not in (await client.get("/metrics")).text

    async with serving(loaded, tmp_path) as client:
        id = await register()
        await train(client, training(model), **{"Idempotency-Key": "epoch 1"})
        for _ in range(2):
            asked = {"max_tokens": 80, "min_tokens": 50}
            completions = [
                asyncio.create_task(say(client, name, seed=seed, stream=seed % 2 == 0, **asked))
                for seed in range(8)
                for name in ("agent", "agent@1")
            ]
            await until(is_sampling)
            delete = client.delete(f"/v1/preview/models/{id}")
            deleted, _ = await asyncio.gather(delete, register()) if together else (await delete, await register())
            assert deleted.status_code == 200
            assert await step(client, model) == 0
            completions.append(asyncio.create_task(say(client, "agent", **asked)))
            await train(client, training(model), **{"Idempotency-Key": "epoch 1"})
            assert await step(client, model) == 1
            replies = await asyncio.wait_for(asyncio.gather(*completions), HANGS)
            assert {reply.status_code for reply in replies} <= {200, 404}
            assert all(reply.text.rstrip().endswith(("}", "[DONE]")) for reply in replies)
            assert (await say(client, "agent@1")).status_code == 200


async def test_metrics_of_later_clients(loaded, tmp_path):
    """Under the names of all releases, the number of steps the same on each line."""
    async with serving(loaded, tmp_path) as client:
        lines = await train(client, training(packed_sequence_length=400))
        assert len(lines) > 2
        for line in lines:
            assert line["num_gradient_steps"] == line["data/step_num_gradient_steps"] == len(lines)
            assert line["loss/train"] == line["loss"]
            assert line["loss/learning_rate"] == 1e-3
            assert (line["data/step_num_groups_submitted"], line["data/step_num_groups_trainable"]) == (3, 2)
            assert (line["data/step_num_trajectories"], line["data/step_dropped_equal_rewards"]) == (9, 2)
            assert line["data/step_trainer_tokens"] == json.dumps(groups()[:2]).count("token_id:")
        skipped = await train(client, training(trained=groups()[2:]))
        assert len(skipped) == 1
        assert skipped[0]["loss/train"] == skipped[0]["data/step_num_gradient_steps"] == 0
        assert await step(client) == 2
        first, second = [(await say(client, name)).json() for name in ("agent@1", "agent@2")]
        assert first["choices"] == second["choices"]  # the skipped step has the same weights


async def test_names_and_the_spelling_of_tokens(loaded, tmp_path):
    async with serving(loaded, tmp_path) as client:
        await client.post("/_prepare_backend_for_training", json={"model": MODEL, "config": None})
        for name in ("agent", "agent@0", "some-hub/llama"):
            choice = (await say(client, name)).json()["choices"][0]
            assert all(token["token"].startswith("token_id:") for token in choice["logprobs"]["content"])
            assert choice["prompt_token_ids"][0] == 258
        plain = (await say(client, "agent", return_tokens_as_token_ids=False)).json()["choices"][0]
        assert not plain["logprobs"]["content"][0]["token"].startswith("token_id:")
        native = (await say(client, "policy", logprobs=True, return_tokens_as_token_ids=True)).json()["choices"][0]
        assert native["logprobs"]["content"][0]["token"].startswith("token_id:")
        assert "prompt_token_ids" not in native
        assert (await say(client, "policy")).json()["choices"][0]["logprobs"] is None
        streamed = await say(client, "agent", stream=True)
        assert streamed.text.count('"token":"token_id:') == 3
        for name in ("agent@1", "agent@x", "agent@", "other", "wandb-artifact:///insitu/games/agent:step9"):
            assert (await say(client, name)).status_code == 404
        assert (await client.get("/v1/models/some-hub/llama")).json()["policy_version"] == 0


async def test_each_model_is_a_line_of_its_own(loaded, tmp_path):
    """From the same start: training one changes neither the others nor the backend's own."""
    other = MODEL | {"name": "other"}
    async with serving(loaded, tmp_path) as client:
        start = await logprobs(client, "policy")
        await train(client, training(config={"learning_rate": 1e-2}))
        await train(client, training(config={"learning_rate": 1e-2}, trained=groups()[:1]))
        await train(client, training(other, config={"learning_rate": 1e-2}))
        assert (await step(client), await step(client, other)) == (2, 1)
        said = {name: await logprobs(client, name) for name in ("agent", "agent@1", "other", "other@1")}
        assert await logprobs(client, "policy") == await logprobs(client, "agent@0") == start
        assert said["other"] == said["other@1"] == said["agent@1"] != start
        assert said["agent"] != said["agent@1"]
        assert (await client.get("/health")).json()["policy_version"] == 0


async def test_a_model_goes_on_in_another_process(loaded, tmp_path):
    async with serving(loaded, tmp_path) as client:
        await train(client, training(config={"learning_rate": 1e-2}))
        await client.post("/_log", json={"model": MODEL, "trajectory_groups": groups(), "split": "val"})
        said = (await say(client, "agent")).json()["choices"][0]
    async with serving(loaded, tmp_path) as client:
        assert (await say(client, "agent")).status_code == 404  # until somebody asks for the model
        assert await step(client) == 1
        assert (await say(client, "agent")).json()["choices"][0] == said
        await train(client, training(config={"learning_rate": 1e-2}))
        assert await step(client) == 2
        kept = MODEL | {"_internal_config": None}
        await client.post("/_delete_checkpoints", json=kept, params={"benchmark": "val/reward"})
        assert (await say(client, "agent@1")).json()["choices"][0] == said  # the best of what was logged
        await client.post("/_delete_checkpoint_files", json={"model": kept, "steps_to_keep": []})
        assert (await say(client, "agent@1")).status_code == 404
        assert (await say(client, "agent")).status_code == 200


async def test_a_lost_reply_is_not_paid_twice(loaded, tmp_path):
    """Who left before the end and sends the same again gets the reply; who had it means to train once more."""
    body = training(packed_sequence_length=100)
    async with serving(loaded, tmp_path) as client:
        async with client.stream("POST", "/_train_model", json=body) as reply:
            first = await anext(reply.aiter_lines())
        again = await train(client, body)
        assert json.loads(first) == again[0]
        assert await step(client) == 1
        assert len((await client.get("/art/jobs")).json()["jobs"]) == 1
        once_more = await train(client, body)
        assert once_more[0]["loss"] != again[0]["loss"]
        assert await step(client) == 2
        named = await train(client, body, **{"Idempotency-Key": "epoch 3"})
        assert await train(client, body, **{"Idempotency-Key": "epoch 3"}) == named
        assert await step(client) == 3


async def test_another_body_with_the_same_key_is_told(loaded, tmp_path):
    async with serving(loaded, tmp_path) as client:
        for config, differs in (({}, None), ({}, None), ({"learning_rate": 0.5}, "true")):
            reply = await client.post(
                "/_train_model", json=training(config=config), headers={"Idempotency-Key": "epoch 1"}
            )
            assert (reply.status_code, reply.headers.get("Body-Differs")) == (200, differs)
        assert await step(client) == 1


async def test_failures_can_be_read(loaded, tmp_path):
    """Before there is a job by status, in the middle by a broken connection; each time at /art/jobs, and undone."""
    targets = {"_internal_config": {"peft_args": {"target_modules": ["nowhere"]}}}
    async with serving(loaded, tmp_path) as client:
        early = await client.post("/_train_model", json=training(MODEL | targets))
        assert early.status_code == 409
        assert "nowhere" in early.json()["detail"] == early.json()["error"]["message"]
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(
                "/_train_model", json=training(config={"learning_rate": 1e38}, packed_sequence_length=300)
            )
        refused = await client.post("/_train_model", json=training(kimi_k2_tau=0.5))
        assert refused.status_code == 422
        assert refused.json()["detail"] == refused.json()["error"]["message"]
        state = (await client.get("/art/jobs")).json()
        assert [(job["status"], job["model"]) for job in state["jobs"]] == [("failed", "insitu/games/agent")]
        assert "the weights from before the job were restored" in state["jobs"][0]["message"]
        assert state["refused"][0]["param"] == "kimi_k2_tau"
        assert "nowhere" in state["refused"][1]["message"]
        assert (await client.get(f"/art/jobs/{state['jobs'][0]['id']}")).json() == state["jobs"][0]
        assert await step(client) == 0
        await train(
            client, training(MODEL | {"_internal_config": {"peft_args": {"r": 2, "target_modules": ["q_proj"]}}})
        )
        assert await step(client) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/register", MODEL | {"base_model": "Qwen/Qwen2.5-3B"}, 409, "base_model is 'Qwen/Qwen2.5-3B', but this"),
        ("/register", MODEL | {"name": ".."}, 422, "the model's name is '..'"),
        ("/register", MODEL | {"name": "policy"}, 409, "the name 'policy'"),
        ("/register", MODEL | {"name": "some-hub/llama"}, 409, "is taken: the base model is served under it"),
        ("/register", MODEL | {"name": "llama", "base_model": "llama"}, 409, "is taken: the base model is served"),
        ("/register", MODEL | {"project": "others"}, 409, "insitu/games/agent is served under it"),
        ("/register", [MODEL], 422, "the body: "),
        ("/register", MODEL | {"_internal_config": {"peft_args": {"bias": "all"}}}, 422, "peft_args.bias is 'all'"),
        ("/_train_model", {"model": MODEL, "trajectory_groups": {}}, 422, "trajectory_groups: "),
        ("/_train_model", {"model": MODEL, "trajectory_groups": [], "config": 3}, 422, "config: Input should"),
        ("/_delete_checkpoints?benchmark_smoothing=2", MODEL, 422, "in (0, 1], got '2'"),
        ("/_experimental_push_to_s3", {"model": MODEL}, 400, "the checkpoints of insitu/games/agent are in"),
        ("/v1/preview/training-jobs", {"model_id": "x", "trajectory_groups": []}, 404, "no such model: 'x'"),
        ("/v1/preview/sft-training-jobs", {}, 400, "not supported"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_in_both_shapes(loaded, tmp_path, path, body, status, named):
    async with serving(loaded, tmp_path) as client:
        await client.post("/_get_step", json=MODEL)
        reply = await client.post(path, json=body)
        assert reply.status_code == status
        assert named in reply.json()["detail"] == reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["some-hub/llama", "policy"])
async def test_a_name_serves_what_is_trained_under_it_or_is_refused(loaded, tmp_path, name):
    """It is never taken for the base model when its own was trained, nor the other way round."""
    async with serving(loaded, tmp_path) as client:
        reply = await client.post("/_train_model", json=training(MODEL | {"name": name}))
        if reply.status_code == 200:
            assert (await say(client, name)).json()["policy_version"] == 1
        assert reply.status_code == 409
        alias = MODEL | {"name": "llama", "base_model": "policy"}
        assert await step(client, alias) == 0
        reply = await client.post("/register", json=MODEL | {"base_model": "llama"})
        assert reply.status_code == 409
        assert "insitu/games/llama is served under that name; 'policy' is the same model" in reply.text


async def test_a_torn_history_is_continued_and_a_damaged_one_is_named(loaded, tmp_path, caplog, monkeypatch):
    survives = power_failures(monkeypatch)
    history = tmp_path / "art/insitu/games/agent/history.jsonl"
    history.parent.mkdir(parents=True)
    history.write_bytes(b'{"step": 0, "val/reward": 0.25}\n{"step": 0, "val/rew')
    log = {"model": MODEL, "trajectory_groups": groups(), "split": "val"}
    async with serving(loaded, tmp_path) as client:
        assert await step(client) == 0
        assert f"{history}: skipped an incomplete last line" in caplog.text
        assert (await client.post("/_log", json=log)).status_code == 200
    assert [json.loads(line)["step"] for line in history.read_text().splitlines()] == [0, 0]
    assert survives(history)
    for damaged in ("nonsense\n", '{"val/reward": 1}\n'):
        history.write_text('{"step": 0}\n' + damaged)
        async with serving(loaded, tmp_path) as client:
            reply = await client.post("/_get_step", json=MODEL)
            assert f"{history}, line 2 " in reply.json()["error"]["message"]


async def test_another_adapter_is_refused_before_episodes_are_played(loaded, tmp_path):
    """A model that goes on in another process, or its base, has adapters already."""
    adapters = {"_internal_config": {"peft_args": {"r": 2}}}
    async with serving(loaded, tmp_path) as client:
        await train(client, training(MODEL))
    async with serving(loaded, tmp_path) as client:
        prepared = await client.post("/_prepare_backend_for_training", json={"model": MODEL | adapters, "config": None})
        assert prepared.status_code == 409
        assert "allowed: none (all weights)" in prepared.json()["error"]["message"]
        assert await step(client) == 1


async def test_a_token_is_asked_of_art_clients_too(loaded, tmp_path):
    """Clients of `art run` know no tokens, but make basic authentication of an address with a password."""
    async with serving(loaded, tmp_path, token="s3cret") as client:
        assert (await client.get("/healthcheck")).json() == {"status": "ok"}
        assert (await client.post("/register", json=MODEL)).status_code == 401
        for wrong in ("Basic czNjcmV0", "Basic !", "Bearer nope", "s3cret"):
            headers = {"Authorization": wrong}
            assert (await client.post("/register", json=MODEL, headers=headers)).status_code == 401
        address = str(client.base_url).replace("http://", "http://art:s3cret@")
        async with httpx.AsyncClient(base_url=address) as inside:
            assert (await inside.post("/register", json=MODEL)).json() is None
            config = {"server_args": {"api_key": "default"}}
            reply = await inside.post("/_prepare_backend_for_training", json={"model": MODEL, "config": config})
            assert reply.json() == [f"{client.base_url}/v1", "s3cret"]


@pytest.mark.slow
async def test_adapters_by_the_backends_option_and_by_the_models(loaded, tmp_path):
    """Where the model does not ask for adapters, those of --lora_rank are trained, or all weights."""
    own = MODEL | {"name": "own", "_internal_config": {"peft_args": {"r": 2, "lora_alpha": 8}}}
    async with serving(loaded, tmp_path, lora_rank=4) as client:
        await train(client, training())
        await train(client, training(own))
    kept = {}
    for name in ("agent", "own"):
        folder = tmp_path / f"art/insitu/games/{name}/checkpoints/step_000001"
        kept[name] = json.loads((folder / "adapter_config.json").read_text())
    assert (kept["agent"]["r"], kept["agent"]["lora_alpha"]) == (4, 8)
    assert (kept["own"]["r"], kept["own"]["lora_alpha"]) == (2, 8)


async def test_settings_without_effect_are_named_once(loaded, tmp_path, caplog):
    model = MODEL | {"_internal_config": {"engine_args": {"tensor_parallel_size": 2}, "trainer_args": None}}
    async with serving(loaded, tmp_path) as client:
        for _ in range(2):
            await train(client, training(model, trained=groups()[2:], plot_tensors=True))
    named = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert named == [
        "model insitu/games/agent: settings without effect here: engine_args.tensor_parallel_size, plot_tensors"
    ]


async def test_what_art_asks_of_a_server_besides(loaded, tmp_path):
    async with serving(loaded, tmp_path) as client:
        assert (await client.post("/close")).json() is None
        text = (await client.get("/metrics")).text
        kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
        assert kinds.pop("vllm:request_success_total") == "counter"
        assert {*kinds.values()} == {"gauge"}
        assert len(re.findall(r"^# HELP \S+ .+$", text, re.MULTILINE)) == 4
        *metrics, started = (line for line in text.splitlines() if not line.startswith("#"))
        assert metrics == ["vllm:num_requests_running 0", "vllm:num_requests_waiting 0", "vllm:request_success_total 0"]
        assert 0 <= time.time() - float(started.removeprefix("process_start_time_seconds ")) < 600
        prompted = {"name": "gpt", "project": "games", "trainable": False}
        assert (await client.post("/register", json=prompted)).json() is None
        assert await step(client, prompted) == 0
        assert (await client.post("/_log", json={"model": prompted, "trajectory_groups": groups()})).json() is None


async def test_numbers_that_python_does_not_read_are_refused(loaded, tmp_path):
    """`int` raises ValueError for more than 4,300 digits, which was answered with 500."""
    many = "9" * 5000
    async with serving(loaded, tmp_path) as client:
        await step(client)
        for name in (f"agent@{many}", f"policy@{many}", f"agent:step{many}"):
            assert (await say(client, name)).status_code == 404
        assert (await client.get(f"/v1/models/policy@{many}")).status_code == 404
        text = json.dumps(training())
        assert text.count("token_id:") > 2
        for body in (re.sub(r"token_id:\d+", f"token_id:{many}", text, count=1), text.replace('"0.1"', many)):
            assert (await client.post("/_train_model", content=body)).status_code < 500


@pytest.mark.parametrize("changes", [{"reward": -1e200}, {"metrics": {"won": 1e200}}])
async def test_numbers_whose_squares_python_cannot_compute_are_refused(loaded, tmp_path, changes):
    trained = groups()
    trained[0]["trajectories"][0] |= changes
    async with serving(loaded, tmp_path) as client:
        await step(client)
        reply = await client.post("/_train_model", json=training(trained=trained))
        assert reply.status_code == 422, reply.text
        assert f"trajectories.0.{next(iter(changes))}" in reply.text
