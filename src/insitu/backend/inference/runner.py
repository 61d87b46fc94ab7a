"""Runs the model's forward pass for prefill and decoding, over keys and values cached per sequence and per prefix.

Shapes: S slots, R rows of a forward pass, C columns (tokens per row), H heads, T positions, D head size, V vocabulary.
"""

import inspect
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from insitu.backend.model import ATTENTION_LAYERS, layer_types, sliding_window, text_config

MAX_COLUMNS = 256
COLUMNS = (16, 32, 48, 64, 96, 128, 192, MAX_COLUMNS)
"""A prompt is computed 256 tokens at a time, the remainder in the narrowest of these that fits."""
MIN_WIDTH = 64


class Span(NamedTuple):
    """Part of a prompt computed by one forward pass: tokens [start, end), padded to `columns` columns."""

    start: int
    end: int
    columns: int


def next_span(prompt_length: int, done: int) -> Span:
    """The span after the first `done` tokens; depends on the prompt length only, so equal prompts share spans."""
    end = min(prompt_length, done + MAX_COLUMNS)
    return Span(done, end, COLUMNS[bisect_left(COLUMNS, end - done)])


def width_for(length: int) -> int:
    """Positions attended to for a longest row of `length`; rounded so that few different shapes occur."""
    step = 32 if length <= 256 else 256
    return max(MIN_WIDTH, -(-length // step) * step)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values for all slots, (S, H, T + 1, D); padding is written to the last position."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
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
        room = 1 << (length - 1).bit_length() if length <= 256 else length  # growing copies everything, so seldom
        self.slots, self.length = max(self.slots, slots), max(self.length, room)
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


class Runner:
    """A model and its key-value cache.

    Masks are passed for each layer type, which transformers' models accept instead of making them, or one for all.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        weight = next(module.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        config = text_config(module)
        shared = getattr(config, "num_kv_shared_layers", None) or 0  # the last layers, which use those of others
        self.cache = SlotCache(config.num_hidden_layers - shared)
        self._window: Any = sliding_window(config)
        self._chunk: Any = getattr(config, "attention_chunk_size", None)
        kinds = layer_types(config)
        self._by_layer_type = kinds <= ATTENTION_LAYERS and not kinds <= {"full_attention"}
        one_for_all = "full_attention" if self._window is None else "sliding_attention"
        self._masks_of = sorted(kinds) if self._by_layer_type else [one_for_all]
        model: Any = module
        if hasattr(module, "get_base_model"):  # a PEFT wrapper
            model = model.get_base_model()
        parameters = inspect.signature(model.forward).parameters
        self._arguments: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": self.cache}
        if "logits_to_keep" in parameters:
            self._arguments["logits_to_keep"] = 1

    def prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], spans: Sequence[Span], rows: int
    ) -> list[Chunk]:
        """Computes a span of each prompt into its slot, in a batch padded to `rows`; returns a chunk per prompt.

        All spans have the same `start` and `columns`. Rows are left-padded: the last token is in the last column.
        """
        start, columns = spans[0].start, spans[0].columns
        self.cache.ensure(max(slots) + 1, width_for(start + columns))
        tokens_RC = np.zeros((rows, columns), dtype=np.int64)
        position_RC = np.zeros((rows, columns), dtype=np.int64)
        write_RC = np.full((rows, columns), self.cache.length, dtype=np.int64)
        slot_R = np.full(rows, slots[0], dtype=np.int64)
        slot_R[: len(slots)] = slots
        padding_R = np.full(rows, columns - 1, dtype=np.int64)
        for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
            padding_R[row] = first = columns - (span.end - start)
            tokens_RC[row, first:] = prompt[start : span.end]
            position_RC[row, first:] = write_RC[row, first:] = range(start, span.end)
        positions = self._tensor(position_RC)
        if start == 0:  # causal and without padding, which attends to itself only
            place_RC = torch.arange(columns, device=self.device) - self._tensor(padding_R)[:, None]
            keys, queries = place_RC[:, None], place_RC[..., None]
            masked = (keys > queries) | ((keys < 0) & (keys != queries))
        else:
            keys, queries = torch.arange(start + columns, device=self.device), positions[..., None]
            masked = keys > queries
        fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
        rows_R = self._tensor(slot_R)
        self.cache.mapping = SlotMapping(rows_R[:, None], self._tensor(write_RC), rows_R, start + columns, fresh)
        masks = self._masks(keys, queries, masked)
        logits_RV = self._forward(self._tensor(tokens_RC), positions, masks)
        return [Chunk(fresh, row, span.end - start, logits_RV[row]) for row, span in enumerate(spans)]

    def decode(self, token_B: np.ndarray, position_B: np.ndarray, min_width: int = MIN_WIDTH) -> torch.Tensor:
        """Logits (B, V) after one more token in each of the first B slots; rows at position 0 are padding."""
        width = max(min_width, width_for(int(position_B.max()) + 1))
        self.cache.ensure(len(token_B), width)
        write_B = np.where(position_B > 0, position_B, self.cache.length)
        positions = self._tensor(position_B)[:, None]
        rows = torch.arange(len(token_B), device=self.device)[:, None]
        self.cache.mapping = SlotMapping(rows, self._tensor(write_B)[:, None], slice(len(token_B)), width)
        keys, queries = torch.arange(width, device=self.device), positions[..., None]
        masks = self._masks(keys, queries, keys > queries)
        return self._forward(self._tensor(token_B)[:, None], positions, masks)

    def _masks(self, keys: torch.Tensor, queries: torch.Tensor, masked_RCT: torch.Tensor) -> Any:
        """The mask of all layers, or one for each layer type; `keys` and `queries` are positions."""
        masks = {}
        for kind in self._masks_of:
            hidden = masked_RCT
            if kind == "sliding_attention":
                hidden = hidden | (keys <= queries - self._window)
            elif kind == "chunked_attention":
                hidden = hidden | (keys // self._chunk != queries // self._chunk)
            mask = torch.zeros(hidden.shape, device=self.device, dtype=self._dtype)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(self._dtype).min)[:, None]
        return masks if self._by_layer_type else masks[self._masks_of[0]]

    def _forward(self, tokens_RC: torch.Tensor, position_RC: torch.Tensor, masks: Any) -> torch.Tensor:
        output = self.module(
            input_ids=tokens_RC,
            position_ids=position_RC,
            attention_mask=masks,
            use_cache=True,
            **self._arguments,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
