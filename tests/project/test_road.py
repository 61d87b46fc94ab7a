"""The road of a rollout stays short: as many files and calls as `scripts/trace_rollout.py` measures."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import forked_python

ROOT = Path(__file__).resolve().parents[2]
# What an engineer can read in an hour or two, and what an episode may cost.
MAX_FILES = {"control plane": 34, "backend": 43}
MAX_CALLS = {"control plane": 560}
"""Per episode of tic-tac-toe, 545 to 553 when this was set, more if it takes longer."""


@pytest.fixture(scope="module")
def roads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files and the calls per episode of each process."""
    figures = tmp_path_factory.mktemp("road") / "road.json"
    command = [sys.executable, ROOT / "scripts/trace_rollout.py", "--json", figures, "--python", forked_python()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(figures.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("process", MAX_FILES)
def test_an_episode_passes_few_files(roads: dict[str, Any], process: str) -> None:
    files = roads[process]["files"]
    assert len(files) <= MAX_FILES[process], "\n".join(files)


@pytest.mark.slow
@pytest.mark.parametrize("process", MAX_CALLS)
def test_an_episode_makes_few_calls(roads: dict[str, Any], process: str) -> None:
    road = roads[process]
    most_called = [f"{calls:8.2f}  {file}  {name}" for file, name, calls in road["functions"][:30]]
    assert road["calls"] <= MAX_CALLS[process], "\n".join(most_called)
