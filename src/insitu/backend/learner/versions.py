"""The versions of a policy on disk: checkpoints, and the jobs from which the versions between them are trained again.

checkpoints/step_000003/    the weights; with the state of the optimizer it is a snapshot
job_log/step_000004/        rows.safetensors settings.json    a job that was trained after it
                            training.json                     TrainingRecord, with the digest of each other file

A job that is not followed by a checkpoint is logged before it is reported as completed. Its version is that of the
newest snapshot before it, after the logged jobs since. Each folder is complete or absent.
"""

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from insitu.backend.learner.batches import Row
from insitu.backend.learner.parts import PartedRows
from insitu.backend.model import wrap_errors
from insitu.disk.files import delete_drafts, delete_folder, new_folder
from insitu.disk.json_files import read_object
from insitu.disk.model_files import (
    JOB_LOG,
    OPTIMIZER_FILE,
    TrainingRecord,
    check_model,
    expired,
    saved_checkpoints,
    write_record,
)
from insitu.errors import BackendError, RequestRefused
from insitu.schemas.training_jobs import Retention, TrainingSettings

logger = logging.getLogger(__name__)

_ROWS, _SETTINGS = "rows.safetensors", "settings.json"
_DELETED = "deleted"
"""A file in the logged job of a deleted version that others are trained again from."""
_ARRAYS = ("token_ids", "positions", "rollout_logprobs", "advantages")
_NAMES = ("episode", "pair", "preferred", "temperature", "shaping")


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


