"""Decoding steps on a GPU as CUDA graphs: it starts a step's thousand kernels at once, not one by one.

a shape's first step: as usual -> its second: captured -> from then on: replayed
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from insitu.backend.inference.batches import DecodeBatch
from insitu.backend.inference.kv_pool import Windows

logger = logging.getLogger(__name__)

Forward = Callable[[DecodeBatch, Tensor, Tensor, Tensor], Tensor]
"""From a batch, tokens (B, 1), their positions (B, 1), and those of the keys (B, T) to logits (B, 1, V)."""


class DecodeGraphs:
    """The captured steps of a model, by the shapes of what they read.

    A graph reads the windows where they lay when it was captured; all are dropped when the windows move. Logits are
    overwritten by the next step.
    """

    def __init__(self) -> None:
        self._place: tuple[Windows, int] | None = None
        self._seen: set[tuple[torch.Size, ...]] = set()
        self._graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self._logits: dict[int, Tensor] = {}
        """The graphs' results, by the number of rows."""
        self._memory = torch.cuda.graph_pool_handle()
        self.works = True

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self, forward: Forward, batch: DecodeBatch, tokens_B1: Tensor, position_B1: Tensor, keys_BT: Tensor
    ) -> Tensor:
        """The logits (B, 1, V)."""
        inputs = [tokens_B1, position_B1, keys_BT]
        if not self.works or not batch.is_in_store:
            return forward(batch, *inputs)
        if self._place != (place := (batch.windows, batch.windows.moves)):
            self._place = place
            self._graphs.clear()
            self._seen.clear()
            self._memory = torch.cuda.graph_pool_handle()  # the last one went with its graphs
        read = [*inputs, *batch.indices]
        shapes = tuple(tensor.shape for tensor in read)
        if shapes not in self._seen:  # the first one also prepares what must not be prepared in a capture
            self._seen.add(shapes)
            logits = forward(batch, *inputs)
            self._logits.setdefault(len(logits), torch.empty_like(logits))
            return logits
        if shapes not in self._graphs:
            try:
                self._graphs[shapes] = self._capture(forward, batch, inputs), read
            except Exception as error:  # a model can do what no graph can
                logger.info("decoding without CUDA graphs: %s: %s", type(error).__name__, error)
                self.works = False
                return forward(batch, *inputs)
        graph, captured = self._graphs[shapes]
        for old, new in zip(captured, read, strict=True):
            if old is not new:
                old.copy_(new)
        graph.replay()
        return self._logits[len(tokens_B1)]

    def _capture(self, forward: Forward, batch: DecodeBatch, inputs: list[Tensor]) -> torch.cuda.CUDAGraph:
        graph, result = torch.cuda.CUDAGraph(), self._logits[len(inputs[0])]
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result.copy_(forward(batch, *inputs))
        return graph
