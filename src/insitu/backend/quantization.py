"""Frozen weights of 8 or 4 bits, over which LoRA adapters are trained and served."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from insitu.errors import BackendError, install_command

_BLOCK = 64
"""Weights that share a scale in nf4."""


def quantizer(kind: str) -> Callable[[nn.Module, torch.device], None]:
    """A function that quantizes the linear layers of a model in place, except for the one that gives the logits.

    It moves the model to the device, these layers one by one. `int8` has one scale for each output (torchao's
    Int8WeightOnlyConfig), `nf4` is the 4-bit NormalFloat of QLoRA (Dettmers et al. 2023, arXiv:2305.14314). Inputs and
    outputs keep their dtype. Raises BackendError if torchao is missing; the function does if no layer is quantized.
    """
    try:
        from torchao.quantization import Int8Tensor, PerRow
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    except ImportError as error:
        raise BackendError(f"quantization is {kind}, which needs torchao ({install_command('quantized')})") from error

    def convert(weight: Tensor) -> Tensor:
        if kind == "int8":
            return Int8Tensor.from_hp(weight, granularity=PerRow())
        return to_nf4(weight.contiguous(), _BLOCK, _scales_together(weight))

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


def _scales_together(weight: Tensor) -> int:
    """The number of scales that are quantized together: at most 256, as many as divide all."""
    blocks = weight.numel() // _BLOCK
    return next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if blocks % size == 0)
