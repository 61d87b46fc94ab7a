"""Linear layers with LoRA adapters, as they are trained: the products of peft's layers without the passes between them.

peft multiplies the adapters' output by its scale and adds it to that of the frozen layer, both as tensors of the size
of the output. Here each product adds to the result of the one before.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def speed_up(module: nn.Module) -> None:
    """Makes the LoRA layers of a model that is trained compute with `_AdaptedLinear`. Files and names stay peft's."""
    from peft.tuners.lora.layer import Linear

    for layer in module.modules():
        if type(layer) is Linear:
            layer.__class__ = _trained_layer()


@functools.cache
def _trained_layer() -> Any:
    from peft.tuners.lora.layer import Linear

    class TrainedLinear(Linear):  # type: ignore[misc, unused-ignore]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args or kwargs or not _is_simple(self):
                output: Tensor = super().forward(x, *args, **kwargs)
                return output
            base: Any = self.base_layer
            (name,) = self.active_adapters
            dtype = base.weight.dtype
            factors = (self.lora_A[name].weight.to(dtype), self.lora_B[name].weight.to(dtype), self.scaling[name])
            x_TI = x.to(dtype).flatten(0, -2)
            output = _AdaptedLinear.apply(x_TI, base.weight, base.bias, *factors)  # type: ignore[no-untyped-call]
            return output.view(*x.shape[:-1], -1)  # not in the function, whose views must not be modified in place

    return TrainedLinear


def _is_simple(layer: Any) -> bool:
    """Whether a layer has one adapter, which is trained, over frozen weights that are not quantized.

    The layers of a served copy are not: they compute as peft's do, however they were loaded.
    """
    base, names = layer.base_layer, layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or type(base) is not nn.Linear:
        return False
    (name,) = names
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_dropout[name].training:
        return False
    is_frozen = not any(parameter.requires_grad for parameter in base.parameters())
    is_plain = not is_traceable_wrapper_subclass(base.weight)
    return is_frozen and is_plain and layer.lora_A[name].weight.requires_grad and layer.lora_B[name].bias is None


class _AdaptedLinear(torch.autograd.Function):
    """`x W^T + bias + scale (x A^T) B^T`, with gradients for `x`, `A` and `B`."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
    ) -> Tensor:
        low_TR = x_TI @ a_RI.t()
        ctx.save_for_backward(x_TI, weight_OI, a_RI, b_OR, low_TR)
        ctx.scale = scale
        return linear(x_TI, weight_OI, bias_O).addmm_(low_TR, b_OR.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TO: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x_TI, weight_OI, a_RI, b_OR, low_TR = ctx.saved_tensors
        low_gradient_TR = (gradient_TO @ b_OR).mul_(ctx.scale)
        of_x_TI = None
        if ctx.needs_input_grad[0]:
            of_x_TI = (gradient_TO @ weight_OI).addmm_(low_gradient_TR, a_RI)
        return of_x_TI, None, None, low_gradient_TR.t() @ x_TI, (gradient_TO.t() @ low_TR).mul_(ctx.scale), None
