"""Training jobs over a real port: uploads good and bad, events, idempotency, queueing, cancelling."""

import asyncio
import contextlib
import gzip
import json
import math
import shutil
import threading
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from aiohttp import web
from factories import power_failures
from marks import slow_but
from processes import wait_until
from tiny_models import byte_tokenizer, save_tiny_model
from torch.optim.optimizer import register_optimizer_step_post_hook
from waiting import turns, until

from insitu.backend.compute import ComputeThread
from insitu.backend.inference.sampler import WeightVersion
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.checkpoints import write_optimizer
from insitu.backend.learner.jobs import TrainingQueue
from insitu.backend.learner.learner import Learner
from insitu.backend.model import load_model
from insitu.backend.protocols.native import job_routes
from insitu.backend.protocols.native.uploads import Limits, read_job
from insitu.backend.protocols.openai.chat import ChatRequest
from insitu.errors import RequestRefused
from insitu.schemas.episodes import TrainingRow
from insitu.wire.addresses import http_url
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_server import guard, listening

SETTINGS = {"learning_rate": 0.01, "mini_batch_size": 4}
JOBS = "/v1/train/jobs"
TOKENIZER = ChatTokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(str(save_tiny_model(tmp_path_factory.mktemp("model") / "llama")), "cpu")
    torch.set_num_threads(before)


