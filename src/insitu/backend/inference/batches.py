"""What the rows of one forward pass read and write, and their attention: a decoding step, or spans of prompts.

On a CPU attention is computed here, where no result depends on what else is in the batch: each row attends to its own
tokens, and a block that several rows share is read once for all of them. What prompts have in common at their beginning
is computed once, also within a block. Decoding steps attend in float32. On other devices, in float16, and for models
with sliding windows or modified scores, the model's own attention reads padded keys and values.

Shapes: B rows of a decoding step, H heads of queries, G heads of keys, R = H / G, T positions, D head size, W positions
of a window.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from insitu.backend.attention import CachedAttention, causal, merged, visible
from insitu.backend.inference.kv_pool import BLOCK, Block, Windows

_COLUMNS, _TOKENS = 32, 64
"""Windows are read up to a multiple of so many positions, and attention within a span is computed for a multiple of so
many tokens: those that `_widths` and `_lengths` find. PyTorch may use matrix units for bfloat16 from 64 on."""
_SUMS = {torch.float32: 8, torch.bfloat16: 64}
"""Heads of which some show that their sums are in another order, which rounding to 16 bits mostly hides."""


class Span(NamedTuple):
    """Tokens [start, end) of a prompt, which lie in one block; those before them are in the blocks of `before`."""

    tokens: Sequence[int]
    start: int
    before: Sequence[Block]
    block: Block

    @property
    def end(self) -> int:
        return self.start + self.block.length


class Batch(CachedAttention, Protocol):
    """A forward pass, layer by layer; queries are (B, H, T, D), new keys and values (B, G, T, D)."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values; returns all that the rows attend to, by position."""


