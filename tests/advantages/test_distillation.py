"""On-policy distillation: what a teacher says about sampled tokens is trained, recorded, and not asked twice."""

import json
import math
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from aiohttp import web
from anyio.from_thread import start_blocking_portal
from factories import MODEL, ROOT, digits_project, read_lines, write_rows
from processes import run, run_project, serving, start_project
from test_resume import VALIDATION, outcome
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from insitu.advantages.credit import AdvantageConfig, Credit
from insitu.advantages.distillation import TeacherEstimator, teacher_metrics
from insitu.advantages.estimator import GroupRelativeEstimator, estimate_epoch
from insitu.errors import RequestRefused
from insitu.runs.records import restore_calls
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import Trajectory, TrajectoryCollection
from insitu.wire.connection import Connection
from insitu.wire.prompt_logprobs import logprobs_of_texts, longest, part_of

ROWS = 5
GENERATIONS = 4


# Advantages


def trajectory(
    name: str, reward: float, *calls: tuple[list[float], list[float | None] | None], **more: Any
) -> Trajectory:
    made = [
        ModelCall(
            index,
            "policy",
            [],
            prompt_token_ids=[1],
            token_ids=[5] * len(own),
            logprobs=own,
            teacher_logprobs=theirs,
            **more,
        )
        for index, (own, theirs) in enumerate(calls)
    ]
    return Trajectory.model_construct(
        reward=reward, id=name, calls=made, trained_calls=[*range(len(made))], metadata={}, rows=[], shaped_rewards=None
    )


def estimator(coefficient: float = 1.0, reward_coefficient: float = 0.0, *, baseline: bool = False) -> TeacherEstimator:
    rewards = GroupRelativeEstimator(AdvantageConfig(scale="none"), Credit())
    return TeacherEstimator(coefficient, reward_coefficient, rewards, baseline=baseline)


def epoch_of(*groups: list[Trajectory]) -> TrajectoryCollection:
    return TrajectoryCollection.model_construct(
        trajectories=[*groups],
        run_id="r",
        epoch=1,
        dropped={},
        drop_reasons={},
        mean_reward=None,
        parts=None,
        streamed=None,
    )


def test_the_advantage_of_a_token_is_the_teachers_logprob_minus_its_own() -> None:
    alone = trajectory("a", 1.0, ([-1.0, -2.0], [-0.5, -4.0]), ([-0.25], [-0.25]))
    estimated = estimate_epoch(epoch_of([alone]), estimator(2.0))
    [(trained, of_calls)] = estimated.advantages
    assert of_calls == {0: [1.0, -4.0], 1: [0.0]}
    assert [row.advantages for row in trained.rows] == [[0.0, 1.0, -4.0], [0.0, 0.0]]
    assert teacher_metrics(estimated.advantages) == {"teacher_kl": pytest.approx((-0.5 + 2.0 + 0.0) / 3)}


def test_advantages_of_rewards_are_added() -> None:
    group = [trajectory("a", 1.0, ([-1.0], [-0.5])), trajectory("b", 0.0, ([-1.0], [-3.0]))]
    (_, first), (_, second) = estimate_epoch(epoch_of(group), estimator(1.0, 4.0)).advantages
    assert (first, second) == ({0: [0.5 + 2.0]}, {0: [-2.0 - 2.0]})
    alike = [trajectory("a", 1.0, ([-1.0], [-0.5])), trajectory("b", 1.0, ([-1.0], [-3.0]))]
    assert [a for _, a in estimate_epoch(epoch_of(alike), estimator(1.0, 4.0)).advantages] == [{0: [0.5]}, {0: [-2.0]}]


def test_the_baseline_of_a_token_is_the_mean_of_the_groups_other_tokens() -> None:
    group = [
        trajectory("a", 1.0, ([-1.0, -2.0], [-3.0, None])),
        trajectory("b", 0.0, ([-1.0], [-1.5]), ([-1.0], [0.0])),
    ]
    estimated = estimate_epoch(epoch_of(group), estimator(2.0, baseline=True)).advantages
    assert [of_calls for _, of_calls in estimated] == [
        {0: [2 * (-2.0 - (-0.5 + 1.0) / 2), 0.0]},
        {0: [2 * (-0.5 - (-2.0 + 1.0) / 2)], 1: [2 * (1.0 - (-2.0 - 0.5) / 2)]},
    ]
    assert teacher_metrics(estimated) == {"teacher_kl": pytest.approx((2.0 + 0.5 - 1.0) / 3)}
    alone = estimate_epoch(epoch_of([trajectory("a", 1.0, ([-1.0], [-3.0]))]), estimator(baseline=True)).advantages
    assert [of_calls for _, of_calls in alone] == [{0: [-2.0]}]


