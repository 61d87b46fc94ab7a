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
            if args or kwargs or (parts := _simple_parts(self)) is None:
                return super().forward(x, *args, **kwargs)
            x_TI = x.to(parts[0].dtype).flatten(0, -2)
            if torch.is_grad_enabled():
                output = _AdaptedLinear.apply(x_TI, *parts)  # type: ignore[no-untyped-call]
            else:
                output, _ = _products(x_TI, *parts)
            return output.view(*x.shape[:-1], -1)  # not in the function, whose views must not be modified in place

    return FastLinear


def _simple_parts(layer: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """Weights, bias, the factors A and B, and their scale, of a layer with one adapter over plain frozen weights."""
    modules = vars(layer)["_modules"]  # as attributes they take longer to find than a small product
    base, factors_a, factors_b = modules["base_layer"], modules["lora_A"], modules["lora_B"]
    names = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or type(base) not in (nn.Linear, PackedLinear):
        return None
    (name,) = names
    if name not in factors_a or name in layer.lora_variant or modules["lora_dropout"][name].training:
        return None
    weight, bias, factor_b = base.weight, base.bias, factors_b[name]
    is_frozen = not (weight.requires_grad or (bias is not None and bias.requires_grad))
    if not is_frozen or type(weight) is not nn.Parameter or factor_b.bias is not None:
        return None
    dtype = weight.dtype
    return weight, bias, factors_a[name].weight.to(dtype), factor_b.weight.to(dtype), layer.scaling[name]


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
