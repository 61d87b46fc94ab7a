"""The official clients, unchanged and in separate environments, train against a backend process."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import art_runs
import pytest
from words_model import save_words_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WEAVE_DISABLED": "true",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_words_model(tmp_path_factory.mktemp("model") / "words")


@pytest.fixture(scope="module")
def backend(model, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """A backend's address and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("backend")
    with art_runs.backend(model, folder) as address:
        yield address, folder


@art_runs.each_release
def test_reward_rises_from_chance(release, backend, model, tmp_path):
    """Nine words are about equally likely at first; the step rises with each training, and old checkpoints go."""
    address, folder = backend
    script = HERE / f"preference_{'0_5_4' if release == '0.5.4' else '0_5_18'}.py"
    python = ROOT / ".environments/art" / release / "bin/python"
    done = subprocess.run(
        [python, script, address, model, release],
        env=os.environ | QUIET,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rewards = [line["reward"] for line in lines if "reward" in line]
    print(release, [round(reward, 2) for reward in rewards])
    assert rewards[0] < 0.35
    assert rewards[-1] > 0.9
    assert lines[-1] == {"steps": len(rewards) - 1}
    checkpoints = list(folder.glob("art/*/preference/*/checkpoints/step_*"))
    assert len([path for path in checkpoints if release.replace(".", "") in str(path)]) <= 3
