"""What a backend gives to the processes that train for it: the rows of a job as a file, and a secret."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from insitu.backend.training.batches import Row

TOKEN_VARIABLE = "INSITU_RANKS_TOKEN"
"""The environment variable with the secret that rank 0 sends first."""
_ARRAYS = ("token_ids", "positions", "rollout_logprobs", "advantages")
_NAMES = ("episode", "pair", "preferred")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Rows as arrays, one after the other, with their lengths; without pickle."""
    names = json.dumps([[getattr(row, name) for name in _NAMES] for row in rows])
    arrays = {name: [getattr(row, name) for row in rows] for name in _ARRAYS}
    values = {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in arrays.items()}
    lengths = {f"{name}_lengths": np.array([len(part) for part in parts]) for name, parts in arrays.items()}
    saved: dict[str, Any] = {"names": np.array(names), **values, **lengths}
    np.savez(path, **saved)


def read_rows(path: Path) -> list[Row]:
    with np.load(path, allow_pickle=False) as file:
        parts = [np.split(file[name], np.cumsum(file[f"{name}_lengths"])[:-1]) for name in _ARRAYS]
        names = json.loads(str(file["names"]))
    return [Row(*arrays, *own) for *arrays, own in zip(*parts, names, strict=True)] if names else []