def test_a_token_beyond_the_teachers_context_has_no_advantage() -> None:
    [(_, of_calls)] = estimate_epoch(
        epoch_of([trajectory("a", 1.0, ([-1.0, -2.0], [-3.0, None]))]), estimator()
    ).advantages
    assert of_calls == {0: [-2.0, 0.0]}


def test_what_the_teacher_cannot_be_compared_with_is_counted() -> None:
    scored, unscored = trajectory("a", 1.0, ([-1.0], [-1.0])), trajectory("b", 1.0, ([-1.0], None))
    tempered = trajectory("c", 1.0, ([-1.0], [-1.0]), logprobs_temperature=0.7, sampling={"temperature": 0.7})
    estimated = estimate_epoch(epoch_of([scored, unscored, tempered]), estimator())
    assert estimated.collection.dropped == {"teacher_error": 1, "unmodeled_sampling": 1}
    assert estimated.metrics == {"untrained_calls": {"teacher_temperature": 1}}
    assert [t.id for t, _ in estimated.advantages] == ["a"]
    for call in (several := trajectory("d", 1.0, ([-1.0], [-2.0]), ([-1.0], [0.0]), ([-0.1], [-9.0]))).calls[2:]:
        call.sampling = {"temperature": 0}
    [(_, of_calls)] = estimate_epoch(epoch_of([several]), estimator(baseline=True)).advantages
    assert of_calls == {0: [-2.0], 1: [2.0]}, "their baseline is that of what is trained"


def test_a_text_is_part_of_a_longer_one_whose_many_others_are_not_compared_with_it() -> None:
    cuts = Counter[str]()

    class Tokens(tuple[int, ...]):
        def __getitem__(self, index: Any) -> Any:
            cuts["in all"] += 1
            return super().__getitem__(index)

    turns = [Tokens((1, first, *[2] * size)) for first in range(300) for size in (0, 3, 5)]
    asked = longest([Tokens((1, 300, 2)), *turns, *turns])
    assert {*asked} == {*turns[2::3], (1, 300, 2)}
    found = {text: [float(text[1]) + k for k in range(len(text))] for text in asked}
    assert part_of(turns[4], 2, asked, found) == [3.0, 4.0, 5.0]
    assert part_of(turns[5], 0, asked, found) == found[turns[5]]
    assert cuts["in all"] < 5 * len(turns)


# Runs


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokenizer of the student, which prefers one of the digits."""
    folder = tmp_path_factory.mktemp("teacher")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp.down_proj" in name:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Teacher:
    """A served teacher."""

    def __init__(self, address: str) -> None:
        self.block = {"base_url": f"{address}/v1", "model": "policy"}
        self._metrics = f"{address}/metrics"

    @property
    def scored(self) -> int:
        """The texts that it has scored so far."""
        with urllib.request.urlopen(self._metrics) as response:
            lines = response.read().decode().splitlines()
        return int(next(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total")))


@pytest.fixture(scope="module")
def teacher(other_weights: Path) -> Iterator[Teacher]:
    with serving("backend", "--model", other_weights, "--port", "0") as (_, address):
        yield Teacher(address)


def project(folder: Path, block: dict[str, Any], *, rows: list[dict[str, Any]] | None = None, **adapter: Any) -> Path:
    folder.mkdir(exist_ok=True)
    digits_project(folder, held_out=5, **(adapter or {"model": str(MODEL)}))
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["trainers"]["grpo"]["teacher"] = block
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    write_rows(folder, rows if rows is not None else [{"say": f"Row {number}"} for number in range(ROWS)])
    return folder


def finished(folder: Path, *options: str) -> Path:
    code, out, err = run_project(folder, *VALIDATION, *options)
    assert code == 0, out + err
    return folder / "run"


def calls_of(run: Path) -> dict[str, list[ModelCall]]:
    by_episode: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(run / "calls.jsonl.gz")[1:]:
        by_episode.setdefault(line["episode"], []).append(line)
    return {episode: restore_calls(lines) for episode, lines in by_episode.items()}


def reference_logprobs(model: Any, prompt: list[int], sampled: list[int]) -> list[float]:
    """Of the sampled tokens, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0].log_softmax(-1)
    return [float(logits[len(prompt) - 1 + k, token]) for k, token in enumerate(sampled)]


