"""Projects that run environments of others in the environment of their package, and train in a backend of ours."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import HANGS, LOGGED_BACKEND, ONE_THREAD

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STARTER = ROOT / "src/insitu/starter/model"


def python_of(environment: str) -> Path:
    return ROOT / ".environments/environments" / environment / "bin/python"


class Project:
    """A folder in which commands run in the environment of a package, with the modules of `paths`."""

    def __init__(self, environment: str, folder: Path, *paths: Path) -> None:
        self.python, self.folder, self.paths = python_of(environment), folder, paths

    def run(self, *arguments: str | Path, code: int = 0) -> str:
        """Runs a script, or insitu by `-m insitu ...`; returns what it printed."""
        (self.folder / "home").mkdir(exist_ok=True)
        unwanted = ("OPENAI_", "PRIME_", "HTTP_PROXY", "http_proxy")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        variables = {**kept, **ONE_THREAD, "HOME": str(self.folder / "home"), "HF_HUB_OFFLINE": "1"}
        variables["PYTHONPATH"] = ":".join(map(str, self.paths))
        done = subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, cwd=self.folder, env=variables, timeout=HANGS
        )
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    def write(self, settings: Mapping[str, Any], name: str = "config.yml") -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
        return path


@contextmanager
def backend(model: Path, folder: Path) -> Iterator[str]:
    """A backend in our environment; `folder/samples.jsonl` gets a line for each completion."""
    options = ["--model", model, "--port", "0", "--output_dir", folder / "backend"]
    with subprocess.Popen(
        [sys.executable, LOGGED_BACKEND, folder / "samples.jsonl", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_THREAD,
    ) as process:
        try:
            assert process.stdout is not None
            ready = re.search(r"ready at (\S+)", process.stdout.readline())
            assert ready, "the backend did not start"
            yield ready[1]
        finally:
            process.terminate()


def training(address: str, epochs: int = 1, generations: int = 4, **settings: Any) -> dict[str, Any]:
    """The sections of a file that trains by the evaluator `reward` in a running backend."""
    adapter = {"_type": "insitu_trainer_adapter", "url": address, "training": settings}
    return {
        "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder", "num_generations": generations}},
        "trainer_adapters": {"backend": adapter},
        "trainers": {"grpo": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "grpo",
            "trajectory_builder": "episodes",
            "trainer_adapter": "backend",
            "reward_function": {"name": "reward"},
            "num_epochs": epochs,
            "output_dir": "run",
        },
    }


def last_json(printed: str) -> Any:
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
