"""The state that is kept from job to job, and its checkpoints.

Rank 0 writes the model, and every rank the parts of the optimizer's state that it holds, into one file.

The format of that file is https://github.com/huggingface/safetensors: a length, a JSON header with the dtype, shape and
offsets of each tensor, and the tensors row by row. So the number of ranks may change between jobs.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from insitu.algorithms.memory_budget import ROUND, SMALL_MODEL
from insitu.backend.learner.batches import ALONE, MicroBatch, Ranks, is_sharded
from insitu.backend.learner.code import NO_CODE, CodeFolder
from insitu.backend.learner.logprobs import LogprobComputer, TokenLogprobs
from insitu.backend.learner.policy import ReferenceWeights, TrainablePolicy
from insitu.backend.model import LoadedModel, wrap_errors
from insitu.disk.files import new_folder
from insitu.disk.model_files import OPTIMIZER_FILE, TrainingRecord, check_optimizer_file, write_record
from insitu.disk.processor import usable_cores
from insitu.errors import BackendError, InsituError, JobFailed, a_type
from insitu.schemas.parts import Part
from insitu.schemas.training_jobs import TrainingSettings

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """Uses a CPU's cores: `count` micro-batches in parallel for a small model, else threads within each operation.

    A `round` of micro-batches is computed, by all ranks, before their gradients are summed.
    """

    def __init__(self, loaded: LoadedModel, ranks: Ranks = ALONE) -> None:
        cores = max(1, usable_cores() // ranks.on_machine)
        self.is_small = sum(parameter.numel() for parameter in loaded.module.parameters()) < SMALL_MODEL
        is_parallel = self.is_small and loaded.device.type == "cpu" and not ranks.shards_weights
        self.round = max(ROUND, ranks.count) if is_parallel else ranks.count
        self.count = min(cores, ROUND) if is_parallel else 1
        self._threads = (1 if is_parallel else cores) if loaded.device.type == "cpu" else None
        self._pool = ThreadPoolExecutor(self.count, "insitu-training") if self.count > 1 else None

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Results in the order of `items`, at most `count` of them."""
        if self._pool is None or len(items) < 2:
            return [fn(item) for item in items]
        return list(self._pool.map(self.threads()(fn), items))

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Sets torch's thread count for training within the block."""
        before = torch.get_num_threads()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@dataclass
class TrainState:
    """State kept from job to job; `reference` loads the weights that a job can be compared with.

    `forward` computes the log-probabilities of a micro-batch under the policy, `compute_logprobs` under any module.
    `optimizer` was made by `optimizer_part`. `before_step` waits until no other thread reads what it changes.
    """

    policy: TrainablePolicy
    forward: Callable[[MicroBatch], TokenLogprobs]
    compute_logprobs: LogprobComputer
    workers: Workers
    reference: Callable[[], ReferenceWeights]
    before_step: Callable[[], None]
    ranks: Ranks = ALONE
    code: CodeFolder = NO_CODE
    optimizer: torch.optim.Optimizer = field(init=False)
    optimizer_part: str | Part | None = field(init=False)

    def set_optimizer(self, settings: TrainingSettings) -> None:
        """A new one, without state."""
        wait = self.before_step
        wait()
        self.optimizer = make_optimizer(self.code, self.policy.trainable, settings)
        self.optimizer_part = settings.optimizer
        self.optimizer.register_step_pre_hook(lambda *_: wait())

    def prepare(self, settings: TrainingSettings) -> None:
        """For a job. Raises BackendError if the layers cannot be as it asks."""
        if self.optimizer_part != settings.optimizer:
            self.set_optimizer(settings)
        self.policy.prepare_layers(settings)
        for group in self.optimizer.param_groups:
            if "decays" in group:  # AdamW
                group.update(betas=settings.betas, weight_decay=settings.weight_decay if group["decays"] else 0.0)

    @property
    def optimizer_prefix(self) -> str:
        """Before the names of the optimizer's state in a checkpoint; "" for AdamW."""
        part = self.optimizer_part
        name = part if part is None or isinstance(part, str) else part.function or part.type
        return "" if name in (None, "adamw") else f"{name}/".replace(".", "_")