def test_a_run_is_trained_on_what_the_teacher_says(tmp_path: Path, teacher: Teacher, other_weights: Path) -> None:
    options = ("-o", "finetuning.num_epochs", "4", "-o", "trajectory_builders.episodes.num_generations", "4")
    code, out, err = run_project(folder := project(tmp_path, teacher.block), *options)
    assert code == 0, err
    run, model = folder / "run", AutoModelForCausalLM.from_pretrained(other_weights)
    calls = calls_of(run)
    assert len(calls) == 4 * ROWS * 4
    for [call] in [*calls.values()][::7]:
        assert call.prompt_token_ids is not None
        assert call.token_ids is not None
        expected = reference_logprobs(model, call.prompt_token_ids, call.token_ids)
        assert call.teacher_logprobs == pytest.approx(expected, abs=1e-4)
    trained = read_lines(run / "advantages.jsonl")[1:]
    assert len(trained) == len(calls)
    groups: dict[str, dict[str, list[float]]] = {}
    for episode, [call] in calls.items():
        gaps = [p - q for p, q in zip(call.teacher_logprobs or [], call.logprobs or [], strict=True)]  # type: ignore[operator]
        groups.setdefault(episode.rsplit("/", 2)[0], {})[episode] = gaps
    for line in trained:
        group = groups[line["episode"].rsplit("/", 2)[0]]
        every = [gap for gaps in group.values() for gap in gaps]
        expected = [gap - (sum(every) - gap) / (len(every) - 1) for gap in group[line["episode"]]]
        assert line["token_advantages"] == {"0": pytest.approx(expected)}
        assert line["dropped"] is None
    metrics = read_lines(run / "training_metrics.jsonl")
    assert metrics[-1]["teacher_kl"] < 0.6 * metrics[0]["teacher_kl"]
    first = [call for name, [call] in calls.items() if name.split("/")[1] == "1"]
    gaps = [q - p for c in first for p, q in zip(c.teacher_logprobs or [], c.logprobs or [], strict=True)]  # type: ignore[operator]
    assert metrics[0]["teacher_kl"] == pytest.approx(sum(gaps) / len(gaps))
    assert "teacher_kl" in out
    assert "tokenizer the same" in out


@pytest.mark.slow
def test_a_streamed_run_trains_the_same(tmp_path: Path, teacher: Teacher) -> None:
    one_step = ("-o", "trainer_adapters.backend.training.mini_batch_size", "1000")
    options = ("-o", "trajectory_builders.episodes.num_generations", "8", *one_step)
    rows = [{"say": f"Row {number}"} for number in range(12)]
    plain = finished(project(tmp_path / "plain", teacher.block, rows=rows), *options)
    stream = finished(
        project(tmp_path / "stream", teacher.block, rows=rows), *options, "-o", "trainers.grpo.stream", "true"
    )
    assert '"stream":true' in (stream / "run.json").read_text().replace(" ", "")
    one, other = (outcome(run) for run in (plain, stream))
    assert one.weights == other.weights
    assert one.trained == other.trained
    kl = [[line["teacher_kl"] for line in of.metrics] for of in (one, other)]
    assert kl[0] == pytest.approx(kl[1])


@pytest.mark.slow
def test_episodes_of_a_workflow_service_are_scored(tmp_path: Path, teacher: Teacher) -> None:
    folder = project(tmp_path, teacher.block)
    with serving("serve", "--config_file", "config.yml", "--port", "0", folder=folder) as (_, address):
        run = finished(folder, "-o", "general.executor", json.dumps({"_type": "service", "url": address}))
    assert all(call.teacher_logprobs for calls in calls_of(run).values() for call in calls)


@pytest.mark.slow
def test_lora_and_staleness_go_with_a_teacher(tmp_path: Path, teacher: Teacher) -> None:
    training = {"learning_rate": 3e-3, "lora": {"rank": 4}, "old_logprobs": "rollout"}
    run = finished(
        project(tmp_path, teacher.block),
        *("-o", "trainers.grpo.staleness", "1", "-o", "finetuning.num_epochs", "4"),
        *("-o", "trainer_adapters.backend.training", json.dumps(training)),
        *("-o", "trajectory_builders.episodes.num_generations", "8"),
    )
    metrics = read_lines(run / "training_metrics.jsonl")
    assert metrics[-1]["teacher_kl"] < metrics[0]["teacher_kl"]
    assert all(call.teacher_logprobs is not None for calls in calls_of(run).values() for call in calls)


