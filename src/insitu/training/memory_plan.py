"""What a run needs of this machine, computed before anything is loaded: one table, and whether it fits."""

import operator
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from insitu.algorithms.memory_budget import (
    CORE_OPERATIONS,
    MemoryBudget,
    ModelShape,
    Workload,
    memory_budget,
    operations,
    remedies,
)
from insitu.disk.files import nearest_folder, readable_bytes, readable_seconds
from insitu.disk.memory import MachineMemory
from insitu.disk.processor import usable_cores
from insitu.errors import BackendUnavailable, ConfigError, InsituError
from insitu.schemas.training_jobs import KeepConfig

_SHOWN_SECONDS = 10_000_000
"""Parameters from which the time of an epoch is estimated: that of smaller models is not in their operations."""


_LATEST = 2
"""Versions that are kept whatever the file says."""


def kept_versions(keep: KeepConfig, epochs: int, staleness: int, *, keeps_best: bool) -> tuple[int, int]:
    """How many checkpoints there are at most, and how many with optimizer state, with one that is being written."""
    versions = max(keep.last, _LATEST + staleness) + int(keep.best and keeps_best)
    versions += epochs // keep.every if keep.every is not None else 0
    return min(epochs, versions + 1), min(epochs, keep.optimizer + 1)


@dataclass(frozen=True)
class Epoch:
    """The tokens of an epoch: `prompts` are those of its rows, `completions` those of its episodes."""

    episodes: int
    prompts: int
    completions: int


@dataclass(frozen=True)
class MemoryPlan:
    """`key` is the adapter's block, `checkpoints` the number of versions with and without optimizer state."""

    key: str
    model: str
    shape: ModelShape
    workload: Workload
    epoch: Epoch
    versions: int
    optimizers: int
    folder: Path
    machine: MachineMemory | None

    @property
    def budget(self) -> MemoryBudget:
        return memory_budget(self.shape, self.workload)

    @property
    def kv_limit(self) -> int | None:
        """Bytes of keys and values that the backend may keep; None where it is to find out itself."""
        return self.budget.kv_bytes(self.machine.available) if self.machine is not None else None

    @property
    def checkpoint_bytes(self) -> int:
        """Disk space of the checkpoints that exist at the same time."""
        return self.versions * self.budget.checkpoint_weights + self.optimizers * self.budget.optimizer

    @property
    def epoch_seconds(self) -> float | None:
        """Roughly; None for models so small that operations say nothing."""
        if self.shape.parameters < _SHOWN_SECONDS:
            return None
        epoch, lora = self.epoch, self.workload.lora_rank is not None
        tokens = epoch.prompts + epoch.completions
        return operations(self.shape, sampled=tokens, trained=tokens, lora=lora) / (CORE_OPERATIONS * usable_cores())

    def problem(self, *, free: bool) -> InsituError | None:
        """Why it does not fit: a ConfigError if the machine's memory, or the limit of a cgroup, is too small.

        `free`: BackendUnavailable if other processes hold too much of it now.
        """
        machine, needed = self.machine, self.budget.needed
        if machine is None or needed <= (machine.available if free else machine.total):
            return None
        if needed > machine.total:
            return ConfigError(self._advice(machine.total, _limit(machine)))
        held = f"only {readable_bytes(machine.available)} of {readable_bytes(machine.total)} are free"
        return BackendUnavailable(self._advice(machine.available, held))

    def _advice(self, available: int, limit: str) -> str:
        """A sentence with the settings of which each alone makes it fit, or else all together."""
        *changes, together = remedies(self.shape, self.workload)
        enough = [f"{each.settings} ({readable_bytes(each.needed)})" for each in changes if each.needed <= available]
        what = "training adapters over" if self.workload.lora_rank is not None else "training all weights of"
        problem = f"{self.key}: {what} {self.model} needs {readable_bytes(self.budget.needed)} of memory, but {limit}"
        if enough:
            return f"{problem}; each of these alone makes it fit: {', '.join(enough)}"
        with_all = f"with {together.settings} it would need {readable_bytes(together.needed)}"
        return f"{problem}; {with_all}" + ("; use a smaller model" if together.needed > available else "")

    def summary(self) -> str:
        """A line for the header of a run."""
        budget, machine = self.budget, self.machine
        if machine is None:
            return f"memory: about {readable_bytes(budget.fixed + budget.kv_wanted)}"
        free, total = readable_bytes(machine.available), readable_bytes(machine.total)
        tokens = budget.kv_bytes(machine.available) // budget.kv_token
        return (
            f"memory: about {readable_bytes(budget.expected(machine.available))} of {free} that are free ({total} in "
            f"all); keys and values of {tokens:,} tokens fit beside weights and training"
        )

    def table(self, measured: int | None = None) -> Iterator[str]:
        """The lines of the table; `measured` is the peak of a backend that trained a small job, in bytes."""
        yield self.summary()
        budget, workload = self.budget, self.workload
        trained = "all weights" if workload.lora_rank is None else f"LoRA of rank {workload.lora_rank}"
        parts = [
            ("weights", budget.weights, f"{self.shape.parameters:,} parameters, {self._stored()}"),
            ("trained weights", budget.trained, f"{trained}, in float32"),
            ("gradients", budget.gradients, ""),
            ("optimizer", budget.optimizer, "two moments for each trained weight"),
            ("served versions", budget.served, f"{workload.versions} beside the starting weights"),
            ("activations", budget.activations, "of a micro-batch"),
            ("logits", budget.logits, f"a vocabulary of {self.shape.vocab:,}"),
            ("packed weights", budget.packed, "to sample on a CPU"),
            ("process", budget.process, "Python and torch"),
            ("keys and values", budget.kv_request, f"one request of about {workload.request_tokens:,} tokens"),
        ]
        if workload.concurrency > 1:
            parts.append(("", budget.kv_wanted, f"{workload.concurrency} of them at once; with less, some wait"))
        parts.append(("measured", measured or 0, "the backend, in the job of this command"))
        for name, size, note in filter(operator.itemgetter(1), parts):
            yield f"  {name:<16}{readable_bytes(size):>9}  {note}".rstrip()

    def costs(self) -> Iterator[str]:
        """The lines about disk and time."""
        free = shutil.disk_usage(nearest_folder(self.folder)).free
        yield f"disk: about {readable_bytes(self.checkpoint_bytes)} of checkpoints; {readable_bytes(free)} are free"
        if (seconds := self.epoch_seconds) is not None:
            rate = f"{CORE_OPERATIONS / 1e9:g} GFLOP/s for each of {usable_cores()} cores"
            yield f"time: roughly {readable_seconds(seconds)} an epoch of {self.epoch.episodes} episodes, at {rate}"

    def _stored(self) -> str:
        bits = self.workload.quantization
        return f"layers in {bits}, others in {self.workload.dtype}" if bits is not None else self.workload.dtype


def check_memory(plan: MemoryPlan | None, *, free: bool = False) -> MemoryPlan | None:
    """Returns the plan. Raises what its `problem` is."""
    if plan is not None and (problem := plan.problem(free=free)) is not None:
        raise problem
    return plan


def _limit(machine: MachineMemory) -> str:
    size = readable_bytes(machine.total)
    return f"this machine has {size}" if machine.cgroup is None else f"the limit of {machine.cgroup} is {size}"
