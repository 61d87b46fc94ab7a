"""Keys and values: blocks of prompts shared by reference in one pool, and a window for each running sequence.

A sequence's tokens are cut at multiples of `BLOCK`. Each full block of a prompt is stored once, for all sequences whose
prompts begin with the same tokens. What follows the last full block lies in the sequence's window, where its tokens are
added; a full window becomes a block of the sequence alone. So on a CPU memory follows the tokens that are there, and is
given back to the system; on a GPU the memory of most full blocks is taken at the start (`BlockStore`).

Shapes: S slots, H heads of keys, W positions of a window, D head size.
"""

import functools
import math
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from insitu.algorithms.memory_budget import KV_BLOCK

BLOCK = KV_BLOCK
_WIDTHS = (64, 128, BLOCK)
"""Widths of windows."""
_KEPT_WHEN_IDLE = 64 * 2**20
"""Maximum bytes of windows that an idle scheduler keeps."""


class LayerShape(NamedTuple):
    """One layer's keys and values of a token."""

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class Layout:
    """What a model stores for each token."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    store: "BlockStore | None" = field(default=None, compare=False)
    """Where full blocks lie; None: each in its own memory."""

    @property
    def token_bytes(self) -> int:
        return sum(layer.heads * (layer.key_size + layer.value_size) for layer in self.layers) * self.dtype.itemsize

    @functools.cached_property
    def value_sizes(self) -> frozenset[int]:
        return frozenset(layer.value_size for layer in self.layers)

    def empty(self, *sizes: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of all layers, each (*sizes, H, length, D), in one piece of memory."""
        shapes = [
            (*sizes, layer.heads, length, size) for layer in self.layers for size in (layer.key_size, layer.value_size)
        ]
        counts = [math.prod(shape) for shape in shapes]
        parts = [part.view(shape) for part, shape in zip(self._memory(sum(counts)).split(counts), shapes, strict=True)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def _memory(self, count: int) -> Tensor:
        """On a CPU its own mapping, which the system gets back as soon as it is not used any more.

        A private one: the first use of a page of a shared one, which is Python's default, takes longer.
        """
        if self.device.type != "cpu" or not count:
            return torch.zeros(count, dtype=self.dtype, device=self.device)
        memory = mmap.mmap(-1, count * self.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=self.dtype)


class BlockStore:
    """Full blocks in one tensor for each layer's keys and values, from which a batch's are read by index at once.

    A GPU takes longer to start a copy for each of them than to copy them. Block 0 stays zero.
    """

    def __init__(self, layout: Layout, count: int) -> None:
        self.layers = layout.empty(count + 1, length=BLOCK)
        self._free = list(range(count, 0, -1))

    def place(self, block: "Block") -> int:
        """A place for a block as long as it exists; 0 if there is none."""
        try:
            place = self._free.pop()
        except IndexError:
            return 0
        weakref.finalize(block, self._free.append, place).atexit = False
        return place


class Block:
    """Keys and values (H, length, D) of each layer for up to `BLOCK` tokens; `logits_V` after the last of a prompt.

    `place` is that in the layout's store, 0 if it is not there. `users` are the sequences that need it.
    """

    def __init__(self, layout: Layout, length: int) -> None:
        self.place, store = 0, layout.store
        if store is not None and length == BLOCK:
            self.place = store.place(self)
        if store is not None and self.place:
            self.layers = [(keys[self.place], values[self.place]) for keys, values in store.layers]
        else:
            self.layers = layout.empty(length=length)
        self.length = length
        self.size = length * layout.token_bytes
        self.logits_V: Tensor | None = None
        self.users = 0
        self.key: Hashable = None

    def keep_logits(self, logits_V: Tensor) -> None:
        self.logits_V = logits_V.clone()
        self.size += logits_V.nbytes


class KVPool:
    """Counts the bytes of all blocks and windows, and keeps the blocks of earlier prompts while there is room.

    At most `limit` bytes are in use, of which at most `prefix_limit` are blocks that no sequence needs.
    """

    def __init__(self, limit: int, prefix_limit: int) -> None:
        self.limit, self.prefix_limit = limit, prefix_limit
        self.used = self.unused = 0
        """Bytes that are taken, and those of them in blocks that no sequence needs."""
        self._blocks: dict[Hashable, Block] = {}
        self._idle: OrderedDict[Hashable, Block] = OrderedDict()

    def take(self, size: int) -> bool:
        """Takes bytes, if need be those of blocks that no sequence needs; returns False if there are too few."""
        if size > self.limit - self.used + self.unused:
            return False
        self._trim(self.limit - size)
        self.used += size
        return True

    def give(self, size: int) -> None:
        self.used -= size

    def use(self, key: Hashable) -> Block | None:
        """The block with this key, which stays until it is dropped; None if there is none."""
        if (block := self._blocks.get(key)) is not None:
            self._use(block)
        return block

    def add(self, key: Hashable, block: Block) -> Block:
        """Keeps a block, whose bytes were taken, as one in use; returns the one to use, an equal one if there is."""
        block.key = key
        kept = self._blocks.setdefault(key, block)
        if kept is not block:
            self.used -= block.size
        self._use(kept)
        return kept

    def drop(self, blocks: Sequence[Block]) -> None:
        """Ends the use of blocks: those of a prompt are kept if there is room, others are freed."""
        for block in blocks:
            block.users -= 1
            if block.users:
                continue
            if self._blocks.get(block.key) is block:
                self._idle[block.key] = block
                self.unused += block.size
            else:
                self.used -= block.size
        self._trim(self.limit)

    def forget(self, owner: object) -> None:
        """Frees the blocks of an owner, the first part of their keys, as soon as no sequence needs them."""
        for key in [key for key in self._blocks if key[0] is owner]:  # type: ignore[index]
            block = self._blocks.pop(key)
            if self._idle.pop(key, None) is not None:
                self.unused -= block.size
                self.used -= block.size

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def _use(self, block: Block) -> None:
        if not block.users and self._idle.pop(block.key, None) is not None:
            self.unused -= block.size
        block.users += 1

    def _trim(self, most: int) -> None:
        while self._idle and (self.unused > self.prefix_limit or self.used > most):
            key, block = self._idle.popitem(last=False)
            del self._blocks[key]
            self.unused -= block.size
            self.used -= block.size


def tensors(layers: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """Keys and values, layer by layer."""
    return chain.from_iterable(layers)


class Windows:
    """The windows of a scheduler's running sequences: for each layer keys and values (S, H, W, D)."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.slots = self.width = 0
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.moves = 0
        """How often they got other memory."""

    def ensure(self, slots: int, length: int) -> None:
        """Makes room for the first `slots` sequences, and for `length` tokens in each."""
        if slots <= self.slots and length <= self.width:
            return
        old, size = self.layers, min(slots, self.slots)
        self.moves += 1
        self.slots = max(self.slots, 1 << (slots - 1).bit_length())
        self.width = max(self.width, next(width for width in _WIDTHS if width >= length))
        self.layers = self.layout.empty(self.slots, length=self.width)
        for new, before in zip(tensors(self.layers), tensors(old), strict=False):
            new[:size, :, : before.shape[2]] = before[:size]

    def release(self) -> None:
        """No sequence is running: frees the memory, unless it is little."""
        if self.slots * self.width * self.layout.token_bytes > _KEPT_WHEN_IDLE:
            self.slots, self.width, self.layers = 0, 0, []
            self.moves += 1

    def load(self, first: int, blocks: Sequence[Block]) -> None:
        """Copies blocks to the beginning of the windows from slot `first` on, but full ones."""
        if lengths := [block.length for block in blocks if block.length < BLOCK]:
            self.ensure(first + len(blocks), max(lengths))
        for block, repeated in groupby(blocks):
            slots = slice(first, first := first + len(list(repeated)))
            if block.length < BLOCK:
                for tensor, part in zip(tensors(self.layers), tensors(block.layers), strict=True):
                    tensor[slots, :, : block.length] = part

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a window."""
        if source >= self.slots:  # its prompt was whole blocks, and no token of it has been sampled after the first
            return
        for tensor in tensors(self.layers):
            tensor[target, :, :length] = tensor[source, :, :length]

    def block(self, slot: int) -> Block:
        """A copy of a full window."""
        block = Block(self.layout, BLOCK)
        for tensor, part in zip(tensors(self.layers), tensors(block.layers), strict=True):
            part.copy_(tensor[slot])
        return block