@dataclass(eq=False)
class Versions:
    """The versions that can be served, by number; all but 0, the loaded model, which is step `first_step`.

    The compute thread uses it; checkpoints are written in another.
    """

    output_dir: Path
    first_step: int

    def __post_init__(self) -> None:
        self.latest = 0
        self.missed_snapshot = False
        """Whether the last one could not be written."""
        self.folder = self.output_dir / "checkpoints"
        self._log = self.output_dir / JOB_LOG
        self._folders: dict[int, Path] = {}
        self._snapshots: set[int] = set()
        self._logged: set[int] = set()
        self._writing: dict[int, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "insitu-snapshot")  # started by its first work

    @property
    def numbers(self) -> list[int]:
        """Oldest first; 0 is always one of them."""
        return [0, *self._folders]

    def folder_of(self, version: int) -> Path:
        """Where its checkpoint is, if it has one."""
        return self._folders.get(version, self.folder / f"step_{self.first_step + version:06d}")

    def job_of(self, version: int) -> Path:
        """Where its job is, if it is logged."""
        return self._log / f"step_{self.first_step + version:06d}"

    def was_deleted(self, version: int) -> bool:
        return 0 < version <= self.latest and version not in self._folders

    def delete_drafts(self) -> None:
        for folder in (self.folder, self._log):
            delete_drafts(folder)

    def saved(self) -> list[tuple[Path, TrainingRecord]]:
        """What earlier processes have left, oldest first: the checkpoint of a step, or else its job."""
        each = [*saved_checkpoints(self._log), *saved_checkpoints(self.folder)]
        by_step = {record.step: (path, record) for path, record in each}
        return [by_step[step] for step in sorted(by_step)]

    def add(self, version: int, *, checkpoint: Path | None, is_snapshot: bool) -> None:
        """Makes it the latest. Without a checkpoint, its job is logged."""
        self.latest, job = version, self.job_of(version)
        if not (job / _DELETED).exists():
            self._folders[version] = checkpoint or self.folder_of(version)
        if is_snapshot:
            self._snapshots.add(version)
        if job.is_dir():
            self._logged.add(version)

    def base(self, version: int) -> int:
        """The newest snapshot from which a version is trained again, which may be its own; 0: the loaded model."""
        snapshots = self._snapshots.copy()  # another thread adds to them
        return max((each for each in snapshots if each <= version), default=0)

    def is_snapshot(self, version: int) -> bool:
        return version in self._snapshots

    def log(self, record: TrainingRecord, settings: TrainingSettings, rows: PartedRows) -> Path:
        """Writes a job. Raises InsituError or OSError."""
        sizes = [len(rows.part(number) or []) for number in range(rows.count)]
        header = {"parts": sizes, "logprobs_ahead": rows.logprobs_ahead, "settings": settings.model_dump(mode="json")}
        folder = self.job_of(record.version)
        with new_folder(folder) as draft:
            write_rows(draft / _ROWS, rows.rows)
            (draft / _SETTINGS).write_text(json.dumps(header) + "\n")
            write_record(draft, record)
        return folder

    def logged(self, version: int) -> tuple[TrainingSettings, PartedRows]:
        """A job. Raises BackendError if it is not there, or damaged."""
        folder = self.job_of(version)
        if not folder.is_dir():
            raise BackendError(f"{folder} is missing: version {version} cannot be trained again without this job")
        check_model(folder)
        header = read_object(folder / _SETTINGS)
        with wrap_errors(f"{folder / _ROWS} cannot be read"):
            rows = read_rows(folder / _ROWS)
        ends = np.cumsum(header["parts"]).tolist()
        parts = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        settings = TrainingSettings.model_validate(header["settings"])
        return settings, PartedRows.whole(parts, logprobs_ahead=header["logprobs_ahead"])

    def begin(self, version: int, write: Callable[[], object], *, is_snapshot: bool) -> "Future[None]":
        """Writes a checkpoint in another thread; a failure is reported, and raised to those that wait for it."""

        def work() -> None:
            try:
                write()
            except Exception as error:  # re-raised
                self.missed_snapshot = self.missed_snapshot or is_snapshot
                problem = f"version {version} has no checkpoint, but its job is logged"
                logger.warning("%s: %s", problem, error.__cause__ or error)
                raise
            if is_snapshot:
                self._snapshots.add(version)
                self.missed_snapshot = False

        self._writing[version] = writing = self._thread.submit(work)
        return writing

    def writing(self, version: int) -> "Future[None] | None":
        """The checkpoint of a version that is being written."""
        self._writing = {number: each for number, each in self._writing.items() if not each.done()}
        return self._writing.get(version)

    def wait(self) -> None:
        """Waits until no checkpoint is being written: then the tensors of training may change."""
        wait([*self._writing.values()])

    def expired(self, keep: Retention) -> list[int]:
        """The versions that a retention policy deletes, oldest first, but the snapshots that others need."""
        gone = expired(self._folders.keys(), keep)
        needed = {self.base(version) for version in self._folders.keys() - {*gone} if self._is_trained_again(version)}
        return [version for version in gone if version not in needed]

    def _is_trained_again(self, version: int) -> bool:
        """Whether it needs its base: to be served, or to be trained on."""
        has_weights = version != self.latest and self._folders[version].is_dir()
        return not has_weights and version not in self._snapshots

    def delete(self, version: int) -> None:
        """Raises RequestRefused for the latest version, which training continues from, and OSError."""
        if version == self.latest:
            problem = f"{version} is the latest step, which training continues from; it cannot be deleted"
            raise RequestRefused(problem, status=409, code="latest_step")
        folder, job = self._folders[version], self.job_of(version)
        if (writing := self.writing(version)) is not None:
            wait([writing])
        try:
            if folder.exists():
                delete_folder(folder)
                logger.info("deleted %s", folder)
            if job.is_dir():
                (job / _DELETED).touch()
        finally:
            if not folder.exists():
                del self._folders[version]
                self._snapshots.discard(version)

    def prune(self, optimizer_states: int) -> None:
        """Deletes the optimizer states of all but the last versions, and the logged jobs, that no version needs."""
        again = [version for version in self._folders if self._is_trained_again(version)]
        bases = {self.base(version) for version in again}
        for version, folder in self._folders.items():
            if version <= self.latest - optimizer_states and version not in bases:
                try:
                    (folder / OPTIMIZER_FILE).unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("an old optimizer state cannot be deleted: %s", error)
        jobs = {number for version in again for number in range(self.base(version) + 1, version + 1)}
        for version in sorted(self._logged - jobs):
            try:
                delete_folder(self.job_of(version))
            except OSError as error:
                logger.warning("a logged job cannot be deleted: %s", error)
            self._logged.discard(version)
