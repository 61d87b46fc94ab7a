"""Splits rows into optimizer steps and micro-batches, collates them, and computes token logprobs and entropies.

Rows with the same tokens and trained positions (common for short completions of the same prompt) share one forward
pass.

Shapes: B rows, S distinct sequences, T input tokens of the longest sequence, K maximum trained tokens per sequence, N
trained tokens of all distinct sequences, D hidden size, V vocab_size.
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
"""Maximum logits (N x V) computed together where only trained positions are projected; more are computed in chunks and
recomputed in the backward pass."""


@dataclass(frozen=True, slots=True)
class Row:
    """A training row without the logprobs and advantages of untrained tokens.

    `positions` (K) of the trained tokens are ascending and above 0; `rollout_logprobs` and `advantages` (K) are those
    of the trained tokens. `episode` groups rows that must stay in one optimizer step; empty: the row is its own group.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    episode: str = ""

    @property
    def input_length(self) -> int:
        """Length of the model's input: the tokens before the last trained one."""
        return int(self.positions[-1])

    @property
    def sequence_key(self) -> bytes:
        """Deduplication key: rows with equal keys have the same log-probabilities at their trained tokens."""
        return self.token_ids[: self.input_length + 1].tobytes() + self.positions.tobytes()


class MicroBatch(NamedTuple):
    """One forward pass.

    `logit_positions_N` are the positions in the flattened `input_ids_ST` whose logits predict `targets_N`;
    `target_mask_SK` marks each sequence's targets, in the order of N.
    """

    input_ids_ST: Tensor
    logit_positions_N: Tensor
    targets_N: Tensor
    target_mask_SK: Tensor
    sequence_index_B: Tensor
    mask_BK: Tensor
    rollout_logprobs_BK: Tensor
    advantage_BK: Tensor

    def to_rows(self, values_N: Tensor) -> Tensor:
        """Expands values per distinct token (N) to rows (B, K), zero-padded."""
        values_SK = values_N.new_zeros(self.target_mask_SK.shape).masked_scatter(self.target_mask_SK, values_N)
        return values_SK.index_select(0, self.sequence_index_B)


def optimizer_steps(rows: Sequence[Row], settings: TrainingSettings) -> list[list[int]]:
    """The row indices of each optimizer step, in training order.

    Each pass shuffles the episodes and distributes them over at most ceil(rows / `mini_batch_size`) steps (or
    `steps_per_iteration`) of about equal size, without splitting an episode.
    """
    episodes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        episodes.setdefault(row.episode or f"\0{index}", []).append(index)  # a key no episode id can equal
    steps: list[list[int]] = []
    for iteration in range(settings.num_iterations):
        order = list(episodes.values())
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


def micro_batches(rows: Sequence[Row], indices: Iterable[int], max_tokens: int) -> Iterator[list[int]]:
    """Splits the rows, shortest first, into micro-batches of at most `max_tokens` padded tokens.

    A longer sequence gets its own.
    """
    micro_batch: list[int] = []
    sequences = 0
    previous = b""
    for length, key, index in sorted((rows[index].input_length, rows[index].sequence_key, index) for index in indices):
        if key != previous:
            if micro_batch and (sequences + 1) * length > max_tokens:
                yield micro_batch
                micro_batch, sequences = [], 0
            sequences, previous = sequences + 1, key
        micro_batch.append(index)
    if micro_batch:
        yield micro_batch


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Collates rows into a right-padded micro-batch.

    No attention mask is needed: with causal attention no token attends to the padding.
    """
    sequence_indices: dict[bytes, int] = {}
    sequence_index_B = np.array([sequence_indices.setdefault(row.sequence_key, len(sequence_indices)) for row in rows])
    distinct = [rows[index] for index in np.unique(sequence_index_B, return_index=True)[1]]
    width = max(row.input_length for row in distinct)
    input_ids = np.zeros((len(distinct), width), dtype=np.int64)
    for line, row in zip(input_ids, distinct, strict=True):
        line[: row.input_length] = row.token_ids[: row.input_length]
    counts = np.array([len(row.positions) for row in distinct])
    starts = np.repeat(np.arange(len(distinct)) * width, counts)
    target_mask = np.arange(counts.max()) < counts[:, None]
    mask = target_mask[sequence_index_B]
    arrays = {
        "input_ids_ST": input_ids,
        "logit_positions_N": np.concatenate([row.positions for row in distinct]) - 1 + starts,
        "targets_N": np.concatenate([row.token_ids[row.positions] for row in distinct]).astype(np.int64),
        "target_mask_SK": target_mask,
        "sequence_index_B": sequence_index_B,
        "mask_BK": mask,
        "rollout_logprobs_BK": pad([row.rollout_logprobs for row in rows], mask),
        "advantage_BK": pad([row.advantages for row in rows], mask),
    }
    return MicroBatch(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def pad(values: list[np.ndarray], mask_BK: np.ndarray) -> np.ndarray:
    """Zero-pads the values of B rows to (B, K)."""
    padded = np.zeros(mask_BK.shape, dtype=np.float32)
    padded[mask_BK] = np.concatenate(values)
    return padded


class TokenLogprobs(NamedTuple):
    logprobs_N: Tensor
    entropy_N: Tensor
    """Entropy of each token's distribution, in nats; without gradient."""


