"""Frozen weights of 8 or 4 bits, over which LoRA adapters are trained and served."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from insitu.errors import BackendError, needing

_BLOCK = 64
"""Weights that share a scale in nf4."""
_MOST_SCALES = 256
"""Scales that are quantized together, or as many as divide all."""


def quantizer(kind: str) -> Callable[[nn.Module, torch.device], None]:
    """A function that quantizes the linear layers of a model in place, except for the one that gives the logits.

    It moves the model to the device, these layers one by one. `int8` has one scale for each output (torchao's
    Int8WeightOnlyConfig), `nf4` is the 4-bit NormalFloat of QLoRA (Dettmers et al. 2023, arXiv:2305.14314). Inputs and
    outputs keep their dtype. Raises BackendError if torchao is missing; the function does if no layer is quantized.
    """
    with needing("quantized", f"quantization {kind}", BackendError):
        from torchao.quantization import Int8Tensor, PerRow
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    def convert(weight: Tensor) -> Tensor:
        if kind == "int8":
            return Int8Tensor.from_hp(weight, granularity=PerRow())
        return to_nf4(weight.contiguous(), _BLOCK, math.gcd(weight.numel() // _BLOCK, _MOST_SCALES))

    def quantize(module: nn.Module, device: torch.device) -> None:
        head = module.get_output_embeddings()  # type: ignore[operator]
        layers = [
            layer
            for name, layer in module.named_modules()
            if type(layer) is nn.Linear and layer is not head and "lora_" not in name
            if kind == "int8" or layer.weight.numel() % _BLOCK == 0
        ]
        if not layers:
            raise BackendError(f"quantization is {kind}, but {type(module).__name__} has no linear layer for it")
        for layer in layers:
            layer.weight = nn.Parameter(convert(layer.weight.detach().to(device)), requires_grad=False)
        module.to(device)

    return quantize
