"""Runs on a real backend: which calls are trained, on whose reward, by which curriculum, and what is no run.

Two functions that ask two models each; what the backend sampled is compared with what it was sent to train on.
"""

import asyncio
import io
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import duo_plugin
import pytest
from factories import power_failures
from marks import slow_after
from rich.console import Console
from tiny_backend import Served
from tiny_models import byte_tokenizer

from insitu.collect import episodes
from insitu.errors import BackendError, ConfigError, PluginError, TrajectoryError
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.training.runtime import finetuning_main

ROWS = 2
GENERATIONS = 3


def project(write: Any, served: Served, finetuning: dict[str, Any], **functions: Any) -> Path:
    write([{"id": f"r{i}", "question": f"row {i}"} for i in range(ROWS)], "rows.jsonl")
    sampling = {"max_tokens": 5, "max_retries": 0}
    judge = {"_type": "openai", "base_url": f"{served.address}/v1", "api_key": "t", "model_name": "policy"}
    asking = {"_type": "ask_both", "player": "player", "judge": "judge"}
    adapter = {"_type": "keeping_adapter", "url": served.address, "api_key": "t", "name": "policy"}
    return write(
        {
            "llms": {"player": {"_type": "policy", **sampling}, "judge": {**judge, **sampling}},
            "functions": {
                "plan": {**asking, "word": "plans", **functions},
                "move": {**asking, "word": "moves", **functions},
            },
            "workflow": {"_type": "duo", "functions": ["plan", "move"]},
            "eval": {
                "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
                "evaluators": {"score": {"_type": "letters"}, "other": {"_type": "letters", "more": -2e6}},
            },
            "trajectory_builders": {"b": {"_type": "insitu_traj_builder", "num_generations": GENERATIONS}},
            "trainer_adapters": {"a": adapter},
            "trainers": {"t": {"_type": "insitu_trainer"}},
            "finetuning": {
                "enabled": True,
                "trainer": "t",
                "trajectory_builder": "b",
                "trainer_adapter": "a",
                "reward_function": {"name": "score"},
                "output_dir": str(write("", "run/x").parent),
                **finetuning,
            },
        }
    )


async def train(path: Path, *overrides: tuple[str, str], console: Console | None = None) -> list[Any]:
    duo_plugin.sent.clear()
    duo_plugin.collections.clear()
    return await finetuning_main(FinetuneRunConfig(config_file=path, override=overrides), console)


@pytest.mark.parametrize(
    ("framework", "functions", "model", "trained"),
    slow_after(
        2,
        [
            (None, ["move"], "player", {"player moves"}),
            ("langchain", ["move"], "policy@7", {"player moves", "judge moves"}),
            (None, ["<workflow>"], "judge", {"judge plans", "judge moves"}),
            ("langchain", ["plan", "move"], None, {"player plans", "player moves"}),
        ],
    ),
    ids=["key", "name at a step", "everywhere", "default"],
)
async def test_the_trained_rows_are_what_the_targeted_calls_sampled(
    write: Any, served: Served, framework: str | None, functions: list[str], model: str | None, trained: set[str]
) -> None:
    before = len(served.samples())
    target = {"target_functions": functions, "target_model": model}
    (status,) = await train(project(write, served, target, framework=framework))
    assert status.status == "completed"

    samples = served.samples()[before + 4 :]  # a row is played before the first epoch
    assert len(samples) == ROWS * GENERATIONS * 4
    tokenizer = byte_tokenizer()
    expected = []
    for sample in samples:
        text = tokenizer.decode(sample["prompt_token_ids"])
        if any(f"{words}: row" in text for words in trained):
            expected.append((sample["prompt_token_ids"] + sample["token_ids"], sample["logprobs"]))
    assert len(expected) == ROWS * GENERATIONS * len(trained)

    rows = [(row.token_ids, row.logprobs[row.loss_mask.index(1) :]) for row in duo_plugin.sent]
    assert sorted(rows) == sorted(expected)
    assert all(row.loss_mask == sorted(row.loss_mask) for row in duo_plugin.sent)  # context, then what is trained
    (metrics,) = map(json.loads, (write("", "run/y").parent / "training_metrics.jsonl").read_text().splitlines())
    assert metrics["rows"] == len(expected)
    assert metrics["tokens"] == sum(len(logprobs) for _, logprobs in expected)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({"target_functions": ["moves"]}, "'moves' does not exist (did you mean 'move'?); available: move, plan"),
        ({"target_functions": []}, "finetuning.target_functions: List should have at least 1 item"),
        ({"target_model": "plyer"}, "(did you mean 'player'?); available: player, judge, policy"),
    ],
)
async def test_an_unknown_target_is_refused_with_all_there_are(
    write: Any, served: Served, target: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await train(project(write, served, target))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("functions", "reason", "called"),
    [
        ("[plan]", "no_target_calls", "judge in <workflow> > plan, player in <workflow> > plan"),
        ("[]", "no_calls", "none"),
    ],
)
async def test_targets_that_are_never_called_are_told_with_what_was_called(
    write: Any, served: Served, functions: str, reason: str, called: str
) -> None:
    path = project(write, served, {"target_functions": ["move"], "target_model": "judge"})
    with pytest.raises(TrajectoryError) as caught:
        await train(path, ("workflow.functions", functions))
    message = str(caught.value)
    dropped = f"{ROWS * GENERATIONS} {reason}"
    assert message.startswith(f"epoch 1: no episode can be trained on; dropped: {dropped}; most often {reason}: ")
    assert f"the model calls of judge in move are trained; it called {called} (all of them: " in message


