"""Splits rows into optimizer steps and micro-batches, deals these to ranks, and collates them into tensors.

Rows with the same tokens and trained positions (common for short completions of the same prompt) are computed once. So
are prompts that several rows share, where the method allows it.

Processes that train one policy together are its ranks: all have the rows of a job, and each computes some
micro-batches. The loss of a micro-batch is already its share of the loss of the optimizer step, normalized over all
rows of the step. So gradients and sums are added over the ranks, never averaged, however unequal their tokens are.

Shapes: B rows, S distinct sequences, T input tokens of the longest sequence (without a shared prompt), K maximum
trained tokens per sequence, N trained tokens of all distinct sequences, G distinct prompts, P tokens of the longest.
"""

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from insitu.disk.model_files import JobRecord
from insitu.schemas.training_jobs import TrainingSettings

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Row:
    """A training row without the logprobs and advantages of untrained tokens.

    `positions` (K) of the trained tokens are ascending and above 0; `rollout_logprobs` and `advantages` (K) are those
    of the trained tokens, for `method: grpo`. Rows with the same `episode` or the same `pair` stay in one optimizer
    step; `preferred` is the side of the pair, or whether the episode is desirable. All log-probabilities of the row are
    those of the logits divided by `temperature`.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    rollout_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    episode: str = ""
    pair: str = ""
    preferred: bool | None = None
    temperature: float = 1.0

    @property
    def input_length(self) -> int:
        """Length of the model's input: the tokens before the last trained one."""
        return int(self.positions[-1])

    @property
    def prompt_length(self) -> int:
        """Tokens before the one that predicts the first trained token; rows may share their computation."""
        return int(self.positions[0]) - 1

    @property
    def sequence_key(self) -> bytes:
        """Deduplication key: rows with equal keys have the same log-probabilities at their trained tokens."""
        temperature = b"" if self.temperature == 1 else np.float64(self.temperature).tobytes()
        return self.token_ids[: self.input_length + 1].tobytes() + self.positions.tobytes() + temperature

    @property
    def prompt_key(self) -> bytes:
        return self.token_ids[: self.prompt_length].tobytes()


class SharedPrompts(NamedTuple):
    """The prompts of a micro-batch whose sequences go on from them.

    `attention_mask_SL` covers the P tokens of the prompt and the T tokens after it.
    """

    input_ids_GP: Tensor
    prompt_index_S: Tensor
    attention_mask_SL: Tensor
    position_ids_ST: Tensor


class MicroBatch(NamedTuple):
    """One forward pass, with `prompts` two.

    `logit_positions_N` are the positions in the flattened `input_ids_ST` whose logits predict `targets_N`;
    `target_mask_SK` marks each sequence's targets, in the order of N. `temperature_N` is None if all are 1.
    """

    input_ids_ST: Tensor
    logit_positions_N: Tensor
    targets_N: Tensor
    target_mask_SK: Tensor
    sequence_index_B: Tensor
    mask_BK: Tensor
    prompts: SharedPrompts | None
    temperature_N: Tensor | None

    def to_rows(self, values_N: Tensor) -> Tensor:
        """Expands values per distinct token (N) to rows (B, K), zero-padded."""
        values_SK = values_N.new_zeros(self.target_mask_SK.shape).masked_scatter(self.target_mask_SK, values_N)
        return values_SK.index_select(0, self.sequence_index_B)