class DecodeBatch:
    """One token for each of the first B slots; `blocks_B` are the blocks before their windows.

    `position_B` is the token's position.
    """

    def __init__(self, windows: Windows, blocks_B: Sequence[Sequence[Block]], position_B: np.ndarray) -> None:
        self.windows, self._blocks, device = windows, blocks_B, windows.layout.device
        offset_B = position_B - BLOCK * np.array([len(blocks) for blocks in blocks_B])
        self.width = windows.width  # few shapes for graphs
        if device.type == "cpu":
            self.width = _enough(_widths(windows.layout.value_sizes), int(offset_B.max()) + 1)
            windows.ensure(len(blocks_B), self.width)
        self._offset_B = torch.from_numpy(offset_B).to(device)
        self._slot_B = torch.arange(len(blocks_B), device=device)
        deep = [row for row, blocks in enumerate(blocks_B) if blocks]
        self._deep = sorted(deep, key=lambda row: (*map(id, blocks_B[row]),))
        """The rows with blocks, those that share some next to each other."""
        rows = [blocks_B[row] for row in self._deep]
        self._depth = max(map(len, rows), default=0)
        self._runs = [(level, *run) for level in range(self._depth) for run in _runs(rows, level)]

    @functools.cached_property
    def _mask_B11W(self) -> Tensor:
        """What is added to scores: -inf after the token. (That is several times as fast as `masked_fill_`.)"""
        hidden_BW = torch.arange(self.width) > self._offset_B[:, None]
        return torch.zeros(hidden_BW.shape).masked_fill_(hidden_BW, -torch.inf)[:, None, None]

    def _store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.windows.layers[layer]
        keys[self._slot_B, :, self._offset_B] = key[:, :, 0].to(keys.dtype)
        values[self._slot_B, :, self._offset_B] = value[:, :, 0].to(values.dtype)
        count = len(self._blocks)
        return keys[:count, :, : self.width], values[:count, :, : self.width]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys_BGWD, values_BGWD = self._store(layer, key, value)
        count, heads = key.shape[:2]
        query_BGRD = query.view(count, heads, -1, query.shape[-1]).to(keys_BGWD.dtype) * scale
        scores = _product(query_BGRD.flatten(0, 1), keys_BGWD.flatten(0, 1).transpose(1, 2), query.shape[-1])
        scores_BGRW = scores.view(*query_BGRD.shape[:3], -1).add_(self._mask_B11W)
        weights_BGRW = torch.softmax(scores_BGRW, -1)
        if self._deep:
            of_blocks = self._attend_to_blocks(layer, query_BGRD, scores_BGRW, weights_BGRW)
        result = _product(weights_BGRW.flatten(0, 1), values_BGWD.flatten(0, 1), value.shape[-1])
        if self._deep:
            result.view(count, heads, -1, result.shape[-1])[self._deep] += of_blocks
        return result.reshape(count, 1, query.shape[1], -1)

    def _attend_to_blocks(self, layer: int, query_BGRD: Tensor, scores_BGRW: Tensor, weights_BGRW: Tensor) -> Tensor:
        """The sum over the blocks for the rows that have some, whose weights in their windows it sets."""
        _, heads, repeats, _ = query_BGRD.shape
        deep, rows, past = self._deep, len(self._deep), self._depth * BLOCK
        query = query_BGRD[deep].transpose(0, 1).reshape(heads, rows * repeats, -1)
        scores = query.new_full((heads, rows, repeats, past + self.width), -torch.inf)
        flat = scores.flatten(1, 2)
        for level, first, end in self._runs:
            keys = self._blocks[deep[first]][level].layers[layer][0]
            part = slice(first * repeats, end * repeats)
            flat[:, part, level * BLOCK : (level + 1) * BLOCK] = _product_of_many(query[:, part], keys.transpose(1, 2))
        scores[..., past:] = scores_BGRW[deep].transpose(0, 1)
        weights = torch.softmax(scores, -1)
        result = query.new_zeros(heads, rows * repeats, self.windows.layers[layer][1].shape[-1])
        for level, first, end in self._runs:
            values = self._blocks[deep[first]][level].layers[layer][1]
            part = slice(first * repeats, end * repeats)
            of_level = weights.flatten(1, 2)[:, part, level * BLOCK : (level + 1) * BLOCK]
            result[:, part] += _product_of_many(of_level, values)
        weights_BGRW[deep] = weights[..., past:].transpose(0, 1)
        return result.view(heads, rows, repeats, -1).transpose(0, 1)

    @property
    def is_in_store(self) -> bool:
        """Whether `update` reads only windows and the store."""
        return not self._elsewhere

    @property
    def indices(self) -> list[Tensor]:
        """Where `update` reads and writes."""
        return [self._slot_B, self._offset_B, self._places_BL, self._window_BW]

    @property
    def length(self) -> int:
        """Positions of the padded keys and values."""
        return self._depth * BLOCK + self.width

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._store(layer, key, value)
        return (self._padded(layer, 0, keys), self._padded(layer, 1, values)) if self._deep else (keys, values)

    def _padded(self, layer: int, which: int, window_BGWD: Tensor) -> Tensor:
        """The keys (`which` 0) or values (1) of each row by position: its blocks, then its window."""
        count, heads, _, size = window_BGWD.shape
        padded_BGTD = window_BGWD.new_zeros(count, heads, self.length, size)
        blocks = padded_BGTD[:, :, : self._depth * BLOCK].unflatten(2, (self._depth, BLOCK))
        if (store := self.windows.layout.store) is not None:
            blocks.copy_(store.layers[layer][which][self._places_BL].transpose(1, 2))
        for row, level, block in self._elsewhere:
            blocks[row, :, level] = block.layers[layer][which]
        padded_BGTD.transpose(1, 2)[self._slot_B[:, None], self._window_BW] = window_BGWD.transpose(1, 2)
        return padded_BGTD

    @functools.cached_property
    def _window_BW(self) -> Tensor:
        """The positions of the windows."""
        begin_B = BLOCK * np.array([len(blocks) for blocks in self._blocks])
        return torch.from_numpy(begin_B[:, None] + np.arange(self.width)).to(self.windows.layout.device)

    @functools.cached_property
    def _places_BL(self) -> Tensor:
        places_BL = np.zeros((len(self._blocks), self._depth), np.int64)
        for row, blocks in enumerate(self._blocks):
            places_BL[row, : len(blocks)] = [block.place for block in blocks]
        return torch.from_numpy(places_BL).to(self.windows.layout.device)

    @functools.cached_property
    def _elsewhere(self) -> list[tuple[int, int, Block]]:
        """The blocks that are not in the store: (row, level, block)."""
        every = ((row, level, block) for row, own in enumerate(self._blocks) for level, block in enumerate(own))
        return [each for each in every if not each[2].place]


