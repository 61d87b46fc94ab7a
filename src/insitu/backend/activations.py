"""Activation functions on a CPU whose result for one row does not depend on the other rows.

PyTorch's threads compute equal shares of all elements: whole vectors first, and what remains of a share by scalar
formulas, so that the last bits of `silu` depend on where an element is. Here no share has a remainder: where shares
would not be whole vectors, the elements are computed in small, padded parts, each by one thread.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_VECTORS = 64
"""A multiple of the elements that are computed at a time, which are two vectors: 64 in 16 bits with AVX-512."""
_SERIAL, _SHARE = 2**14, 2**15
"""Up to `_SERIAL` elements, `gelu` runs on one thread, and above that on all. Other functions run on one thread up to
`_SHARE` (`at::internal::GRAIN_SIZE`), then in shares of at least that many."""


def align_activations(module: nn.Module) -> None:
    """Makes the activation functions of a model, and of copies of it, compute so in inference mode."""
    for layer in module.modules():
        if next(layer.parameters(), None) is None and (aligned := _aligned().get(type(layer))):
            layer.__class__ = aligned


@functools.cache
def _aligned() -> dict[Any, Any]:
    """By the classes of the functions that transformers has names for, and of those that its models use besides."""
    from transformers.activations import ACT2CLS

    named = (each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values())
    return {kind: _aligned_class(kind) for kind in (*named, nn.GELU)}


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

    Aligned.__name__ = Aligned.__qualname__ = kind.__name__
    return Aligned


def _has_whole_shares(count: int) -> bool:
    """Whether threads compute so many elements in shares of whole vectors."""
    threads = torch.get_num_threads()
    shares = min(threads, -(-count // _SHARE)) or 1
    return count % (_VECTORS * (math.lcm(shares, threads) if count > _SERIAL else 1)) == 0
