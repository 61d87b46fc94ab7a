"""Benchmarks measure today's code: those that end in seconds if they have little to do, by what they report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LITTLE = {
    "control_plane": {"CALLS": 8, "WARM_UP": 4, "SIZES": [[64, 16]]},
    "gateway": {"PAIRS": 4, "CALLS": 64, "WARM_UP": 64},
    "preferences": {"ROUNDS": 1, "SHAPES": [[16, 8, 2]], "PROMPTS": 1},
    "sampling": {"REQUESTS": 8, "ROUNDS": 1, "ALONE": 1, "LENGTHS": [8]},
}
"""What of a benchmark's constants is made small."""
RUN = "import importlib, json, sys\n"
RUN += "module = importlib.import_module(sys.argv[1])\n"
RUN += "vars(module).update(json.loads(sys.argv[2]))\n"
RUN += "print(module.report())"


@pytest.mark.slow
@pytest.mark.parametrize("name", LITTLE)
def test_a_benchmark_ends_with_its_table(name: str) -> None:
    command = [sys.executable, "-c", RUN, name, json.dumps(LITTLE[name])]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) > 2
    assert "nan" not in done.stdout