def group_rows(rows: Sequence[Row], indices: Iterable[int]) -> list[list[int]]:
    """The rows of each pair or episode; a row with neither is a group."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        row = rows[index]
        groups.setdefault(row.pair or row.episode or f"\0{index}", []).append(index)  # a key no id can equal
    return list(groups.values())


def optimizer_steps(rows: Sequence[Row], settings: TrainingSettings) -> list[list[int]]:
    """The row indices of each optimizer step, in training order.

    Each pass shuffles the episodes (or pairs) and distributes them over at most ceil(rows / `mini_batch_size`) steps
    (or `steps_per_iteration`) of about equal size, without splitting one.
    """
    groups = group_rows(rows, range(len(rows)))
    steps: list[list[int]] = []
    for iteration in range(settings.num_iterations):
        order = list(groups)
        random.Random(f"{settings.seed}|{iteration}").shuffle(order)
        num_steps = settings.steps_per_iteration or -(-len(rows) // (settings.mini_batch_size or len(rows)))
        iteration_steps: list[list[int]] = [[] for _ in range(num_steps)]
        start = 0
        for members in order:
            middle = start + len(members) / 2  # an episode on a boundary belongs to the step with most of it
            iteration_steps[min(int(middle * num_steps / len(rows)), num_steps - 1)] += members
            start += len(members)
        steps += [step for step in iteration_steps if step]
    return steps


class _Piece(NamedTuple):
    """A row in the order of micro-batches: rows of similar length, and those with the same tokens, are neighbors."""

    prompt_length: int
    prompt_key: bytes
    length: int
    key: bytes
    row: int


class _Size:
    """Counts the distinct tokens of the rows that are added, and those of a micro-batch of them, padding included."""

    def __init__(self) -> None:
        self._prompts: set[bytes] = set()
        self._sequences: set[bytes] = set()
        self._longest_prompt = self._longest = 0
        self.distinct_tokens = 0

    def add(self, unit: Iterable[_Piece]) -> bool:
        """Returns whether there were new tokens among them."""
        before = self.distinct_tokens
        for piece in unit:
            if piece.prompt_key not in self._prompts:
                self._prompts.add(piece.prompt_key)
                self.distinct_tokens += piece.prompt_length
            if piece.key not in self._sequences:
                self._sequences.add(piece.key)
                self.distinct_tokens += piece.length
            self._longest_prompt = max(self._longest_prompt, piece.prompt_length)
            self._longest = max(self._longest, piece.length)
        return self.distinct_tokens > before

    @property
    def padded_tokens(self) -> int:
        return len(self._prompts) * self._longest_prompt + len(self._sequences) * self._longest


@dataclass(frozen=True)
class Packer:
    """Packs rows into micro-batches; with `share_prompts`, rows with the same prompt share its computation."""

    rows: Sequence[Row]
    share_prompts: bool = field(kw_only=True)

    def micro_batches(self, units: Iterable[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
        """Splits the rows, shortest first, into micro-batches of at most `max_tokens` padded tokens.

        A unit of rows stays together if it fits into a micro-batch; a longer sequence gets its own.
        """
        micro_batch: list[int] = []
        size = _Size()
        for unit in sorted(self._split(units, max_tokens), key=lambda pieces: pieces[-1]):
            if size.add(unit) and micro_batch and size.padded_tokens > max_tokens:
                yield micro_batch
                micro_batch, size = [], _Size()
                size.add(unit)
            micro_batch += [piece.row for piece in unit]
        if micro_batch:
            yield micro_batch

    def even_share(self, units: Sequence[Sequence[int]], max_tokens: int, count: int) -> int:
        """The padded tokens of a micro-batch if all units are spread evenly over rounds of `count` of them."""
        size = _Size()
        longest = 0
        for unit in self._split(units, max_tokens):
            own = _Size()
            own.add(unit)
            longest = max(longest, own.padded_tokens)
            size.add(unit)
        rounds = -(-size.distinct_tokens // (max_tokens * count))
        return min(-(-size.distinct_tokens // max(rounds * count, 1)) + longest, max_tokens)

    def collate(self, indices: Sequence[int], device: torch.device) -> MicroBatch:
        return collate([self.rows[index] for index in indices], device, share_prompts=self.share_prompts)

    def _split(self, units: Iterable[Sequence[int]], max_tokens: int) -> Iterator[list[_Piece]]:
        """The units, and the rows of those that do not fit into a micro-batch."""
        for unit in units:
            pieces = sorted(map(self._piece, unit))
            size = _Size()
            size.add(pieces)
            if len(pieces) > 1 and size.padded_tokens > max_tokens:
                yield from ([piece] for piece in pieces)
            else:
                yield pieces

    def _piece(self, index: int) -> _Piece:
        row = self.rows[index]
        length, key = (row.prompt_length, row.prompt_key) if self.share_prompts else (0, b"")
        return _Piece(length, key, row.input_length - length, row.sequence_key, index)


def collate(rows: Sequence[Row], device: torch.device, *, share_prompts: bool = False) -> MicroBatch:
    """Collates rows into a right-padded micro-batch; with `share_prompts`, prompts of several sequences are separate.

    Without prompts no attention mask is needed: with causal attention no token attends to the padding.
    """
    sequence_indices: dict[bytes, int] = {}
    sequence_index_B = np.array([sequence_indices.setdefault(row.sequence_key, len(sequence_indices)) for row in rows])
    distinct = [rows[index] for index in np.unique(sequence_index_B, return_index=True)[1]]
    shares = share_prompts and len({row.prompt_key for row in distinct}) < len(distinct)
    starts = [row.prompt_length if shares else 0 for row in distinct]
    input_ids = _padded([row.token_ids[start : row.input_length] for row, start in zip(distinct, starts, strict=True)])
    counts = np.array([len(row.positions) for row in distinct])
    offsets = np.arange(len(distinct)) * input_ids.shape[1] - np.array(starts)
    target_mask = np.arange(counts.max()) < counts[:, None]
    arrays = {
        "input_ids_ST": input_ids,
        "logit_positions_N": np.concatenate([row.positions for row in distinct]) - 1 + np.repeat(offsets, counts),
        "targets_N": np.concatenate([row.token_ids[row.positions] for row in distinct]).astype(np.int64),
        "target_mask_SK": target_mask,
        "sequence_index_B": sequence_index_B,
        "mask_BK": target_mask[sequence_index_B],
    }
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    prompts = _shared_prompts(distinct, input_ids.shape[1], device) if shares else None
    temperature_N = np.repeat(np.array([row.temperature for row in distinct], np.float32), counts)
    divides = None if (temperature_N == 1).all() else torch.from_numpy(temperature_N).to(device)
    return MicroBatch(**tensors, prompts=prompts, temperature_N=divides)


def _shared_prompts(distinct: Sequence[Row], width: int, device: torch.device) -> SharedPrompts:
    prompt_indices: dict[bytes, int] = {}
    index_S = np.array([prompt_indices.setdefault(row.prompt_key, len(prompt_indices)) for row in distinct])
    firsts = [distinct[index] for index in np.unique(index_S, return_index=True)[1]]
    input_ids = _padded([row.token_ids[: row.prompt_length] for row in firsts])
    lengths_S1 = np.array([[row.prompt_length] for row in distinct])
    inputs_S1 = np.array([[row.input_length] for row in distinct])
    is_prompt = np.arange(input_ids.shape[1]) < lengths_S1
    # Positions of padding repeat the last one: there may be no embedding for more.
    positions = np.minimum(lengths_S1 + np.arange(width), inputs_S1 - 1)
    arrays = (input_ids, index_S, np.hstack([is_prompt, np.ones((len(distinct), width), dtype=bool)]), positions)
    return SharedPrompts(*(torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays))


def _padded(sequences: Sequence[np.ndarray], dtype: type[np.generic] = np.int64) -> np.ndarray:
    padded = np.zeros((len(sequences), max(map(len, sequences))), dtype)
    for line, sequence in zip(padded, sequences, strict=True):
        line[: len(sequence)] = sequence
    return padded


def pad(values: Sequence[np.ndarray]) -> Tensor:
    """Zero-pads the values of B rows to (B, K)."""
    return torch.from_numpy(_padded(values, np.float32))


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
