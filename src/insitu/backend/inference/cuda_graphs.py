"""CUDA graphs of decoding steps: a GPU starts a thousand kernels faster together than one by one.

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
_MOST = 32
"""Graphs that are kept; each takes memory of the driver."""
_cannot: set[type] = set()
"""Classes of models whose steps cannot be captured."""


class DecodeGraphs:
    """The captured steps of a model, by the shapes of what they read.

    A graph reads the windows where they lay when it was captured; all are dropped when the windows move. Logits are
    overwritten by the next step.
    """

    def __init__(self, kind: type, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self.clear()

    def clear(self) -> None:
        """Gives back the memory of all graphs."""
        self._place: tuple[Windows, int] | None = None
        self._seen: set[tuple[torch.Size, ...]] = set()
        self._graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self._logits: dict[int, Tensor] = {}
        """The graphs' results, by the number of rows."""
        self._memory = torch.cuda.graph_pool_handle()  # one ends with its graphs

    @property
    def works(self) -> bool:
        return self._kind not in _cannot

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self, forward: Forward, batch: DecodeBatch, tokens_B1: Tensor, position_B1: Tensor, keys_BT: Tensor
    ) -> Tensor:
        """The logits (B, 1, V)."""
        inputs = [tokens_B1, position_B1, keys_BT]
        if not self.works or not batch.is_in_store:
            return forward(batch, *inputs)
        place = batch.windows, batch.windows.moves
        if self._place != place or len(self._graphs) > _MOST:
            self.clear()
            self._place = place
        read = [*inputs, *batch.indices]
        shapes = tuple(tensor.shape for tensor in read)
        if shapes not in self._seen:  # the first one also prepares what must not be prepared in a capture
            self._seen.add(shapes)
            logits = forward(batch, *inputs)
            self._logits.setdefault(len(logits), torch.empty_like(logits))
            return logits
        with torch.cuda.device(self._device):
            if shapes not in self._graphs:
                if (graph := self._capture(forward, batch, inputs)) is None:
                    return forward(batch, *inputs)
                self._graphs[shapes] = graph, read
            graph, captured = self._graphs[shapes]
            for old, new in zip(captured, read, strict=True):
                if old is not new:
                    old.copy_(new)
            graph.replay()
        return self._logits[len(tokens_B1)]

    def _capture(self, forward: Forward, batch: DecodeBatch, inputs: list[Tensor]) -> torch.cuda.CUDAGraph | None:
        graph, result = torch.cuda.CUDAGraph(), self._logits[len(inputs[0])]
        try:
            # The outer stream is the current one again after a capture that fails.
            with torch.cuda.stream(torch.cuda.current_stream()):
                with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                    result.copy_(forward(batch, *inputs))
        except Exception as error:  # a model can do what no graph can
            if not isinstance(error, torch.OutOfMemoryError):
                kind, problem = self._kind.__name__, f"{type(error).__name__}: {error}"
                logger.warning("%s samples without CUDA graphs, which is slower: %s", kind, problem)
                _cannot.add(self._kind)
            self.clear()
            return None
        return graph