@contextlib.asynccontextmanager
async def serving(loaded, folder, **limits):
    """The routes on a port; `post` and `get` give (status, JSON), `published` are the versions that were served."""
    compute = ComputeThread()
    compute.start()
    learner = Learner(loaded, folder)
    learner.resume()
    published: list[int] = []

    async def publish(weights: WeightVersion, module: torch.nn.Module | None) -> None:
        assert weights.version is not None
        published.append(weights.version)

    sampler = SimpleNamespace(publish=publish, check=lambda lora: None, keep_loaded=lambda count: None)
    jobs = TrainingQueue(learner, compute, sampler, folder)
    app = web.Application(middlewares=[guard(AccessPolicy())])
    limits = Limits(vocab_size=loaded.vocab_size, max_length=loaded.max_length, **limits)
    for route in job_routes(jobs, limits, ChatTokenizer(loaded.tokenizer)):
        route.add_to(app)

    async with (
        listening(app, ("127.0.0.1", 0)) as address,
        aiohttp.ClientSession(http_url(*address), headers={"Content-Type": "application/x-ndjson"}) as session,
    ):

        async def post(body: bytes = b"", path=JOBS, **headers: str):
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.post(path, data=body, headers=headers) as response:
                return response.status, await response.json()

        async def get(path: str):
            async with session.get(path) as response:
                return response.status, await response.json()

        async def events(id: str) -> list[dict]:
            async with session.get(f"{JOBS}/{id}/events") as response:
                assert response.content_type == "text/event-stream"
                return [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: ")]

        yield SimpleNamespace(
            post=post,
            get=get,
            events=events,
            jobs=jobs,
            learner=learner,
            published=published,
            session=session,
            compute=compute,
        )
    await jobs.close()
    compute.close()


def row(**changes) -> dict:
    good = {
        "token_ids": [1, 5, 9, 7, 2],
        "loss_mask": [0, 0, 0, 1, 1],
        "logprobs": [0, 0, 0, -0.1, -0.7],
        "advantages": 0.5,
        "episode": "a",
    }
    return good | changes


def lines(rows, settings=SETTINGS, **header) -> bytes:
    head = {"settings": settings, "num_rows": len(rows)} | header
    return "\n".join(json.dumps(line) for line in (head, *rows)).encode()


MANY = [row(token_ids=[1, 5, 9, index, 2], episode=str(index)) for index in range(60)]


async def test_a_job_from_upload_to_served_weights(loaded, tmp_path):
    async with serving(loaded, tmp_path) as backend:
        status, state = await backend.post(gzip.compress(lines(MANY)), Content_Encoding="gzip", Idempotency_Key="run/1")
        assert status == 200
        assert state["status"] in ("pending", "running")
        events = await backend.events(state["id"])
        assert [event["status"] for event in events] == ["pending", *["running"] * 16, "completed"]
        assert [event["progress"] for event in events] == sorted(event["progress"] for event in events)
        assert all(math.isfinite(event["metrics"]["grad_norm"]) for event in events[2:])
        _, final = await backend.get(f"{JOBS}/{state['id']}")
        assert final == events[-1] == (await backend.events(state["id"]))[-1]
        assert (final["policy_version"], final["progress"]) == (1, 100)
        assert final["metrics"]["steps"] == 15
        assert final["metrics"]["rows"] == 60
        assert backend.published == [1]
        assert load_model(final["checkpoint"], "cpu").tokenizer.chat_template
        record = json.loads((tmp_path / "jobs" / f"{state['id']}.json").read_text())
        assert record == final | {"checkpoint": "checkpoints/step_000001"}  # right wherever the folder is moved
        assert final["checkpoint"] == str(tmp_path / record["checkpoint"])

        # the same key again: the first job's result, and nothing trained
        assert await backend.post(lines(MANY), Idempotency_Key="run/1") == (200, final)
        assert backend.learner.version == 1
        # no key, no compression: another job
        _, other = await backend.post(lines(MANY))
        assert (await backend.events(other["id"]))[-1]["policy_version"] == 2


async def test_the_record_of_a_job_survives_a_power_failure(loaded, tmp_path, monkeypatch):
    survives = power_failures(monkeypatch)
    async with serving(loaded, tmp_path) as backend:
        _, state = await backend.post(lines([row()]))
        await backend.events(state["id"])
    assert survives(tmp_path / "jobs" / f"{state['id']}.json")


async def test_a_key_is_known_after_a_restart(loaded, tmp_path):
    async with serving(loaded, tmp_path) as backend:
        _, state = await backend.post(lines([row()]), Idempotency_Key="run/1")
        final = (await backend.events(state["id"]))[-1]
    shutil.rmtree(tmp_path / "jobs")  # the process was killed after its checkpoint, before this record
    async with serving(loaded, tmp_path) as backend:
        assert await backend.post(lines([row()]), Idempotency_Key="run/1") == (200, final)
        assert await backend.events(state["id"]) == [final]
        assert backend.published == []
        _, other = await backend.post(lines([row()]), Idempotency_Key="run/2")
        assert (await backend.events(other["id"]))[-1]["policy_version"] == 2


async def test_another_body_with_the_same_key_is_told(loaded, tmp_path):
    """Compared are settings and rows, however they are compressed, and whichever process is asked."""
    mine = [row(), row(episode="b")]
    same = [
        lines(mine),
        gzip.compress(lines(mine), mtime=7),
        lines(mine, keep={"last": 9}),
        lines(
            mine,
            SETTINGS
            | {"schedule_range": [0.25, 0.5], "loss_agg_mode": "token"}
            | {"micro_batch_tokens": 7, "attention": "padded", "kl_rows": 3},
        ),
    ]
    other = [lines([row(), row(episode="c")]), lines([row()]), lines(mine, SETTINGS | {"learning_rate": 0.5})]
    garbage = [gzip.compress(lines(mine))[:-9], b"{", b"", lines(mine)[:-9], lines(mine) + b"no row"]

    async def answers(backend) -> list[bool]:
        bodies = [
            await backend.post(
                body, Idempotency_Key="run/1", **({"Content_Encoding": "gzip"} if body[:2] == b"\x1f\x8b" else {})
            )
            for body in (*same, *other)
        ]
        assert {(status, state["id"]) for status, state in bodies} == {(200, first["id"])}
        return [state["body_differs"] for _, state in bodies]

    expected = [*(False for _ in same), *(True for _ in other)]
    async with serving(loaded, tmp_path) as backend:
        _, first = await backend.post(lines(mine), Idempotency_Key="run/1")
        assert not first["body_differs"]
        for body in garbage:
            encoding = {"Content_Encoding": "gzip"} if body[:2] == b"\x1f\x8b" else {}
            assert (await backend.post(body, Idempotency_Key="run/1", **encoding))[0] == 400
        status, refused = await backend.post(lines(mine), Idempotency_Key="")
        assert (status, refused["error"]["message"][:24]) == (400, "Idempotency-Key is empty")
        assert await answers(backend) == expected
        await backend.events(first["id"])
        assert await answers(backend) == expected
    shutil.rmtree(tmp_path / "jobs")
    async with serving(loaded, tmp_path) as backend:
        assert await answers(backend) == expected
        assert backend.learner.version == 1


async def test_a_key_is_known_after_its_checkpoint_was_deleted(loaded, tmp_path):
    async with serving(loaded, tmp_path) as backend:
        finals = []
        for number in (1, 2):
            _, state = await backend.post(lines([row()]), Idempotency_Key=f"run/{number}")
            finals.append((await backend.events(state["id"]))[-1])
        backend.learner.saved.delete(1)
        assert await backend.post(lines([row()]), Idempotency_Key="run/1") == (200, finals[0])
    (tmp_path / "jobs/job-torn.json").write_text("{")
    async with serving(loaded, tmp_path) as backend:
        for number in (1, 2):
            assert await backend.post(lines([row()]), Idempotency_Key=f"run/{number}") == (200, finals[number - 1])
        assert (backend.learner.versions, backend.published) == ([0, 2], [])


async def test_settings_are_checked_before_there_are_rows(loaded, tmp_path):
    check = "/v1/train/check"
    async with serving(loaded, tmp_path) as backend:
        status, settings = await backend.post(json.dumps(SETTINGS).encode(), check)
        assert (status, settings["mini_batch_size"], settings["betas"]) == (200, 4, [0.9, 0.999])
        for body, status, message in (
            ({"lora": {"target_modules": ["nowhere"]}}, 409, "lora.target_modules is ['nowhere']"),
            ({"lora": {"rank": 2**61}}, 400, "lora.rank: Input should be less than or equal to 65536"),
            ({"learning_rat": 1}, 400, "learning_rat: Extra inputs are not permitted"),
            ([], 400, "the body: Input should be"),
        ):
            reply = await backend.post(json.dumps(body).encode(), check)
            assert (reply[0], message in reply[1]["error"]["message"]) == (status, True), reply
        assert backend.published == []


async def test_jobs_wait_their_turn_and_can_be_canceled(loaded, tmp_path):
    async with serving(loaded, tmp_path) as backend:
        long = {"learning_rate": 0.01, "mini_batch_size": 1, "num_iterations": 50}
        _, first = await backend.post(lines(MANY, long), Idempotency_Key="run/1")
        _, second = await backend.post(lines(MANY), Idempotency_Key="run/2")
        _, third = await backend.post(lines(MANY), Idempotency_Key="run/3")
        assert (await backend.get(f"{JOBS}/{second['id']}"))[1]["status"] == "pending"
        _, canceled = await backend.post(path=f"{JOBS}/{second['id']}/cancel")
        assert canceled["status"] == "canceled"

        async def has_begun() -> bool:
            return (await backend.get(f"{JOBS}/{first['id']}"))[1]["progress"] > 0

        await until(has_begun)
        _, canceled = await backend.post(path=f"{JOBS}/{first['id']}/cancel")
        assert canceled["status"] == "canceled"
        done = (await backend.events(third["id"]))[-1]
        assert (done["status"], done["policy_version"]) == ("completed", 1)
        assert (await backend.post(path=f"{JOBS}/{third['id']}/cancel"))[1] == done
        assert backend.published == [1]
        # the third job ran on weights that the canceled one had not touched
        async with serving(loaded, tmp_path / "quiet") as quiet:
            _, alone = await quiet.post(lines(MANY))
            alone = (await quiet.events(alone["id"]))[-1]
            assert alone["metrics"] | {"seconds": 0} == done["metrics"] | {"seconds": 0}
        # the key of a canceled job is free again
        _, again = await backend.post(lines(MANY), Idempotency_Key="run/1")
        assert again["id"] != first["id"]
        assert (await backend.events(again["id"]))[-1]["status"] == "completed"


async def test_a_failed_job_says_why_and_the_next_one_runs(loaded, tmp_path):
    """A loss that overflows, and steps so long that only the last one's weights do, or what is computed with them."""
    async with serving(loaded, tmp_path) as backend:
        endless = lines([row(advantages=1e38), row(episode="b")], {"truncated_importance": 1e38})
        endless = endless.replace(b"-0.1, -0.7", b"-100, -100")
        for body, problem in (
            (endless, "the loss is"),
            (lines([row()], {"learning_rate": 1e300}), "weight is not finite"),
            (lines([row()], {"learning_rate": 1e25}), "a logit is not finite"),
        ):
            _, state = await backend.post(body)
            failed = (await backend.events(state["id"]))[-1]
            assert failed["status"] == "failed"
            assert problem in failed["message"]
            assert "were restored" in failed["message"]
        assert backend.learner.version == 0
        _, state = await backend.post(lines(MANY))
        assert (await backend.events(state["id"]))[-1]["policy_version"] == 1


async def test_a_checkpoint_that_cannot_be_written_fails_its_job_only(loaded, tmp_path):
    (tmp_path / "checkpoints").write_text("")
    (tmp_path / "jobs").write_text("")
    async with serving(loaded, tmp_path) as backend:
        _, state = await backend.post(lines(MANY))
        failed = (await backend.events(state["id"]))[-1]
        assert (failed["status"], backend.learner.version, backend.published) == ("failed", 0, [])
        assert "checkpoints" in failed["message"]
        (tmp_path / "checkpoints").unlink()
        _, state = await backend.post(lines(MANY))
        assert (await backend.events(state["id"]))[-1]["policy_version"] == 1


async def test_other_adapters_than_the_first_jobs_are_refused(loaded, tmp_path):
    async with serving(loaded, tmp_path) as backend:
        _, state = await backend.post(lines(MANY))
        await backend.events(state["id"])
        status, answer = await backend.post(lines(MANY, {"lora": {"rank": 2}}))
        assert status == 409
        assert answer["error"]["param"] == "settings.lora"


async def test_unknown_jobs_and_cut_off_uploads(loaded, tmp_path):
    async with serving(loaded, tmp_path) as backend:
        for call in (backend.get(f"{JOBS}/no"), backend.post(path=f"{JOBS}/no/cancel")):
            status, answer = await call
            assert status == 404
            assert answer["error"]["code"] == "job_not_found"
        assert (await backend.post(lines(MANY, {"lerning_rate": 1})))[0] == 400

        async def half():
            yield lines(MANY)[:500]
            raise ConnectionResetError

        with pytest.raises((aiohttp.ClientError, ConnectionResetError)):
            await backend.session.post(JOBS, data=half())
        status, job = await backend.post(lines(MANY))
        assert status == 200
        _, answer = await backend.get(f"{JOBS}/no")
        assert answer["error"]["message"].endswith(f"known jobs: {job['id']}")


async def read(body: bytes, encoding: str = "", piece: int = 1000, tokenizer=TOKENIZER, **limits):
    async def chunks():
        for start in range(0, len(body), piece):
            yield body[start : start + piece]

    allowed = Limits(**({"vocab_size": 320, "max_length": 256} | limits))
    header, rows, _ = await read_job(chunks(), encoding, allowed, tokenizer)
    return header.settings, rows.rows


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "the job is empty"),
        (lines([]), "none of the 0 rows has a trained token"),
        (lines([row(loss_mask=[0] * 5)]), "none of the 1 rows has a trained token"),
        (b"{]", "line 1.*not JSON"),
        (lines([], {"lerning_rate": 1}), r"settings\.lerning_rate: unknown key; available: .*learning_rate"),
        (lines([], {"kl": {"betta": 1}}), r"settings\.kl\.betta: unknown key"),
        (lines([], {"learning_rate": "fast"}), r"settings\.learning_rate: .*not 'fast'"),
        (lines([row()], num_rows=2), "ends after 1 of 2 rows"),
        (lines([row()], num_rows=0), "num_rows is 0, but the upload has more"),
        (lines([row(), 1]), "row 2"),
        (lines([row()]) + b"x", "row 1: not JSON"),
        (lines([row(shaping={"top_k": 3})]), "row 1: .*top_k does not add to logits"),
        (lines([row(shaping={"logit_bias": {"320": 1}})]), "row 1: logit_bias has the token 320"),
        (lines([row(shaping={"temperature": 1})]), "row 1: shaping.temperature: unknown key"),
        (lines([row(advantage=1)]), "row 1: advantage: unknown key"),
        (lines([row(loss_mask=[0, 1])]), "row 1: loss_mask has 2 entries, token_ids has 5"),
        (lines([row(), row(logprobs=[-1.0] * 6)]), "row 2: logprobs has 6 entries, token_ids has 5"),
        (lines([row(advantages=[1.0])]), "row 1: advantages has 1 entries"),
        (lines([row(loss_mask=[0, 0, 2, 1, 1])]), r"row 1: loss_mask\[2\] is 2; allowed: 0, 1"),
        (lines([row(loss_mask=[0, 0, True, 1, 1])]), r"row 1: loss_mask\.2"),
        (lines([row(loss_mask=[1, 0, 0, 1, 1])]), r"row 1: loss_mask\[0\] is 1"),
        (lines([row(logprobs=[0, 0, 0, math.nan, -1])]), r"row 1: logprobs\[3\] is nan"),
        (lines([row(logprobs=[0, 0, 0, -1, None])]), r"row 1: logprobs\[4\] is None"),
        (lines([row(logprobs=[0, 0, 0, -1, -math.inf])]), r"row 1: logprobs\[4\] is -inf"),
        (lines([row(advantages=1e39)]), r"row 1: advantages\[3\] is 1e\+39"),
        (lines([], {"betas": [0.9, 1]}), r"settings\.betas\.1: .*less than 1, not 1"),
        (lines([], {"betas": [-0.9, 0.99]}), r"settings\.betas\.0: .*greater than or equal to 0, not -0\.9"),
        (lines([row(advantages=math.nan)]), r"row 1: advantages\[3\] is nan"),
        (lines([row(advantages=None)]), r"row 1: advantages\[3\] is None"),
        (lines([row(temperature=0)]), r"row 1: temperature: .*greater than or equal to 0.00001, not 0"),
        (lines([row(temperature=math.nan)]), "row 1: temperature"),
        (lines([row(token_ids=[1, 2, 320, 4, 5])]), r"row 1: token_ids\[2\] is 320; the vocabulary ends at 319"),
        (lines([row(token_ids=[1, 2, -1, 4, 5])]), r"row 1: token_ids\[2\] is -1"),
        (lines([row(token_ids=[1, 2, 1.5, 4, 5])]), r"row 1: token_ids\.2"),
        (
            lines([row(token_ids=[1] * 257, loss_mask=[0] * 257, logprobs=[0] * 257)]),
            "257 entries; the model takes 256",
        ),
    ],
)
async def test_what_is_refused_says_where_and_why(body, problem):
    for encoding in ("", "gzip"):
        with pytest.raises(RequestRefused, match=problem) as refused:
            await read(gzip.compress(body) if encoding else body, encoding)
        assert refused.value.status == 400


