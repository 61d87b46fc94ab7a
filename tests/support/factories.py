"""Builders of what tests are about: messages, model calls, rows of a dataset, and the project that trains on digits."""

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from fake_nemo import CONFIG as CUSTOMIZATION_CONFIG
from fake_nemo import FakeNeMo
from fake_openai import FakeOpenAI

if TYPE_CHECKING:
    from insitu.workflow.llms import ModelClient

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/tic_tac_toe/model"
"""A trained model of a few hundred thousand parameters."""


# messages and calls


def model_client(server: FakeOpenAI | str, name: str = "player", **settings: Any) -> "ModelClient":
    from insitu.workflow.llms import OpenAIConfig, connect

    base_url = server if isinstance(server, str) else server.base_url
    config = OpenAIConfig(model_name="fake", base_url=base_url, **settings)
    return connect(name, config, "fake", base_url, "none")


@asynccontextmanager
async def connected(server: FakeOpenAI | str, **settings: Any) -> "AsyncIterator[ModelClient]":
    client = model_client(server, **settings)
    try:
        yield client
    finally:
        await client.aclose()


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
    (folder / "pairs_plugin.py").write_text((ROOT / "tests/support/pairs_plugin.py").read_text())
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


def read_lines(path: Path) -> list[Any]:
    """The records of a file of JSON lines, which may be compressed."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return [json.loads(line) for line in file]


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records of a run's file, without its header."""
    return [record for record in read_lines(path) if "format" not in record]


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
    folder: Path,
    *,
    workflow: dict[str, Any] | None = None,
    plugin: str = "digits_plugin",
    rows: int = 0,
    held_out: int = 0,
    **adapter: Any,
) -> Path:
    """A training run on `digits_plugin`, to be run by `processes.run_project`; `adapter` is where the model is.

    `rows` in `rows.jsonl`, which the run trains on, and `held_out` in `validation.jsonl`.
    """
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
    (folder / "digits_plugin.py").write_text((ROOT / "tests/support/digits_plugin.py").read_text())
    for name, say, count in (("rows.jsonl", "Row", rows), ("validation.jsonl", "Held out", held_out)):
        if count:
            write_rows(folder, [{"say": f"{say} {i}"} for i in range(count)], name)
    return folder


def recorded_run(folder: Path, *scores: list[float], lora: bool = False, dataset: str = "d" * 64) -> Path:
    """A run that has trained a tiny model: `scores` are those of the held-out rows, before training and after each job.

    The files that the control plane writes are made up, as far as later commands read them.
    """
    import numpy as np
    from tiny_models import save_tiny_model

    from insitu.algorithms.statistics import mean_ci95
    from insitu.backend.learner.batches import Row
    from insitu.backend.learner.learner import Learner
    from insitu.backend.model import load_model
    from insitu.schemas.lora import LoRASettings
    from insitu.schemas.training_jobs import TrainingSettings

    loaded = load_model(str(save_tiny_model(folder.parent / f"{folder.name}-base")), "cpu")
    learner = Learner(loaded, folder / "backend", default_lora=LoRASettings(rank=4, alpha=32) if lora else None)
    row = Row(np.array([1, 5, 7, 2], np.int32), np.array([2, 3]), np.full(2, -1.0, np.float32), np.ones(2, np.float32))
    history: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = [{"format": 2}]
    for version, of_rows in enumerate(scores):
        if version:
            for _ in learner.run(TrainingSettings(learning_rate=0.01), [row]):
                pass
        mean, *ci95, number = mean_ci95(of_rows)
        record = {"epoch": version, "policy_version": version, "avg_reward": mean, "ci95": ci95}
        history.append(record | {"num_examples": number, "dropped": {}, "seconds": 0.1})
        by_row = {str(i): [score] for i, score in enumerate(of_rows)}
        line = {"epoch": version, "policy_version": version, "evaluator": "score", "dataset": dataset}
        lines.append(line | {"scores": by_row})
    best = max(history, key=lambda each: each["avg_reward"])
    version = best["policy_version"]
    settings = {
        "run_id": f"insitu_run_{folder.name}",
        "insitu": "0.1.0",
        "source": str(folder.parent / "agent.yml"),
        "dataset": {"file": str(folder.parent / "rows.jsonl"), "sha256": "e" * 64},
        "epochs": len(scores) - 1,
        "seed": 3,
        "training": {"method": "grpo", "learning_rate": 0.01},
        "override": {"eval.general.dataset.file_path": str(folder.parent / "rows.jsonl"), "llms.m.n": "[1]"},
    }
    checkpoint = f"backend/checkpoints/step_{version:06d}" if version else None
    for name, data in (
        ("run.json", settings),
        ("validation_history.json", history),
        ("best.json", best | {"checkpoint": checkpoint}),
    ):
        (folder / name).write_text(json.dumps(data))
    (folder / "validation_scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
