"""Files of workspaces: copies, and what a verifier writes."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from insitu.disk.temporary import remove
from insitu.errors import WorkflowError, first_problem
from insitu.schemas.evaluation import Outcome

REWARD_FILE = "reward.json"
_REWARD_KEYS = ("reward", "rewards", "metrics")
_MAX_REWARD_BYTES = 2**20


def read_outcome(path: Path, answer: Any, otherwise: float) -> Outcome:
    """The outcome that the verifier has written; without a file, that of its exit code."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return Outcome(answer=answer, reward=otherwise)
    except OSError as error:
        raise WorkflowError(f"workflow.verify: {REWARD_FILE} cannot be read: {error.strerror}") from error
    allowed = f"allowed: a number, or an object of {', '.join(_REWARD_KEYS)}, with finite numbers"
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WorkflowError(f"workflow.verify: {REWARD_FILE} is not a file; {allowed}")
        with open(descriptor, "rb", closefd=False) as file:
            text = file.read(_MAX_REWARD_BYTES)
    finally:
        os.close(descriptor)
    try:
        data = json.loads(text)
        data = data if isinstance(data, dict) else {"reward": data}
        if unknown := data.keys() - set(_REWARD_KEYS):
            raise ValueError(f"it has the keys {', '.join(sorted(unknown))}")
        return Outcome.model_validate({"answer": answer, **data}, strict=True)
    except ValidationError as error:
        raise WorkflowError(f"workflow.verify: {REWARD_FILE} is malformed: {first_problem(error)}; {allowed}") from None
    except ValueError as error:
        raise WorkflowError(f"workflow.verify: {REWARD_FILE} is malformed: {error}; {allowed}") from None


def copy_over(source: Path, target: Path) -> None:
    """Copies files over those of an agent, whose links are replaced instead of followed."""
    target.chmod(target.stat().st_mode | 0o700)
    for entry in [*os.scandir(source)]:
        place = target / entry.name
        if not entry.is_dir(follow_symlinks=False):
            remove(place)
            shutil.copy2(entry.path, place, follow_symlinks=False)
            continue
        if place.is_symlink() or not place.is_dir():
            remove(place)
            place.mkdir()
        copy_over(Path(entry.path), place)


def run_tool(*command: str) -> None:
    """Runs a program of the system. Raises WorkflowError with what it says."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    except OSError as error:
        raise WorkflowError(f"{command[0]} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise WorkflowError(f"{command[0]}: {done.stderr.strip()}")
