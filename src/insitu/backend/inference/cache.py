"""Key and value storage: one slot a request, each row with a write position of its own; and prompts kept for reuse.

Shapes: S slots, R rows of a forward pass, C columns (tokens a row), H heads, T positions, D head size.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values for all slots, (S, H, T + 1, D); the last position takes what is never read."""

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
        """Grow to the cache's size, keeping what is there."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(self.cache.slots, old.shape[1], self.cache.length + 1, old.shape[3])
            new[: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]
            setattr(self, name, new)

    def update(self, key_states, value_states, *args, **kwargs):
        """Store (R, H, C, D) where `cache.plan` says, and return all that the rows may look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.cache.plan
        self.keys[plan.rows_R1, :, plan.write_RC] = key_states.transpose(1, 2)
        self.values[plan.rows_R1, :, plan.write_RC] = value_states.transpose(1, 2)
        if plan.fresh is not None:
            plan.fresh.append((key_states, value_states))
            if plan.width == key_states.shape[2]:
                return key_states, value_states
        return self.keys[plan.read, :, : plan.width], self.values[plan.read, :, : plan.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.plan.width, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.cache.length


@dataclass(slots=True)
class Plan:
    """Where the rows of one forward pass write, and what they read.

    `fresh` collects each layer's new keys and values of a prefill, whose rows need not be in slot order.
    """

    rows_R1: torch.Tensor
    write_RC: torch.Tensor
    read: slice | torch.Tensor
    width: int
    fresh: list[tuple[torch.Tensor, torch.Tensor]] | None = None


class SlotCache(Cache):
    """The cache handed to the model; it starts small and doubles when more or longer requests need it."""

    def __init__(self, num_layers: int, slots: int = 4, length: int = 64) -> None:
        self.slots, self.length = slots, length
        self.plan: Plan = Plan(torch.empty(0), torch.empty(0), slice(0), 0)
        self.slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def ensure(self, slots: int, length: int) -> None:
        """Hold at least `slots` requests of `length` positions."""
        if slots <= self.slots and length <= self.length:
            return
        self.slots, self.length = max(self.slots, slots), max(self.length, length)
        for layer in self.slot_layers:
            if layer.is_initialized:
                layer.resize()

    def load(self, slot: int, start: int, chunk: "Chunk") -> None:
        """Copy a chunk that another request's prefill computed into `slot`."""
        end = start + chunk.length
        for layer, (keys, values) in zip(self.slot_layers, chunk.layers, strict=True):
            layer.keys[slot, :, start:end] = keys[chunk.row, :, -chunk.length :]
            layer.values[slot, :, start:end] = values[chunk.row, :, -chunk.length :]


@dataclass(slots=True, eq=False)
class Chunk:
    """Keys and values of some prompt tokens given those before them, and the logits that follow the last of them.

    `layers` is shared by all rows of the forward pass that made it; the chunk is row `row`, its last `length` columns.
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
    """Chunks by all prompt tokens up to their end; the longest unused go when they outgrow `limit` bytes."""

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
