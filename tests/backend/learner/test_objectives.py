"""What preference jobs promise: shared prompts, units of micro-batches, references computed once, exact resumption."""

import itertools
import math
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow_after, slow_but
from test_learner import LORA, same, train, weights
from tiny_models import save_tiny_model

from insitu.backend.learner.batches import Row, collate
from insitu.backend.learner.learner import Learner, Learners
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.learner.objectives import mismatched_rows
from insitu.backend.model import LoadedModel, load_model
from insitu.errors import JobFailed, RequestRefused
from insitu.schemas.training_jobs import TrainingSettings

METHODS = {
    "dpo": {"method": "dpo", "dpo": {"beta": 0.5, "sft_loss_weight": 0.1}},
    "job start": {"method": "dpo", "dpo": {"beta": 0.5, "reference": "job_start"}},
    "kto": {"method": "kto", "kto": {"beta": 0.5}},
    "sft": {"method": "sft"},
}
each_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("models") / "llama")), "cpu")


def random_tokens(rng, low: int, high: int) -> np.ndarray:
    return rng.integers(0, 256, int(rng.integers(low, high))).astype(np.int32)


def completion(prompt: np.ndarray, tokens: np.ndarray, **fields) -> Row:
    whole = np.concatenate([prompt, tokens])
    return Row(whole, np.arange(len(prompt), len(whole), dtype=np.int32), **fields)


