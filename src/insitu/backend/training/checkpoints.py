"""Checkpoint folders: a model as `insitu backend --model` loads it, with what training needs to go on from it.

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

OPTIMIZER = "optimizer.safetensors"
RECORD = "training.json"


class TrainingRecord(BaseModel):
    """`step` counts the jobs since training began, over all processes; `version` those of the process that wrote it.

    `started_from` is the model training began with, which the KL penalty refers to; None of `lora` means all weights.
    """

    step: int
    version: int
    started_from: str
    lora: LoRASettings | None = None


def read_record(source: str | Path) -> TrainingRecord | None:
    """What stands in a checkpoint folder's training.json; None for any other source."""
    path = Path(source) / RECORD
    try:
        return TrainingRecord.model_validate_json(path.read_text()) if path.is_file() else None
    except ValueError as error:  # pydantic's, and that of bytes that are no text
        raise BackendError(f"{path} cannot be read: {error}") from error


def saved_checkpoints(folder: Path) -> dict[Path, TrainingRecord]:
    """The checkpoints in a folder of them, oldest first."""
    found = [(path, read_record(path)) for path in sorted(folder.glob("step_*"))]
    return {path: record for path, record in found if record is not None}


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """Empty for a folder whose optimiser state was not kept."""
    path = folder / OPTIMIZER
    return load_file(path) if path.is_file() else {}


def write_training(folder: Path, record: TrainingRecord, optimizer: dict[str, Tensor]) -> None:
    save_file(optimizer, folder / OPTIMIZER)
    (folder / RECORD).write_text(record.model_dump_json(indent=2) + "\n")


def forget_optimizer(folder: Path) -> None:
    (folder / OPTIMIZER).unlink(missing_ok=True)


@contextlib.contextmanager
def atomically(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` when the block ends well, and vanishes when it does not.

    What stands under `target` is whole at any time, also after a power cut; a folder already there is replaced.
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
