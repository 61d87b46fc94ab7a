"""Each family of models in transformers: sampled as its own forward pass computes, trained for a step, or refused.

A model has random weights and a byte-level tokenizer. The table of families is `tests/support/model_families.py`.
"""

import asyncio
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from model_families import REFUSED, SERVED, WINDOW, Family
from peft import LoraConfig, get_peft_model
from test_engine import asks, params, running
from test_learner import reference_logprobs, train
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner, TrainedVersion
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.model import LoadedModel, load_model, quiet_peft
from insitu.errors import BackendError, RequestRefused
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import TrainingSettings

LENGTHS = (1, 9, 30, 50, WINDOW + 1, 150, 290, 290)
"""Tokens of the prompts; more than 256 are computed in two parts, the first of which the last two share."""
TOKENS = 12
LORA = {"rank": 4, "alpha": 8, "target_modules": "all-linear"}


class Sample(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens


class Case(NamedTuple):
    """A family's model, what was sampled from it twice, and the columns of the forward passes of the second time."""

    family: Family
    folder: Path
    loaded: LoadedModel
    samples: list[Sample]
    columns: list[int]


def save(family: Family, folder: Path) -> Path:
    return save_tiny_model(folder, family.model_type, **{"max_position_embeddings": 512, **family.settings})


@pytest.fixture(scope="module", params=SERVED, ids=lambda family: family.key)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    before = torch.get_num_threads()
    folder = save(request.param, tmp_path_factory.mktemp("model") / "model")
    loaded = load_model(str(folder), "cpu")
    yield Case(request.param, folder, loaded, *asyncio.run(sample_twice(loaded)))
    torch.set_num_threads(before)


async def sample_twice(loaded: LoadedModel) -> tuple[list[Sample], list[int]]:
    rng, samples, columns = random.Random(0), [], []
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    prompts[-1][:270] = prompts[-2][:270]
    async with running(loaded) as engine:
        for repeat in range(2):
            answers = await asyncio.gather(
                *(engine.complete(asks(prompt, [params(repeat * 100 + n, TOKENS)])) for n, prompt in enumerate(prompts))
            )
            for prompt, (answer,) in zip(prompts, answers, strict=True):
                tokens = [token.id for token in answer.tokens]
                samples.append(Sample(prompt, tokens, [token.logprob for token in answer.tokens]))
            if not repeat:
                hook = loaded.module.register_forward_pre_hook(
                    lambda module, args, kwargs: columns.append(kwargs["input_ids"].shape[1]), with_kwargs=True
                )
    hook.remove()
    return samples, columns


def test_sampled_tokens_have_the_log_probabilities_of_transformers(case: Case) -> None:
    """In one batch of different lengths, over windows and in two parts; then over cached prompts."""
    plain = AutoModelForCausalLM.from_pretrained(case.folder).eval()
    for sample in case.samples:
        expected = reference_logprobs(plain, sample.ids)[-TOKENS:]
        assert torch.tensor(sample.logprobs) == pytest.approx(expected, abs=1e-4), len(sample.prompt)
    assert {*case.columns} == {1}


def rows_of(samples: list[Sample]) -> list[Row]:
    """Rows of two episodes a prompt, one of which was better."""
    return [
        Row(
            np.array(sample.ids, np.int32),
            np.arange(len(sample.prompt), len(sample.ids)),
            np.array(sample.logprobs, np.float32),
            np.full(TOKENS, 1 if number < len(samples) // 2 else -1, np.float32),
            episode=str(number),
        )
        for number, sample in enumerate(samples)
    ]


def within_window(case: Case) -> list[Sample]:
    return [sample for sample in case.samples if len(sample.ids) <= WINDOW]


def step(case: Case, folder: Path, samples: list[Sample], **settings: Any) -> tuple[Learner, TrainedVersion]:
    """One GRPO step on the samples, which the learner must see as the sampler did."""
    learner = Learner(case.loaded, folder)
    version, _ = train(learner, rows_of(samples), attention="packed", **settings)
    metrics = {key: value for key, value in version.metrics.items() if value is not None}
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["steps"] == 1
    assert metrics["grad_norm"] > 0
    assert metrics["logprob_gap"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    return learner, version


def check_reloaded(case: Case, learner: Learner, version: TrainedVersion) -> None:
    """An older version and a restarted backend have the weights of that time."""
    for sample in case.samples[:: len(LENGTHS) - 1]:
        expected = reference_logprobs(version.module, sample.ids)
        assert not torch.allclose(expected, reference_logprobs(case.loaded.module, sample.ids), atol=1e-4)
        for module in (learner.load_version(1), load_model(str(version.checkpoint), "cpu").module):
            assert torch.allclose(reference_logprobs(module, sample.ids), expected, atol=1e-6)


def is_used(name: str) -> bool:
    """Whether the text goes through a layer."""
    return all(other not in name for other in ("vision_tower", "multi_modal_projector", "correct_output_scale"))


def test_a_step_trains_all_weights(case: Case, tmp_path: Path) -> None:
    weights = case.loaded.module.named_parameters()
    before = {name: weight.clone() for name, weight in weights if is_used(name)}
    learner, version = step(case, tmp_path, case.samples)
    after = dict(version.module.named_parameters())
    unchanged = [name for name, weight in before.items() if torch.equal(weight, after[name])]
    assert not unchanged
    train(learner, rows_of(case.samples[:2]))
    check_reloaded(case, learner, version)


def test_a_step_trains_adapters_of_all_linear_layers(case: Case, tmp_path: Path) -> None:
    learner, version = step(case, tmp_path, case.samples, lora=LORA)
    adapters = {name: weight for name, weight in version.module.named_parameters() if "lora_B" in name}
    adapters = {name: weight for name, weight in adapters.items() if is_used(name)}
    assert all(weight.any() for weight in adapters.values())
    modules = {re.sub(r"(\.\d+)?\.lora_B.*", "", name).split(".")[-1] for name in adapters}
    assert modules == {*case.family.lora}
    train(learner, rows_of(case.samples[:2]), lora=LORA)
    check_reloaded(case, learner, version)


def test_rows_are_packed_if_the_table_says_so(case: Case, tmp_path: Path) -> None:
    """Those of a window or less: longer ones are padded, as are all rows of models that attend otherwise."""
    assert LogprobComputer(case.loaded).can_pack == case.family.packed
    _, version = step(case, tmp_path / "short", within_window(case))
    assert (version.metrics["computed_tokens"] < version.metrics["row_tokens"]) or not case.family.packed
    assert (version.metrics["padding_tokens"] == 0) == case.family.packed


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    """In a job and in a folder: peft would change the modules that other threads use."""
    family = next(family for family in SERVED if family.model_type == "qwen3_moe")
    folder = save(family, tmp_path / "model")
    learner = Learner(load_model(str(folder), "cpu"), tmp_path)
    settings = TrainingSettings(lora=LoRASettings(target_modules=["gate_proj", "up_proj", "down_proj"]))
    with pytest.raises(RequestRefused, match=r"lora\.target_modules is .*: adapters of the stacked weights of experts"):
        learner.verify(settings)
    config = LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"], task_type="CAUSAL_LM")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with quiet_peft():
        get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(BackendError, match=r"the adapter in .* cannot be served: adapters of the stacked weights"):
        load_model(str(tmp_path / "adapter"), "cpu")


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.key)
async def test_a_family_that_cannot_be_sampled_is_refused_by_name(family: Family, tmp_path: Path) -> None:
    folder = save(family, tmp_path / "model")
    with pytest.raises(BackendError, match=f"{family.model_type} models cannot be served here: .*{family.refused}"):
        async with running(folder):
            pass