def make_optimizer(
    code: CodeFolder, trainable: Mapping[str, nn.Parameter], settings: TrainingSettings
) -> torch.optim.Optimizer:
    """The optimizer of a job. Raises BackendError if the function that the job names makes none."""
    make = code.function("optimizer", settings.optimizer or "adamw")
    with wrap_errors("optimizer: it cannot be made"):
        optimizer = make(trainable, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BackendError(f"optimizer: {a_type(optimizer)} was returned; allowed: a torch.optim.Optimizer")
    return optimizer


def optimizer_tensors(state: TrainState) -> dict[str, Tensor]:
    """What a snapshot has of the optimizer: the tensors that it changes, not copies."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in state.policy.trainable.items():
        entries = {key: value for key, value in state.optimizer.state[parameter].items() if value is not None}
        numbers = {key: v if isinstance(v, Tensor) else torch.tensor(float(v)) for key, v in entries.items()}
        tensors |= {f"{state.optimizer_prefix}{key}.{name}": value for key, value in numbers.items()}
        if state.policy.loaded.dtype != torch.float32:
            tensors[f"weights.{name}"] = parameter.detach()
    return tensors


def write_checkpoint(
    target: Path,
    policy: TrainablePolicy,
    served: nn.Module | None,
    optimizer: Mapping[str, Tensor] | None,
    record: TrainingRecord,
    tokenizer_files: Mapping[str, bytes],
    ranks: Ranks = ALONE,
) -> Path:
    """`served` has the weights to serve, on rank 0; without `optimizer`, they are all that is written.

    Returns `target`. Raises JobFailed on all ranks alike, and then leaves nothing.
    """

    def write_model() -> Path:
        draft = folder.enter_context(new_folder(target))
        assert served is not None
        policy.save(draft, served)
        for name, content in tokenizer_files.items():
            (draft / name).write_bytes(content)
        return draft

    try:
        with ExitStack() as folder:
            draft = ranks.on_first(write_model)
            if optimizer is not None:
                write_optimizer(draft, optimizer, ranks)
            ranks.on_first(lambda: write_record(draft, record))
            ranks.on_first(folder.close)
    except (OSError, InsituError, SafetensorError) as error:
        of_checkpoint = isinstance(error, InsituError)  # it names the folder, or a file in it
        reason = f"the checkpoint {error if of_checkpoint else f'{target} cannot be written: {error}'}"
        raise JobFailed(f"{reason}; the weights from before the job were restored") from error
    return target


class SavedOptimizer:
    """The tensors of a file, each read when it is asked for; none if there is no file."""

    def __init__(self, file: Any = None) -> None:
        self._file = file
        self.names = frozenset(file.keys()) if file is not None else frozenset[str]()

    def states(self, maker: str) -> dict[str, list[str]]:
        """By parameter, the keys of its state in the optimizer of this name ("" for AdamW)."""
        states: dict[str, list[str]] = {}
        for name in self.names:
            made_by, _, rest = name.rpartition("/")
            key, _, parameter = rest.partition(".")
            if made_by == maker and key != "weights":
                states.setdefault(parameter, []).append(key)
        return states

    def read(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def read_part(self, name: str, like: Tensor) -> Tensor:
        """On the device of `like`, and distributed over the ranks as `like` is, if the shapes are equal."""
        rows = self._file.get_slice(name)
        if not is_sharded(like) or tuple(rows.get_shape()) != like.shape:
            return self.read(name).to(like.device)
        from torch.distributed.tensor import DTensor

        assert isinstance(like, DTensor)
        local = like.to_local()
        first = _first_row(like)
        part = rows[first : first + len(local)] if len(local) else torch.empty_like(local)
        return DTensor.from_local(
            *(part.to(local.device), like.device_mesh, like.placements),
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


@contextmanager
def open_optimizer(folder: Path) -> Iterator[SavedOptimizer]:
    """The optimizer state of a checkpoint. Raises BackendError if it cannot be read."""
    path = folder / OPTIMIZER_FILE
    with ExitStack() as stack:
        with wrap_errors(f"{path} cannot be read"):
            saved = SavedOptimizer(stack.enter_context(safe_open(path, framework="pt")) if path.is_file() else None)
        yield saved


def check_optimizer(folder: Path, *, required: bool) -> None:
    """Raises BackendError if the optimizer state is damaged, or is missing and `required`."""
    check_optimizer_file(folder, required=required)
    with open_optimizer(folder):
        pass


def write_optimizer(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Writes float32 tensors, which are distributed over the ranks or the same on all. Raises OSError on all alike."""
    path = folder / OPTIMIZER_FILE
    header, starts, size = _layout(tensors)

    def create() -> None:
        with path.open("xb") as file:
            file.write(header)
            file.truncate(size)

    def write_parts() -> None:
        with path.open("r+b") as file:
            for name, tensor in tensors.items():
                if is_sharded(tensor):
                    part = tensor.to_local()  # type: ignore[attr-defined]
                    offset = _first_row(tensor) * math.prod(tensor.shape[1:])
                elif ranks.index == 0:
                    part, offset = tensor, 0
                else:
                    continue
                if part.numel():
                    file.seek(starts[name] + 4 * offset)
                    file.write(memoryview(part.detach().cpu().contiguous().numpy()).cast("B"))

    ranks.on_first(create)
    ranks.on_each(write_parts)


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The header of the file, where each tensor begins, and the size of the file, in bytes."""
    entries, starts, end = {}, {}, 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.dtype != torch.float32:
            raise BackendError(f"the optimizer state {name} is {tensor.dtype}, not float32")
        starts[name], end = end, end + 4 * tensor.numel()
        entries[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end


def _first_row(tensor: Any) -> int:
    """The first row that this rank holds of a tensor that is distributed by rows, as `torch.chunk` divides them."""
    (placement,) = tensor.placements
    assert placement.is_shard(0), placement
    rows, mesh = tensor.shape[0], tensor.device_mesh
    return int(min(mesh.get_local_rank() * -(-rows // mesh.size()), rows))
