"""The rows that the metric `kl` is measured on, and what it costs."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from marks import slow_after
from test_learner import train
from tiny_models import save_tiny_model

from insitu.algorithms.memory_budget import SMALL_MODEL
from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner
from insitu.backend.learner.packing import KL_SHARE, Packer, Sizes, kl_budget, kl_rows
from insitu.backend.model import load_model


def made(groups: int, generations: int, prompt: int, completion: int) -> list[Row]:
    chance = np.random.default_rng(0)
    rows = []
    for group, generation in itertools.product(range(groups), range(generations)):
        start = np.random.default_rng(group).integers(3, 60, prompt)
        tokens = np.concatenate([start, chance.integers(3, 60, completion)]).astype(np.int32)
        positions, advantage = np.arange(prompt, prompt + completion), 1.0 if generation % 2 else -1.0
        values = np.full(completion, -4.0, np.float32), np.full(completion, advantage, np.float32)
        rows.append(Row(tokens, positions, *values, episode=f"{group}-{generation}"))
    return rows


def cost(packer: Packer, rows: Sequence[int]) -> int:
    """Both forward passes, in tokens."""
    return 2 * packer.computed_tokens(rows)[0] if rows else 0


@pytest.mark.parametrize("packed", slow_after(1, [True, False]))
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("shape", [(40, 8, 30, 16), (8, 8, 70, 16), (1, 8, 70, 16), (2, 2, 3, 90), (64, 1, 8, 8)])
def test_kl_costs_at_most_its_share_on_average(packed: bool, lora: bool, shape: tuple[int, int, int, int]) -> None:
    rows = made(*shape)
    packer, indices = Packer(rows, packed=packed), range(len(rows))
    sizes = Sizes(computed_tokens=packer.computed_tokens(indices)[0])
    budget = kl_budget(sizes, len(rows), lora=lora)
    chosen = [kl_rows(packer, indices, None, budget, job) for job in range(200)]
    assert chosen[0], "the first job is always measured"
    interval = next((job for job, rows in enumerate(chosen[1:], 1) if rows), len(chosen))
    work = sizes.computed_tokens * (2 if lora else 3)
    assert cost(packer, chosen[0]) <= KL_SHARE * work * interval
    assert [job for job, rows in enumerate(chosen) if rows] == [*range(0, 200, interval)]


def test_rows_of_one_prompt_are_taken_together() -> None:
    rows = made(8, 8, 70, 16)
    packer = Packer(rows, packed=True)
    chosen = kl_rows(packer, range(64), None, 71.0, 0)
    assert len(chosen) == 4  # 85 + 3 x 15 tokens, of which two jobs allow 142
    assert len({row // 8 for row in chosen}) == 1
    assert kl_rows(packer, range(64), None, 71.0, 1) == []


def test_a_small_model_is_measured_as_before_and_the_number_of_rows_can_be_chosen() -> None:
    rows = made(8, 8, 70, 16)
    packer = Packer(rows, packed=True)
    assert kl_rows(packer, range(64), None, None, 1) == [*range(32)]  # with 512 trained tokens
    assert kl_rows(packer, range(64), 3, 1.0, 1) == [0, 1, 2]
    assert kl_rows(packer, range(64), 0, 1.0, 0) == []


def test_rows_without_gradient_are_worth_a_forward_pass() -> None:
    whole = kl_budget(Sizes(computed_tokens=1000), 10, lora=False)
    assert whole == pytest.approx(45)
    assert kl_budget(Sizes(computed_tokens=1000, rows_without_gradient=10), 10, lora=False) == pytest.approx(15)
    assert kl_budget(Sizes(computed_tokens=1000), 10, lora=True) == pytest.approx(30)


@pytest.mark.slow
def test_a_larger_model_measures_some_of_its_jobs(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama", hidden_size=128, intermediate_size=8192)
    learner = Learner(load_model(str(folder), "cpu"), tmp_path)
    assert sum(parameter.numel() for parameter in learner.loaded.module.parameters()) > SMALL_MODEL
    jobs = [train(learner, made(8, 4, 20, 6), learning_rate=1e-3)[0] for _ in range(4)]
    assert [job.metrics["kl"] is not None for job in jobs] == [True, False, True, False]