class LogprobComputer:
    """Computes log-probabilities under the policy or the reference model (the starting weights).

    Most models end in a linear LM head. If a test forward pass confirms that, only the positions of trained tokens are
    projected; otherwise (logit softcapping or scaling) all positions are.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._device, self._dtype = loaded.device, loaded.dtype
        self._vocab_size = loaded.vocab_size
        self._can_project_selected = self._probe_projection(loaded.module)

    def __call__(self, module: nn.Module, batch: MicroBatch) -> TokenLogprobs:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            if not self._can_project_selected:
                logits_STV = module(input_ids=batch.input_ids_ST, use_cache=False).logits
                return _token_logprobs(logits_STV.flatten(0, 1)[batch.logit_positions_N], batch.targets_N)
            body, head = _parts(module)
            assert head is not None  # the test forward pass used it
            hidden_STD = body(input_ids=batch.input_ids_ST, use_cache=False).last_hidden_state
            hidden_ND = hidden_STD.flatten(0, 1).index_select(0, batch.logit_positions_N)
            return _in_chunks(head, self._vocab_size, hidden_ND, batch.targets_N)

    @torch.no_grad()
    def _probe_projection(self, module: nn.Module) -> bool:
        body, head = _parts(module)
        input_ids_ST = torch.arange(min(8, self._vocab_size), device=self._device)[None]
        hidden = getattr(body(input_ids=input_ids_ST, use_cache=False), "last_hidden_state", None)
        if hidden is None or head is None:  # another architecture
            return False
        return torch.equal(head(hidden), module(input_ids=input_ids_ST, use_cache=False).logits)


def _parts(module: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The transformer body, which returns hidden states, and the LM head."""
    if hasattr(module, "get_base_model"):  # PEFT: LoRA adapters live inside the base model's layers
        module = module.get_base_model()  # type: ignore[operator]
    return module.base_model, module.get_output_embeddings()  # type: ignore[return-value, operator]


def _in_chunks(head: nn.Module, vocab_size: int, hidden_ND: Tensor, targets_N: Tensor) -> TokenLogprobs:
    def project(hidden_ND: Tensor, targets_N: Tensor) -> TokenLogprobs:
        return _token_logprobs(head(hidden_ND), targets_N)

    size = max(1, CHUNK_ELEMENTS // vocab_size)
    if len(targets_N) <= size:
        return project(hidden_ND, targets_N)
    chunks = [
        checkpoint(project, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True)
    ]
    return TokenLogprobs(*(torch.cat(values) for values in zip(*chunks, strict=True)))


def _token_logprobs(logits_NV: Tensor, targets_N: Tensor) -> TokenLogprobs:
    logprobs_NV = logits_NV.float().log_softmax(-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(-1)
    return TokenLogprobs(logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N)
