"""Files of workspaces: copies, what a verifier writes, and what is left to delete."""

import json
import logging
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from insitu.errors import WorkflowError
from insitu.schemas.evaluation import Outcome

logger = logging.getLogger(__name__)

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
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    text = os.read(descriptor, _MAX_REWARD_BYTES) if is_file else b""
    os.close(descriptor)
    if not is_file:
        raise WorkflowError(f"workflow.verify: {REWARD_FILE} is not a file; {allowed}")
    try:
        data = json.loads(text)
        data = data if isinstance(data, dict) else {"reward": data}
        if unknown := data.keys() - set(_REWARD_KEYS):
            raise ValueError(f"it has the keys {', '.join(sorted(unknown))}")
        return Outcome.model_validate({"answer": answer, **data}, strict=True)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise WorkflowError(f"workflow.verify: {REWARD_FILE} is malformed: {found}; {allowed}") from None
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


def remove(path: Path) -> None:
    """Deletes a file or folder, whatever a program has made of it; a warning says what remains."""
    for pause in (0.0, 0.1, 0.5):  # programs that were just killed may still write
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        time.sleep(pause)
        if subprocess.run(["rm", "-rf", "--", path], check=False, capture_output=True).returncode:
            subprocess.run(["chmod", "-R", "u+rwx", "--", path], check=False, capture_output=True)
    if path.exists():
        logger.warning("%s cannot be deleted", path)


def run_tool(*command: str) -> None:
    """Runs a program of the system. Raises WorkflowError with what it says."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    except OSError as error:
        raise WorkflowError(f"{command[0]} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise WorkflowError(f"{command[0]}: {done.stderr.strip()}")