def side(preferred: bool | None = True, **changes) -> dict:
    return {"token_ids": [1, 5, 9, 7], "loss_mask": [0, 0, 1, 1], "pair": "p", "preferred": preferred} | changes


def dialogue(**changes) -> dict:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    return {"messages": messages, "preferred": True} | changes


def without(row: dict, *keys: str) -> dict:
    return {key: value for key, value in row.items() if key not in keys}


PAIR = [side(True), side(False)]


@pytest.mark.parametrize(
    ("method", "rows", "problem"),
    [
        ("dpo", [without(side(), "pair")], "row 1: pair is missing; method dpo requires it"),
        ("dpo", [side(), without(side(), "preferred")], "row 2: preferred is missing; method dpo requires it"),
        ("dpo", [side(), side()], "row 1: pair 'p' has no row with preferred: false; a pair has two sides"),
        ("dpo", [*PAIR, side(False, pair="q")], "row 3: pair 'q' has no row with preferred: true"),
        ("dpo", [side(), side(False, loss_mask=[0] * 4)], r"row 1: pair 'p' has no trained token .* preferred: false"),
        ("dpo", [side(), side(False, loss_mask=[0] * 3)], "row 2: loss_mask has 3 entries, token_ids has 4"),
        ("dpo", [side(logprobs=[-1.0])], "row 1: logprobs has 1 entries, token_ids has 4"),
        ("dpo", [side("yes")], "row 1: preferred: .*boolean"),
        ("dpo", [side(messages=[])], "row 1: messages and token_ids exclude each other"),
        ("dpo", [without(side(), "token_ids")], "row 1: token_ids is missing; allowed instead: messages"),
        ("dpo", [without(side(), "loss_mask")], "row 1: loss_mask is missing"),
        ("dpo", [side(tools=[])], "row 1: tools requires messages"),
        ("dpo", [side(trained_messages=[0])], "row 1: trained_messages requires messages"),
        ("kto", [without(side(), "pair", "preferred")], "row 1: preferred is missing; method kto requires it"),
        ("kto", [side()], "row 1: pair cannot be used with method kto"),
        (
            "kto",
            [without(side(each, episode="e"), "pair") for each in (True, True, False)],
            "rows 1 and 3: preferred differs within the episode 'e'",
        ),
        ("sft", [without(side(), "pair")], "row 1: preferred cannot be used with method sft"),
        ("grpo", [row(preferred=True)], "row 1: preferred cannot be used with method grpo"),
        ("grpo", [row(pair="p")], "row 1: pair cannot be used with method grpo"),
        ("grpo", [without(row(), "logprobs")], "row 1: logprobs is missing; method grpo requires it"),
        ("grpo", [without(dialogue(), "preferred")], "row 1: logprobs is missing"),
        ("kto", [dialogue(messages=[])], "none of the 1 rows has a trained token"),
        ("kto", [dialogue(messages=[{"role": "user", "content": 1}])], r"row 1: messages\.0\.content"),
        ("kto", [dialogue(messages=[{"content": "a"}])], r"row 1: messages\.0\.role"),
        ("kto", [dialogue(trained_messages=[0])], r"row 1: trained_messages has 0, .* of role 'user'"),
        ("kto", [dialogue(trained_messages=[2])], r"row 1: trained_messages has 2, but messages\[2\] does not exist"),
        ("kto", [dialogue(trained_messages=[-1])], r"row 1: trained_messages has -1, .* does not exist"),
        (
            "kto",
            [dialogue(messages=[{"role": "assistant", "content": "x" * 250}])],
            "row 1: messages has 262 tokens; the model takes 256",
        ),
        (
            "kto",
            [dialogue(messages=[{"role": "assistant", "content": [{"type": "image_url"}]}])],
            "only text is supported",
        ),
    ],
)
async def test_rows_that_do_not_suit_the_method_are_refused(method, rows, problem):
    with pytest.raises(RequestRefused, match=problem) as refused:
        await read(lines(rows, {"method": method}))
    assert refused.value.status == 400


