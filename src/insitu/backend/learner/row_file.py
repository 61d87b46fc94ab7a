"""What a backend gives to the processes that train for it: the rows of a job as a file, and a secret."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from insitu.backend.learner.batches import Row

TOKEN_VARIABLE = "INSITU_RANKS_TOKEN"
"""The environment variable with the secret that rank 0 sends first."""
_ARRAYS = ("token_ids", "positions", "rollout_logprobs", "advantages")
_NAMES = ("episode", "pair", "preferred")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """The arrays of all rows one after the other, with their lengths."""
    arrays = {name: [getattr(row, name) for row in rows] for name in _ARRAYS}
    values = {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in arrays.items()}
    lengths = {f"{name}_lengths": np.array([len(part) for part in parts], int) for name, parts in arrays.items()}
    names = json.dumps([[getattr(row, name) for name in _NAMES] for row in rows])
    save_file(values | lengths, path, metadata={"names": names})


def read_rows(path: Path) -> list[Row]:
    with safe_open(path, framework="numpy") as file:
        parts = [
            np.split(file.get_tensor(name), np.cumsum(file.get_tensor(f"{name}_lengths"))[:-1]) for name in _ARRAYS
        ]
        names = json.loads(file.metadata()["names"])
    return [Row(*arrays, *own) for *arrays, own in zip(*parts, names, strict=True)] if names else []