async def test_step_rewards_are_those_of_the_trained_calls(write: Any, served: Served) -> None:
    step = ("trainers.t.credit", "step")
    target = {"target_functions": ["move"], "target_model": "player"}
    await train(project(write, served, target, earn=0.5), step, ("functions.plan.earn", "-9"))
    (collection,) = duo_plugin.collections
    trajectories = [t for group in collection.trajectories for t in group]
    assert len(trajectories) == ROWS * GENERATIONS
    for t in trajectories:
        said = [c.message["content"] for c in t.calls if c.message and "move" in c.functions]
        assert t.shaped_rewards == [0.5 * len("".join(said))]
        assert [row.advantages[-1] != 0 for row in t.rows] == [True]  # type: ignore[index]


async def test_credit_by_steps_without_step_rewards_trains_nothing_and_says_so(write: Any, served: Served) -> None:
    with pytest.raises(TrajectoryError, match=rf"no epoch trained anything: .*: {ROWS * GENERATIONS} no_step_rewards"):
        await train(project(write, served, {}), ("trainers.t.credit", "step"))


@pytest.mark.parametrize(("name", "negative"), slow_after(1, [("score", False), ("other", True)]))
async def test_the_named_evaluator_gives_the_reward(write: Any, served: Served, name: str, negative: bool) -> None:
    await train(project(write, served, {"reward_function": {"name": name}}))
    (collection,) = duo_plugin.collections
    assert {t.reward < 0 for group in collection.trajectories for t in group} == {negative}


async def test_a_job_that_cannot_be_trained_is_refused_before_the_first_episode(write: Any, served: Served) -> None:
    """The backend trains all weights, since its first job."""
    path = project(write, served, {})
    await train(path)
    before = len(served.samples())
    with pytest.raises(ConfigError, match=r"are refused by the backend: .*lora differs .*none \(all weights\)"):
        await train(path, ("trainer_adapters.a.training.lora", "{rank: 2}"))
    assert len(served.samples()) == before