def _product(rows: Tensor, matrix: Tensor, size: int) -> Tensor:
    """Products with keys or values of that head size."""
    return _padded_product(rows, matrix, _least_rows(size))


@functools.cache
def _least_rows(size: int) -> int:
    """The fewest rows of a product: one or two, unless their bits depend on the columns or on where in memory they are.

    They are computed otherwise than three, and in half the time.
    """
    random = torch.Generator().manual_seed(0)
    keys_NTD = torch.randn(8, BLOCK, size, generator=random)

    def agrees(rows_NRX: Tensor, matrix_NXY: Tensor) -> bool:
        whole, columns = torch.bmm(rows_NRX, matrix_NXY), range(_COLUMNS, matrix_NXY.shape[-1], _COLUMNS)
        parts = [(torch.bmm(rows_NRX, matrix_NXY[..., :width]), whole[..., :width]) for width in columns]
        elsewhere = torch.bmm(rows_NRX[-1:].repeat(3, 1, 1), matrix_NXY[-1:].expand(3, -1, -1))
        return all(torch.equal(*part) for part in [*parts, (elsewhere, whole[-1:].expand(3, -1, -1))])

    for count in (1, 2):
        query_NRD, weights_NRT = (torch.randn(8, count, each, generator=random) for each in (size, BLOCK))
        if not (agrees(query_NRD, keys_NTD.transpose(1, 2)) and agrees(weights_NRT, keys_NTD)):
            return 3
    return 1


def _product_of_many(rows: Tensor, matrix: Tensor) -> Tensor:
    """Products of as many rows as share a block."""
    return _padded_product(rows, matrix, 4)


def _padded_product(rows: Tensor, matrix: Tensor, least: int) -> Tensor:
    """At least two products of at least so many rows: threads share the columns of a single one."""
    heads, count, _ = rows.shape
    if count < least:
        rows = torch.cat([rows] * least, 1)[:, :least]
    if heads == 1:
        rows, matrix = rows.expand(2, -1, -1), matrix.expand(2, -1, -1)
    return torch.bmm(rows, matrix)[:heads, :count]


