"""Trajectory builders that read the episodes of an earlier run instead of running the workflow."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import MODEL, digits_project, read_lines, write_rows
from marks import slow_but_at
from processes import run_project
from safetensors.torch import load_file, save_file
from test_inspection import Run, episode
from test_preference_builders import ROWS, file
from tiny_backend import Served

from insitu.cli import main
from insitu.collect.collector import collect
from insitu.collect.conversations import collection_of
from insitu.collect.shared_run import RunState
from insitu.config import load_config
from insitu.errors import ConfigError, InsituError
from insitu.plugin_api import Builder
from insitu.runs.files import RESCORES
from insitu.runs.replay import StoredRun
from insitu.runs.store import RunStore
from insitu.schemas.finetuning import FinetuneRunConfig, Trajectory, TrajectoryCollection
from insitu.training.runtime import finetuning_main

EPOCHS = 2


async def collected(path: Path, run_id: str, folder: Path) -> list[TrajectoryCollection]:
    """The epochs of a builder, recorded as a run."""
    config = load_config(path)
    store, collections = RunStore(folder), []
    store.write("run.json", {"run_id": run_id})
    async with Builder(config) as builder:
        made = await builder.get_trajectory_builder("pairs")
        await made.initialize(config.finetuning)
        for epoch in range(1, EPOCHS + 1):
            groups = []
            async for group in collect(made.plan(run_id, epoch), builder, RunState.of(builder)):
                store.append_group(group, epoch)
                groups.append(group)
            collections.append(collection_of(groups, run_id, epoch))
    store.close()
    return collections


def without_names(trajectory: Trajectory) -> dict[str, Any]:
    rows = [row.model_dump(exclude={"episode", "pair"}) for row in trajectory.rows]
    name = str(trajectory.id).partition("/")[2]
    about = trajectory.metadata or {}
    sides = {key: about[key].partition("/")[2] for key in ("chosen_episode", "rejected_episode") if key in about}
    return {**dict(trajectory), "id": name, "rows": rows, "metadata": about | sides}


def compared(collections: list[TrajectoryCollection]) -> list[Any]:
    return [([[without_names(t) for t in group] for group in c.trajectories], c.epoch, c.dropped) for c in collections]


def project(write: Any, served: Served, builder: dict[str, Any], **finetuning: Any) -> Path:
    content = file(served, builder)
    if builder["_type"] != "dpo_traj_builder":
        content["workflow"] = {"_type": "preference_ask", "llm": "player"}
        content["finetuning"]["reward_function"] = {"name": "score"}
    content["finetuning"] |= finetuning
    write([{"id": f"r{i}", "question": f"row {i}", "answer": "sure"} for i in range(ROWS)], "rows.jsonl")
    return write(content)


BUILDERS: list[dict[str, Any]] = [
    {"_type": "dpo_traj_builder", "num_generations": 2},
    {"_type": "dpo_from_groups", "num_generations": 3, "exhaustive_pairs": True},
    {"_type": "insitu_traj_builder", "num_generations": 2},
]


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda b: b["_type"])
async def test_recorded_groups_are_those_that_were_collected(
    write: Any, served: Served, tmp_path: Path, builder: dict[str, Any]
) -> None:
    """Replay gives equal trajectories, rows and drop reasons, without requests to the model and without the dataset."""
    first = await collected(project(write, served, builder), "first", tmp_path / "first")
    assert all(c.trajectories for c in first)
    sampled = len(served.samples())
    stored = {**builder, "num_generations": 5, "rows_per_epoch": 1}  # the recorded groups are used as they are
    path = project(write, served, {**stored, "episodes_from": "first"})
    (tmp_path / "rows.jsonl").unlink()
    again = await collected(path, "second", tmp_path / "second")
    assert len(served.samples()) == sampled
    assert compared(again) == compared(first)
    records = read_lines(tmp_path / "second/episodes.jsonl.gz")[1:]
    assert {r["source"].replace("first/", "second/", 1) for r in records} == {r["episode"] for r in records}
    assert {r["source"].partition("/")[0] for r in records} == {"first"}
    third = await collected(project(write, served, {**stored, "episodes_from": "second"}), "third", tmp_path / "third")
    assert compared(third) == compared(first)


async def test_epochs_are_chosen_and_start_over(write: Any, served: Served, tmp_path: Path) -> None:
    first = await collected(project(write, served, BUILDERS[2]), "first", tmp_path / "first")
    stored = {"_type": "insitu_traj_builder", "episodes_from": {"run": "first", "epochs": [2]}}
    again = await collected(project(write, served, stored), "second", tmp_path / "second")
    rewards = [[[t.reward for t in group] for group in c.trajectories] for c in (*again, *first)]
    assert rewards[0] == rewards[1] == rewards[3] != rewards[2]


async def test_another_score_is_the_reward(write: Any, served: Served, tmp_path: Path) -> None:
    """A later score of an evaluator wins, and an episode without one is dropped for the recorded reason."""
    first = await collected(project(write, served, BUILDERS[2]), "first", tmp_path / "first")
    names = [str(t.id) for c in first for group in c.trajectories for t in group]
    store = RunStore(tmp_path / "first")
    line = {"evaluator": "other", "reasoning": None, "error": None, "reason": None}
    store.append(RESCORES, [{**line, "episode": name, "score": 7.0} for name in names])
    store.append(RESCORES, [{**line, "episode": names[0], "score": None, "error": "no", "reason": "evaluator_error"}])
    store.append(RESCORES, [{**line, "episode": names[1], "score": 9.0}])
    store.close()
    stored = {"_type": "insitu_traj_builder", "episodes_from": {"run": "first", "reward": "other"}}
    again = await collected(project(write, served, stored), "second", tmp_path / "second")
    rewards = [t.reward for c in again for group in c.trajectories for t in group]
    assert rewards == [9.0] + [7.0] * (len(names) - 2)
    assert [c.dropped for c in again] == [{"evaluator_error": 1}, {}]
    stored["episodes_from"]["reward"] = "-other"  # of which less is better
    again = await collected(project(write, served, stored), "less", tmp_path / "less")
    assert [t.reward for c in again for group in c.trajectories for t in group] == [-reward for reward in rewards]
    stored["episodes_from"]["reward"] = "score"
    recorded = await collected(project(write, served, stored), "third", tmp_path / "third")
    assert compared(recorded) == compared(first)


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ({"run": "nowhere"}, "'nowhere' does not exist"),
        ({"run": "."}, "is not a run directory: episodes.jsonl.gz is missing"),
        ({"run": "evaluation"}, "is the directory of an evaluation, which records answers but no model calls"),
        ({"run": "empty"}, "has no complete group yet"),
        ({"run": "newer"}, "newer/groups.jsonl has format 99; supported: 2"),
        ({"run": "first", "epochs": [3]}, "has no complete group of epoch 3; available: 1, 2"),
        ({"run": "first", "reward": "taste"}, "has no scores of 'taste'; available: score"),
    ],
)
async def test_a_run_that_cannot_be_read_is_one_sentence(
    write: Any, served: Served, tmp_path: Path, stored: dict[str, Any], problem: str
) -> None:
    await collected(project(write, served, BUILDERS[2]), "first", tmp_path / "first")
    write("[]", "evaluation/workflow_output.json")
    for name in ("episodes.jsonl.gz", "calls.jsonl.gz"):
        write("", f"empty/{name}")
    shutil.copytree(tmp_path / "first", tmp_path / "newer")
    write('{"format":99}\n', "newer/groups.jsonl")
    path = project(write, served, {"_type": "insitu_traj_builder", "episodes_from": stored})
    async with Builder(load_config(path)) as builder:
        with pytest.raises(ConfigError, match=r"^trajectory_builders\.pairs\.episodes_from: ") as raised:
            await builder.get_trajectory_builder("pairs")
    assert problem in str(raised.value)


async def test_a_group_that_is_being_written_is_not_read(write: Any, served: Served, tmp_path: Path) -> None:
    await collected(project(write, served, BUILDERS[2]), "first", tmp_path / "first")
    groups = tmp_path / "first/groups.jsonl"
    groups.write_text("".join(groups.read_text().splitlines(keepends=True)[:-1]))
    run = StoredRun(tmp_path / "first")
    assert [len(run.groups(epoch)) for epoch in run.epochs] == [ROWS, ROWS - 1]
    first, second = run.groups(1)[:2]
    with pytest.raises(InsituError, match=r"calls\.jsonl\.gz has 0 of the 2 calls of episode first/1/r\d/\d/0"):
        run.load(first._replace(calls=second.calls))


TRAINERS = [
    ("insitu_kto_trainer", "insitu_traj_builder", "kto"),
    ("insitu_sft_trainer", "insitu_traj_builder", "sft"),
    ("insitu_dpo_trainer", "dpo_from_groups", "dpo"),
    ("insitu_trainer", "insitu_traj_builder", "grpo"),
]


@pytest.mark.parametrize(("trainer", "builder", "method"), slow_but_at({0, 3}, TRAINERS))
async def test_trainers_train_recorded_episodes(
    write: Any, served: Served, tmp_path: Path, trainer: str, builder: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the directory that the run is written to; GRPO only those that the served weights have sampled."""
    monkeypatch.chdir(tmp_path)
    path = project(write, served, BUILDERS[2])
    await collected(path, "first", tmp_path / "run")
    sampled = len(served.samples())
    path = project(write, served, {"_type": builder, "episodes_from": "run"}, num_epochs=2, output_dir="run")
    overrides = (("trainers.t._type", trainer), ("trainer_adapters.a.training", f"{{method: {method}}}"))
    request = FinetuneRunConfig(config_file=path, override=overrides)
    if method == "grpo":
        with pytest.raises(InsituError, match="was sampled at policy version") as raised:
            await finetuning_main(request)
        assert str(raised.value).startswith(
            f"the episodes of {tmp_path}/run.1 cannot be trained by insitu_trainer, which needs those of the served "
        )
        assert len(read_lines(tmp_path / "run/training_metrics.jsonl")) == 1, "the first epoch trains"
        return
    assert len(await finetuning_main(request)) == 2
    assert len(served.samples()) == sampled
    metrics = read_lines(tmp_path / "run/training_metrics.jsonl")
    assert [(m["job"], m["num_groups"]) for m in metrics] == [("completed", ROWS)] * 2
    sources = Counter(r["source"].split("/")[1] for r in read_lines(tmp_path / "run/episodes.jsonl.gz")[1:])
    assert sources == {"1": 2 * ROWS, "2": 2 * ROWS}
    settings = json.loads((tmp_path / "run/run.json").read_text())
    assert settings["episodes_from"] == {"run": str(tmp_path / "run.1"), "epochs": [1, 2], "reward": None}
    assert settings["targets"] == {"functions": ["<workflow>"], "model": "player", "llms": ["player"]}


