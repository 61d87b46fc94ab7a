"""What `--checkpoint` and `model` may name: folders, runs, and their best and latest weights; also after a move."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import processes
import pytest
from factories import recorded_run
from rich.console import Console

from insitu.config import Config, load_config
from insitu.errors import ConfigError, InsituError
from insitu.runs.checkpoints import find_checkpoint, model_of_run
from insitu.schemas.kinds import TRAINER_ADAPTER
from insitu.training.runtime import starting_from


def make_run(folder: Path, steps: int = 3, best: Any = "backend/checkpoints/step_000002") -> Path:
    for step in range(1, steps + 1):
        checkpoint = folder / f"backend/checkpoints/step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text("{}")
    (folder / "best.json").write_text(json.dumps({"avg_reward": 0.5, "epoch": 2, "checkpoint": best}))
    return folder


def test_a_backend_serves_the_weights_of_a_run(tmp_path: Path) -> None:
    better = recorded_run(tmp_path / "better", [0.0] * 3, [1.0] * 3, [0.5] * 3)
    for name, step in (("better/best", 1), ("better/latest", 2), ("better", 1), ("better/step_000002", 2)):
        assert model_of_run(str(tmp_path / name), "--model") == str(better / f"backend/checkpoints/step_00000{step}")
    for model in ("Qwen/Qwen2.5-0.5B", "best", str(tmp_path / "better-base"), str(tmp_path / "nowhere/best")):
        assert model_of_run(model, "--model") == model
    (better / "best.json").write_text(json.dumps({"avg_reward": 0.5, "epoch": 0, "checkpoint": None}))
    started = {"model": str(tmp_path / "better-base")}
    (better / "backend/started_from.json").write_text(json.dumps(started))
    assert model_of_run(str(better / "best"), "--model") == started["model"]
    (tmp_path / "elsewhere").mkdir()
    for name in ("run.json", "best.json"):
        shutil.copy(better / name, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"key: .*elsewhere are those that its backend at a url had .*; name that"):
        model_of_run(str(tmp_path / "elsewhere"), "key")
    with processes.serving("backend", "--model", "better/latest", "--port", 0, "--threads", 1, folder=tmp_path) as (
        _,
        address,
    ):
        assert httpx.get(f"{address}/health").status_code == 200
    (better / "best.json").unlink()
    refused = processes.run("backend", "--model", "better/best", folder=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: --model: better has no best.json, although it was validated; better/lat")


@pytest.fixture
def config(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The configuration of a file whose run is in `runs/agent`, which exists."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/agent")
    return load_config(write({"finetuning": {"output_dir": "runs/agent"}}))


def test_an_adapter_whose_name_has_a_dot_starts_from_a_checkpoint(config: Config, write: Any) -> None:
    """The weights of the file's own run."""
    section = {"enabled": True, "output_dir": "runs/agent", "trainer": "grpo", "trajectory_builder": "episodes"}
    file = write(
        {
            "llms": {"player": {"_type": "policy"}},
            "eval": {"evaluators": {"score": {"_type": "python", "function": "operator:eq"}}},
            "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder"}},
            "trainer_adapters": {"qwen2.5": {"_type": "insitu_trainer_adapter", "model": "base"}},
            "trainers": {"grpo": {"_type": "insitu_trainer"}},
            "finetuning": section | {"trainer_adapter": "qwen2.5", "reward_function": {"name": "score"}},
        }
    )
    started = starting_from(load_config(file), Path("latest"), Console(quiet=True))
    assert started.block(TRAINER_ADAPTER, "qwen2.5").starts_from == "runs/agent/backend/checkpoints/step_000003"


@pytest.mark.parametrize(
    ("name", "step", "note"),
    [
        ("best", 2, "the best of runs/agent: 0.5 at epoch 2"),
        ("latest", 3, "the latest of runs/agent"),
        ("runs/agent", 2, "the best of "),
        ("runs/agent/latest", 3, "the latest of "),
        ("runs/agent/best", 2, "the best of "),
        ("step_000001", 1, "of runs/agent"),
        ("runs/agent/step_000001", 1, "of "),
        ("runs/agent/backend/checkpoints/step_000001", 1, None),
    ],
)
def test_weights_of_a_run_are_found_by_name(config: Config, name: str, step: int, note: str | None) -> None:
    found = find_checkpoint(config, name, "--checkpoint")
    assert found.folder is not None
    assert found.folder.resolve() == Path(f"runs/agent/backend/checkpoints/step_{step:06d}").resolve()
    assert (found.note or "").startswith(note or "")
    assert (found.note is None) == (note is None)