async def test_what_is_trained_is_on_disk_before_the_job(
    write: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure the files still say what the weights were trained on."""
    survives = power_failures(monkeypatch)
    names = ("run.json", "calls.jsonl.gz", "episodes.jsonl.gz", "groups.jsonl", "advantages.jsonl")
    folder = write("", "run/x").parent
    durable: list[list[str]] = []
    monkeypatch.setattr(
        duo_plugin, "on_submit", lambda: durable.append([name for name in names if survives(folder / name)])
    )
    await train(project(write, served, {}))
    assert durable == [[*names]]
    assert all(map(survives, folder.glob("*.json*")))


async def test_a_backend_that_serves_another_model_is_refused(write: Any, served: Served) -> None:
    with pytest.raises(ConfigError, match=r"name is 'mine', but http.* serves 'policy'; set name to 'policy'"):
        await train(project(write, served, {}), ("trainer_adapters.a.name", "mine"))


async def test_what_is_sampled_must_be_what_is_trained(write: Any, served: Served) -> None:
    frozen = project(write, served, {"target_model": "judge", "num_epochs": 2})
    before = len(served.samples())
    with pytest.raises(ConfigError, match=r"llms\.judge\.model_name is 'policy@0', but 'policy' at http.* is trained"):
        await train(frozen, ("llms.judge.model_name", "policy@0"))
    assert len(served.samples()) == before
    says = r"requested model 'policy@0' and was sampled at policy version 0, but the adapter trains .* at version"
    async with relay(int(served.address.rpartition(":")[2])) as port:  # behind another address it may be any model
        behind = ("llms.judge.base_url", f"http://127.0.0.1:{port}/v1")
        with pytest.raises(BackendError, match=says):
            await train(frozen, ("llms.judge.model_name", "policy@0"), behind)


@asynccontextmanager
async def relay(target: int) -> AsyncIterator[int]:
    """Another port of the server at `target`."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_version_that_does_not_move_ends_the_run(write: Any, served: Served) -> None:
    with pytest.raises(BackendError, match=r"epoch 1: the job completed, but the backend still serves .* \d+"):
        await train(project(write, served, {}), ("trainer_adapters.a.stuck", "true"))


async def test_a_trainer_that_weighs_calls_is_refused_where_nobody_would_be_told(write: Any, served: Served) -> None:
    path = project(write, served, {})
    write("{}", "run/run.json")
    with pytest.raises(ConfigError, match="insitu_trainer computes advantages, but the backend of weighing_adapter"):
        await train(path, ("trainer_adapters.a._type", "weighing_adapter"))
    assert (path.parent / "run/run.json").exists(), "an earlier run has been moved"


@pytest.mark.parametrize("method", ["dpo", "kto", "sft"])
async def test_a_method_that_the_trainer_makes_no_rows_for_is_refused(write: Any, served: Served, method: str) -> None:
    """Supervised finetuning would otherwise imitate bad episodes as well as good ones."""
    before = len(served.samples())
    with pytest.raises(ConfigError, match=f"training.method is {method}, but .* insitu_trainer trains with grpo"):
        await train(project(write, served, {}), ("trainer_adapters.a.training.method", method))
    assert len(served.samples()) == before


async def test_a_wrong_token_is_told_before_anything_runs(write: Any, served: Served) -> None:
    before = len(served.samples())
    with pytest.raises(BackendError, match="token"):
        await train(project(write, served, {}), ("trainer_adapters.a.api_key", "wrong"))
    assert len(served.samples()) == before


# what is found before it is paid for, and what reaches the policy by other ways


async def test_an_evaluator_that_fails_is_known_before_the_first_epoch(write: Any, served: Served) -> None:
    before = len(served.samples())
    path = project(write, served, {})
    with pytest.raises(PluginError) as caught:
        await train(path, ("eval.evaluators.score.raises", "[r0, r1]"))
    message = str(caught.value)
    assert message.startswith("no row could be scored, so nothing can be trained; row 'r")
    assert f"evaluator score raised LookupError: no such column ({duo_plugin.__file__}, line " in message
    assert len(served.samples()) == before + 2 * 4
    assert not (path.parent / "run/episodes.jsonl.gz").exists()


async def test_an_evaluator_may_fail_on_a_row(write: Any, served: Served) -> None:
    path, fails = project(write, served, {}), ("eval.evaluators.score.raises", "[r0]")
    await train(path, fails)
    (metrics,) = metrics_of(path)
    assert (metrics["dropped"], metrics["num_trajectories"]) == ({"evaluator_error": GENERATIONS}, GENERATIONS)
    await train(path, fails, ("finetuning.reward_function.on_failure", "-1"))
    (metrics,) = metrics_of(path)
    assert (metrics["dropped"], metrics["num_trajectories"]) == ({"no_variance": GENERATIONS}, 2 * GENERATIONS)
    assert metrics["min_reward"] == -1


async def test_what_episodes_leave_behind_is_counted(
    write: Any, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(episodes, "CANCEL_GRACE_SECONDS", 0.05)
    path = project(write, served, {}, thread=True, clings="row 1")
    console = Console(file=io.StringIO(), width=300)
    await train(path, ("eval.general.episode_timeout", "3"), console=console)
    assert capsys.readouterr().out == ""  # everything goes to the given console
    (metrics,) = metrics_of(path)
    assert metrics["stray_completions"] == 2 * GENERATIONS  # of two functions, in the episodes of row 0
    assert metrics["abandoned_attempts"] == GENERATIONS
    assert metrics["dropped"]["timeout"] == GENERATIONS
    duo_plugin.released.set()
    await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "isolated"])
    duo_plugin.released.clear()