@pytest.mark.slow
def test_episodes_of_other_weights_with_the_same_version_are_refused(tmp_path: Path) -> None:
    """Those that differ where no digest looks are trained, with a warning."""
    digits_project(tmp_path)
    write_rows(tmp_path, [{"say": f"Row {i}"} for i in range(3)])
    stored = ("-o", "trajectory_builders.episodes.episodes_from", "first")
    one_epoch = ("-o", "finetuning.num_epochs", "1")
    code, _, err = run_project(tmp_path, *one_epoch)
    assert code == 0, err
    (tmp_path / "run").rename(tmp_path / "first")

    def trained_from(model: str, step: Callable[[int], int]) -> tuple[int, str, str]:
        """Another model: each tensor with all elements larger but each `step`-th."""
        shutil.copytree(MODEL, tmp_path / model)
        weights = tmp_path / model / "model.safetensors"
        tensors = load_file(weights)
        for tensor in tensors.values():
            kept = tensor.flatten()[:: step(tensor.numel())].clone()
            tensor.mul_(1.1).view(-1)[:: step(tensor.numel())] = kept
        save_file(tensors, weights, {"format": "pt"})
        return run_project(tmp_path, *one_epoch, *stored, "-o", "trainer_adapters.backend.model", model)

    code, _, err = trained_from("other", lambda size: size)
    assert code == 1
    assert re.search(r"was sampled at weights \w{16}, the backend serves weights \w{16} as the same version, 0;", err)
    code, out, err = trained_from("alike", lambda size: max(1, size // 256))
    assert code == 0, err
    assert re.search(r"epoch 1: WARNING: logprob_gap is 0.\d+, above 0.005: the log-probabilities of the sampler", out)


@pytest.mark.parametrize("stored", [False, True])
def test_preferences_are_valid_without_a_reward_function(
    write: Any,
    served: Served,
    tmp_path: Path,
    stored: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And recorded episodes without a dataset."""
    monkeypatch.chdir(tmp_path)
    builder: dict[str, Any] = {"_type": "dpo_traj_builder"}
    if stored:
        made = Run(tmp_path / "first")
        made.add("r1", episode(0, "r1"))
        made.store.close()
        builder["episodes_from"] = "first"
    path = project(write, served, builder)
    if stored:
        (tmp_path / "rows.jsonl").unlink()
    options = ("trainers.t._type", "insitu_dpo_trainer"), ("trainer_adapters.a.training", "{method: dpo}")
    words = [word for option in options for word in ("-o", *option)]
    monkeypatch.setattr("sys.argv", ["insitu", "validate", str(path), *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("is valid")
