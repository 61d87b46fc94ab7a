"""Linear layers with LoRA adapters: the products of peft's layers without the passes between them.

peft multiplies the adapters' output by its scale and adds it to that of the frozen layer, both as tensors of the size
of the output. Here each product adds to the result of the one before: in float32 in the same order, to the same bits;
in 16 bits that of the frozen layer last, which is summed in float32 and rounded once. There, the output of an adapter
that has learned little is less than half of the last digit of the frozen layer's, so that it would be lost if it were
added to the rounded one.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from insitu.backend.packed import PackedLinear, packed_linear, packs


def speed_up(module: nn.Module) -> None:
    """Makes the LoRA layers of a model, and of copies of it, compute with `_products`. Files and names stay peft's."""
    from peft.tuners.lora.layer import Linear

    for layer in module.modules():
        if type(layer) is Linear:
            layer.__class__ = _fast_layer()


@functools.cache
def _fast_layer() -> Any:
    from peft.tuners.lora.layer import Linear

    class FastLinear(Linear):  # type: ignore[misc, unused-ignore]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args or kwargs or not _is_simple(self):
                return super().forward(x, *args, **kwargs)
            base: Any = self.base_layer
            (name,) = self.active_adapters
            dtype = base.weight.dtype
            factors: Any = (self.lora_A[name].weight.to(dtype), self.lora_B[name].weight.to(dtype), self.scaling[name])
            x_TI = x.to(dtype).flatten(0, -2)
            if torch.is_grad_enabled():
                output = _AdaptedLinear.apply(x_TI, base.weight, base.bias, *factors)  # type: ignore[no-untyped-call]
            else:
                output, _ = _products(x_TI, base.weight, base.bias, *factors)
            return output.view(*x.shape[:-1], -1)  # not in the function, whose views must not be modified in place

    return FastLinear


def _is_simple(layer: Any) -> bool:
    """Whether a layer has one adapter, over frozen weights that are not quantized."""
    base, names = layer.base_layer, layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or type(base) not in (nn.Linear, PackedLinear):
        return False
    (name,) = names
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_dropout[name].training:
        return False
    is_frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
    return is_frozen and type(base.weight) is nn.Parameter and layer.lora_B[name].bias is None


def _products(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, and `x A^T`, with as many rows as columns and four a thread: see `inference.batch_shapes`."""
    tokens, missing = len(x_TI), max(len(a_RI), 4 * torch.get_num_threads()) - len(x_TI)
    padded = pad(x_TI, (0, 0, 0, missing)) if missing > 0 and x_TI.device.type == "cpu" else x_TI
    low_TR = (padded @ a_RI.t())[:tokens]
    if x_TI.dtype == torch.float32:
        return linear(x_TI, weight_OI, bias_O).addmm_(low_TR, b_OR.t(), alpha=scale), low_TR
    added_TO = x_TI.new_empty(tokens, len(b_OR)).addmm_(low_TR, b_OR.t(), beta=0, alpha=scale)
    if packs(weight_OI):
        return packed_linear(x_TI, weight_OI, bias_O, added_TO), low_TR
    output_TO = added_TO.addmm_(x_TI, weight_OI.t())
    return output_TO if bias_O is None else output_TO.add_(bias_O), low_TR


class _AdaptedLinear(torch.autograd.Function):
    """`x W^T + bias + scale (x A^T) B^T`, with gradients for `x`, `A` and `B`."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
    ) -> Tensor:
        output, low_TR = _products(x_TI, weight_OI, bias_O, a_RI, b_OR, scale)
        ctx.save_for_backward(x_TI, weight_OI, a_RI, b_OR, low_TR)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TO: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x_TI, weight_OI, a_RI, b_OR, low_TR = ctx.saved_tensors
        low_gradient_TR = (gradient_TO @ b_OR).mul_(ctx.scale)
        of_x_TI = (low_gradient_TR @ a_RI).addmm_(gradient_TO, weight_OI) if ctx.needs_input_grad[0] else None
        return of_x_TI, None, None, low_gradient_TR.t() @ x_TI, (gradient_TO.t() @ low_TR).mul_(ctx.scale), None