async def test_a_token_id_beyond_the_vocabulary_costs_its_episode(write: Any, served: Served) -> None:
    dropped = f"{ROWS * GENERATIONS} capture_error"
    says = rf"{dropped}; most often capture_error: .*'policy' returned the token id \d+; the vocabulary ends at 9 "
    with pytest.raises(TrajectoryError, match=says):
        await train(project(write, served, {}), ("trainer_adapters.a.vocab_size", "10"))


# the curriculum

STEPS = {"enabled": True, "initial_percentile": 0.3, "increment_percentile": 0.3, "expansion_interval": 1}


def metrics_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path.parent / "run/training_metrics.jsonl").read_text().splitlines()]


async def test_a_curriculum_grows_from_epoch_to_epoch(
    write: Any, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(write, served, {"num_epochs": 2, "curriculum_learning": STEPS})
    write([{"id": f"r{i}", "question": f"row {i}"} for i in range(6)], "rows.jsonl")
    await train(path)
    lines = metrics_of(path)
    states = [line["curriculum_state"] for line in lines]
    assert [(s["epoch"], s["current_percentile"], len(s["included_groups"])) for s in states] == [
        (1, 0.3, 2),
        (2, 0.6, 4),
    ]
    assert set(states[0]["included_groups"]) < set(states[1]["included_groups"]) < {f"r{i}" for i in range(6)}
    assert [line["dropped"] for line in lines] == [{"curriculum": 4 * GENERATIONS}, {"curriculum": 2 * GENERATIONS}]
    assert [line["filtered_groups"] for line in lines] == [2, 4]
    trained = [{g[0].metadata["row_id"] for g in c.trajectories} for c in duo_plugin.collections]  # type: ignore[index]
    assert trained == [set(s["included_groups"]) for s in states]
    assert "curriculum 60 % (4 of 6 examples)" in capsys.readouterr().out


async def test_an_epoch_that_the_curriculum_leaves_empty_is_no_failure_unless_all_are(
    write: Any, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(write, served, {"num_epochs": 2, "curriculum_learning": {**STEPS, "increment_percentile": 0.5}})
    easy = ("eval.evaluators.score.fixed", "{r0: 9e9}")  # the easiest has no variance
    (status,) = await train(path, easy)
    assert status.status == "completed"
    assert "epoch 1: nothing to train on; every group was dropped" in capsys.readouterr().out
    first, second = metrics_of(path)
    assert (first["dropped"], first["filtered_groups"]) == ({"curriculum": GENERATIONS, "no_variance": GENERATIONS}, 0)
    assert (second["dropped"], second["filtered_groups"]) == ({"no_variance": GENERATIONS}, 1)
    assert second["policy_version"] == first["policy_version"] + 1
    with pytest.raises(TrajectoryError, match="no epoch trained anything"):
        await train(path, easy, ("finetuning.num_epochs", "1"))


async def test_a_rollout_passes_every_file_of_the_walk(write: Any, served: Served) -> None:
    """The walk in CONTRIBUTING, measured: each of its files runs code between the start of an epoch and its job."""
    executed: set[str] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        executed.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        await train(project(write, served, {}))
    finally:
        sys.setprofile(None)
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    walk = re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.M)
    assert len(walk) > 10
    assert [name for name in walk if not any(file.endswith(f"/insitu/{name}") for file in executed)] == []
