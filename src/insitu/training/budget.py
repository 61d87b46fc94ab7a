"""The rollout budget of the built-in trajectory builder: its settings, and the rows of each epoch under it.

`PlannedRows` reads the outcomes of earlier groups from the run's `groups.jsonl`, as far as they are known whenever an
epoch is planned: a resumed run or a fork plans the same rows.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from insitu.algorithms.budget import Budget, choose_rows, draw_reserve, is_skipped, lacks_variance
from insitu.disk.json_files import AppendedLines, read_line
from insitu.schemas.evaluation import EvalInputItem


class KnownGroups(NamedTuple):
    """The file of a run's groups; those of epochs up to `lag` before another one are known when that is planned."""

    path: Path
    lag: int = 1


class BudgetConfig(BaseModel):
    """Which episodes are not worth playing, and what is played instead."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    waves: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    """Sizes of the waves in which the `num_generations` attempts at a row begin, each when the one before has ended. A
    group whose rewards so far are all equal ends between waves; none: all attempts begin at once."""
    replace: int = Field(default=0, ge=0)
    """How often a row whose attempts have equal rewards is replaced by another one, which the epoch did not plan."""
    retry_solved: float = Field(default=1.0, gt=0, le=1)
    """The probability that a row is planned although the rewards of its latest group were all equal; others take its
    place. Without `rows_per_epoch`, the epoch becomes smaller."""

    def check(self, num_generations: int) -> None:
        """Raises ValueError unless the waves make up a group, and the first one can tell something."""
        waves = self.waves or [num_generations]
        if sum(waves) != num_generations:
            problem = f"budget.waves {waves} are {sum(waves)} attempts"
            raise ValueError(f"{problem}; allowed: as many as num_generations, {num_generations}")
        if len(waves) > 1 and waves[0] < 2:
            raise ValueError(f"budget.waves {waves}: a single attempt differs from none; allowed: 2 or more at first")

    def of_epoch(self, epoch: int, planned: "EpochRows", rows: Sequence[EvalInputItem], generations: int) -> Budget:
        """The budget of an epoch over the dataset `rows`."""
        taken = {str(row.id) for row in planned.rows}
        count = self.replace * len(planned.rows)
        reserve = draw_reserve(rows, lambda row: row in taken or planned.skips(row), count, epoch, planned.seed)
        return Budget(tuple(self.waves or [generations]), reserve, len(planned.rows), planned.skipped)


class EpochRows(NamedTuple):
    """The rows of an epoch in the order they are run, and how many were skipped.

    `settled` are the rows that are tried with a `chance` only.
    """

    rows: list[EvalInputItem]
    epoch: int
    seed: int
    skipped: int = 0
    settled: frozenset[str] = frozenset()
    chance: float = 1.0

    def skips(self, row_id: str) -> bool:
        return row_id in self.settled and is_skipped(row_id, self.chance, self.epoch, self.seed)


class PlannedRows:
    """The rows of each epoch in turn. Those that were always or never solved are tried with a `chance`.

    The plan of an epoch depends on the groups that are `known` before it.
    """

    def __init__(
        self,
        rows: Sequence[EvalInputItem],
        order: Callable[[int], list[EvalInputItem]],
        size: int,
        seed: int,
        chance: float,
        known: KnownGroups,
    ) -> None:
        self._rows, self._size, self._seed, self._chance = rows, size, seed, chance
        self._known, self._lines = known, AppendedLines(known.path)
        self._ahead: list[tuple[int, str, bool]] = []
        """Outcomes that were read, but are of later epochs than is known to the plan."""
        self._settled: set[str] = set()
        self._start = self._epoch = 0
        self._planned = EpochRows([], 0, seed)
        self._order = lru_cache(maxsize=2)(order)

    def of_epoch(self, epoch: int) -> EpochRows:
        """The rows of an epoch that is not before the last one asked for."""
        while self._epoch < epoch:
            self._epoch += 1
            self._read_outcomes(self._epoch - self._known.lag)
            self._planned = self._next()
        return self._planned

    def _next(self) -> EpochRows:
        planned = EpochRows([], self._epoch, self._seed, 0, frozenset(self._settled), self._chance)
        total = len(self._rows)
        chosen = choose_rows(lambda p: str(self._at(p).id), self._start, self._size, total, planned.skips)
        self._start = chosen.end
        return planned._replace(rows=[*map(self._at, chosen.positions)], skipped=chosen.skipped)

    def _at(self, position: int) -> EvalInputItem:
        number, place = divmod(position, len(self._rows))
        return self._order(number)[place]

    def _read_outcomes(self, last: int) -> None:
        """Takes the outcomes of the epochs up to `last` into account."""
        for line in self._lines.read():
            record = read_line(self._known.path, line.number, line.content)
            if len(record.get("rewards", ())) > 1:
                self._ahead.append((record["epoch"], record["row_id"], lacks_variance(record["rewards"])))
        for _, row, is_settled in (outcome for outcome in self._ahead if outcome[0] <= last):
            (self._settled.add if is_settled else self._settled.discard)(row)
        self._ahead = [outcome for outcome in self._ahead if outcome[0] > last]
