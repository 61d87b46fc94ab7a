"""Builders of what tests are about: messages, model calls, rows of a dataset, and the project that trains on digits."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_nemo import CONFIG as CUSTOMIZATION_CONFIG
from fake_nemo import FakeNeMo

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples/tic_tac_toe/model"
"""A trained model of a few hundred thousand parameters."""


# messages and calls


def sampled(logprobs: dict[str, Any]) -> list[float]:
    """The numbers in the logprobs of a message."""
    return [entry["logprob"] for entry in logprobs.get("content", ())]


# files


def customizer_project(folder: Path, nemo: FakeNeMo, rows: int = 5, **blocks: dict[str, Any]) -> Path:
    """A run of `pairs_plugin` on the services of `fake_nemo`, to be run by `processes.run_project`.

    Row n asks for n + 1 and has three answers, the best first. `blocks` add keys to the adapter, the trainer, the
    trajectory builder or `finetuning`.
    """
    adapter = {
        "_type": "nemo_customizer_trainer_adapter",
        "entity_host": nemo.entity_host,
        "datastore_host": nemo.datastore_host,
        "namespace": "games",
        "customization_config": CUSTOMIZATION_CONFIG,
        "poll_interval_seconds": 0.02,
    }
    finetuning = {
        "enabled": True,
        "trainer": "trainer",
        "trajectory_builder": "builder",
        "trainer_adapter": "adapter",
        "reward_function": {"name": "zero"},
        "output_dir": str(folder / "run"),
    }
    config = {
        "general": {"seed": 3, "plugins": ["pairs_plugin"]},
        "workflow": {"_type": "nothing"},
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": str(folder / "rows.jsonl")}},
            "evaluators": {"zero": {"_type": "zero"}},
        },
        "trajectory_builders": {"builder": {"_type": "pairs_by_hand", **blocks.get("builder", {})}},
        "trainer_adapters": {"adapter": adapter | blocks.get("adapter", {})},
        "trainers": {"trainer": {"_type": "nemo_customizer_trainer", **blocks.get("trainer", {})}},
        "finetuning": finetuning | blocks.get("finetuning", {}),
    }
    answers = ({"id": n, "question": f"{n} + 1 =", "answers": [str(n + 1), str(n), "no"]} for n in range(rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (folder / "pairs_plugin.py").write_text((ROOT / "tests/pairs_plugin.py").read_text())
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


def read_lines(path: Path) -> list[Any]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(folder: Path, questions: list[dict[str, Any]], name: str = "rows.jsonl") -> None:
    """A dataset with these questions, the ids of which are 0, 1, ..."""
    rows = [json.dumps({"id": i, "question": question}) for i, question in enumerate(questions)]
    (folder / name).write_text("\n".join(rows))


@contextmanager
def disk_space(size: int) -> Iterator[None]:
    """Files that grow beyond this size cannot be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def power_failures(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Observes what is synced from now on: the function says whether a path would survive a power failure as it is."""
    synced: dict[tuple[int, int], tuple[int, int]] = {}
    fsync = os.fsync

    def state(of: os.stat_result) -> tuple[int, int]:
        return of.st_size, of.st_mtime_ns

    def note(descriptor: int) -> None:
        fsync(descriptor)
        of = os.fstat(descriptor)
        synced[of.st_dev, of.st_ino] = state(of)

    def survives(path: Path) -> bool:
        of = path.stat()
        return synced.get((of.st_dev, of.st_ino)) == state(of)

    monkeypatch.setattr(os, "fsync", note)
    return survives


def pip_install(source: Path, folder: Path) -> Path:
    """The folder, below `folder`, in which pip has installed a copy of the package in `source`."""
    shutil.copytree(source, folder / "source")  # setuptools builds beside the sources
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", folder / "source"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "site"


def digits_project(
    folder: Path, *, workflow: dict[str, Any] | None = None, plugin: str = "digits_plugin", **adapter: Any
) -> Path:
    """A training run on `digits_plugin`, to be run by `processes.run_project`; `adapter` is where the model is."""
    training = {"learning_rate": 1e-3, "mini_batch_size": 16}
    config = {
        "general": {"seed": 3, "plugins": [plugin]},
        "llms": {"player": {"_type": "policy", "max_tokens": 6, "max_retries": 0}},
        "workflow": {"llm": "player", **(workflow or {"_type": "ask"})},
        "eval": {
            "general": {
                "max_concurrency": 16,
                "episode_timeout": 20,
                "dataset": {"_type": "jsonl", "file_path": "rows.jsonl"},
            },
            "evaluators": {"score": {"_type": "digits"}},
        },
        "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder", "num_generations": 4}},
        "trainer_adapters": {
            "backend": {"_type": "insitu_trainer_adapter", "training": training, **(adapter or {"model": str(MODEL)})}
        },
        "trainers": {"grpo": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "grpo",
            "trajectory_builder": "episodes",
            "trainer_adapter": "backend",
            "reward_function": {"name": "score"},
            "num_epochs": 2,
            "output_dir": "run",
        },
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "digits_plugin.py").write_text((ROOT / "tests/digits_plugin.py").read_text())
    return folder
