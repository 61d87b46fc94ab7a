"""Checkpoint folders: a model that `insitu backend --model` loads, plus the state to resume training from it.

checkpoints/step_000012/
    config.json model.safetensors, or adapter_config.json adapter_model.safetensors; tokenizer and its template
    optimizer.safetensors    AdamW's moments by parameter name, float32 weights where others are served
    training.json            TrainingRecord
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from insitu.errors import BackendError
from insitu.schemas.training_jobs import LoRASettings

OPTIMIZER_FILE = "optimizer.safetensors"
RECORD_FILE = "training.json"


class TrainingRecord(BaseModel):
    """`step` counts all jobs since the start of training, `version` those of the process that wrote the checkpoint.

    `started_from` is the model that training started from, the reference of the KL penalty. Without `lora` all weights
    are trained.
    """

    step: int
    version: int
    started_from: str
    lora: LoRASettings | None = None


def read_record(source: str | Path) -> TrainingRecord | None:
    """The record of a checkpoint folder; None for any other source."""
    path = Path(source) / RECORD_FILE
    try:
        return TrainingRecord.model_validate_json(path.read_text()) if path.is_file() else None
    except ValueError as error:  # pydantic's, and UnicodeDecodeError
        raise BackendError(f"{path} cannot be read: {error}") from error


def saved_checkpoints(folder: Path) -> dict[Path, TrainingRecord]:
    """The checkpoints in `folder`, oldest first."""
    records = [(path, read_record(path)) for path in sorted(folder.glob("step_*"))]
    return {path: record for path, record in records if record is not None}


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """The optimizer state; empty if it was deleted."""
    path = folder / OPTIMIZER_FILE
    return load_file(path) if path.is_file() else {}


def write_training_state(folder: Path, record: TrainingRecord, optimizer: dict[str, Tensor]) -> None:
    save_file(optimizer, folder / OPTIMIZER_FILE)
    (folder / RECORD_FILE).write_text(record.model_dump_json(indent=2) + "\n")


def delete_optimizer(folder: Path) -> None:
    (folder / OPTIMIZER_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces `target` on success and is deleted on failure.

    `target` is complete at any time, even after a power failure.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        for path in [*draft.rglob("*"), draft]:
            _sync(path)
        if target.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            target.rename(replaced / "old")
            draft.rename(target)
            shutil.rmtree(replaced)
        else:
            draft.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
