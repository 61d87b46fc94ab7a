"""The reward that a verifier writes to a file of its workspace."""

import json
import tarfile
from pathlib import Path
from typing import Any

from insitu.errors import WorkflowError, first_problem
from insitu.schemas.evaluation import Outcome

REWARD_FILE = "reward.json"
_REWARD_KEYS = ("reward", "rewards", "metrics")
_MAX_REWARD_BYTES = 2**20


def read_outcome(archive: Path, answer: Any, otherwise: float) -> Outcome:
    """The outcome in `reward.json` of what a verifier has left; without the file, that of its exit code."""
    allowed = f"allowed: a number, or an object of {', '.join(_REWARD_KEYS)}, with finite numbers"
    try:
        with tarfile.open(archive, mode="r|") as entries:
            if (entry := entries.next()) is None:
                return Outcome(answer=answer, reward=otherwise)
            if (file := entries.extractfile(entry) if entry.isreg() else None) is None:
                raise WorkflowError(f"workflow.verify: {REWARD_FILE} is not a file; {allowed}")
            text = file.read(_MAX_REWARD_BYTES)
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:
        raise WorkflowError(f"workflow.verify: {REWARD_FILE} cannot be read: {error}") from None
    try:
        data = json.loads(text)
        data = data if isinstance(data, dict) else {"reward": data}
        if unknown := data.keys() - set(_REWARD_KEYS):
            raise ValueError(f"it has the keys {', '.join(sorted(unknown))}")
        return Outcome.model_validate({"answer": answer, **data}, strict=True)
    except (ValueError, RecursionError) as error:
        raise WorkflowError(f"workflow.verify: {REWARD_FILE} is malformed: {first_problem(error)}; {allowed}") from None