@pytest.mark.slow
def test_a_run_that_is_killed_asks_for_no_episode_again(tmp_path: Path, teacher: Teacher) -> None:
    rows = [{"say": f"Row {number}"} for number in range(ROWS)] + [{"say": "Last", "hang": True}]
    whole = project(tmp_path / "whole", teacher.block, rows=rows)
    (whole / "released").touch()
    expected = outcome(finished(whole))
    killed = project(tmp_path / "killed", teacher.block, rows=rows)
    journal, before = killed / "run/journal.jsonl", teacher.scored
    with start_project(killed, *VALIDATION) as process:
        process.wait_until(lambda: journal.exists() and len(journal.read_text().splitlines()) > ROWS * GENERATIONS)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert teacher.scored - before == 1 + ROWS * GENERATIONS  # one to see whether it can
    journaled = [line for line in read_lines(journal) if "episode" in line]
    assert all(call["teacher_logprobs"] for line in journaled for call in line["calls"])
    (killed / "released").touch()
    run = finished(killed, "--resume")
    assert teacher.scored - before == 2 + 2 * (ROWS + 1) * GENERATIONS
    assert outcome(run) == expected


async def test_a_text_as_long_as_the_context_is_scored_without_its_last_token(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    texts = [tuple((7 * k + n) % 250 for k in range(length)) for n, length in enumerate((24, 9, 24))]
    with serving("backend", "--model", folder, "--port", "0", "--max_length", "24") as (_, address):
        connection = Connection("the teacher", {}, 60, 0)
        try:
            found = await logprobs_of_texts(connection, f"{address}/v1", "policy", texts)
            with pytest.raises(RequestRefused, match="24"):
                await logprobs_of_texts(connection, f"{address}/v1", "policy", [(*texts[0], 1, 2)])
        finally:
            await connection.close()
    model = AutoModelForCausalLM.from_pretrained(folder)
    for text in texts:
        expected = reference_logprobs(model, [text[0]], [*text[1:]])
        cut = len(text) == 24
        assert found[text] == [None, *map(pytest.approx, expected[:-1] if cut else expected), *([None] if cut else [])]


# Self-distillation


def test_a_model_that_sees_the_expected_answer_is_its_own_teacher(tmp_path: Path) -> None:
    block = {"adapter": "self", "context": "Expected: {expected}. Said: {reasoning}"}
    folder = project(tmp_path, block)
    (folder / "said.py").write_text("def score(answer):\n    return 0.0, f'not {len(answer)}'\n")
    scored_by = ("-o", "eval.evaluators.score", "{_type: python, function: 'said:score'}")
    rows = [{"id": i, "question": {"say": f"Row {i}"}, **({"answer": f"{i} is it"} if i else {})} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = finished(
        folder, "-o", "finetuning.num_epochs", "2", "-o", "trainer_adapters.backend.keep.every", "1", *scored_by
    )
    reasoning = {line["episode"]: line["reasoning"] for line in read_lines(run / "episodes.jsonl.gz")[1:]}
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    weights = {0: MODEL, 1: run / "backend/checkpoints/step_000001"}
    models = {version: AutoModelForCausalLM.from_pretrained(folder) for version, folder in weights.items()}
    compared = Counter[int | None]()
    for episode, [call] in calls_of(run).items():
        row = int(episode.split("/")[2])
        if row == 0:
            assert call.teacher_logprobs is None
            continue
        said = reasoning[episode] if isinstance(reasoning[episode], str) else json.dumps(reasoning[episode])
        content = f"Row {row}\n\nExpected: {row} is it. Said: {said}"
        messages = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        expected = reference_logprobs(models[call.policy_version or 0], prompt, call.token_ids or [])
        assert call.teacher_logprobs == pytest.approx(expected, abs=1e-4)
        compared[call.policy_version] += 1
    assert compared == {0: (ROWS - 1) * GENERATIONS, 1: (ROWS - 1) * GENERATIONS}
    metrics = read_lines(run / "training_metrics.jsonl")
    assert [line["dropped"] for line in metrics] == [{"no_teacher_context": GENERATIONS}] * 2


def test_a_context_that_the_chat_template_leaves_out_is_an_error(tmp_path: Path) -> None:
    """The teacher would say what the policy says, and training follow rounding."""
    folder = project(tmp_path, {"adapter": "self", "context": "It is 7."})
    first_line = "{% for message in messages %}{{ message.content.split('\\n')[0] }}{% endfor %}"
    (folder / "template.jinja").write_text(first_line)
    code, _, err = run_project(folder, "-o", "trainer_adapters.backend.chat_template", "template.jinja")
    assert code == 1
    assert "teacher_error: trainers.grpo.teacher.context: the chat template leaves it out" in err


@pytest.mark.slow
def test_the_starting_weights_as_teacher_hold_the_policy_back(tmp_path: Path) -> None:
    run = finished(project(tmp_path, {"adapter": "self", "version": "initial", "reward_coefficient": 1.0}))
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    later = [call for name, [call] in calls_of(run).items() if name.split("/")[1] == "2"]
    for call in later[::3]:
        expected = reference_logprobs(model, call.prompt_token_ids or [], call.token_ids or [])
        assert call.teacher_logprobs == pytest.approx(expected, abs=1e-4)
    first, second = (line["teacher_kl"] for line in read_lines(run / "training_metrics.jsonl"))
    assert abs(first) < 1e-4
    assert second > 1e-3


# Failures


class FaultyTeacher:
    """A server whose answers to `faults` (by the number of the request, from 1) are wrong; it has no `/tokenize`."""

    def __init__(self, faults: dict[int, str]) -> None:
        self.faults, self.requests = faults, 0

    async def complete(self, request: web.Request) -> web.Response:
        self.requests += 1
        prompts, fault = (await request.json())["prompt"], self.faults.get(self.requests)
        if fault == "refused":
            return web.json_response({"error": {"message": "no"}}, status=400)
        if fault == "down":
            return web.json_response({"error": {"message": "busy"}}, status=503)
        if fault == "endless":
            return web.Response(body=bytes(2**28 + 1))
        value = {"nan": math.nan, "positive": 50.0, "huge": -1e308, "true": True, "text": "-1"}.get(fault or "", -1.0)
        choices: list[dict[str, Any]] = []
        for index, prompt in enumerate(prompts):
            entries = [None, *({str(token): {"logprob": value}} for token in prompt[1:])]
            entries = entries[:-1] if fault == "short" else entries
            choices.append({"index": index, "text": "", **({} if fault == "missing" else {"prompt_logprobs": entries})})
        return web.json_response({"choices": choices}, dumps=json.dumps)

    @contextmanager
    def served(self) -> Iterator[str]:
        async def start() -> tuple[web.AppRunner, str]:
            app = web.Application()
            app.router.add_post("/v1/completions", self.complete)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

        with start_blocking_portal() as portal:
            runner, address = portal.call(start)
            try:
                yield address
            finally:
                portal.call(runner.cleanup)


@pytest.mark.slow
def test_episodes_without_the_teachers_word_are_dropped_and_counted(tmp_path: Path) -> None:
    faults = ("nan", "missing", "refused", "short", "down", "positive", "huge", "true", "text", "endless")
    faulty = FaultyTeacher({2 * number: fault for number, fault in enumerate(faults, 1)})
    with faulty.served() as address:
        folder = project(tmp_path, {"base_url": address, "model": "any"})
        code, out, err = run_project(folder, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    [metrics] = read_lines(folder / "run/training_metrics.jsonl")
    assert metrics["dropped"] == {"teacher_error": 9}
    assert metrics["num_trajectories"] == ROWS * GENERATIONS - 9
    dropped = [e for e in read_lines(folder / "run/episodes.jsonl.gz")[1:] if e["reason"] == "teacher_error"]
    assert {e["reward"] for e in dropped} == {None}
    assert sorted(e["error"].partition(f"{address} ")[2][:26] or e["error"] for e in dropped) == [
        "POST /v1/completions: no",
        "answered POST /v1/completi",
        "returned no prompt_logprob",
        "returned prompt_logprobs t",
        "returned the logprob '-1' ",
        "returned the logprob -1e+3",
        "returned the logprob 50.0 ",
        "returned the logprob True ",
        "returned the logprob nan f",
    ]
    assert faulty.requests == 1 + ROWS * GENERATIONS + 1  # one again
    assert "not compared" in out


@pytest.mark.slow
def test_the_doctor_judges_a_teacher_not_the_variance_of_rewards(tmp_path: Path, teacher: Teacher) -> None:
    rows = [{"say": f"Row {number}", "score": 1} for number in range(ROWS)]
    folder = project(tmp_path, teacher.block, rows=rows)
    code, out, err = run_project(folder, command="doctor")
    assert code == 0, out + err
    assert "variance" not in out
    assert "reward of every episode" not in out
    context = ("-o", "trainers.grpo.teacher.context", "It is {expected}.")
    code, out, err = run_project(folder, *context, command="doctor")
    assert code == 1, out + err
    assert "20 episodes failed as no_teacher_context" in out
    assert "trainers.grpo.teacher.context" in out


@pytest.mark.slow
def test_a_run_whose_teacher_is_lost_fails_and_continues(tmp_path: Path, teacher: Teacher) -> None:
    faulty = FaultyTeacher(dict.fromkeys(range(2, 1000), "refused"))
    with faulty.served() as address:
        folder = project(tmp_path, {"base_url": address, "model": "policy"})
        code, _, err = run_project(folder, *VALIDATION)
        assert code == 1
        assert "no episode can be trained on; dropped: 20 teacher_error" in err
    finished(folder, "--resume", "-o", "trainers.grpo.teacher.base_url", teacher.block["base_url"])


# What is refused


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({}, "set exactly one of base_url"),
        ({"base_url": "http://a/v1"}, "model is missing"),
        ({"base_url": "a", "model": "b"}, "must begin with http"),
        ({"adapter": "self"}, "says what the policy says"),
        ({"adapter": "self", "context": "x", "model": "m"}, "model: allowed with base_url"),
        ({"adapter": "self", "context": "{answer}"}, "{answer} is not known; allowed: {expected}, {reasoning}"),
        ({"adapter": "self", "context": "{"}, "context: "),
        ({"base_url": "http://127.0.0.1:9/v1", "model": "b"}, "no answer from the teacher at http://127.0.0.1:9/v1"),
    ],
)
def test_a_wrong_block_is_refused_before_anything_starts(tmp_path: Path, block: dict[str, Any], problem: str) -> None:
    code, _, err = run_project(project(tmp_path, block), command="validate")
    assert code in (1, 2)
    assert problem in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("llms.player.temperature", "0.7"), "llms.player.temperature is 0.7, but trainers.grpo.teacher gives"),
        (("trajectory_builders.episodes.budget", "{replace: 1}"), "trajectory_builders.episodes.budget: a teacher"),
        (("trajectory_builders.episodes.episodes_from", "run"), "does not exist"),
    ],
)
def test_settings_that_do_not_go_with_a_teacher_are_refused(
    tmp_path: Path, teacher: Teacher, options: tuple[str, str], problem: str
) -> None:
    code, _, err = run_project(project(tmp_path, teacher.block), "-o", *options, command="validate")
    assert code == 2
    assert problem in err


