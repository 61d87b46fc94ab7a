"""Which versions get a checkpoint and which jobs are logged instead; checkpoints that are written beside training."""

import functools
import tempfile
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import nn

from insitu.backend.learner.checkpoints import TrainState, optimizer_tensors, write_checkpoint
from insitu.backend.learner.policy import TrainablePolicy
from insitu.backend.learner.versions import Versions
from insitu.backend.model import LoadedModel
from insitu.disk.model_files import TrainingRecord, read_record
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import Retention, TrainingSettings

SMALL_SNAPSHOT = 1 << 28
"""Bytes of a snapshot below which every version gets one."""
SNAPSHOT_SHARE = 0.05
"""Share of the work of training that snapshots may take."""
OPERATIONS_PER_BYTE = 400
"""Floating-point operations in the time in which a byte of a snapshot is written, digested and synced: of two CPU cores
150 G/s, of a disk 0.4 GB/s. A constant, so that equal runs have equal snapshots, however fast their machine is."""
_OWN_REFERENCES = ("initial", "job_start")
"""Those whose weights follow from the jobs before."""
_MOMENTS = 8
"""Bytes of AdamW's state for each weight; weights that are served in another dtype have a copy in float32 too."""


class Snapshots:
    """Writes the checkpoints of a policy."""

    def __init__(self, loaded: LoadedModel, saved: Versions) -> None:
        self._loaded = loaded
        self._saved = saved
        parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
        masters = 0 if loaded.dtype == torch.float32 else 4
        self.size = parameters * (loaded.dtype.itemsize + masters + _MOMENTS)
        """Bytes of a snapshot with all weights."""
        self.small = SMALL_SNAPSHOT
        self.tokens_between = max(1, int(self.size * OPERATIONS_PER_BYTE / SNAPSHOT_SHARE / (6 * parameters)))
        """The tokens to compute between two snapshots; one takes six operations per parameter."""

    def log_jobs(self, settings: TrainingSettings, keep: Retention) -> bool:
        """Whether jobs with these settings are logged: they must be trained again to the same bits.

        On a GPU they are not, nor with Python code, which may change, nor if a package chooses the reference, which may
        be any other version.
        """
        if self._loaded.device.type != "cpu" or settings.code or settings.reference not in (None, *_OWN_REFERENCES):
            return False
        if keep.snapshots is None:
            return settings.lora is None and self.size >= self.small
        return keep.snapshots > 1

    def is_due(self, version: int, keep: Retention, before: int, tokens: int) -> bool:
        """Whether the version of a logged job gets a snapshot; `tokens` were computed up to it, `before` without it."""
        if self._saved.missed_snapshot or (keep.every is not None and version % keep.every == 0):
            return True
        if keep.snapshots is not None:
            return version % keep.snapshots == 0
        return tokens // self.tokens_between > before // self.tokens_between

    def begin(
        self, version: int, served: nn.Module, lora: LoRASettings | None, state: TrainState | None
    ) -> "Future[None]":
        """Writes the version of a logged job in another thread: a snapshot of `state`, or without it the weights."""
        record = read_record(self._saved.job_of(version))
        assert record is not None
        policy = TrainablePolicy(served, lora, self._loaded) if state is None else state.policy
        optimizer = None if state is None else optimizer_tensors(state)
        parts = self._saved.folder_of(version), policy, served, optimizer, record
        write = functools.partial(write_checkpoint, *parts, self._tokenizer_files)
        return self._saved.begin(version, write, is_snapshot=state is not None)

    def write(self, state: TrainState, served: nn.Module | None, record: TrainingRecord) -> Path:
        """Writes a snapshot; all ranks must call it. Raises JobFailed on all alike."""
        parts = state.policy, served, optimizer_tensors(state), record, self._tokenizer_files, state.ranks
        return write_checkpoint(self._saved.folder_of(record.version), *parts)

    @functools.cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files, which are the same in every checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            self._loaded.tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
