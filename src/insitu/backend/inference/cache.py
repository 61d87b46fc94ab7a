"""Key-value cache with one slot per sequence, and a prefix cache.

Shapes: S slots, R rows of a forward pass, C columns (tokens per row), H heads, T positions, D head size.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values for all slots, (S, H, T + 1, D); padding is written to the last position."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.cache.slots, key_states.shape[1], self.cache.length + 1)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def resize(self) -> None:
        """Grows to the cache's size, keeping the contents."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(self.cache.slots, old.shape[1], self.cache.length + 1, old.shape[3])
            new[: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]
            setattr(self, name, new)

    def update(self, key_states, value_states, *args, **kwargs):
        """Writes (R, H, C, D) according to `cache.mapping`; returns the keys and values the rows attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        mapping = self.cache.mapping
        self.keys[mapping.rows_R1, :, mapping.write_RC] = key_states.transpose(1, 2)
        self.values[mapping.rows_R1, :, mapping.write_RC] = value_states.transpose(1, 2)
        if mapping.fresh is not None:
            mapping.fresh.append((key_states, value_states))
            if mapping.width == key_states.shape[2]:
                return key_states, value_states
        return self.keys[mapping.read, :, : mapping.width], self.values[mapping.read, :, : mapping.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.mapping.width, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.cache.length


@dataclass(slots=True)
class SlotMapping:
    """Where the rows of one forward pass write, and what they read.

    `fresh` collects each layer's new keys and values during a prefill, whose rows need not be in slot order.
    """

    rows_R1: torch.Tensor
    write_RC: torch.Tensor
    read: slice | torch.Tensor
    width: int
    fresh: list[tuple[torch.Tensor, torch.Tensor]] | None = None


class SlotCache(Cache):
    """The cache passed to the model; starts small and grows with the number and length of sequences."""

    def __init__(self, num_layers: int, slots: int = 4, length: int = 64) -> None:
        self.slots, self.length = slots, length
        self.mapping: SlotMapping = SlotMapping(torch.empty(0), torch.empty(0), slice(0), 0)
        self.slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def ensure(self, slots: int, length: int) -> None:
        """Makes room for at least `slots` sequences of `length` positions."""
        if slots <= self.slots and length <= self.length:
            return
        self.slots, self.length = max(self.slots, slots), max(self.length, length)
        for layer in self.slot_layers:
            if layer.is_initialized:
                layer.resize()

    def load(self, slot: int, start: int, chunk: "Chunk") -> None:
        """Copies a chunk computed by another sequence's prefill into `slot`."""
        end = start + chunk.length
        for layer, (keys, values) in zip(self.slot_layers, chunk.layers, strict=True):
            layer.keys[slot, :, start:end] = keys[chunk.row, :, -chunk.length :]
            layer.values[slot, :, start:end] = values[chunk.row, :, -chunk.length :]


@dataclass(slots=True, eq=False)
class Chunk:
    """Keys and values of a span of prompt tokens, and the logits after the last of them.

    `layers` is shared by all rows of the forward pass; the chunk is the last `length` columns of `row`.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    row: int
    length: int
    logits_V: torch.Tensor
    size: int = field(init=False)

    def __post_init__(self) -> None:
        share = sum(t.numel() * t.element_size() for pair in self.layers for t in pair) // self.layers[0][0].shape[0]
        self.size = share + self.logits_V.numel() * self.logits_V.element_size()


class PrefixCache:
    """LRU cache of at most `limit` bytes: chunks by all prompt tokens up to the chunk's end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._chunks: OrderedDict[tuple[int, ...], Chunk] = OrderedDict()

    def get(self, key: tuple[int, ...]) -> Chunk | None:
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._chunks.move_to_end(key)
        return chunk

    def put(self, key: tuple[int, ...], chunk: Chunk) -> None:
        replaced = self._chunks.pop(key, None)
        self._chunks[key] = chunk
        self.size += chunk.size - (replaced.size if replaced else 0)
        while self.size > self.limit and len(self._chunks) > 1:
            self.size -= self._chunks.popitem(last=False)[1].size

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: tuple[int, ...]) -> bool:
        return key in self._chunks