async def test_rows_with_all_fields_of_a_training_row():
    """As `model_dump` writes them, with the defaults of those that are not used."""
    rows = [
        TrainingRow.model_validate(each) for each in (*PAIR, dialogue(pair="q"), dialogue(pair="q", preferred=False))
    ]
    _, read_rows = await read(lines([each.model_dump() for each in rows], {"method": "dpo"}))
    assert [(each.pair, each.preferred) for each in read_rows] == [(each.pair, each.preferred) for each in rows]


async def test_dialogues_are_the_tokens_that_chat_completions_read_and_sample():
    """One row for all turns; trained are the assistant's up to the end of each turn, tool calls included."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "blue"},
        {"role": "assistant", "content": "It is blue."},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    _, (whole,) = await read(lines([{"messages": messages, "tools": tools}], {"method": "sft"}))
    chat = lambda count: ChatRequest(model="m", messages=messages[:count], tools=tools)  # noqa: E731
    prompts = [chat(count).prompts(TOKENIZER)[0] for count in (2, 4)]
    texts = ('<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>', "It is blue.")
    sampled = [TOKENIZER.encode(f"{text}<|im_end|>", False) for text in texts]
    assert whole.token_ids.tolist() == prompts[1] + sampled[1]
    assert whole.token_ids[: len(prompts[0]) + len(sampled[0])].tolist() == prompts[0] + sampled[0]
    spans = [range(len(prompt), len(prompt) + len(tokens)) for prompt, tokens in zip(prompts, sampled, strict=True)]
    assert whole.positions.tolist() == [*spans[0], *spans[1]]
    _, (last,) = await read(lines([{"messages": messages, "tools": tools, "trained_messages": [4]}], {"method": "sft"}))
    assert (last.token_ids.tolist(), last.positions.tolist()) == (whole.token_ids.tolist(), [*spans[1]])


FORGETFUL = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if loop.last or message.role == 'user' else message.content[-1:] }}<|im_end|>{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHANGING = "{%- for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


async def test_templates_that_shorten_earlier_turns_give_a_row_per_turn():
    """The rows of such a dialogue belong together; a template whose replies do not follow its prompt is refused."""
    turns = [{"role": role, "content": f"{role} {turn}"} for turn in "ab" for role in ("user", "assistant")]
    tokenizer = ChatTokenizer(byte_tokenizer(FORGETFUL))
    sent = [{"messages": turns, "preferred": True}] * 2
    _, rows = await read(lines(sent, {"method": "kto"}), tokenizer=tokenizer)
    texts = [tokenizer.decode(each.token_ids[each.positions].tolist()) for each in rows]
    assert texts == ["assistant a", "assistant b"] * 2
    assert tokenizer.decode(rows[1].token_ids.tolist()).count("assistant a") == 0
    assert [each.episode for each in rows] == [rows[0].episode] * 2 + [rows[2].episode] * 2
    assert rows[0].episode != rows[2].episode
    with pytest.raises(RequestRefused, match=r"row 1: messages\[1\]: the chat template renders it differently from"):
        await read(lines(sent, {"method": "kto"}), tokenizer=ChatTokenizer(byte_tokenizer(CHANGING)))


PREFERENCES = {
    "dpo": [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": text}], "pair": str(n)}
        | {"preferred": text == "yes"}
        for n in range(6)
        for text in ("yes", "no")
    ]
}
PREFERENCES["kto"] = [without(each, "pair") for each in PREFERENCES["dpo"]]
PREFERENCES["sft"] = [without(each, "preferred") for each in PREFERENCES["kto"] if each["preferred"]]


@pytest.mark.parametrize("method", slow_but(["dpo"], ["dpo", "kto", "sft"]))
async def test_a_job_of_preferences_from_upload_to_served_weights(loaded, tmp_path, method):
    settings = {"method": method, "learning_rate": 3e-3, "num_iterations": 4, "mini_batch_size": 6}
    rows = PREFERENCES[method]
    async with serving(loaded, tmp_path) as backend:
        status, checked = await backend.post(json.dumps(settings).encode(), "/v1/train/check")
        assert (status, checked["method"], checked["num_iterations"]) == (200, method, 4)
        _, state = await backend.post(lines(rows, settings), Idempotency_Key="run/1")
        events = await backend.events(state["id"])
        assert [event["progress"] for event in events] == sorted(event["progress"] for event in events)
        final = events[-1]
        assert (final["status"], final["policy_version"], backend.published) == ("completed", 1, [1])
        metrics = final["metrics"]
        assert metrics["rows"] == len(rows)
        assert await backend.post(lines(rows, settings), Idempotency_Key="run/1") == (200, final)
        _, again = await backend.post(lines(rows, settings), Idempotency_Key="run/2")
        second = (await backend.events(again["id"]))[-1]
        assert second["policy_version"] == 2
        for name in ("loss",) if method == "sft" else ("loss", "rewards/margins"):
            better = second["metrics"][name] - metrics[name]
            assert better < -0.01 if name == "loss" else better > 0.1
        if method == "dpo":
            assert (metrics["pairs"], second["metrics"]["rewards/accuracies"]) == (6, 1.0)
            assert second["metrics"]["logps/chosen"] > metrics["logps/chosen"]
        # the weights of version 2 are those of the checkpoint
        model = load_model(second["checkpoint"], "cpu").module
        served = backend.learner.load_version(2)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), served.parameters(), strict=True))


async def test_what_is_masked_may_be_anything():
    nan = math.nan
    sent = row(logprobs=[None, nan, math.inf, -0.5, -0.25], advantages=[None, nan, 0, 1, -1])
    settings, rows = await read(lines([row(loss_mask=[0] * 5), sent]))
    assert settings.mini_batch_size == 4
    assert len(rows) == 1
    assert rows[0].rollout_logprobs.tolist() == [-0.5, -0.25]
    assert rows[0].advantages.tolist() == [1, -1]
    assert rows[0].positions.tolist() == [3, 4]


async def test_bad_compression():
    packed = gzip.compress(lines(MANY))
    assert len((await read(packed, "gzip", piece=7))[1]) == 60
    damaged = ((lines(MANY), "is not gzip"), (packed[:-20], "truncated gzip"), (packed + b"more", "after the end"))
    for body, problem in damaged:
        with pytest.raises(RequestRefused, match=problem):
            await read(body, "gzip")
    with pytest.raises(RequestRefused, match="allowed: gzip, deflate, identity") as refused:
        await read(packed, "br")
    assert refused.value.status == 415


async def test_a_compressed_bomb_is_stopped_early():
    import tracemalloc

    endless = gzip.compress(b"a" * 20_000_000, compresslevel=1)
    many = gzip.compress(lines([row()] * 15_000))
    tracemalloc.start()
    for body, limits, problem in (
        (endless, {}, "a line is longer"),
        (b"".join([endless]), {"max_bytes": 500_000}, "larger than 500000 bytes"),
        (many, {"max_bytes": 1_000_000}, "larger than 1000000 bytes"),
    ):
        with pytest.raises(RequestRefused, match=problem) as refused:
            await read(body, "gzip", piece=65536, **limits)
        assert refused.value.status == 413
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


@pytest.mark.slow
async def test_a_full_queue_refuses_jobs(loaded, tmp_path):
    async with serving(loaded, tmp_path) as backend:
        backend.jobs.max_unfinished = 1
        _, first = await backend.post(lines(MANY), Idempotency_Key="run/1")
        async with backend.session.post(JOBS, data=lines(MANY)) as response:
            assert (response.status, response.headers["Retry-After"].isdecimal()) == (429, True)
            assert (await response.json())["error"]["message"] == "1 training jobs are queued already"
        assert (await backend.post(lines(MANY), Idempotency_Key="run/1"))[1]["id"] == first["id"]
        await backend.events(first["id"])
        assert (await backend.post(lines(MANY)))[0] == 200


async def test_the_oldest_ended_jobs_are_forgotten(loaded, tmp_path):
    async with serving(loaded, tmp_path) as backend:
        backend.jobs.max_ended = 1
        ids = []
        for number in range(3):
            _, job = await backend.post(lines([row()]), Idempotency_Key=f"key {number}")
            ids.append(job["id"])
            await backend.events(job["id"])
        assert [(await backend.get(f"{JOBS}/{id}"))[0] for id in ids] == [404, 200, 200]
        assert (tmp_path / "jobs" / f"{ids[0]}.json").exists()


@pytest.fixture
def before_writing(monkeypatch):
    """Sets what is called before the optimizer of a checkpoint is written."""

    def set_call(call):
        def write(*args):
            call()
            write_optimizer(*args)

        monkeypatch.setattr("insitu.backend.learner.checkpoints.write_optimizer", write)

    return set_call


async def test_sampling_continues_while_a_checkpoint_is_written(loaded, tmp_path, before_writing):
    """A checkpoint's files may take many seconds to be written and hashed."""
    steps, continued = threading.Semaphore(0), []

    def sampling_step():
        steps.release()
        return True

    def wait_for_steps():
        while steps.acquire(blocking=False):  # those before
            pass
        continued.append(all(steps.acquire(timeout=20) for _ in range(3)))

    before_writing(wait_for_steps)
    async with serving(loaded, tmp_path) as backend:
        backend.compute.sampling_step = sampling_step
        _, job = await backend.post(lines([row()]))
        assert (await backend.events(job["id"]))[-1]["status"] == "completed"
    assert continued == [True]


