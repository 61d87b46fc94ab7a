"""Trajectories with rewards to training rows, as ART weighs them: groups, advantages, packed sequences.

A choice is trained on as it was sampled: the ids in it behind the prompt it was sampled from, which is the one it
carries, or else what the chat template makes of the messages before it. Nothing that was sampled is tokenised again.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from insitu.advantages.credit import AdvantageConfig, group_advantages
from insitu.advantages.estimator import rows_of
from insitu.backend.art.messages import Group, History, Trajectory
from insitu.backend.training.batches import Row
from insitu.backend.training.uploads import Limits
from insitu.errors import RequestRefused
from insitu.schemas.episodes import ModelCall, TrainingRow

SEQUENCE = 2048
"""The length of a packed sequence is the next multiple of this that takes the longest row."""

Render = Callable[[list[dict[str, Any]], list[Any] | None], list[int]]
"""Messages and tools to the prompt's token ids."""


@dataclass
class Batch:
    """`rows` to train on; `sequences` ART would pack them into; `dropped` trajectories (too_long: rows) by reason."""

    rows: list[Row] = field(default_factory=list)
    sequences: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    trainable_groups: int = 0


@dataclass(frozen=True)
class RowOptions:
    """`max_length` tokens a row may have; `packed_length` of a sequence, none for the default.

    `sequence_limit` is what the client configured as the longest sequence, the limit of the default.
    """

    scale_rewards: bool
    advantage_balance: float
    max_length: int
    packed_length: int | None = None
    sequence_limit: int | None = None


def make_batch(groups: Sequence[Group], options: RowOptions, render: Render, limits: Limits) -> Batch:
    """Everything there is to train on. Raises RequestRefused where ids or rewards cannot be used."""
    batch = Batch()
    scale = AdvantageConfig(scale="population_std" if options.scale_rewards else "none", epsilon=1e-6)
    packed = _Packing(options)
    advantages: dict[str, float] = {}
    found: list[list[TrainingRow]] = []
    for number, group in enumerate(groups):
        rewards = [trajectory.reward for trajectory in group.trajectories]
        batch.trainable_groups += len(set(rewards)) > 1
        of_group: list[TrainingRow] = []
        for place, (trajectory, advantage) in enumerate(
            zip(group.trajectories, group_advantages(rewards, scale), strict=True)
        ):
            if advantage == 0:
                batch.dropped["equal_rewards"] += 1
                continue
            episode = f"{number}/{place}"
            rows = _rows(trajectory, episode, render, limits)
            fitting = [row for row in rows if len(row.token_ids) <= options.max_length]
            batch.dropped["too_long"] += len(rows) - len(fitting)
            batch.dropped["no_logprobs"] += not rows
            if fitting:
                advantages[episode] = _balanced(advantage, options.advantage_balance)
                of_group += fitting
        found.append(of_group)
    size = sum(map(abs, advantages.values())) / max(len(advantages), 1)
    if size == 0:
        batch.dropped["no_weight"] += len(advantages)  # advantage_balance is 1 or -1 and all are of the other kind
    else:
        batch.rows = [_row(row, advantages[row.episode] / size) for of_group in found for row in of_group]
        batch.sequences = packed.count(found)
    batch.dropped = +batch.dropped
    return batch


def _balanced(advantage: float, balance: float) -> float:
    """`balance` takes weight from one side: above 0 from the worse than average, below 0 from the better."""
    return advantage * (1 - max(balance, 0.0) if advantage < 0 else 1 + min(balance, 0.0))


def _rows(trajectory: Trajectory, episode: str, render: Render, limits: Limits) -> list[TrainingRow]:
    rows: list[TrainingRow] = []
    for history in trajectory.histories:
        calls = _calls(history, render, limits, episode)
        rows += rows_of(calls, dict.fromkeys(range(len(calls)), 1.0), episode)
    return rows


def _calls(history: History, render: Render, limits: Limits, episode: str) -> list[ModelCall]:
    """A call for each choice whose sampled ids are known."""
    calls = []
    for place, turn in enumerate(history.turns):
        if turn.token_ids is None:
            continue
        prompt = turn.prompt_token_ids
        if prompt is None:
            prompt = render([before.message for before in history.turns[:place]], history.tools)
        if not prompt:
            raise _refused(f"trajectory {episode}: nothing stands before its choice {place}")
        for token in (*prompt, *turn.token_ids):
            if not isinstance(token, int) or not 0 <= token < limits.vocabulary:
                raise _refused(
                    f"trajectory {episode}: choice {place} has the token id {token!r}; the vocabulary ends at "
                    f"{limits.vocabulary - 1}"
                )
        calls.append(
            ModelCall(place, "", [], prompt_token_ids=prompt, token_ids=turn.token_ids, logprobs=turn.logprobs)
        )
    return calls


def _row(row: TrainingRow, advantage: float) -> Row:
    positions = np.flatnonzero(row.loss_mask).astype(np.int32)
    return Row(
        token_ids=np.array(row.token_ids, dtype=np.int32),
        positions=positions,
        rollout=np.array(row.logprobs, dtype=np.float32)[positions],
        advantages=np.full(len(positions), advantage, dtype=np.float32),
        episode=row.episode,
    )


class _Packing:
    """How many sequences ART packs rows into: one after the other, a prefix that all rows of a group share once."""

    def __init__(self, options: RowOptions) -> None:
        self._options = options

    def count(self, groups: Sequence[Sequence[TrainingRow]]) -> int:
        longest = max(len(row.token_ids) for rows in groups for row in rows)
        usual = math.ceil(longest / SEQUENCE) * SEQUENCE
        length = self._options.packed_length or min(usual, self._options.sequence_limit or usual)
        sequences, room = 1, length
        for rows in groups:
            shared = _shared(rows)
            here = False  # whether the sequence holds the shared prefix
            for row in rows:
                needed = len(row.token_ids) - (shared if here else 0)
                if needed > room:
                    sequences, room, needed = sequences + 1, length, len(row.token_ids)
                room, here = room - needed, True
        return sequences


def _shared(rows: Sequence[TrainingRow]) -> int:
    """The length of the prefix of all that ART keeps once: what none has sampled, less its last token."""
    prompts = [row.token_ids[: row.loss_mask.index(1)] for row in rows]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    return max(sum(1 for _ in same) - 1, 0)


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, status=422, param="trajectory_groups", code="invalid_request")
