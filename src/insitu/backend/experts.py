"""Layers of experts on a CPU, in which a token does not depend on the others.

Each expert's products have as many rows as tokens are sent to it. MKL's kernels for AVX2 compute fewer than four rows
otherwise (see `inference.batch_shapes`), so that a token's last bits depend on which others its experts get. Here
further tokens, whose results are dropped, fill the rows of every expert up to a multiple of four.

Shapes: T tokens, K experts of each token, H features.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 4


def fill_experts(module: nn.Module) -> None:
    """Makes the experts of a model, and of copies of it, compute so in inference mode."""
    for layer in module.modules():
        kind: Any = type(layer)
        if hasattr(layer, "_is_expert_parallel"):  # as transformers marks them
            layer.__class__ = _filled_class(kind)


@functools.cache
def _filled_class(kind: Any) -> Any:
    class Filled(kind):  # type: ignore[misc]
        def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Any:
            if not torch.is_inference_mode_enabled() or experts_TK.dim() != 2:
                return super().forward(hidden_TH, experts_TK, weights_TK)
            further_FK = _further(experts_TK, self.num_experts)
            count = len(further_FK)
            hidden = torch.cat([hidden_TH, hidden_TH[:1].expand(count, -1)])
            weights = torch.cat([weights_TK, weights_TK[:1].expand(count, -1)])
            return super().forward(hidden, torch.cat([experts_TK, further_FK]), weights)[: len(hidden_TH)]

    Filled.__name__ = Filled.__qualname__ = kind.__name__
    return Filled


def _further(experts_TK: Tensor, number: int) -> Tensor:
    """The experts of tokens with which each has a multiple of four, or none."""
    choices = experts_TK.shape[1]
    missing = -torch.bincount(experts_TK.flatten(), minlength=number) % _ROWS
    further = torch.repeat_interleave(torch.arange(number), missing)
    while len(further) % choices:
        further = torch.cat([further, experts_TK.flatten()[:1].expand(_ROWS)])
    return further.view(-1, choices)
