"""Cuts a job's rows into optimiser steps and micro-batches, and lays a micro-batch out as tensors.

Rows that hold the same tokens (short answers to the same prompt often do) are computed once.

Shapes: B rows, S different sequences among them, T tokens of the longest, K trained tokens of the one that has most,
N trained tokens of all sequences.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from insitu.schemas.training_jobs import TrainingSettings


@dataclass(frozen=True, slots=True)
class Row:
    """A training row as the learner keeps it: what is not trained is context only, its logprobs are gone.

    `token_ids` (T); `positions` (K) of the trained tokens in it, ascending, the first above 0; `rollout` and
    `advantages` (K) of those.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    episode: str = ""

    @property
    def length(self) -> int:
        """Tokens the model must see: all before the last trained one."""
        return int(self.positions[-1])

    @property
    def sequence(self) -> bytes:
        """The same for rows whose trained tokens get the same log-probabilities from any model."""
        return self.token_ids[: self.length + 1].tobytes() + self.positions.tobytes()


class MicroBatch(NamedTuple):
    """Rows computed at once. `predecessors_N` are positions in the flattened (S x T) whose output predicts
    `targets_N`; `filled_SK` says which of the K places a sequence fills, in the order of N."""

    tokens_ST: Tensor
    predecessors_N: Tensor
    targets_N: Tensor
    filled_SK: Tensor
    sequence_B: Tensor
    mask_BK: Tensor
    rollout_BK: Tensor
    advantage_BK: Tensor

    def spread(self, values_N: Tensor) -> Tensor:
        """(N) to (B, K), zeros where a row has no more trained tokens."""
        values_SK = values_N.new_zeros(self.filled_SK.shape).masked_scatter(self.filled_SK, values_N)
        return values_SK.index_select(0, self.sequence_B)


def optimiser_steps(rows: Sequence[Row], settings: TrainingSettings) -> list[list[int]]:
    """The indices of the rows of each optimiser step, in the order of training.

    Each pass shuffles the episodes and cuts them into steps of about the same number of rows, an episode always
    whole: as many steps as batches of `mini_batch_size` would fill, or `steps`.
    """
    episodes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        episodes.setdefault(row.episode or f"\0{index}", []).append(index)
    steps = []
    for number in range(settings.num_iterations):
        order = list(episodes.values())
        random.Random(f"{settings.seed}|{number}").shuffle(order)
        parts = settings.steps_per_iteration or -(-len(rows) // (settings.mini_batch_size or len(rows)))
        steps += _cut(order, parts, len(rows))
    return steps


def _cut(episodes: list[list[int]], parts: int, total: int) -> list[list[int]]:
    steps: list[list[int]] = [[] for _ in range(parts)]
    seen = 0
    for members in episodes:
        middle = seen + len(members) / 2  # an episode on a boundary goes where most of it lies
        steps[min(int(middle * parts / total), parts - 1)] += members
        seen += len(members)
    return [step for step in steps if step]


def micro_batches(rows: Sequence[Row], chosen: Iterable[int], budget: int) -> Iterator[list[int]]:
    """Splits the chosen rows, shortest first, into parts of at most `budget` padded tokens, or of one sequence."""
    part: list[int] = []
    sequences = 0
    latest = b""
    for length, sequence, index in sorted((rows[index].length, rows[index].sequence, index) for index in chosen):
        if sequence != latest:
            if part and (sequences + 1) * length > budget:
                yield part
                part, sequences = [], 0
            sequences, latest = sequences + 1, sequence
        part.append(index)
    if part:
        yield part


def lay_out(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Right-padded: under causal attention nothing sees the padding, so the model needs no attention mask."""
    numbers: dict[bytes, int] = {}
    sequence_of = np.array([numbers.setdefault(row.sequence, len(numbers)) for row in rows])
    different = [rows[index] for index in np.unique(sequence_of, return_index=True)[1]]
    width = max(row.length for row in different)
    tokens = np.zeros((len(different), width), dtype=np.int64)
    for line, row in zip(tokens, different, strict=True):
        line[: row.length] = row.token_ids[: row.length]
    counts = np.array([len(row.positions) for row in different])
    starts = np.repeat(np.arange(len(different)) * width, counts)
    filled = np.arange(counts.max()) < counts[:, None]
    mask = filled[sequence_of]
    arrays = {
        "tokens_ST": tokens,
        "predecessors_N": np.concatenate([row.positions for row in different]) - 1 + starts,
        "targets_N": np.concatenate([row.token_ids[row.positions] for row in different]).astype(np.int64),
        "filled_SK": filled,
        "sequence_B": sequence_of,
        "mask_BK": mask,
        "rollout_BK": place([row.rollout for row in rows], mask),
        "advantage_BK": place([row.advantages for row in rows], mask),
    }
    return MicroBatch(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def place(values: list[np.ndarray], mask_BK: np.ndarray) -> np.ndarray:
    """Each row's (K) values in one (B, K), zeros behind them."""
    placed = np.zeros(mask_BK.shape, dtype=np.float32)
    placed[mask_BK] = np.concatenate(values)
    return placed
