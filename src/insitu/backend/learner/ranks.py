"""The processes that train one policy together: all have the rows of a job, and each computes some micro-batches.

The loss of a micro-batch is already its share of the loss of the optimizer step, normalized over all rows of the step.
So gradients and sums are added over the ranks, never averaged, however unequal the ranks' tokens are.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from insitu.backend.learner.batches import Row
from insitu.disk.model_files import JobRecord
from insitu.schemas.training_jobs import TrainingSettings

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Ranks:
    """The processes that train together, as each of them sees them: here a single one."""

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
    """The ranks as the backend sees them, an entry point of `insitu.backend.learners`.

    It is called with the LearnerOptions, the LoadedModel, the backend's output_dir, and the folder of jobs' code.
    """

    def train(
        self, folder: Path, policy: str, settings: TrainingSettings, rows: Sequence[Row], job: JobRecord
    ) -> Generator[Any, None, dict[str, Any]]:
        """Yields the job's progress; returns {"version", "metrics"}. Raises JobFailed."""

    def close(self) -> None: ...


def is_sharded(tensor: Tensor) -> bool:
    """Whether the ranks hold parts of it: it is a DTensor, whose import takes long."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the parts of all ranks, which all must ask for."""
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return result
