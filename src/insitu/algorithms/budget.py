"""Decisions of the rollout budget: which attempts are saved, which rows take their place, and which are skipped.

Each depends on the seed, the plan, and results of the same group or of earlier epochs, never on who was first: a
repeated run plays the same episodes.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from insitu.schemas.evaluation import EvalInputItem


@dataclass(frozen=True)
class Budget:
    """How the groups of an epoch are played.

    `waves` are the sizes of the waves in which the attempts of a group begin. `reserve` are rows for the groups without
    variance, up to one for each of `positions` planned rows in the first try, and so on. `skipped` rows were not
    planned.
    """

    waves: tuple[int, ...]
    reserve: Sequence[EvalInputItem] = ()
    positions: int = 0
    skipped: int = 0

    def replacement(self, position: int, number: int) -> EvalInputItem | None:
        """The row of the try `number` (from 1) at a position of the plan; None if none is left."""
        index = (number - 1) * self.positions + position
        return self.reserve[index] if index < len(self.reserve) else None

    def next_wave(self, begun: int) -> int:
        """How many attempts begin once `begun` have ended; 0 after the last wave."""
        waves = iter(self.waves)
        while begun > 0:
            begun -= next(waves)
        return next(waves, 0)


@dataclass
class Spending:
    """The episodes of an epoch, as far as it is decided: `planned + extra - saved` are played.

    The field names are keys of `training_metrics.jsonl`.
    """

    planned_episodes: int
    """Rows of the plan x generations."""
    extra_episodes: int = 0
    """Those of rows that took the place of others, all generations."""
    saved_episodes: int = 0
    """Those of ended groups that were not played."""
    replaced_groups: int = 0
    skipped_rows: int = 0

    @classmethod
    def of(cls, budget: Budget | None, planned: int) -> "Spending":
        return cls(planned, skipped_rows=budget.skipped if budget is not None else 0)

    def add(self, saved: int, extra: int) -> None:
        """Counts a group that has ended; `extra` episodes are planned for the row in its place, 0 without one."""
        self.saved_episodes += saved
        self.extra_episodes += extra
        self.replaced_groups += extra > 0

    @property
    def episodes(self) -> int:
        return self.planned_episodes + self.extra_episodes - self.saved_episodes


def lacks_variance(rewards: Sequence[float]) -> bool:
    """Whether several rewards are all equal, so that a group teaches nothing; a single one says nothing."""
    return len(rewards) > 1 and len(set(rewards)) == 1


def draw_reserve(
    rows: Sequence[EvalInputItem], unavailable: Callable[[str], bool], count: int, epoch: int, seed: int
) -> list[EvalInputItem]:
    """Up to `count` of the rows that are available, in a seeded order."""
    available = [row for row in rows if not unavailable(str(row.id))]
    return random.Random(f"{seed}|reserve|{epoch}").sample(available, min(count, len(available)))


def is_skipped(row_id: str, chance: float, epoch: int, seed: int) -> bool:
    """Whether a row that is planned with a chance is not, in this epoch."""
    return random.Random(f"{seed}|retry|{epoch}|{row_id}").random() >= chance


class Choice(NamedTuple):
    """The positions of the rows of an epoch in the order over all passes, where the next epoch begins, and how many
    rows were passed over."""

    positions: list[int]
    end: int
    skipped: int


def choose_rows(row_at: Callable[[int], str], start: int, size: int, total: int, skip: Callable[[str], bool]) -> Choice:
    """At most `size` distinct rows of a dataset of `total`, from `start` on, without those to skip.

    If too few are left, skipped rows fill the epoch, the first ones first. An epoch of all rows becomes smaller
    instead, but never empty.
    """
    chosen: dict[str, int] = {}
    skipped: dict[str, int] = {}
    position = start
    while len(chosen) < size and len(chosen) + len(skipped) < total:
        row = row_at(position)
        if row not in chosen and row not in skipped:
            (skipped if skip(row) else chosen)[row] = position
        position += 1
    needed = size - len(chosen) if size < total else int(not chosen)
    filled = [*islice(skipped.values(), needed)]
    return Choice([*chosen.values(), *filled], position, len(skipped) - len(filled))
