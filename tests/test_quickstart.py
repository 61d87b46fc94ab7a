"""What `make quickstart` runs, for two epochs: the example as it is shipped, and HTTP between the processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = "examples/tic_tac_toe/grpo.yml"


def test_make_quickstart_runs_the_example() -> None:
    said = subprocess.run(
        ["make", "--dry-run", "--always-make", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"insitu finetune --config_file {CONFIG}" in said.stdout


def test_two_epochs_of_the_quickstart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("-o", "finetuning.num_epochs", "2", "-o", "finetuning.output_dir", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "insitu", "finetune", "--config_file", CONFIG, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    validations = json.loads((folder / "validation_history.json").read_text())
    assert [v["epoch"] for v in validations] == [0, 2]
    assert all(v["num_examples"] >= 600 for v in validations)
    assert validations[0]["avg_reward"] <= 0.60
    assert validations[0]["ci95"][0] < validations[0]["avg_reward"] < validations[0]["ci95"][1]
    metrics = [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]
    assert [m["policy_version"] for m in metrics] == [1, 2]
    for m in metrics:
        assert m["num_trajectories"] == 512
        assert m["logprob_gap"] < 1e-3
        assert abs(m["ratio_mean"] - 1) < 1e-3
        assert m["grad_norm"] > 0
    assert str(folder) in done.stdout.replace("\n", "")
