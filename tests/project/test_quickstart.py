"""What `make quickstart` runs, for two epochs and on a part of its rows, with HTTP between the processes."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import forked_python

ROOT = Path(__file__).parents[2]
CONFIG = "examples/tic_tac_toe/grpo.yml"
TRAINED, HELD_OUT = 4, 20
"""Rows; the example has 64 and 600."""


def test_make_quickstart_runs_the_example() -> None:
    said = subprocess.run(
        ["make", "--dry-run", "--always-make", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"insitu finetune --config_file {CONFIG}" in said.stdout


@pytest.mark.slow
def test_two_epochs_of_the_quickstart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held_out = tmp_path / "held_out.jsonl"
    rows = (ROOT / "examples/tic_tac_toe/validation.jsonl").read_text().splitlines(keepends=True)
    held_out.write_text("".join(rows[:HELD_OUT]))
    overrides = {
        "finetuning.num_epochs": 2,
        "finetuning.output_dir": folder,
        "finetuning.validation.dataset": held_out,
        "trajectory_builders.episodes.rows_per_epoch": TRAINED,
    }
    options = [str(word) for override in overrides.items() for word in ("-o", *override)]
    done = subprocess.run(
        [forked_python(), "-m", "insitu", "finetune", "--config_file", CONFIG, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    validations = json.loads((folder / "validation_history.json").read_text())
    assert [v["epoch"] for v in validations] == [0, 2]
    assert all(v["num_examples"] == HELD_OUT for v in validations)
    assert validations[0]["avg_reward"] < 0.7, "about 0.5 on all rows"
    assert validations[0]["ci95"][0] < validations[0]["avg_reward"] < validations[0]["ci95"][1]
    metrics = [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]
    assert [m["policy_version"] for m in metrics] == [1, 2]
    for m in metrics:
        assert m["num_trajectories"] == 8 * TRAINED
        assert m["logprob_gap"] < 1e-3
        assert abs(m["ratio_mean"] - 1) < 1e-3
        assert m["grad_norm"] > 0
    assert str(folder) in done.stdout.replace("\n", "")


@pytest.mark.parametrize("minor", [11, 14])
def test_make_quickstart_takes_the_python_that_is_there(tmp_path: Path, minor: int) -> None:
    for name in ("make", "bash", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    python = tmp_path / f"python3.{minor}"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    command = ["make", "--dry-run", "--always-make", "VENV=elsewhere", "quickstart"]
    environment = {"PATH": str(tmp_path)}
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    assert f"python3.{minor} -m venv elsewhere" in said.stdout


@pytest.mark.slow
def test_the_benchmark_for_a_gpu_runs_on_a_cpu() -> None:
    code = """if True:
        import dataclasses, sys
        sys.path.insert(0, "benchmarks")
        import gpu, learner
        gpu.TRL = False
        scale = dataclasses.replace(gpu.SMALL, lora=True, tokens=40, requests=8)
        shapes = {name: learner.Shape(32, 4, 8) for name in gpu.SHAPES}
        print(gpu.report([scale], shapes, groups=1, rounds=1))"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([forked_python(), "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {cells[0].strip("| "): cells[1:] for line in done.stdout.splitlines() if (cells := line.split(" | "))[1:]}
    assert {"one GRPO step of 64 episodes of 40 tokens, LoRA", "ratio", "peak memory in it"} <= rows.keys()
    for shape in ("mixed lengths", "shared prompts"):
        seconds, rate, peak, trl = rows[shape][:4]
        assert seconds.endswith(" s")
        assert float(rate) > 0
        assert peak.endswith(" GB")
        assert trl == "TRL is not installed"
    (found,) = rows["norm of the difference, packed from padded: logprobs and gradients"]
    assert all(float(difference) < 1e-4 for difference in found.strip(" |").split(" and "))


@pytest.mark.skipif("NEVER_WAIT" not in os.environ, reason="takes a minute; make test WITH=pairs runs it")
def test_the_benchmark_of_slow_agents_runs_on_a_small_scale() -> None:
    code = """if True:
        import dataclasses, sys
        sys.path.insert(0, "benchmarks")
        import models, never_wait, one_device
        one_device.ALONE = 0.1
        sizes = models.SMALL.sizes | {"hidden_size": 32, "num_hidden_layers": 1}
        scale = dataclasses.replace(models.SMALL, sizes=sizes)
        print(never_wait.report(never_wait.Size(2, 1, 4, 0.01, 1, 32, 1, (1, 1, scale), ("K = 0", "K = 1"))))"""
    done = subprocess.run([forked_python(), "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[*map(str.strip, line.strip("| ").split("|"))] for line in done.stdout.splitlines() if line[:2] == "| "]
    first, ahead = (next(row for row in rows if row[0] == variant) for variant in ("K = 0", "K = 1"))
    assert first[2] == "1.00"
    assert float(ahead[2]) > 0
    assert all(float(row[column].removesuffix(" s")) > 0 for row in (first, ahead) for column in (1, 3, 4))
    (scores,) = (row for row in rows if row[0] == "0")
    assert scores[1]
    assert all(0 <= float(score.split()[0]) <= 1 for score in scores[2:])
    shares = [row for row in rows if row[1] in ("each alone", "0%", "75%")]
    assert len(shares) == 6
    assert all(float(row[2]) > 0 for row in shares)
