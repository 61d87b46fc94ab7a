"""Runs the model's forward pass over stored keys and values: spans of prompts, or a token of each running sequence.

Shapes: B rows of a decoding step, C tokens per row, T positions, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from insitu.backend.attention import ATTENTION_LAYERS, attend_to_trees, layer_types, sliding_window, text_config
from insitu.backend.inference.batches import Batch, DecodeBatch, PrefillBatch, SharedRows, Span
from insitu.backend.inference.cuda_graphs import DecodeGraphs
from insitu.backend.inference.kv_pool import BLOCK, Block, LayerShape, Layout, Windows


def next_span(prompt_length: int, done: int) -> tuple[int, int]:
    """(start, end) of the span after the first `done` tokens, which are full blocks."""
    return done, min(prompt_length, done + BLOCK)


_HIDDEN = 1 << 40
"""A position after all others."""


class _Layer(CacheLayerMixin):
    """A layer of the cache that gives transformers' attention the keys and values of a batch."""

    is_initialized = True

    def __init__(self, batch: Batch, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch, self._number = batch, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the keys and values lie in blocks and windows."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self._batch.update(self._number, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class Runner:
    """A model's forward passes. With `attends_here`, attention is computed by the batches (see `batches`).

    Otherwise masks are passed for each layer type, which transformers' models accept instead of making them, or one for
    all.
    """

    def __init__(self, module: nn.Module, *, attends_here: bool = False) -> None:
        self.module = module
        self.attends_here = attends_here
        weight = next(module.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        config = text_config(module)
        self._num_layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
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
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.selects_logits = "logits_to_keep" in parameters
        if attends_here:
            attend_to_trees(model.base_model)
        self.graphs = DecodeGraphs(type(model), self.device) if self.device.type == "cuda" else None

    @property
    def can_attend_here(self) -> bool:
        """Whether `attends_here` may be tried: its results are checked."""
        can_be_exact = self.device.type == "cpu" and self._dtype in (torch.float32, torch.bfloat16)
        return can_be_exact and self._masks_of == ["full_attention"] and not self._by_layer_type

    def layout(self, *, attends_here: bool = False) -> Layout:
        """What the model stores for each token, as a forward pass shows; with `attends_here` in float32."""
        stored: list[Any] = [DynamicLayer() for _ in range(self._num_layers)]
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.module(input_ids=zero, use_cache=True, **{self._cache_name: Cache(layers=stored)})
        layers = tuple(LayerShape(each.keys.shape[1], each.keys.shape[3], each.values.shape[3]) for each in stored)
        return Layout(layers, torch.float32 if attends_here else stored[-1].keys.dtype, self.device)

    def prefill(self, spans: Sequence[Span], rows: int = 1) -> torch.Tensor:
        """Computes spans into their blocks; returns the logits after the last token of each.

        With `attends_here` in one row, whose tokens and results are padded to multiples of `rows`, and in which tokens
        that several spans begin with are computed once; otherwise all spans have the same start, and are padded to the
        longest.
        """
        if not self.attends_here:
            return self._prefill_padded(spans)
        shared = SharedRows()
        rows_of = [shared.add(span.tokens[span.start : span.end], span.before) for span in spans]
        total = len(shared.tokens)
        tokens, positions = np.zeros((2, 1, total + -total % rows), np.int64)
        tokens[0, :total], positions[0, :total] = shared.tokens, shared.positions
        last = [own[-1] for own in rows_of]
        last += last[:1] * (-len(last) % rows)
        inputs = self._placed(tokens, positions, np.empty(0), np.array(last))
        return self._forward(PrefillBatch(spans, rows_of), *inputs)[0, : len(spans)]

    def _prefill_padded(self, spans: Sequence[Span]) -> torch.Tensor:
        start, longest = spans[0].start, max(span.block.length for span in spans)
        tokens, positions = np.zeros((2, len(spans), longest), np.int64)
        keys_BT = np.full((len(spans), start + longest), _HIDDEN)  # of padding
        keys_BT[:, :start] = np.arange(start)
        for row, span in enumerate(spans):
            tokens[row, -span.block.length :] = span.tokens[start : span.end]
            positions[row, -span.block.length :] = np.arange(start, span.end)
            keys_BT[row, -span.block.length :] = np.arange(start, span.end)
        inputs = self._placed(tokens, positions, keys_BT, np.array([longest - 1]))
        return self._forward(PrefillBatch(spans), *inputs)[:, 0]

    def decode(
        self, windows: Windows, blocks_B: Sequence[Sequence[Block]], token_B: np.ndarray, position_B: np.ndarray
    ) -> torch.Tensor:
        """Logits (B, V) after one more token in each of the first B slots, at `position_B`.

        On a GPU they are overwritten by the next step.
        """
        batch = DecodeBatch(windows, blocks_B, position_B)
        keys_BT = np.empty(0) if self.attends_here else np.arange(batch.length)[None]
        inputs = self._placed(token_B[:, None], position_B[:, None], keys_BT)
        if self.graphs is None:
            return self._forward(batch, *inputs)[:, 0]
        return self.graphs.run(self._forward, batch, *inputs)[:, 0]

    def rest(self, windows: Windows) -> None:
        """No sequence is running: gives back what decoding steps keep."""
        windows.release()
        if self.graphs is not None:
            self.graphs.clear()

    def _placed(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def _masks(self, keys_BT: torch.Tensor, queries_BC: torch.Tensor) -> Any:
        """The mask of all layers, or one for each layer type; keys and queries are positions."""
        keys_B1T, queries_BC1 = keys_BT[:, None], queries_BC[..., None]
        masks = {}
        for kind in self._masks_of:
            hidden = keys_B1T > queries_BC1
            if kind == "sliding_attention":
                hidden = hidden | (keys_B1T <= queries_BC1 - self._window)
            elif kind == "chunked_attention":
                hidden = hidden | (keys_B1T // self._chunk != queries_BC1 // self._chunk)
            mask = torch.zeros(hidden.shape, device=self.device, dtype=self._dtype)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(self._dtype).min)[:, None]
        return masks if self._by_layer_type else masks[self._masks_of[0]]

    def _forward(
        self,
        batch: Any,
        input_ids_BC: torch.Tensor,
        position_ids_BC: torch.Tensor,
        keys_BT: torch.Tensor,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of some columns of each row, None: of all; `keys_BT` are positions."""
        if self.attends_here:  # a 4-D mask is passed on unchanged, and none is needed
            no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
            options: dict[str, Any] = {"attention_mask": no_mask, "use_cache": False, "cached": batch}
        else:
            cache = Cache(layers=[_Layer(batch, number) for number in range(self._num_layers)])
            masks = self._masks(keys_BT, position_ids_BC)
            options = {"attention_mask": masks, "use_cache": True, self._cache_name: cache}
        if self.selects_logits and columns is not None:
            options["logits_to_keep"] = columns
        logits: torch.Tensor = self.module(input_ids=input_ids_BC, position_ids=position_ids_BC, **options).logits
        return logits if self.selects_logits or columns is None else logits[:, columns]
