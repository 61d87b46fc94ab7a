"""Splits a job's rows into optimizer steps and micro-batches, collates them into tensors, and scores their tokens.

Rows with identical tokens (common for short completions of the same prompt) are computed once.

Shapes: B rows, S distinct sequences, T tokens of the longest one, K maximum trained tokens per sequence, N trained
tokens of all sequences, D hidden size, V vocab_size.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insitu.backend.model import LoadedModel
from insitu.schemas.training_jobs import TrainingSettings

CHUNK_ELEMENTS = 1 << 26
"""Logits (N x V) held in memory; beyond this they are computed in chunks, and recomputed for the gradient."""


@dataclass(frozen=True, slots=True)
class Row:
    """A training row without the logprobs and advantages of untrained tokens.

    `token_ids` (T); `positions` (K) of the trained tokens, ascending and above 0; `rollout` logprobs and `advantages`
    (K) of the trained tokens.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    episode: str = ""

    @property
    def length(self) -> int:
        """Length of the model's input: the tokens before the last trained one."""
        return int(self.positions[-1])

    @property
    def sequence(self) -> bytes:
        """Key of rows whose trained tokens have the same log-probabilities under any model."""
        return self.token_ids[: self.length + 1].tobytes() + self.positions.tobytes()


class MicroBatch(NamedTuple):
    """Rows of one forward pass. `predecessors_N` are the positions in the flattened (S x T) that predict `targets_N`;
    `filled_SK` marks the trained tokens of each sequence, in the order of N."""

    tokens_ST: Tensor
    predecessors_N: Tensor
    targets_N: Tensor
    filled_SK: Tensor
    sequence_B: Tensor
    mask_BK: Tensor
    rollout_BK: Tensor
    advantage_BK: Tensor

    def scatter(self, values_N: Tensor) -> Tensor:
        """(N) to (B, K), padded with zeros."""
        values_SK = values_N.new_zeros(self.filled_SK.shape).masked_scatter(self.filled_SK, values_N)
        return values_SK.index_select(0, self.sequence_B)


