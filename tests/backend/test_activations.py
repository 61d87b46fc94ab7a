"""Activation functions on a CPU."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN

from insitu.backend.activations import align_activations

ELEMENTWISE = sorted(name for name in ACT2CLS if not any(ACT2FN[name].parameters()))


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_neither_on_the_others_nor_on_threads(threads: int, dtype: torch.dtype) -> None:
    """Of a width that is no multiple of a vector, and of one that three threads do not divide."""
    for width in (700, 896):
        x = torch.randn(100, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        for name in ELEMENTWISE:
            plain = ACT2FN[name]
            align_activations(aligned := nn.Sequential(copy.deepcopy(plain)))
            for count in (1, 2, 23, 47, 75, 100):
                together = aligned(x[:count])
                for row in range(0, count, 11):
                    assert torch.equal(together[row], aligned(x[row])), name
            torch.testing.assert_close(together, plain(x))
            assert torch.equal(aligned(x[:, ::2]), aligned(x[:, ::2].contiguous())), name


def test_gradients_are_those_of_the_plain_function() -> None:
    x = torch.randn(5, 700, requires_grad=True)
    align_activations(aligned := nn.Sequential(nn.SiLU()))
    (gradient,) = torch.autograd.grad(copy.deepcopy(aligned)(x).sum(), x)
    (expected,) = torch.autograd.grad(nn.SiLU()(x).sum(), x)
    assert torch.equal(gradient, expected)
