"""The processes that train one policy together: all have the rows of a job, and each computes some micro-batches.

The loss of a micro-batch is already its share of the loss of the optimizer step, normalized over all rows of the step.
So gradients and sums are added over the ranks, never averaged, however unequal the ranks' tokens are.
"""

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from insitu.backend.learner.batches import Row
from insitu.disk.model_files import JobRecord
from insitu.schemas.training_jobs import TrainingSettings

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_ARRAYS = ("token_ids", "positions", "rollout_logprobs", "advantages")
_NAMES = ("episode", "pair", "preferred")
_WAIT = timedelta(days=20)
"""As long as gloo can count. A rank that has ended is noticed by its closed connections."""


class Ranks:
    """A single process; `ProcessGroup` are several."""

    index = 0
    count = 1
    shards_weights = False
    """Whether a forward pass exchanges weights, so that all ranks must run equally many."""

    def deal(self, micro_batches: Sequence[T]) -> Sequence[T]:
        """Returns the micro-batches of this rank; those of a round are of about equal length."""
        return micro_batches[self.index :: self.count]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, on each of them."""
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces gradients by their sums over the ranks."""

    def merge(self, values: dict[K, V]) -> dict[K, V]:
        """The entries of all ranks."""
        return values

    def on_first(self, function: Callable[[], T]) -> T:
        """Calls it on rank 0 only, and returns its result on all. An exception is raised on all."""
        return function()

    def on_each(self, function: Callable[[], object]) -> None:
        """Calls it on every rank. An exception is raised on all."""
        function()

    def shard(self, module: nn.Module, root: nn.Module) -> None:
        """Distributes the weights of `module` over the ranks, if that is the strategy.

        They can only be used within a forward pass of `root`, a module that contains it.
        """


ALONE = Ranks()


class TrainsJobs(Protocol):
    """The ranks as the backend sees them: `rank_group.RankGroup`."""

    def train(
        self, folder: Path, policy: str, settings: TrainingSettings, rows: Sequence[Row], job: JobRecord
    ) -> Generator[Any, None, dict[str, Any]]:
        """Yields the job's progress; returns {"version", "metrics"}. Raises JobFailed."""


class ProcessGroup(Ranks):
    """The ranks of torch's default process group, which has been initialized.

    With `shards_weights` they hold parts of the weights (FSDP2), otherwise all of them (data parallel).
    """

    def __init__(self, device: torch.device, *, shards_weights: bool) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.shards_weights = shards_weights
        self._dist = dist
        self._mesh = init_device_mesh(device.type, (self.count,))
        # Of CPU data, and without torch's time limit: rank 0 may wait hours for a job, or write a large file.
        self._control = dist.new_group(backend="gloo", timeout=_WAIT)

    def close(self) -> None:
        """Ends the connections to the other ranks; torch may abort a process that still holds a group when it ends."""
        self._control = None
        self._dist.destroy_process_group()

    def sum(self, tensor: Tensor) -> Tensor:
        self._dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.shards_weights:  # summed in the backward pass
            return
        for parameter in parameters:  # a rank without micro-batches has none
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._dist.all_reduce(parameter.grad)

    def merge(self, values: dict[K, V]) -> dict[K, V]:
        parts: list[Any] = [None] * self.count
        self._dist.all_gather_object(parts, values, self._control)
        return {key: value for part in parts for key, value in part.items()}

    def on_first(self, function: Callable[[], T]) -> T:
        outcome: list[Any] = [None, None]
        if self.index == 0:
            try:
                outcome[0] = function()
            except Exception as error:  # raised below, on all ranks
                outcome[1] = error
        self._dist.broadcast_object_list(outcome, group=self._control)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def on_each(self, function: Callable[[], object]) -> None:
        error = None
        try:
            function()
        except Exception as raised:  # raised below, on all ranks
            error = raised
        errors: list[Exception | None] = [None] * self.count
        self._dist.all_gather_object(errors, error, self._control)
        if (first := next(filter(None, errors), None)) is not None:
            raise first

    def shard(self, module: nn.Module, root: nn.Module) -> None:
        if not self.shards_weights:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        blocks = set(getattr(module, "_no_split_modules", None) or ())
        for part in [part for part in module.modules() if type(part).__name__ in blocks]:
            fully_shard(part, mesh=self._mesh)
        # Also after forward passes without gradient, so that the parameters are always the sharded ones.
        fully_shard(root, mesh=self._mesh, reshard_after_forward=True)
        for part in root.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # the sum, not the mean
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other


def is_sharded(tensor: Tensor) -> bool:
    """Whether the ranks hold parts of it: it is a DTensor, whose import takes long."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the parts of all ranks, which all must ask for."""
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return result


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
