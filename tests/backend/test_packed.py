"""Products in bfloat16 on a CPU with packed weights."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny_models import with_bfloat16_kernels
from torch import Tensor, nn

from insitu.backend.adapters import speed_up
from insitu.backend.packed import PackedLinear, pack_linears, packed_linear


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).bfloat16()


@with_bfloat16_kernels
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 200), (100, 37), (576, 1536), (1536, 576), (4864, 896)])
def test_a_row_does_not_depend_on_the_others(inputs: int, outputs: int) -> None:
    x, weight, bias, added = random(300, inputs), random(outputs, inputs), random(outputs), random(300, outputs)
    with torch.inference_mode():
        for extra in (None, added):
            together = packed_linear(x, weight, bias, extra)
            for count in (1, 7, 16, 33, 64, 128, 129):
                added_to_some = None if extra is None else extra[:count]
                assert torch.equal(packed_linear(x[:count], weight, bias, added_to_some), together[:count])


@with_bfloat16_kernels
def test_a_result_is_rounded_once() -> None:
    x, weight, bias, added = random(40, 576), random(192, 576), random(192), random(40, 192)
    exact = torch.addmm(bias.double(), x.double(), weight.double().t()) + added.double()
    with torch.inference_mode():
        result = packed_linear(x, weight, bias, added)
    assert ((result.double() - exact).abs() <= 0.51 * 2.0**-7 * exact.abs() + 1e-4).all()


@with_bfloat16_kernels
def test_copies_of_a_model_share_packed_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    x, plain = random(5, 64), copy.deepcopy(model)
    pack_linears(model)
    other = copy.deepcopy(model, {id(each): each for each in model.parameters()})
    assert [type(each) for each in other] == [PackedLinear, PackedLinear]
    with torch.inference_mode():
        assert torch.equal(other(x), model(x))
        assert (other(x) - plain(x)).norm() < 0.01 * plain(x).norm()
    model[0].weight.requires_grad_(True)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_an_adapter_that_has_learned_little_counts(trains: bool, has_bias: bool) -> None:
    """What it adds is below half of the last digit of the frozen layer's output, so that it shows in some of many."""
    model = nn.Sequential(nn.Linear(64, 400, bias=has_bias)).bfloat16().requires_grad_(False)
    pack_linears(model)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules="0"), model)
    speed_up(model.eval())
    layer, x = model[0], random(500, 64)
    assert type(layer).__name__ == "FastLinear"
    layer.lora_A.default.weight.data.fill_(1 / 64)
    with torch.set_grad_enabled(trains), torch.inference_mode(not trains):
        before = model(x).detach().clone()
        layer.lora_B.default.weight.data.fill_(2.0**-12)
        change = model(x).detach() - before
    expected = 2.0**-10 * x.double().mean(1, keepdim=True).expand_as(change)
    part = before.abs() > 0.5  # where half of the last digit is at least 2 ** -10
    slope = (change.double()[part] * expected[part]).sum() / expected[part].square().sum()
    assert slope == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (1536, 576)])
def test_in_float32_a_layer_computes_the_bits_of_pefts(trains: bool, has_bias: bool, inputs: int, outputs: int) -> None:
    """So that an exported adapter answers elsewhere as it was trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=has_bias)).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules="0", init_lora_weights=False), model)
    fast = copy.deepcopy(model)
    speed_up(fast.eval())
    model.eval()
    with torch.set_grad_enabled(trains):
        for count in (9, 40, 300):
            x = torch.randn(count, inputs)
            assert torch.equal(fast(x), model(x))
