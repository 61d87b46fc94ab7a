"""A checkpoint's folder: its files, the record that says what they are, and their SHA-256 digests.

checkpoints/step_000012/
    config.json model.safetensors, or adapter_config.json adapter_model.safetensors; tokenizer and its template
    optimizer.safetensors    AdamW's moments by parameter name, float32 weights where others are served
    training.json            TrainingRecord, with the digest of each other file

The backend writes these folders. Whatever loads one checks it first, so that damaged weights are never served or
trained.
"""

import hashlib
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from insitu.errors import BackendError
from insitu.schemas.training_jobs import LoRASettings, Retention

OPTIMIZER_FILE = "optimizer.safetensors"
RECORD_FILE = "training.json"
STATE_FILES = (OPTIMIZER_FILE, RECORD_FILE)
"""What training resumes from, besides the model."""


class JobRecord(BaseModel):
    """The job that made a checkpoint, so that its key is known to later processes too."""

    id: str
    key: str | None = None
    metrics: dict[str, Any] = {}


class TrainingRecord(BaseModel):
    """`step` counts all jobs since the start of training, `version` those of the process that wrote the checkpoint.

    `started_from` is the model that training started from, the reference of the KL penalty. Without `lora` all weights
    are trained. `sha256` has the digests of the other files by name; None in checkpoints of earlier releases.
    """

    step: int
    version: int
    started_from: str
    lora: LoRASettings | None = None
    job: JobRecord | None = None
    sha256: dict[str, str] | None = None


def write_record(folder: Path, record: TrainingRecord) -> None:
    """Writes the record with the digests of all other files, which must be complete."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != RECORD_FILE)
    digests = {path.name: _digest(path) for path in files}
    complete = record.model_copy(update={"sha256": digests})
    (folder / RECORD_FILE).write_text(complete.model_dump_json(indent=2) + "\n")


def read_record(source: str | Path) -> TrainingRecord | None:
    """The record of a checkpoint folder; None for any other source."""
    path = Path(source) / RECORD_FILE
    try:
        return TrainingRecord.model_validate_json(path.read_text()) if path.is_file() else None
    except ValueError as error:  # pydantic's, and UnicodeDecodeError
        raise BackendError(f"{path} cannot be read: {error}") from error


def saved_checkpoints(folder: Path) -> list[tuple[Path, TrainingRecord]]:
    """The checkpoints in `folder`, oldest first. Raises BackendError if one has no record."""
    found = []
    for path in folder.glob("step_*"):
        record = read_record(path)
        if record is None:
            raise BackendError(
                f"{path} is not a checkpoint of this backend: it has no {RECORD_FILE}; move it elsewhere"
            )
        found.append((path, record))
    return sorted(found, key=lambda each: each[1].step)


def check_model(folder: Path) -> None:
    """Raises BackendError if a file of the checkpoint's model is missing or differs from what was saved.

    Does nothing for a folder without a record, or with one of an earlier release.
    """
    for name, sha256 in _listed(folder).items():
        if name != OPTIMIZER_FILE:
            _check(folder / name, sha256)


def check_optimizer_file(folder: Path, *, required: bool) -> None:
    """Raises BackendError if the optimizer state differs from what was saved, or is missing and `required`."""
    path = folder / OPTIMIZER_FILE
    listed = _listed(folder)
    if OPTIMIZER_FILE in listed and (required or path.exists()):
        _check(path, listed[OPTIMIZER_FILE])


def copy_model(folder: Path, target: Path) -> None:
    """Copies the checkpoint's model without the state of its training. Raises BackendError if a file is damaged.

    The copies are checked, so that a checkpoint that is deleted meanwhile is reported and not half copied.
    """
    listed = _listed(folder)
    for name in {*listed, *(path.name for path in folder.iterdir())} - {*STATE_FILES}:
        try:
            shutil.copyfile(folder / name, target / name)
        except FileNotFoundError:
            raise _missing(folder / name) from None
        if name in listed:
            _check(target / name, listed[name], folder / name)


def _listed(folder: Path) -> dict[str, str]:
    record = read_record(folder)
    return (record.sha256 or {}) if record is not None else {}


def _missing(path: Path) -> BackendError:
    return BackendError(f"{path} is missing, but {RECORD_FILE} lists it; use another checkpoint")


def _check(path: Path, sha256: str, original: Path | None = None) -> None:
    """`original` is the file that the message names, if `path` is its copy."""
    try:
        damaged = _digest(path) != sha256
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise BackendError(f"{path} cannot be read: {error.strerror}") from error
    if damaged:
        raise BackendError(
            f"{original or path} is damaged: its SHA-256 is not that in {RECORD_FILE}; restore the file or use another "
            "checkpoint"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expired(versions: Collection[int], keep: Retention) -> list[int]:
    """The versions that a policy deletes, oldest first; never the latest, nor those that it names."""
    kept = {*sorted(versions)[-keep.last :], *keep.versions}
    if keep.every is not None:
        kept |= {version for version in versions if version % keep.every == 0}
    return sorted(version for version in versions if version > keep.after and version not in kept)