def sides(method: str = "dpo", pairs: int = 6, seed: int = 0) -> list[Row]:
    """Pairs whose sides have one row or two; for other methods than DPO their episodes."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(pairs):
        prompt = random_tokens(rng, 2, 30)
        for preferred, _ in itertools.product((True, False), range(1 + number % 2)):
            tokens = random_tokens(rng, 1, 9)
            rows.append(
                completion(prompt, tokens, episode=f"{number} {preferred}", pair=f"p{number}", preferred=preferred)
            )
    return rows if METHODS[method]["method"] == "dpo" else [replace(row, pair="") for row in rows]


def likelihood(module, rows: list[Row], preferred: bool) -> float:
    """Mean log-probability of the trained tokens of a side."""
    batch = collate([row for row in rows if row.preferred == preferred], torch.device("cpu"))
    loaded = LoadedModel(module, None, torch.device("cpu"), torch.float32, 256, "")
    return LogprobComputer(loaded)(module, batch).logprobs_N.mean().item()


@pytest.mark.parametrize("method", slow_but(("dpo", "kto", "sft"), METHODS))
@pytest.mark.parametrize("lora", slow_after(1, [None, LORA]))
def test_a_job_moves_probabilities_as_its_method_says(llama, tmp_path, method, lora):
    rows = sides(method)
    result, events = train(
        Learner(llama, tmp_path), rows, learning_rate=3e-3, num_iterations=8, lora=lora, **METHODS[method]
    )
    before, after = (
        [likelihood(module, rows, preferred) for preferred in (True, False)] for module in (llama.module, result.module)
    )
    metrics = result.metrics
    if method == "sft":
        assert metrics["loss"] < -sum(before) / 2
        assert min(a - b for a, b in zip(after, before, strict=True)) > 0.1
    else:
        assert after[0] - after[1] > before[0] - before[1] + 0.1
        margins = [event.metrics["rewards/margins"] for event in events if event.metrics]
        assert margins[0] == 0
        assert margins[-1] > max(0.1, margins[1])
        assert metrics["rewards/margins"] == pytest.approx(sum(margins) / len(margins))
    if method == "kto":
        assert (after[0] > before[0], after[1] < before[1]) == (True, True)
    assert (metrics["rows"], metrics["episodes"], metrics["steps"]) == (18, 12, 8)
    assert metrics["tokens"] == sum(len(row.positions) for row in rows)
    assert all(value is None or math.isfinite(value) for value in metrics.values())
    assert "clip_fraction" not in metrics


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_after(1, METHODS))
def test_the_size_of_micro_batches_changes_nothing(llama, tmp_path, method):
    """Pairs and episodes split over micro-batches included, and several steps, each with its own shuffling."""
    ends, own = [], {"seconds", "computed_tokens"}
    for budget in (1, 60, 10_000):
        changes = {"micro_batch_tokens": budget, "num_iterations": 2, "mini_batch_size": 7}
        result, _ = train(
            Learner(llama, tmp_path / str(budget)), sides(method), learning_rate=1e-3, **changes, **METHODS[method]
        )
        ends.append({name: value for name, value in result.metrics.items() if name not in own})
    for end in ends[1:]:
        assert end == pytest.approx(ends[0], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_after(1, METHODS))
@pytest.mark.parametrize("lora", slow_but([LORA], [None, LORA]))
def test_a_backend_started_again_continues_to_the_bit(llama, tmp_path, method, lora):
    rows, changes = sides(method), {"lora": lora, "mini_batch_size": 9, **METHODS[method]}
    never_stopped = Learners(Learner(llama, tmp_path / "a")).default
    train(never_stopped, rows, **changes)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = Learners(Learner(llama, tmp_path / "b")).default
    one, other = (train(learner, rows, **changes)[0] for learner in (never_stopped, again))
    assert same(weights(one.module), weights(other.module))
    assert one.metrics | {"seconds": 0} == other.metrics | {"seconds": 0}


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(("dpo", "job start"), METHODS))
def test_a_reference_is_computed_once_and_only_where_it_is_needed(llama, tmp_path, method):
    tokens: Counter[int] = Counter()

    def count(module, args, kwargs, output) -> None:
        tokens[id(module)] += kwargs["input_ids"].numel()

    learner = Learner(llama, tmp_path)
    train(learner, sides(method), **METHODS[method])
    initial = llama.module.base_model
    handle = initial.register_forward_hook(count, with_kwargs=True)
    seen = []
    for passes in (1, 3):
        tokens.clear()
        train(learner, sides(method), num_iterations=passes, mini_batch_size=6, **METHODS[method])
        seen.append(tokens[id(initial)])
    handle.remove()
    if method in ("sft", "job start"):
        assert seen == [0, 0]
    else:  # padded differently; KTO combines prompts and completions anew in each pass
        assert 0 < seen[1] < seen[0] * (1.2 if method == "dpo" else 2.3)


def test_a_job_does_without_the_model_that_training_started_from_unless_it_is_the_reference(llama, tmp_path):
    base = save_tiny_model(tmp_path / "base")
    first, _ = train(Learner(load_model(str(base), "cpu"), tmp_path / "a"), sides(), **METHODS["dpo"])
    base.rename(tmp_path / "moved")
    resumed = Learner(load_model(str(first.checkpoint), "cpu"), tmp_path / "b")
    for method in ("dpo", "kto"):
        with pytest.raises(RequestRefused, match="there is no folder"):
            resumed.verify(TrainingSettings(**METHODS[method]))
    for method in ("sft", "job start"):
        resumed.verify(TrainingSettings(**METHODS[method]))
        train(resumed, sides(method), **METHODS[method])


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_after(1, ["dpo", "kto"]))
@pytest.mark.parametrize("lora", slow_after(1, [None, LORA]))
def test_both_references_are_the_same_in_the_first_job(llama, tmp_path, method, lora):
    """The first steps know their reference without computing it; later passes meet it in other batches."""
    ends = []
    for reference in ("initial", "job_start"):
        changes = {"num_iterations": 3, "mini_batch_size": 6, "micro_batch_tokens": 60, "lora": lora}
        settings = {"method": method, method: {"beta": 0.5, "reference": reference}}
        result, _ = train(Learner(llama, tmp_path / reference), sides(method), **changes, **settings)
        ends.append(result.metrics | {"seconds": 0, "rewards/accuracies": 0})  # rounding decides the first step's ties
    assert ends[0] == pytest.approx(ends[1], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_the_reference_of_a_second_job(llama, tmp_path):
    """At the start of the job it has no margin yet to `job_start`, and one to `initial`."""
    margins = {}
    for method in ("dpo", "job start"):
        learner = Learner(llama, tmp_path / method)
        for _ in range(2):
            _, events = train(learner, sides(), num_iterations=2, **METHODS[method])
        margins[method] = [event.metrics["rewards/margins"] for event in events if event.metrics]
    assert margins["job start"][0] == 0 < margins["job start"][1]
    assert 0.1 < margins["dpo"][0] < margins["dpo"][1]


@pytest.mark.parametrize(
    ("method", "changes"),
    slow_after(
        1, [("dpo", {"dpo": {"beta": 1e-300, "loss_type": "ipo"}}), ("dpo", {"dpo": {"sft_loss_weight": 1e308}})]
    ),
)
def test_an_infinite_loss_fails_the_job_and_keeps_the_weights(llama, tmp_path, method, changes):
    learner, quiet = Learner(llama, tmp_path / "a"), Learner(llama, tmp_path / "b")
    with pytest.raises(JobFailed, match="were restored"):
        train(learner, sides(), method=method, num_iterations=2, **changes)
    assert learner.version == 0
    a, b = (train(each, sides(), **METHODS["dpo"])[0] for each in (learner, quiet))
    assert same(weights(a.module), weights(b.module))


rows_of_prompts = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(rows_of_prompts, st.integers(4, 12))
def test_completions_after_other_prompts(drawn, max_length):
    """Every completion is used once, and none after its own prompt unless one prompt has more than half of the rows."""
    prompt_of = {n: np.array([n] * (1 + n % 3), np.int32) for n in range(5)}
    rows = [
        completion(prompt_of[prompt], np.array([100 + number] * length, np.int32))
        for number, (prompt, length) in enumerate(drawn)
    ]
    mixed = mismatched_rows(rows, max_length)
    if len(rows) == 1:
        assert mixed == []
        return
    used = [int(row.token_ids[row.positions[0]]) - 100 for row in mixed]
    assert sorted(used) == list(range(len(rows)))
    assert sorted(int(row.token_ids[0]) for row in mixed) == sorted(prompt for prompt, _ in drawn)
    matched = [int(row.token_ids[0]) == drawn[index][0] for row, index in zip(mixed, used, strict=True)]
    if max(Counter(prompt for prompt, _ in drawn).values()) <= len(rows) / 2:
        assert not any(matched)
    for row, index in zip(mixed, used, strict=True):
        prompt = prompt_of[int(row.token_ids[0])]
        length = min(drawn[index][1], max_length - len(prompt))
        assert row.positions.tolist() == list(range(len(prompt), len(prompt) + length))
        assert len(row.token_ids) == len(prompt) + length
