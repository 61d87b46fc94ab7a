"""Products with weights in bfloat16 on a CPU, in the layout of oneDNN's kernels.

With plain weights, oneDNN changes their layout for each product, and chooses a kernel by the number of rows, on which a
row's last bits depend then. Weights that were packed for a single row are multiplied by one kernel for many numbers of
rows: with AMX 1 to 128 for up to 2,048 inputs, up to 64 or 32 for more. Which, is found for each size of weights, by
numbers around the borders of kernels, and more rows are computed in parts, so that a row's bits do not depend on the
others. A product of 64 rows takes two thirds of the time.

Shapes: T rows, I inputs, O outputs.
"""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

_PART = 16
_MOST_ROWS, _MOST_OF_MANY = 128, 64
_MANY = 30_000
"""Outputs, of a vocabulary, above which fewer rows are tried: all of them took a second."""
_NUMBERS_OF_ROWS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24, 28, 31, 32, 33, 40, 48),
    *(56, 63, 64, 65, 72, 80, 96, 97, 112, 127, _MOST_ROWS),
)
_ENOUGH = 256
"""Sums, of which some show that they are computed in another order."""
_packed: Any = WeakIdKeyDictionary()
"""By weights, which must not change."""
_limits: dict[tuple[int, int, int], tuple[int, int]] = {}
"""The least and the most rows of a product, by outputs, inputs, and threads."""


class PackedLinear(nn.Linear):
    """A linear layer that computes with packed weights in inference mode."""

    def forward(self, input: Tensor) -> Tensor:
        if not packs(self.weight):
            return super().forward(input)
        return packed_linear(input.flatten(0, -2), self.weight, self.bias).view(*input.shape[:-1], -1)


def pack_linears(module: nn.Module) -> None:
    """Makes the linear layers of a model, and of copies of it, compute with packed weights where they can be packed.

    Copies share the packed weights if they share the weights.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear and _is_packable(layer.weight):
            layer.__class__ = PackedLinear


def packs(weight: Tensor) -> bool:
    """Whether products with these weights, which have no gradients then, are computed with packed ones here and now."""
    return torch.is_inference_mode_enabled() and _is_packable(weight)


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_kernels()


@functools.cache
def _has_kernels() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, added_TO: Tensor | None = None) -> Tensor:
    """`x W^T + bias + added`, rounded once."""
    if (packed := _packed.get(weight_OI)) is None:
        packed = _packed[weight_OI] = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), 1)
    outputs, inputs = weight_OI.shape
    size = outputs, inputs, torch.get_num_threads()
    if (limits := _limits.get(size)) is None:
        found = [_agreeing(packed, inputs, seed) for seed in range(1 + _ENOUGH // outputs)]
        limits = _limits[size] = max(least for least, _ in found), min(most for _, most in found)
    least, most = limits
    x_parts = x_TI.contiguous().split(most)
    added_parts = [None] * len(x_parts) if added_TO is None else added_TO.split(most)
    results = []
    for x, added in zip(x_parts, added_parts, strict=True):
        count, missing = len(x), (0, 0, 0, max(0, least - len(x)))
        if missing[-1]:
            x, added = pad(x, missing), None if added is None else pad(added, missing)
        results.append(_product(x, packed, bias_O, added)[:count])
    return results[0] if len(results) == 1 else torch.cat(results)


def _product(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, added_TO: Tensor | None) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise
    if added_TO is None:
        return linear(x_TI, packed, bias_O, "none", [], "")
    return linear.binary(x_TI, added_TO, packed, bias_O, "add")


def _agreeing(packed: Tensor, inputs: int, seed: int) -> tuple[int, int]:
    """The least and the most rows of products in which each row has the bits that it has in a product of 16 rows.

    What is left of a sum once its rounded value is subtracted, and what is left then, shows the bits that rounding
    hides.
    """
    tried = _MOST_OF_MANY if packed.shape[0] > _MANY else _MOST_ROWS
    x_TI = torch.randn(1, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16().repeat(tried, 1)
    first_TO = -_product(x_TI[:_PART], packed, None, None)
    second_TO = -_product(x_TI[:_PART], packed, None, first_TO)[:1].repeat(tried, 1)

    def hidden(count: int) -> Tensor:
        return _product(x_TI[:count], packed, first_TO[0], second_TO[:count])

    expected_O = hidden(_PART)[0]
    # Largest first: what a product gives back has room for the next one.
    numbers = [count for count in _NUMBERS_OF_ROWS if count <= tried]
    agrees = {count: bool((hidden(count) == expected_O).all()) for count in reversed(numbers)}
    fewer = (count for count in agrees if count < _PART)
    more = (count for count in numbers if count > _PART)
    least, most = ([_PART, *itertools.takewhile(agrees.__getitem__, counts)][-1] for counts in (fewer, more))
    return least, most
