"""Training all weights of a model in bfloat16: small updates count as in float32."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from test_learner import train
from tiny_models import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from insitu.backend.learner.batches import Row, collate
from insitu.backend.learner.learner import Learner
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.learner.policy import as_master
from insitu.backend.model import LoadedModel

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_round_to_the_weights_and_small_updates_reach_them(dtype: torch.dtype) -> None:
    """An update by a tenth of the distance between two numbers changes a tenth of the weights."""
    torch.manual_seed(0)
    weights = (torch.randn(500, 500) / 20).to(dtype)
    weights[0, :5] = torch.tensor([0.0, -0.0, 1.0, -2.0, torch.finfo(dtype).max])
    masters = as_master("layer.weight", weights)
    assert torch.equal(masters.to(dtype), weights)
    assert torch.equal(masters, as_master("layer.weight", weights))
    spacing = torch.finfo(dtype).eps * 2 ** weights.float().abs().clamp(min=1e-4).log2().floor()
    for sign in (1, -1):
        changed = ((masters + sign * spacing / 10).to(dtype) != weights).float().mean().item()
        assert changed == pytest.approx(0.1, rel=0.05)
    vector = weights[1]
    assert torch.equal(as_master("norm.weight", vector), vector.float())


def test_bfloat16_learns_as_float32_does(tmp_path: Path) -> None:
    """From the first steps at a rate for real models on, and along the same direction."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).bfloat16().eval().requires_grad_(False)
    rng, value = np.random.default_rng(0), np.full(20, -5, np.float32)
    rows = [
        Row(rng.integers(10, 250, 40).astype(np.int32), np.arange(20, 40), value, np.full(20, sign, np.float32), str(n))
        for n, sign in enumerate([1, -1] * 4)
    ]
    batch, exact = collate(rows, CPU), copy.deepcopy(module).float()
    signs_B1 = torch.tensor([[1.0], [-1.0]] * 4)

    def gain(served: torch.nn.Module, compute: LogprobComputer) -> float:
        """Of the rewarded rows over the others, in nats per token, from the served weights without other rounding."""
        new, old = (compute(each, batch).logprobs_N for each in (copy.deepcopy(served).float(), exact))
        return ((batch.to_rows(new) - batch.to_rows(old)) * signs_B1).mean().item()

    gains: dict[torch.dtype, list[float]] = {}
    for dtype, start in ((torch.float32, exact), (torch.bfloat16, module)):
        loaded = LoadedModel(start, byte_tokenizer(), CPU, dtype, 64, "none")
        learner = Learner(loaded, tmp_path / str(dtype))
        for _ in range(4):
            trained, _ = train(learner, rows, learning_rate=1e-5)
            in_float32 = LogprobComputer(LoadedModel(exact, byte_tokenizer(), CPU, torch.float32, 64, "none"))
            gains.setdefault(dtype, []).append(gain(trained.module, in_float32))
    assert min(gains[torch.float32]) > 1e-3
    assert gains[torch.bfloat16] == pytest.approx(gains[torch.float32], rel=0.1)
