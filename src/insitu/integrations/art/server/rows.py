"""Trajectories with rewards to training rows, with ART's groups, advantages and packed sequences.

A choice is trained as it was sampled: its token ids after the prompt it was sampled from, which it carries or which the
chat template renders from the preceding messages. Sampled text is never re-tokenized.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from insitu.advantages.credit import AdvantageConfig, group_advantages
from insitu.advantages.estimator import rows_of
from insitu.backend.learner.batches import Row
from insitu.errors import RequestRefused
from insitu.integrations.art.server.settings import ArtSettings
from insitu.integrations.art.server.trajectories import ArtGroup, ArtHistory
from insitu.schemas.episodes import ModelCall, TrainingRow

PACKING_MULTIPLE = 2048
"""By default a packed sequence is the longest row's length, rounded up to a multiple of this."""

Render = Callable[[list[dict[str, Any]], list[Any] | None], list[int]]
"""Messages and tools to the prompt's token ids."""


@dataclass
class ArtBatch:
    """`sequences`: number of packed sequences ART would train on. `dropped` counts trajectories (too_long: rows)."""

    rows: list[Row] = field(default_factory=list)
    sequences: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    trainable_groups: int = 0


def build_batch(
    groups: Sequence[ArtGroup], options: ArtSettings, render: Render, max_length: int, vocab_size: int
) -> ArtBatch:
    """`max_length` is the model's. Raises RequestRefused for invalid token ids or rewards."""
    batch = ArtBatch()
    row_limit = min(options.max_length or max_length, max_length)
    scaled = options.scale_rewards and options.normalize_advantages
    convention = AdvantageConfig(scale="population_std" if scaled else "none", epsilon=1e-6)
    balance = options.advantage_balance  # above 0 it scales down negative advantages, below 0 positive ones
    advantages: dict[str, float] = {}
    rows_by_group: list[list[TrainingRow]] = []
    for number, group in enumerate(groups):
        rewards = [trajectory.reward for trajectory in group.trajectories]
        batch.trainable_groups += len(set(rewards)) > 1
        group_rows: list[TrainingRow] = []
        pairs = zip(group.trajectories, group_advantages(rewards, convention), strict=True)
        for index, (trajectory, advantage) in enumerate(pairs):
            if advantage == 0:
                batch.dropped["equal_rewards"] += 1
                continue
            episode = f"{number}/{index}"
            rows: list[TrainingRow] = []
            for history in trajectory.histories:
                calls = _calls(history, render, vocab_size, episode)
                rows += rows_of(calls, dict.fromkeys(range(len(calls)), 1.0), episode)
            fitting = [row for row in rows if len(row.token_ids) <= row_limit]
            batch.dropped["too_long"] += len(rows) - len(fitting)
            batch.dropped["no_logprobs"] += not rows
            if fitting:
                advantages[episode] = advantage * (1 - max(balance, 0.0) if advantage < 0 else 1 + min(balance, 0.0))
                group_rows += fitting
        rows_by_group.append(group_rows)
    mean = sum(map(abs, advantages.values())) / max(len(advantages), 1)
    if mean == 0:
        batch.dropped["no_weight"] += len(advantages)  # advantage_balance is 1 or -1 and all have the other sign
    else:
        batch.rows = [_row(row, advantages[row.episode] / mean) for group in rows_by_group for row in group]
        batch.sequences = _count_sequences(rows_by_group, options)
    batch.dropped = +batch.dropped
    return batch


def _calls(history: ArtHistory, render: Render, vocab_size: int, episode: str) -> list[ModelCall]:
    """A call for each choice with known token ids."""
    calls = []
    for index, choice in enumerate(history.messages):
        if choice.token_ids is None:
            continue
        prompt = choice.prompt_token_ids
        if prompt is None:
            prompt = render([message.message for message in history.messages[:index]], history.tools or None)
        if not prompt:
            raise _refused(f"trajectory {episode}: there is no prompt before choice {index}")
        for token in (*prompt, *choice.token_ids):
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                problem = f"choice {index} has the token id {token!r}; the vocabulary ends at {vocab_size - 1}"
                raise _refused(f"trajectory {episode}: {problem}")
        call = ModelCall(index, "", [], prompt_token_ids=prompt, token_ids=choice.token_ids, logprobs=choice.logprobs)
        calls.append(replace(call, logprobs_temperature=choice.logprobs_temperature))
    return calls


def _row(row: TrainingRow, advantage: float) -> Row:
    positions = np.flatnonzero(row.loss_mask).astype(np.int32)
    return Row(
        token_ids=np.array(row.token_ids, dtype=np.int32),
        positions=positions,
        rollout_logprobs=np.array(row.logprobs, dtype=np.float32)[positions],
        advantages=np.full(len(positions), advantage, dtype=np.float32),
        episode=row.episode,
        temperature=row.temperature,
    )


def _count_sequences(groups: Sequence[Sequence[TrainingRow]], options: ArtSettings) -> int:
    """Number of sequences ART packs the rows into, in order; rows of a group share their common prefix once."""
    longest = max(len(row.token_ids) for rows in groups for row in rows)
    default = math.ceil(longest / PACKING_MULTIPLE) * PACKING_MULTIPLE
    length = options.packed_length or min(default, options.max_length or default)
    sequences, room = 1, length
    for rows in groups:
        prefix = _shared_prefix(rows)
        has_prefix = False  # whether the current sequence contains the group's prefix
        for row in rows:
            needed = len(row.token_ids) - (prefix if has_prefix else 0)
            if needed > room:
                sequences, room, needed = sequences + 1, length, len(row.token_ids)
            room, has_prefix = room - needed, True
    return sequences


def _shared_prefix(rows: Sequence[TrainingRow]) -> int:
    """Length of the rows' common untrained prefix, without its last token."""
    prompts = [row.token_ids[: row.loss_mask.index(1)] for row in rows]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    return max(sum(1 for _ in same) - 1, 0)


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, status=422, param="trajectory_groups", code="invalid_request")