async def test_a_job_that_is_canceled_twice_has_stopped_after_both(loaded, tmp_path):
    stepped, go = threading.Event(), threading.Event()
    hook = register_optimizer_step_post_hook(lambda *_: (stepped.set(), go.wait()))
    async with serving(loaded, tmp_path) as backend:
        _, job = await backend.post(lines([row()] * 8, SETTINGS | {"num_iterations": 3}))
        await until(stepped.is_set)
        path = f"{JOBS}/{job['id']}/cancel"
        canceling = []
        for _ in range(2):
            canceling.append(asyncio.ensure_future(backend.jobs.cancel(job["id"])))
            await turns(50)
        is_ending = backend.jobs.get(job["id"]).recording
        go.set()
        hook.remove()
        states = [(await each).state.status for each in canceling]
        assert (is_ending, states) == (False, ["canceled"] * 2)
        assert (await backend.post(path=path))[1]["status"] == "canceled"
        assert backend.learner.version == 0


async def test_a_job_that_is_canceled_while_its_checkpoint_is_written_leaves_none(loaded, tmp_path, before_writing):
    async with serving(loaded, tmp_path) as backend:
        writing = asyncio.Event()

        def wait_for_cancel():
            loop.call_soon_threadsafe(writing.set)
            wait_until(backend.jobs.find_by_idempotency_key("run/1").task.cancelling)

        loop = asyncio.get_running_loop()
        before_writing(wait_for_cancel)
        _, job = await backend.post(lines([row()]), Idempotency_Key="run/1")
        await writing.wait()
        _, state = await backend.post(path=f"{JOBS}/{job['id']}/cancel")
        assert state["status"] == "canceled"
        assert (backend.learner.version, backend.published) == (0, [])
        assert not list((tmp_path / "checkpoints").glob("step_*"))
        before_writing(lambda: None)
        _, job = await backend.post(lines([row()]))
        assert (await backend.events(job["id"]))[-1]["policy_version"] == 1
