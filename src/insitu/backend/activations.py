"""Activation functions on a CPU, of which a row does not depend on the others.

PyTorch's threads compute equal shares of all elements, vectors of them first and what is left of a share one by one, by
other formulas: the last bits of `silu` depend on where an element is. Here nothing is left: where shares are not whole
vectors, one thread computes few elements at a time.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_VECTORS = 64
"""Elements of the two vectors that are computed at a time: at most so many, in 16 bits with AVX-512."""
_SERIAL, _SHARE = 2**14, 2**15
"""Elements up to which one thread computes `gelu`, and others: the first, in as many shares as there are threads then,
the others in shares of at least so many (`at::internal::GRAIN_SIZE`)."""


def align_activations(module: nn.Module) -> None:
    """Makes the activation functions of a model, and of copies of it, compute so in inference mode."""
    for layer in module.modules():
        if next(layer.parameters(), None) is None and (aligned := _aligned().get(type(layer))):
            layer.__class__ = aligned


@functools.cache
def _aligned() -> dict[Any, Any]:
    """By the classes of the functions that transformers has for models."""
    from transformers.activations import ACT2CLS

    named = (each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())
    return {kind: _aligned_class(kind) for kind in named}


def _aligned_class(kind: Any) -> Any:
    class Aligned(kind):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Any:
            plain = super().forward
            if not torch.is_inference_mode_enabled():
                return plain(input)
            flat = input.contiguous().view(-1)
            if _has_whole_shares(len(flat)):
                return plain(flat).view(input.shape)
            parts = [*flat.split(_SERIAL)]
            parts[-1] = pad(parts[-1], (0, -len(flat) % _VECTORS))
            return torch.cat([plain(part) for part in parts])[: len(flat)].view(input.shape)

    return Aligned


def _has_whole_shares(count: int) -> bool:
    """Whether threads compute so many elements in shares of whole vectors."""
    threads = torch.get_num_threads()
    shares = min(threads, -(-count // _SHARE)) or 1
    return count % (_VECTORS * (math.lcm(shares, threads) if count > _SERIAL else 1)) == 0
