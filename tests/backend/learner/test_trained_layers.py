"""The layers of a policy being trained, beside those of peft, and compiled."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from marks import slow_but
from peft.tuners.lora.layer import Linear
from pydantic import ValidationError
from test_learner import train
from tiny_models import save_tiny_model
from torch import Tensor, nn
from torch._dynamo.utils import counters

from insitu.backend.learner.batches import MicroBatch, Row, collate
from insitu.backend.learner.learner import Learner
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.learner.policy import TrainablePolicy, build_policy
from insitu.backend.model import LoadedModel, load_model
from insitu.errors import RequestRefused
from insitu.integrations.torchrun.group import RankGroup
from insitu.schemas.backend_processes import LearnerOptions
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import TrainingSettings

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


def fast_layers(module: nn.Module) -> list[Linear]:
    return [layer for layer in module.modules() if isinstance(layer, Linear) and type(layer) is not Linear]


@pytest.mark.parametrize("recomputes", slow_but([True], [False, True]))
@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("qwen2", "float32"), ("qwen2", "bfloat16")])
def test_adapters_are_trained_as_by_peft(tmp_path: Path, kind: str, dtype: str, recomputes: bool) -> None:
    policy = with_adapters(tmp_path, kind, dtype)
    of_peft = copy.deepcopy(policy.module)
    assert len(fast_layers(of_peft)) == 14  # of two blocks
    for layer in fast_layers(of_peft):
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
    """And to the bit as the same adapters are when they are loaded from a checkpoint."""
    policy = with_adapters(tmp_path / "base", "qwen2")
    served = policy.served()
    assert served is not None
    policy.save(tmp_path / "adapters", served)
    tokens = torch.arange(20)[None]
    loaded = load_model(str(tmp_path / "adapters"), "cpu").module
    of_peft = copy.deepcopy(loaded)
    for layer in fast_layers(of_peft):
        layer.__class__ = Linear
    with torch.inference_mode():
        logits, expected = served(tokens).logits, of_peft(tokens).logits
        assert torch.equal(logits, loaded(tokens).logits)
        assert (logits - expected).norm() < 1e-6 * expected.norm()
        assert len(fast_layers(served)) == len(fast_layers(loaded)) == 14


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # some that torch.compile provokes and hides
def test_compiled_layers_train_to_the_same_weights(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny_model(tmp_path / "model", num_hidden_layers=1)), "cpu")
    rng, results = np.random.default_rng(0), []
    prompt = rng.integers(0, 256, 20)
    rows = [
        Row(
            np.concatenate([prompt, rng.integers(0, 256, 5 + number)]).astype(np.int32),
            np.arange(20, 25 + number),
            np.full(5 + number, -5, np.float32),
            np.full(5 + number, number - 1.5, np.float32),
        )
        for number in range(4)
    ]
    compiled_frames = counters["frames"]["ok"]
    for compiles in (False, True):
        learner = Learner(loaded, tmp_path / str(compiles))
        options = {"lora": LORA, "compile": compiles, "attention": "packed", "kl_rows": 0}
        results.append(train(learner, rows, num_iterations=2, mini_batch_size=2, learning_rate=1e-3, **options)[0])
        assert (counters["frames"]["ok"] > compiled_frames) == compiles
    expected, found = results
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-5)
    for (name, one), two in zip(expected.module.named_parameters(), found.module.parameters(), strict=True):
        assert (one - two).norm() <= 1e-5 * one.norm(), name
    compiled_frames = counters["frames"]["ok"]
    found.module(torch.arange(30)[None])
    assert counters["frames"]["ok"] == compiled_frames  # what is served is not compiled


@pytest.mark.slow
def test_layers_are_not_compiled_without_a_compiler(tmp_path: Path) -> None:
    """Refused before a job, with the reason; in a process that has found none."""
    save_tiny_model(tmp_path / "model")
    script = f"""
from pathlib import Path
from insitu.backend.learner.learner import Learner
from insitu.backend.model import load_model
from insitu.errors import RequestRefused
from insitu.schemas.training_jobs import TrainingSettings

learner = Learner(load_model({str(tmp_path / "model")!r}, "cpu"), Path({str(tmp_path)!r}))
try:
    learner.verify(TrainingSettings(compile=True))
except RequestRefused as error:
    print(error)
"""
    environment = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "compile is true, but torch.compile fails: " in done.stdout
    assert "no-such-compiler" in done.stdout


def test_compiling_excludes_what_it_was_not_tested_with(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="compile is true, which excludes gradient_checkpointing: true"):
        TrainingSettings(compile=True, gradient_checkpointing=True)
    loaded = load_model(str(save_tiny_model(tmp_path / "model")), "cpu")
    group = RankGroup(LearnerOptions(processes=2), loaded, tmp_path)
    with pytest.raises(RequestRefused, match="compile is true, but several processes train"):
        Learner(loaded, tmp_path, group=group).verify(TrainingSettings(compile=True))
