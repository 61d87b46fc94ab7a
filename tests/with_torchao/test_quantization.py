"""LoRA adapters over weights of 8 and 4 bits: the same as over ordinary weights with the rounded values."""

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_model
from torch import nn

from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner
from insitu.backend.learner.policy import fingerprint, plain_tensors
from insitu.backend.model import LoadedModel, load_model
from insitu.errors import BackendError, RequestRefused
from insitu.schemas.training_jobs import TrainingSettings

KINDS = ("int8", "nf4")
LORA = {"rank": 4, "alpha": 8}
SETTINGS = TrainingSettings(learning_rate=1e-2, lora=LORA, mini_batch_size=6, kl={"beta": 0.1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}


def rounded(loaded: LoadedModel, folder: Path) -> LoadedModel:
    """The ordinary model whose weights are those that the quantized ones stand for."""
    ordinary = load_model(str(folder), "cpu")
    for name, layer in linear_layers(ordinary.module).items():
        quantized = linear_layers(loaded.module)[name]
        identity = torch.eye(quantized.in_features)
        layer.weight.data.copy_((quantized(identity) - (0 if layer.bias is None else layer.bias)).T)
    return ordinary


def logprobs(module: nn.Module, tokens: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        logits = module(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float()
    return logits.log_softmax(-1)


def rows(module: nn.Module) -> list[Row]:
    rng, made = np.random.default_rng(0), []
    for index in range(12):
        tokens = rng.integers(0, 250, 12 + index).astype(np.int32)
        positions = np.arange(6, 12 + index)
        sampled = logprobs(module, tokens)[positions - 1, tokens[positions]].numpy()
        made.append(Row(tokens, positions, sampled, np.full(len(positions), rng.normal(), np.float32), f"e{index}"))
    return made


def run(learner: Learner, made: list[Row]):
    steps = learner.run(SETTINGS, made)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_trained_as_over_ordinary_weights_of_the_same_values(folder, tmp_path, kind):
    loaded = load_model(str(folder), "cpu", quantization=kind)
    ordinary = rounded(loaded, folder)
    made = rows(ordinary.module)
    before = fingerprint(loaded.module)
    quantized_learner, learner = Learner(loaded, tmp_path / "quantized"), Learner(ordinary, tmp_path / "ordinary")
    for _ in range(2):
        result, expected = run(quantized_learner, made), run(learner, made)
        for key in ("loss", "grad_norm", "kl"):
            assert result.metrics[key] == pytest.approx(expected.metrics[key], rel=1e-3, abs=1e-5)
    assert abs(result.metrics["kl"]) > 1e-4  # training has changed the policy
    for row in made[:3]:
        assert torch.allclose(
            logprobs(result.module, row.token_ids), logprobs(expected.module, row.token_ids), atol=2e-3
        )
        changed = logprobs(result.module, row.token_ids) - logprobs(loaded.module, row.token_ids)
        assert changed.abs().max() > 0.02
    assert fingerprint(loaded.module) == before

    shutil.copytree(tmp_path / "quantized", tmp_path / "copy")
    resumed = Learner(load_model(str(folder), "cpu", quantization=kind), tmp_path / "copy")
    resumed.resume()
    assert resumed.version == 2
    again, third = run(resumed, made), run(quantized_learner, made)
    assert again.metrics | {"seconds": 0} == third.metrics | {"seconds": 0}
    assert fingerprint(again.module) == fingerprint(third.module)


@pytest.mark.parametrize(("kind", "least", "most"), [("int8", 1 / 4, 0.33), ("nf4", 1 / 8, 0.17)])
def test_weights_take_a_quarter_and_an_eighth(tmp_path, kind, least, most):
    folder = save_tiny_model(tmp_path, hidden_size=128, intermediate_size=256)
    loaded, ordinary = load_model(str(folder), "cpu", quantization=kind), load_model(str(folder), "cpu")
    before = linear_layers(ordinary.module)
    ratios = {
        name: sum(part.nbytes for part in plain_tensors(layer.weight)) / before[name].weight.nbytes
        for name, layer in linear_layers(loaded.module).items()
    }
    assert ratios.pop("lm_head") == 1
    assert least < min(ratios.values()) <= max(ratios.values()) < most
    probe = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    for name, layer in linear_layers(loaded.module).items():
        if layer.in_features == 128:
            error = (layer(probe) - before[name](probe)).norm() / before[name](probe).norm()
            assert error < {"int8": 0.01, "nf4": 0.13}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_folder_is_loaded_on_a_quantized_base(folder, tmp_path, kind):
    loaded = load_model(str(folder), "cpu", quantization=kind)
    made = rows(loaded.module)
    result = run(Learner(loaded, tmp_path), made)
    again = load_model(str(result.checkpoint), "cpu", quantization=kind)
    tokens = made[0].token_ids
    assert torch.allclose(logprobs(again.module, tokens), logprobs(result.module, tokens), atol=1e-5)
    ordinary = load_model(str(result.checkpoint), "cpu")
    assert not torch.allclose(logprobs(ordinary.module, tokens), logprobs(result.module, tokens), atol=1e-4)


def test_all_weights_cannot_be_trained(folder, tmp_path):
    learner = Learner(load_model(str(folder), "cpu", quantization="int8"), tmp_path)
    with pytest.raises(RequestRefused, match=r"are quantized \(int8\); train with lora"):
        learner.verify(TrainingSettings(learning_rate=1e-2))
    learner.verify(SETTINGS)


def test_a_model_without_linear_layers_and_damaged_weights_are_refused(folder, tmp_path):
    gpt2 = save_tiny_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(BackendError, match="quantization is nf4, but GPT2LMHeadModel has no linear layer for it"):
        load_model(str(gpt2), "cpu", quantization="nf4")
    damaged = load_model(str(folder), "cpu")
    layer = copy.deepcopy(damaged.module)
    layer.model.layers[0].mlp.up_proj.weight.data[3, 5] = float("nan")
    layer.save_pretrained(tmp_path / "damaged")
    damaged.tokenizer.save_pretrained(tmp_path / "damaged")
    for kind in KINDS:
        with pytest.raises(BackendError, match=r"up_proj\.weight has NaN"):
            load_model(str(tmp_path / "damaged"), "cpu", quantization=kind)