def optimizer_steps(rows: Sequence[Row], settings: TrainingSettings) -> list[list[int]]:
    """The row indices of each optimizer step, in training order.

    Each pass shuffles the episodes and splits them into steps of about equal size without splitting an episode: as many
    steps as batches of `mini_batch_size` rows would take, or `steps_per_iteration`.
    """
    episodes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        episodes.setdefault(row.episode or f"\0{index}", []).append(index)
    steps: list[list[int]] = []
    for iteration in range(settings.num_iterations):
        order = list(episodes.values())
        random.Random(f"{settings.seed}|{iteration}").shuffle(order)
        parts = settings.steps_per_iteration or -(-len(rows) // (settings.mini_batch_size or len(rows)))
        split: list[list[int]] = [[] for _ in range(parts)]
        start = 0
        for members in order:
            middle = start + len(members) / 2  # an episode on a boundary belongs to the step with most of it
            split[min(int(middle * parts / len(rows)), parts - 1)] += members
            start += len(members)
        steps += [step for step in split if step]
    return steps


def micro_batches(rows: Sequence[Row], indices: Iterable[int], budget: int) -> Iterator[list[int]]:
    """Splits the rows, shortest first, into parts of at most `budget` padded tokens or one sequence."""
    part: list[int] = []
    sequences = 0
    latest = b""
    for length, sequence, index in sorted((rows[index].length, rows[index].sequence, index) for index in indices):
        if sequence != latest:
            if part and (sequences + 1) * length > budget:
                yield part
                part, sequences = [], 0
            sequences, latest = sequences + 1, sequence
        part.append(index)
    if part:
        yield part


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Right-padded: under causal attention no token attends to the padding, so no attention mask is needed."""
    numbers: dict[bytes, int] = {}
    sequence_B = np.array([numbers.setdefault(row.sequence, len(numbers)) for row in rows])
    distinct = [rows[index] for index in np.unique(sequence_B, return_index=True)[1]]
    width = max(row.length for row in distinct)
    tokens = np.zeros((len(distinct), width), dtype=np.int64)
    for line, row in zip(tokens, distinct, strict=True):
        line[: row.length] = row.token_ids[: row.length]
    counts = np.array([len(row.positions) for row in distinct])
    starts = np.repeat(np.arange(len(distinct)) * width, counts)
    filled = np.arange(counts.max()) < counts[:, None]
    mask = filled[sequence_B]
    arrays = {
        "tokens_ST": tokens,
        "predecessors_N": np.concatenate([row.positions for row in distinct]) - 1 + starts,
        "targets_N": np.concatenate([row.token_ids[row.positions] for row in distinct]).astype(np.int64),
        "filled_SK": filled,
        "sequence_B": sequence_B,
        "mask_BK": mask,
        "rollout_BK": pad([row.rollout for row in rows], mask),
        "advantage_BK": pad([row.advantages for row in rows], mask),
    }
    return MicroBatch(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def pad(values: list[np.ndarray], mask_BK: np.ndarray) -> np.ndarray:
    """Values of B rows, (K) each, to (B, K), padded with zeros."""
    padded = np.zeros(mask_BK.shape, dtype=np.float32)
    padded[mask_BK] = np.concatenate(values)
    return padded


class Scores(NamedTuple):
    logprobs_N: Tensor
    entropy_N: Tensor
    """Entropy of each token's distribution, in nats; without gradient."""


class Scorer:
    """Scores micro-batches under the policy or the starting weights.

    Most models end in a linear projection to the vocabulary. If a probe confirms that for the loaded model, only scored
    positions are projected; if the model does more (soft caps, scales), all positions are.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._device, self._dtype = loaded.device, loaded.dtype
        self._vocab_size = loaded.vocab_size
        self._ends_in_projection = self._probe_projection(loaded.module)

    def __call__(self, module: nn.Module, batch: MicroBatch) -> Scores:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            if not self._ends_in_projection:
                logits_STV = module(input_ids=batch.tokens_ST, use_cache=False).logits
                return _score(logits_STV.flatten(0, 1)[batch.predecessors_N], batch.targets_N)
            body, head = _parts(module)
            hidden_STD = body(input_ids=batch.tokens_ST, use_cache=False).last_hidden_state
            hidden_ND = hidden_STD.flatten(0, 1).index_select(0, batch.predecessors_N)
            return _in_chunks(head, self._vocab_size, hidden_ND, batch.targets_N)

    @torch.no_grad()
    def _probe_projection(self, module: nn.Module) -> bool:
        body, head = _parts(module)
        tokens_ST = torch.arange(min(8, self._vocab_size), device=self._device)[None]
        hidden = getattr(body(input_ids=tokens_ST, use_cache=False), "last_hidden_state", None)
        if hidden is None or head is None:  # another architecture
            return False
        return torch.equal(head(hidden), module(input_ids=tokens_ST, use_cache=False).logits)


def _parts(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The transformer body, which returns hidden states, and the projection to the vocabulary."""
    if hasattr(module, "get_base_model"):  # adapters are inside the layers of the base model
        module = module.get_base_model()  # type: ignore[operator]
    return module.base_model, module.get_output_embeddings()  # type: ignore[return-value, operator]


def _in_chunks(head: nn.Module, vocab_size: int, hidden_ND: Tensor, targets_N: Tensor) -> Scores:
    def score(hidden_ND: Tensor, targets_N: Tensor) -> Scores:
        return _score(head(hidden_ND), targets_N)

    size = max(1, CHUNK_ELEMENTS // vocab_size)
    if len(targets_N) <= size:
        return score(hidden_ND, targets_N)
    parts = [
        checkpoint(score, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True)
    ]
    return Scores(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _score(logits_NV: Tensor, targets_N: Tensor) -> Scores:
    log_NV = logits_NV.float().log_softmax(-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(log_NV.exp()).sum(-1)
    return Scores(log_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N)
