"""Weights of linear layers in the order in which MKL reads them, for decoding steps of `ROWS` rows.

Of a product with few rows, MKL spends up to half of the time on bringing the weights into that order.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

ROWS = 32
"""Rows of the products; weights are packed for one number of rows."""
LEAST_ROWS = 9
"""Fewer rows are faster with the weights as they are."""

_packed: Any = WeakIdKeyDictionary()
"""By weight, so that versions share what they share of their weights. Served weights never change."""
_lock = threading.Lock()


def can_pack(module: nn.Module) -> bool:
    """Whether the layers of a model on a CPU can be packed; that the results are the same is to be checked."""
    has_mkl = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    return has_mkl and any(True for _ in _weights(module))


@contextlib.contextmanager
def packed_products(module: nn.Module) -> Iterator[None]:
    """Within the block, linear layers of the module compute inputs of `ROWS` rows with packed weights."""
    with _lock:
        for weight in _weights(module):
            if weight not in _packed:
                _packed[weight] = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), ROWS)
    with _PackedProducts():
        yield


def unpack(module: nn.Module, others: Iterable[nn.Module]) -> None:
    """Frees the packed weights of a module, except those that others have too."""
    kept = {id(weight) for other in others for weight in _weights(other)}
    with _lock:
        for weight in _weights(module):
            if id(weight) not in kept:
                _packed.pop(weight, None)


def _weights(module: nn.Module) -> Iterable[Tensor]:
    layers = (layer for layer in module.modules() if type(layer) is nn.Linear)
    return (layer.weight for layer in layers if layer.weight.dtype == torch.float32 and layer.weight.is_contiguous())


class _PackedProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and not kwargs and (packed := _packed.get(args[1])) is not None:
            x, weight, bias = (*args, None)[:3]
            if x.numel() == ROWS * x.shape[-1]:
                return torch.ops.mkl._mkl_linear(x, packed, weight, bias, ROWS)
        return func(*args, **(kwargs or {}))