def test_without_validation_a_run_stands_for_its_latest_weights(config: Config) -> None:
    Path("runs/agent/best.json").unlink()
    found = find_checkpoint(config, "runs/agent", "--checkpoint").folder
    assert found is not None
    assert found.name == "step_000003"
    with pytest.raises(ConfigError, match=r"--checkpoint: .* has no best.json: it was never validated"):
        find_checkpoint(config, "best", "--checkpoint")


def test_the_best_may_be_what_the_run_started_from(config: Config) -> None:
    make_run(Path("runs/worse"), best=None)
    assert find_checkpoint(config, "runs/worse", "key").folder is None


def test_a_moved_run_names_its_own_weights(config: Config) -> None:
    Path("runs/agent").rename("runs/agent.1")
    make_run(Path("runs/agent"), steps=0)
    found = find_checkpoint(config, "runs/agent.1", "key").folder
    assert found is not None
    assert found.resolve() == Path("runs/agent.1/backend/checkpoints/step_000002").resolve()


def test_paths_of_the_file_follow_a_run_that_was_moved_aside(config: Config) -> None:
    Path("runs/agent").rename("runs/agent.1")
    make_run(Path("runs/agent"))  # the new run has checkpoints of the same names
    moved = {Path("runs/agent").resolve(): Path("runs/agent.1").resolve()}
    for name in ("latest", "runs/agent/latest", "runs/agent/backend/checkpoints/step_000003"):
        found = find_checkpoint(config, name, "the trainer adapter's model", moved).folder
        assert found == Path("runs/agent.1/backend/checkpoints/step_000003").resolve()
    assert config.find_path("runs/agent/run.json", "key", moved) == Path("runs/agent.1/run.json").resolve()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("runs/nowhere/best", "--checkpoint: 'runs/nowhere' does not exist"),
        ("runs/nowhere", "--checkpoint: 'runs/nowhere' does not exist"),
        ("runs/remote/latest", "checkpoints holds no checkpoints; a backend at a url keeps its own elsewhere"),
        ("runs/failed/latest", "checkpoints holds no checkpoints; no job of the run has completed"),
        (
            "step_000004",
            "runs/agent/backend/checkpoints/step_000004 was deleted or never made; checkpoints there: step_000001, ",
        ),
        ("runs/agent/step_000004", "runs/agent/backend/checkpoints/step_000004 was deleted or never made; "),
        ("runs/remote/best", "best.json names /srv/gpu/step_000009, which does not exist here"),
        ("runs/damaged/best", "best.json is not JSON"),
        (
            "runs/agent/backend/checkpoints/step_000004",
            "agent/backend/checkpoints/step_000004 was deleted or never made; checkpoints there: step_000001, "
            "step_000002, step_000003 (the key `keep` of the trainer adapter says which are kept)",
        ),
        ("runs/unkept/best", "runs/unkept/backend/checkpoints/step_000002 was deleted or never made; "),
    ],
)
def test_what_is_not_there_is_named(config: Config, name: str, says: str) -> None:
    make_run(Path("runs/remote"), steps=0, best="/srv/gpu/step_000009")
    settings = {"finetuning": {"trainer_adapter": "a"}, "trainer_adapters": {"a": {"model": "m"}}}
    (make_run(Path("runs/failed"), steps=0) / "run.json").write_text(json.dumps({"config": settings}))
    (make_run(Path("runs/damaged")) / "best.json").write_text('{"avg')
    shutil.rmtree(make_run(Path("runs/unkept")) / "backend/checkpoints/step_000002")
    with pytest.raises(InsituError) as caught:
        find_checkpoint(config, name, "--checkpoint")
    assert says in str(caught.value)


def test_best_needs_a_run_in_the_output_dir(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(write({"finetuning": {"output_dir": "runs/agent"}}))
    for name in ("best", "step_000002"):
        said = rf"--checkpoint: {name} is of the run in finetuning\.output_dir, but runs/agent holds no run"
        with pytest.raises(ConfigError, match=rf"{said}; .* RUN_DIR/{name}"):
            find_checkpoint(config, name, "--checkpoint")
