"""Runs whose processes are killed at random moments, and continue: they end as if they had never been killed."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from factories import digits_project, read_lines, write_rows
from processes import HANGS, Process, run_project, start_project, wait_until

SEEDS = range(int(os.environ.get("KILL_SEEDS", "2")))
KILLS = 3
"""Of each run."""
VALIDATION = ("--validation_dataset", "validation.jsonl", "--validation_interval", "2")
EPOCHS = ("-o", "finetuning.num_epochs", "3")
CURRICULUM = (
    *("-o", "finetuning.curriculum_learning.enabled", "true"),
    *("-o", "finetuning.curriculum_learning.initial_percentile", "0.5"),
    *("-o", "finetuning.curriculum_learning.expansion_interval", "1"),
)
DPO = (
    *("-o", "trajectory_builders.episodes", "{_type: dpo_from_groups, num_generations: 4}"),
    *("-o", "trainers.grpo", "{_type: insitu_dpo_trainer}"),
    *("-o", "trainer_adapters.backend.training", "{method: dpo, learning_rate: 1e-3, lora: {rank: 4, dropout: 0.1}}"),
)
METHODS = {"grpo": (), "curriculum": CURRICULUM, "dpo": DPO}


class Outcome(NamedTuple):
    """What must not depend on when a run was killed."""

    metrics: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    rewards: list[dict[str, Any]]
    trained: list[dict[str, Any]]
    """The lines of advantages.jsonl: every episode, in the order of training."""
    calls: set[str]
    weights: dict[str, str]
    curriculum: dict[str, Any]


def outcome(folder: Path) -> Outcome:
    run_id = json.loads((folder / "run.json").read_text())["run_id"]

    def lines(name: str, *changing: str) -> list[dict[str, Any]]:
        text = (folder / name).read_text().replace(run_id, "RUN")
        records = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
        for record in records:
            for key in changing:
                record.pop(key, None)
        return records

    files = sorted((folder / "backend/checkpoints").glob("step_*/*.safetensors"))
    return Outcome(
        metrics=lines("training_metrics.jsonl", "timestamp", "seconds"),
        validations=lines("validation_history.json", "timestamp", "seconds"),
        rewards=lines("reward_history.json"),
        trained=lines("advantages.jsonl"),
        calls={json.dumps({**record, "seconds": 0}) for record in lines("calls.jsonl", "started", "ended")},
        weights={f"{f.parent.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
        curriculum=json.loads((folder / "curriculum_state.json").read_text()),
    )


@pytest.fixture(scope="module", params=METHODS)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A project, the options of its run, how it ended without being killed, and how long it took."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    digits_project(folder)
    write_rows(folder, [{"say": f"Row {i}"} for i in range(6)])
    write_rows(folder, [{"say": f"Held out {i}"} for i in range(5)], "validation.jsonl")
    options = (*VALIDATION, *EPOCHS, *METHODS[request.param])
    for _ in range(2):  # the first one also fills caches
        started = time.monotonic()
        code, _, err = run_project(folder, *options)
        assert code == 0, err
    return folder, options, outcome(folder / "run"), time.monotonic() - started


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(
    uninterrupted: tuple[Any, ...], tmp_path: Path, seed: int
) -> None:
    project, options, expected, seconds = uninterrupted
    for name in ("config.yml", "digits_plugin.py", "rows.jsonl", "validation.jsonl"):
        shutil.copy(project / name, tmp_path)
    dice, kills = random.Random(seed), list[str]()
    while len(kills) < KILLS:
        with start_project(tmp_path, *options, "--resume") as process:
            moment = dice.uniform(0, seconds)
            time.sleep(moment)
            if killed := kill(process, dice.choice(["run", "backend", "both"])):
                kills.append(f"{killed} after {moment:.2f} s")
            else:  # it was faster: the whole run is left to be killed, or nothing of it
                seconds *= 0.8
                if kills:
                    break
                shutil.rmtree(tmp_path / "run")
    code, _, err = run_project(tmp_path, *options, "--resume")
    assert code == 0, (seed, kills, err)
    ended = outcome(tmp_path / "run")
    for name, value in expected._asdict().items():
        assert getattr(ended, name) == value, (seed, kills, name)
    versions = re.findall(r"version (\d+): loss", (tmp_path / "run/backend/backend.log").read_text())
    assert sorted(set(versions)) == sorted(versions), (seed, kills, "a job was trained twice")
    events = [e["event"] for e in read_lines(tmp_path / "run/events.jsonl")[1:]]
    print(f"seed {seed}: killed {', '.join(kills)}; events: {', '.join(events)}")


def kill(process: Process, which: str) -> str | None:
    """Returns what was killed; None if the run had ended."""
    if process.poll() is not None:
        return None
    backends = psutil.Process(process.pid).children()
    victims = [process.pid] * (which != "backend") + [backend.pid for backend in backends] * (which != "run")
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    process.communicate(HANGS)
    process.wait(HANGS)
    for backend in backends:
        wait_until(lambda backend=backend: not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE)
    return which if victims else "nothing yet"