def test_a_teacher_with_another_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    with serving("backend", "--model", save_tiny_model(tmp_path / "bytes"), "--port", "0") as (_, address):
        folder = project(tmp_path, Teacher(address).block)
        for command in ("validate", "doctor"):
            code, _, err = run_project(folder, command=command)
            assert code == 2, err
            assert f"trainers.grpo.teacher: the teacher 'policy' at {address}/v1 has another tokenizer" in err
        with serving("backend", "--model", MODEL, "--port", "0") as (_, own):
            url = ("-o", "trainer_adapters.backend.model", "null", "-o", "trainer_adapters.backend.url", own)
            code, _, err = run_project(folder, *url)
            assert code == 2, err
            assert "has another tokenizer" in err


# The example


@pytest.mark.slow
def test_the_example_learns_from_a_trained_player(tmp_path: Path) -> None:
    """The commands of its README with fewer rows and epochs: a player learns a little, and another one from it."""
    example = ROOT / "examples/tic_tac_toe"
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join((example / "validation.jsonl").read_text().splitlines(keepends=True)[:60]))

    def finetune(file: str, epochs: int, *options: str, **variables: str) -> list[float]:
        keys = {"num_epochs": epochs, "output_dir": tmp_path / file, "validation.dataset": held_out}
        words = [word for key, value in keys.items() for word in ("-o", f"finetuning.{key}", str(value))]
        done = run("finetune", "--config_file", example / f"{file}.yml", *words, *options, folder=tmp_path, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        history = json.loads((tmp_path / file / "validation_history.json").read_text())
        return [record["avg_reward"] for record in history]

    finetune("sft", 1, "-o", "trajectory_builders.episodes.rows_per_epoch", "4")
    with serving("backend", "--model", tmp_path / "sft/best", "--port", "0") as (_, address):
        before, *_, after = finetune("distill", 4, TEACHER_PORT=address.rpartition(":")[2])
    metrics = read_lines(tmp_path / "distill/training_metrics.jsonl")
    assert metrics[-1]["teacher_kl"] < 0.8 * metrics[0]["teacher_kl"]
    assert after > before + 0.05
