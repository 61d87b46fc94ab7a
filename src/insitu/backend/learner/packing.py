"""Chooses rows by the tokens that they compute: those of each micro-batch, and those on which `kl` is measured."""

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from insitu.backend.learner.batches import MIN_SHARED, MicroBatch, Row, collate, common_prefix, group_rows

KL_ROWS, KL_TOKENS = 128, 512
"""Maximum rows of the last step on which `kl` is measured; fewer once they have so many trained tokens."""
LEAST_SHARE = 256
"""Tokens of a micro-batch of a small model that are worth a thread's work."""
KL_SHARE = 0.03
"""Maximum cost of `kl` as a share of the job's: that of its forward and backward passes."""


class _Size:
    """The number of tokens that a micro-batch of the rows added so far computes."""

    def __init__(self, packed: bool, stretches: bool = False) -> None:
        self._packed, self._stretches = packed, stretches
        self._keys: list[bytes] = []
        self._longest = 0
        self.tokens = 0

    def add(self, keys: Iterable[bytes]) -> bool:
        """Returns whether the number has grown."""
        before = self.tokens
        for key in keys:
            place = bisect.bisect_left(self._keys, key)
            neighbors = self._keys[max(place - 1, 0) : place + 1]
            if key in neighbors:
                continue
            self._keys.insert(place, key)
            self._longest = max(self._longest, len(key) // 4)
            if self._packed:
                shared = max((common_prefix(key, neighbor) for neighbor in neighbors), default=0)
                self.tokens += len(key) // 4 - (shared if shared >= MIN_SHARED else 0)
            else:
                self.tokens = len(self._keys) * self._longest
        return self.tokens > before

    def fits(self, max_tokens: int) -> bool:
        """Whether the rows may be a micro-batch: see `Packer`."""
        if self.tokens <= max_tokens or not (self._packed and self._stretches):
            return self.tokens <= max_tokens
        shared = common_prefix(self._keys[0], self._keys[-1])
        return self.tokens <= self._longest + (min(shared, max_tokens) if shared >= MIN_SHARED else 0)


@dataclass(frozen=True)
class Packer:
    """Packs rows into micro-batches: `packed` as trees, otherwise padded.

    If it `stretches`, a tree may exceed the limit of tokens: it may add to its longest sequence as many as all its rows
    share, up to the limit. Otherwise a long prompt is computed again for each micro-batch, which is only worth it if
    several are computed at once.
    """

    rows: Sequence[Row]
    packed: bool = field(kw_only=True)
    stretches: bool = field(default=False, kw_only=True)

    @functools.cached_property
    def _keys(self) -> list[bytes]:
        return [row.key for row in self.rows]

    @property
    def tree_share(self) -> float:
        """Tokens of a prefix tree of all rows, as a share of the tokens of the distinct rows."""
        size = _Size(packed=True)
        size.add(self._keys)
        return size.tokens * 4 / sum(map(len, {*self._keys}))

    def micro_batches(self, units: Iterable[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
        """Splits the rows into micro-batches of at most `max_tokens`, padding included, if it does not stretch.

        Units with a shared prefix (padded: of similar length) are placed next to each other. A unit is kept in one
        micro-batch if it fits, and so is a tree of units; a sequence longer than `max_tokens` is a micro-batch alone.
        """
        micro_batch: list[int] = []
        size = self._size([])
        for tree in self._trees(units, max_tokens):
            whole_tree = list(itertools.chain(*tree))
            for part in [whole_tree] if self._size(whole_tree).fits(max_tokens) else tree:
                if size.add(map(self._keys.__getitem__, part)) and micro_batch and not size.fits(max_tokens):
                    yield micro_batch
                    micro_batch, size = [], self._size(part)
                micro_batch += part
        if micro_batch:
            yield micro_batch

    def even_share(self, units: Sequence[Sequence[int]], max_tokens: int, count: int, least: int = 0) -> int:
        """The tokens of a micro-batch if all units are spread evenly over rounds of `count` of them.

        Of half as many, a quarter, ... at least two, if they would have fewer than `least`.
        """
        sizes = [self._size(unit).tokens for tree in self._trees(units, max_tokens) for unit in tree]
        total = self._size(itertools.chain(*units)).tokens if self.packed else sum(sizes)
        while count > 2 and total < count * least:
            count //= 2
        rounds = -(-total // (max_tokens * count))
        return min(-(-total // max(rounds * count, 1)) + max(sizes, default=0), max_tokens)

    def collate(self, indices: Sequence[int], device: torch.device) -> MicroBatch:
        return collate([self.rows[index] for index in indices], device, packed=self.packed)

    def computed_tokens(self, indices: Sequence[int]) -> tuple[int, int]:
        """The tokens that a micro-batch of these rows computes, and how many of them are padding."""
        keys = {self._keys[index] for index in indices}
        computed = self._size(indices).tokens
        return computed, 0 if self.packed else computed - sum(map(len, keys)) // 4

    def fitting(self, indices: list[int], max_tokens: float) -> list[int]:
        """The first rows that one micro-batch of so many tokens can hold."""
        size = _Size(self.packed)
        for count, index in enumerate(indices):
            size.add([self._keys[index]])
            if size.tokens > max_tokens:
                return indices[:count]
        return indices

    def _size(self, indices: Iterable[int]) -> _Size:
        size = _Size(self.packed, self.stretches)
        size.add(map(self._keys.__getitem__, indices))
        return size

    def _trees(self, units: Iterable[Sequence[int]], max_tokens: int) -> Iterator[list[list[int]]]:
        """Lists of units with a shared prefix; padded, each alone. A unit that does not fit is split into its rows."""
        keys = self._keys

        def order(index: int) -> tuple[int, bytes, int]:
            return 0 if self.packed else len(keys[index]), keys[index], index

        fitting = [[unit] if self._size(unit).fits(max_tokens) else [[index] for index in unit] for unit in units]
        parts = sorted((sorted(part, key=order) for part in itertools.chain(*fitting)), key=lambda part: order(part[0]))
        tree: list[list[int]] = []
        for part in parts:
            if tree and not (self.packed and common_prefix(keys[tree[-1][0]], keys[part[0]]) >= MIN_SHARED):
                yield tree
                tree = []
            tree.append(part)
        if tree:
            yield tree


@dataclass
class Sizes:
    """Metrics of a job: input tokens of its rows, tokens computed and how many of these were padding, over all steps.

    `rows_without_gradient` got no backward pass, because their advantages are 0.
    """

    row_tokens: int = 0
    computed_tokens: int = 0
    padding_tokens: int = 0
    rows_without_gradient: int = 0

    def add(self, packer: Packer, micro_batches: Iterable[Sequence[int]]) -> None:
        for indices in micro_batches:
            computed, padding = packer.computed_tokens(indices)
            self.row_tokens += sum(packer.rows[index].input_length for index in indices)
            self.computed_tokens += computed
            self.padding_tokens += padding


def kl_budget(sizes: Sizes, rows: int, *, lora: bool) -> float:
    """The input tokens on which the metric may be measured after a job of these sizes, which computed `rows` rows.

    A backward pass costs as much as two forward passes, or one if the weights are frozen; the metric takes two.
    """
    with_gradient = sizes.computed_tokens * (1 - sizes.rows_without_gradient / rows)
    return KL_SHARE * (sizes.computed_tokens + (1 if lora else 2) * with_gradient) / 2


def kl_rows(packer: Packer, indices: Sequence[int], rows: int | None, budget: float | None, job: int) -> list[int]:
    """Selects the rows of `indices` on which the metric is measured: one of each episode, then a second, and so on.

    At most `rows`, or what the constants above allow. `job` counts the jobs of a training from 0.

    With a `budget` of input tokens, rows with the same prompt follow each other, as it is computed once. If it is less
    than a row, the metric is measured after every second, third, ... job, so that it costs no more on average.
    """
    by_episode = group_rows(packer.rows, indices)
    in_turn: list[int] = [index for each in itertools.zip_longest(*by_episode) for index in each if index is not None]
    if rows is not None:
        return in_turn[:rows]
    if budget is not None:
        by_prompt: dict[bytes, list[int]] = {}
        for index in in_turn:
            row = packer.rows[index]
            by_prompt.setdefault(row.token_ids[: row.positions[0]].tobytes(), []).append(index)
        in_turn = [*itertools.chain(*by_prompt.values())]
        interval = max(1, math.ceil(packer.computed_tokens(in_turn[:1])[0] / budget))
        in_turn = [*packer.fitting(in_turn, interval * budget)] if job % interval == 0 else []
    before = itertools.accumulate((len(packer.rows[index].positions) for index in in_turn), initial=0)
    return [index for index, tokens in zip(in_turn, before, strict=False) if tokens < KL_TOKENS][:KL_ROWS]
