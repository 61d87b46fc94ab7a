"""Which calls are trained: two functions, two models, a real backend, and what it logged against what it was sent."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duo_plugin
import pytest
from tiny_models import byte_tokenizer, save_tiny_model

from insitu.errors import ConfigError, TrajectoryError
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.training.runtime import finetuning_main

ROWS = 2
GENERATIONS = 3


class Served:
    """A running backend with a tiny model, and the log of what it sampled."""

    def __init__(self, address: str, log: Path) -> None:
        self.address = address
        self._log = log

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = save_tiny_model(folder / "model")
    options = {"model": model, "port": 0, "token": "t", "output_dir": folder / "out", "log_samples": folder / "log"}
    command = [sys.executable, "-m", "insitu", "backend", *(t for k, v in options.items() for t in (f"--{k}", str(v)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Served(process.stdout.readline().split()[-1], folder / "log")
        process.kill()


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


async def train(path: Path, *overrides: tuple[str, str]) -> list[Any]:
    duo_plugin.sent.clear()
    duo_plugin.collections.clear()
    return await finetuning_main(FinetuneRunConfig(config_file=path, override=overrides))


@pytest.mark.parametrize("framework", [None, "langchain"])
@pytest.mark.parametrize(
    ("functions", "model", "trained"),
    [
        (["move"], "player", {"player moves"}),
        (["move"], "policy@7", {"player moves", "judge moves"}),
        (["<workflow>"], "judge", {"judge plans", "judge moves"}),
        (["plan", "move"], None, {"player plans", "player moves"}),
    ],
    ids=["key", "name at a step", "everywhere", "default"],
)
async def test_the_trained_rows_are_what_the_targeted_calls_sampled(
    write: Any, served: Served, framework: str | None, functions: list[str], model: str | None, trained: set[str]
) -> None:
    before = len(served.samples())
    target = {"target_functions": functions, "target_model": model}
    (status,) = await train(project(write, served, target, framework=framework))
    assert status.status == "completed"

    samples = served.samples()[before:]
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
        ({"target_functions": ["moves"]}, "'moves' does not exist (did you mean 'move'?); there is: move, plan"),
        ({"target_functions": []}, "finetuning.target_functions: List should have at least 1 item"),
        ({"target_model": "plyer"}, "(did you mean 'player'?); there is: player, judge, policy"),
    ],
)
async def test_an_unknown_target_is_refused_with_all_there_are(
    write: Any, served: Served, target: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await train(project(write, served, target))
    assert says in str(caught.value)


async def test_targets_that_are_never_called_are_told_with_what_was_called(write: Any, served: Served) -> None:
    path = project(write, served, {"target_functions": ["move"], "target_model": "judge"})
    with pytest.raises(TrajectoryError) as caught:
        await train(path, ("workflow.functions", "[plan]"))
    message = str(caught.value)
    assert message.startswith("epoch 1: no episode can be trained on; left out: 6 no_target_calls; most often ")
    assert "the model calls of judge in move are trained; it called " in message
    assert "it called judge in <workflow> > plan, player in <workflow> > plan" in message


@pytest.mark.parametrize(("name", "negative"), [("score", False), ("other", True)])
async def test_the_named_evaluator_gives_the_reward(write: Any, served: Served, name: str, negative: bool) -> None:
    await train(project(write, served, {"reward_function": {"name": name}}))
    (collection,) = duo_plugin.collections
    assert {t.reward < 0 for group in collection.trajectories for t in group} == {negative}


async def test_a_backend_that_serves_another_model_is_refused(write: Any, served: Served) -> None:
    with pytest.raises(ConfigError, match=r"the trainer adapter's name is 'mine'; http.* serves 'policy'"):
        await train(project(write, served, {}), ("trainer_adapters.a.name", "mine"))
