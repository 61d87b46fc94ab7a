"""The layers of a policy being trained beside those of peft."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft.tuners.lora.layer import Linear
from tiny_models import save_tiny_model
from torch import Tensor, nn

from insitu.backend.learner.batches import MicroBatch, Row, collate
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.learner.policy import TrainablePolicy, build_policy
from insitu.backend.model import LoadedModel, load_model
from insitu.schemas.training_jobs import LoRASettings

CPU = torch.device("cpu")
LORA = LoRASettings(rank=4, alpha=12)


def with_adapters(folder: Path, kind: str, dtype: str = "float32") -> TrainablePolicy:
    """Whose second factors are no longer 0."""
    policy = build_policy(load_model(str(save_tiny_model(folder, kind)), "cpu", dtype), LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.trainable.items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return policy


def batch_of(count: int, prompt: int, packed: bool = True) -> MicroBatch:
    rng = np.random.default_rng(count)
    first, rows = rng.integers(0, 256, prompt), []
    for number in range(count):
        tokens = np.concatenate([first, rng.integers(0, 256, 5 + number)]).astype(np.int32)
        rows.append(Row(tokens, np.arange(prompt, len(tokens))))
    return collate(rows, CPU, packed=packed)


def logprobs_and_gradients(loaded: LoadedModel, module: nn.Module, batch: MicroBatch) -> list[Tensor]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    logprobs_N = LogprobComputer(loaded)(module, batch).logprobs_N
    gradients = torch.autograd.grad(logprobs_N.square().sum(), parameters)
    return [logprobs_N.detach(), torch.cat([gradient.flatten() for gradient in gradients])]


def trained_layers(module: nn.Module) -> list[Linear]:
    return [layer for layer in module.modules() if isinstance(layer, Linear) and type(layer) is not Linear]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("qwen2", "float32"), ("qwen2", "bfloat16")])
def test_adapters_are_trained_as_by_peft(tmp_path: Path, kind: str, dtype: str, recomputes: bool) -> None:
    policy = with_adapters(tmp_path, kind, dtype)
    of_peft = copy.deepcopy(policy.module)
    assert len(trained_layers(of_peft)) == 14  # of two blocks
    for layer in trained_layers(of_peft):
        layer.__class__ = Linear
    policy.checkpoint_activations(recomputes)
    batch = batch_of(4, 20)
    ours, theirs = (logprobs_and_gradients(policy.loaded, module, batch) for module in (policy.module, of_peft))
    exact = logprobs_and_gradients(replace(policy.loaded, dtype=torch.float32), of_peft.float(), batch)
    for value, expected, exact_value in zip(ours, theirs, exact, strict=True):
        if dtype == "float32":
            assert (value - expected).norm() < 1e-6 * expected.norm()
        else:
            assert (value - exact_value).norm() < max(1.2 * (expected - exact_value).norm(), 1e-3 * exact_value.norm())
            assert (value - exact_value).norm() < 0.03 * exact_value.norm()


def test_adapters_are_served_as_by_peft(tmp_path: Path) -> None:
    """To the bit, as the same adapters are when they are loaded from a checkpoint."""
    policy = with_adapters(tmp_path / "base", "qwen2")
    served = policy.served()
    assert served is not None
    policy.save(tmp_path / "adapters", served)
    tokens = torch.arange(20)[None]
    loaded = load_model(str(tmp_path / "adapters"), "cpu").module
    assert trained_layers(loaded) == []
    with torch.inference_mode():
        assert torch.equal(served(tokens).logits, loaded(tokens).logits)