class SharedRows:
    """The rows of a forward pass over spans: one for all tokens that have the same tokens before them.

    Those of spans with different blocks before them are not compared.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self._rows: dict[tuple[Block | int | None, int], int] = {}
        """By the row of the token before, or the block, and the token."""

    def missing(self, tokens: Sequence[int], before: Sequence[Block]) -> int:
        """How many rows `add` would add."""
        last: Block | int | None = before[-1] if before else None
        for number, token in enumerate(tokens):
            if (row := self._rows.get((last, token))) is None:
                return len(tokens) - number
            last = row
        return 0

    def add(self, tokens: Sequence[int], before: Sequence[Block]) -> list[int]:
        """The rows of a span, of which those that are missing are added."""
        rows: list[int] = []
        last: Block | int | None = before[-1] if before else None
        for position, token in enumerate(tokens, len(before) * BLOCK):
            row = self._rows.setdefault((last, token), len(self.tokens))
            if row == len(self.tokens):
                self.tokens.append(token)
                self.positions.append(position)
            rows.append(row)
            last = row
        return rows


class PrefillBatch:
    """Spans of prompts: for `attend` in one row of `SharedRows`, for `update` a row each, from the same start.

    `rows` are those of each span.
    """

    def __init__(self, spans: Sequence[Span], rows: Sequence[Sequence[int]] = ()) -> None:
        self.spans = spans
        self._rows_of, self._indices = rows, list[Tensor]()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if not self._indices:
            lengths = _lengths(value.dtype)
            self._indices = [torch.tensor(_padded(own, _enough(lengths, len(own)))) for own in self._rows_of]
        result = value.new_zeros(*query.shape[:3], value.shape[-1])
        for span, rows in zip(self.spans, self._indices, strict=True):
            length = span.block.length
            queries, keys, values = (each.index_select(2, rows) for each in (query, key, value))
            self._store(span, layer, keys[:, :, :length], values[:, :, :length])
            own = causal(queries, keys, values, scale)
            if span.before:
                blocks = [torch.cat([b.layers[layer][which] for b in span.before], 1)[None] for which in (0, 1)]
                before = [each.to(keys.dtype) for each in blocks]
                own = merged(own, visible(queries, before[0], before[1], scale))
            result.index_copy_(2, rows[:length], own[0][:, :, :length].to(result.dtype))
        return result.transpose(1, 2)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A row for each span, whose last token is in the last column."""
        for row, span in enumerate(self.spans):
            columns = slice(key.shape[2] - span.block.length, None)
            self._store(span, layer, key[row : row + 1, :, columns], value[row : row + 1, :, columns])
        if not self.spans[0].before:
            return key, value
        together = []
        for which, new in enumerate((key, value)):
            rows = [torch.cat([block.layers[layer][which] for block in span.before], 1) for span in self.spans]
            together.append(torch.cat([torch.stack(rows), new], 2))
        return together[0], together[1]

    def _store(self, span: Span, layer: int, keys: Tensor, values: Tensor) -> None:
        for stored, new in zip(span.block.layers[layer], (keys, values), strict=True):
            stored.copy_(new[0])


def _padded(rows: Sequence[int], length: int) -> list[int]:
    return [*rows, *[rows[-1]] * (length - len(rows))]


def _enough(numbers: Sequence[int], needed: int) -> int:
    """The first of ascending numbers that suffices."""
    return next(number for number in numbers if number >= needed)


@functools.cache
def _widths(sizes: frozenset[int]) -> Sequence[int]:
    """The widths of a window whose sums are in the order of those over a whole block, so that no other row counts.

    `sizes` are those of values.

    Kernels add many terms in parts, whose size can depend on their number: MKL's on AMD's processors all of up to 192
    at once, but more in two halves.
    """
    random = torch.Generator().manual_seed(0)

    def agrees(width: int, rows: int, size: int) -> bool:
        weights, values = (torch.randn(8, *shape, generator=random) for shape in ((rows, BLOCK), (BLOCK, size)))
        weights[..., width:] = 0
        return torch.equal(_product(weights[..., :width], values[:, :width], size), _product(weights, values, size))

    shapes = list(itertools.product((1, 2, 3, 4, 7, 16), {64, 128} | sizes))
    widths = range(_COLUMNS, BLOCK, _COLUMNS)
    return [*(width for width in widths if all(agrees(width, *shape) for shape in shapes)), BLOCK]


@functools.cache
def _lengths(dtype: torch.dtype) -> Sequence[int]:
    """The lengths of a span whose attention has the bits that its tokens have in a whole block."""
    random = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 1, _SUMS[dtype], BLOCK, 64, generator=random).to(dtype)

    def computed(length: int) -> Tensor:
        query, key, value = parts[..., :length, :]
        return causal(query, key, value, 1 / 8)[0]

    def agrees(length: int) -> bool:
        return torch.equal(computed(length), expected[..., :length, :])

    expected = computed(BLOCK)
    return [*filter(agrees, range(_TOKENS, BLOCK, _TOKENS)), BLOCK]


def _runs(rows: Sequence[Sequence[Block]], level: int) -> list[tuple[int, int]]:
    """Runs (first, end) of rows that have the same block at a level, in the order of the rows."""
    runs: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        if len(row) <= level:
            continue
        if runs and runs[-1][1] == number and rows[number - 1][level] is row[level]:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
