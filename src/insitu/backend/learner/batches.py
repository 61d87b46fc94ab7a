"""Rows of a training job, their optimizer steps, the tensors of a micro-batch, and the ranks that share the work.

A packed micro-batch computes shared prefixes once: a group's prompt, the earlier turns of a conversation, equal rows.

Processes that train one policy together are its ranks: all have the rows of a job, and each computes some
micro-batches. The loss of a micro-batch is already its share of the loss of the optimizer step, normalized over all
rows of the step. So gradients and sums are added over the ranks, never averaged, however unequal their tokens are.

Shapes: B rows, S padded sequences of T input tokens (packed: S = 1 and T tokens of a prefix tree, in depth-first
order), K maximum trained tokens per row, N distinct trained tokens.
"""

import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from insitu.backend.attention import Node, Nodes
from insitu.backend.learner.logit_offsets import ShapedCompletion, shaping_kinds
from insitu.disk.model_files import JobRecord
from insitu.schemas.training_jobs import TrainingSettings

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
MIN_SHARED = 16
"""Minimum tokens that two sequences share in a node: each node costs two more attention calls in every layer."""


@dataclass(frozen=True, slots=True)
class Row:
    """A training row without the logprobs and advantages of untrained tokens.

    `positions` (K) of the trained tokens are ascending and above 0; `rollout_logprobs` and `advantages` (K) are those
    of the trained tokens, for `method: grpo`. Rows with the same `episode` or the same `pair` stay in one optimizer
    step; `preferred` is the side of the pair, or whether the episode is desirable. All log-probabilities of the row are
    those of the logits divided by `temperature`, after what `shaping` adds to them.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    rollout_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    episode: str = ""
    pair: str = ""
    preferred: bool | None = None
    temperature: float = 1.0
    shaping: str = ""

    @property
    def completions(self) -> list[np.ndarray]:
        """The positions of trained tokens, by completion."""
        return np.split(self.positions, np.flatnonzero(np.diff(self.positions) > 1) + 1)

    @property
    def input_length(self) -> int:
        """Length of the model's input: the tokens before the last trained one."""
        return int(self.positions[-1])

    @property
    def key(self) -> bytes:
        """The model's input, as bytes that sort as the tokens do."""
        return self.token_ids[: self.input_length].astype(">u4").tobytes()


def common_prefix(first: bytes, second: bytes) -> int:
    """Length in tokens of the longest common prefix of two inputs, given by their keys."""
    length = min(len(first), len(second)) // 4
    differ = np.frombuffer(first, "u4", length) != np.frombuffer(second, "u4", length)
    place = int(differ.argmax()) if length else 0
    return place if length and differ[place] else length


class MicroBatch(NamedTuple):
    """One forward pass over padded sequences, or if there is a `tree`, over its T tokens as one packed sequence.

    `logit_positions_N` are the positions in the flattened `input_ids_ST` whose logits predict `targets_N`;
    `token_index_BK` has the trained tokens of each row among the N. `temperature_N` is None if all are 1. `shaped` are
    the completions whose logits were changed.
    """

    input_ids_ST: Tensor
    logit_positions_N: Tensor
    targets_N: Tensor
    token_index_BK: Tensor
    mask_BK: Tensor
    position_ids_ST: Tensor | None
    tree: Nodes | None
    temperature_N: Tensor | None
    shaped: tuple[ShapedCompletion, ...] = ()

    def to_rows(self, values_N: Tensor) -> Tensor:
        """Expands values per distinct token (N) to rows (B, K), zero-padded."""
        values_BK = values_N.index_select(0, self.token_index_BK.flatten()).view(self.mask_BK.shape)
        return torch.where(self.mask_BK, values_BK, 0.0)


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


class PrefixTree(NamedTuple):
    """T distinct tokens with their positions; `paths` maps the tokens of each sequence to their places among the T."""

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    nodes: Nodes
    paths: list[np.ndarray]


