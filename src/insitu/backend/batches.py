"""Cuts a job's rows into optimiser steps and micro-batches, and lays a micro-batch out as tensors.

Shapes: B rows, T tokens of the longest row, K trained tokens of the row that has most, N trained tokens of all rows.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from insitu.schemas.wire import TrainingSettings


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


class MicroBatch(NamedTuple):
    """Rows computed at once. `predecessors_N` are positions in the flattened (B x T) whose output predicts
    `targets_N`; `mask_BK` says which of the K places a row fills, row by row in the order of N."""

    tokens_BT: Tensor
    predecessors_N: Tensor
    targets_N: Tensor
    mask_BK: Tensor
    rollout_BK: Tensor
    advantage_BK: Tensor

    def spread(self, values_N: Tensor) -> Tensor:
        """(N) to (B, K), zeros where a row has no more trained tokens."""
        return values_N.new_zeros(self.mask_BK.shape).masked_scatter(self.mask_BK, values_N)


def optimiser_steps(rows: Sequence[Row], settings: TrainingSettings) -> list[list[int]]:
    """The indices of the rows of each optimiser step, in the order of training.

    Each pass shuffles the episodes and cuts them into steps of about the same number of rows, an episode always
    whole: as many steps as batches of `batch_rows` would fill.
    """
    episodes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        episodes.setdefault(row.episode or f"\0{index}", []).append(index)
    steps = []
    for number in range(settings.passes):
        order = list(episodes.values())
        random.Random(f"{settings.seed}|{number}").shuffle(order)
        steps += _cut(order, -(-len(rows) // (settings.batch_rows or len(rows))), len(rows))
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
    """Splits the chosen rows, shortest first, into parts of at most `budget` padded tokens, or one row."""
    part: list[int] = []
    for index in sorted(chosen, key=lambda index: (rows[index].length, index)):
        if part and (len(part) + 1) * rows[index].length > budget:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def lay_out(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Right-padded: under causal attention nothing sees the padding, so the model needs no attention mask."""
    width = max(row.length for row in rows)
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    for line, row in zip(tokens, rows, strict=True):
        line[: row.length] = row.token_ids[: row.length]
    starts = np.arange(len(rows)) * width
    counts = np.array([len(row.positions) for row in rows])
    mask = np.arange(counts.max()) < counts[:, None]
    predecessors = np.concatenate([row.positions for row in rows]) - 1 + np.repeat(starts, counts)
    targets = np.concatenate([row.token_ids[row.positions] for row in rows]).astype(np.int64)

    def filled(values: list[np.ndarray]) -> Tensor:
        laid = np.zeros(mask.shape, dtype=np.float32)
        laid[mask] = np.concatenate(values)
        return torch.from_numpy(laid).to(device)

    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens).to(device),
        predecessors_N=torch.from_numpy(predecessors).to(device),
        targets_N=torch.from_numpy(targets).to(device),
        mask_BK=torch.from_numpy(mask).to(device),
        rollout_BK=filled([row.rollout for row in rows]),
        advantage_BK=filled([row.advantages for row in rows]),
    )