def build_tree(keys: Sequence[bytes], shared_with_last: Sequence[int]) -> PrefixTree:
    """The tree of distinct sequences by their sort keys (big-endian uint32), in ascending order.

    `shared_with_last` is the length of the prefix that each shares with the sequence before it.
    """
    branch: list[tuple[int, int, int]] = []  # start, stop and depth of the nodes of the latest sequence
    nodes: list[Node] = []
    tokens: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    end = 0
    for number, (key, shared) in enumerate(zip(keys, shared_with_last, strict=True)):
        while branch and branch[-1][2] >= shared:
            start, stop, _ = branch.pop()
            nodes.append(Node(start, stop, end))
        if branch:
            start, stop, depth = branch.pop()
            cut = start + shared - depth
            if cut < stop and shared - depth < MIN_SHARED:
                shared, cut = depth, start
            if cut < stop:
                nodes.append(Node(cut, stop, end))
            if cut > start:
                branch.append((start, cut, depth))
        rest = np.frombuffer(key, ">u4")[shared:]
        tokens.append(rest)
        paths.append(
            np.concatenate([paths[-1][:shared] if number else [], np.arange(end, end + len(rest))]).astype(int)
        )
        branch.append((end, end := end + len(rest), shared))
    nodes += [Node(start, stop, end) for start, stop, _ in branch]
    positions = np.concatenate(
        [np.arange(len(path) - len(rest), len(path)) for path, rest in zip(paths, tokens, strict=True)]
    )
    return PrefixTree(np.concatenate(tokens).astype(np.int64), positions, Nodes(nodes), paths)


def collate(rows: Sequence[Row], device: torch.device, *, packed: bool = False) -> MicroBatch:
    """Collates rows into one micro-batch: `packed` as a tree, otherwise padded on the right.

    Padded sequences need no attention mask: with causal attention no token attends to the padding.
    """
    distinct = sorted({row.key for row in rows})
    tree = None
    if packed:
        tree = build_tree(distinct, [0, *itertools.starmap(common_prefix, itertools.pairwise(distinct))])
        input_ids, paths = tree.token_ids_T[None], tree.paths
    else:
        input_ids = _padded([np.frombuffer(key, ">u4") for key in distinct])
        paths = list(np.arange(input_ids.size).reshape(input_ids.shape))
    path_of = dict(zip(distinct, paths, strict=True))
    # A token is computed once for all rows that predict it from the same place at the same temperature and shaping.
    kinds: dict[tuple[str, int], int] = {}
    trained = [
        (
            path_of[row.key][row.positions - 1],
            row.token_ids[row.positions],
            np.full(len(row.positions), row.temperature),
            shaping_kinds(row.shaping, row.completions, kinds) if row.shaping else np.zeros_like(row.positions),
        )
        for row in rows
    ]
    places, targets, temperatures, shapings = map(np.concatenate, zip(*trained, strict=True))
    columns = np.stack([places, targets, temperatures.view(np.int64), shapings], axis=1)
    distinct_N4, index = np.unique(columns, axis=0, return_inverse=True)
    places_by_row = np.split(index.ravel(), np.cumsum([len(row.positions) for row in rows])[:-1])
    arrays = {
        "input_ids_ST": input_ids,
        "logit_positions_N": distinct_N4[:, 0],
        "targets_N": distinct_N4[:, 1],
        "token_index_BK": _padded(places_by_row),
        "mask_BK": _padded([np.ones(len(row.positions), bool) for row in rows], np.bool_),
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
    by_row = zip(rows, places_by_row, strict=True)
    temperature_N = distinct_N4[:, 2].copy().view(np.float64).astype(np.float32)
    return MicroBatch(
        **tensors,
        position_ids_ST=None if tree is None else torch.from_numpy(tree.positions_T)[None].to(device),
        tree=None if tree is None else tree.nodes,
        temperature_N=None if (temperature_N == 1).all() else torch.from_numpy(temperature_N).to(device),
        shaped=tuple(each for row, places in by_row if row.shaping for each in _shaped_completions(row, places)),
    )


def _shaped_completions(row: Row, places: np.ndarray) -> Iterator[ShapedCompletion]:
    """The completions of a row; `places` are those of its trained tokens among the N."""
    ends = np.cumsum([*map(len, row.completions)])
    for positions, of_completion in zip(row.completions, np.split(places, ends[:-1]), strict=True):
        yield ShapedCompletion(row.shaping, row.token_ids[positions].tolist(), of_completion.tolist())


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
    on_machine = 1
    """Those of them that share this machine's cores."""
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
        self, folder: Path, policy: str, version: int, settings: TrainingSettings, rows: Sequence[Row], job: JobRecord
    ) -> Generator[Any, None, dict[str, Any]]:
        """Trains the version of the policy in `folder`, and yields the job's progress; returns {"metrics"}.

        Raises JobFailed.
        """

    def close(self) -> None: ...


def is_sharded(tensor: Tensor) -> bool:
    """Whether the ranks hold parts of it: it is a DTensor, whose import takes long."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the parts of all ranks, which all must ask for."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
