"""Rows computed as a tree of prefixes beside the same rows computed one by one."""

import copy
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow_after, slow_but_at
from model_families import FAMILIES, MLA, Family, tiny_config
from test_learner import train
from tiny_models import byte_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM

from insitu.algorithms.memory_budget import model_shape
from insitu.backend.attention import attend, by_blocks
from insitu.backend.learner.batches import MIN_SHARED, PrefixTree, Row, build_tree, collate, common_prefix, group_rows
from insitu.backend.learner.code import CodeFolder
from insitu.backend.learner.learner import Learner
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.learner.losses import mean_of_clusters
from insitu.backend.learner.packing import Packer
from insitu.backend.learner.policy import activation_bytes
from insitu.backend.model import LoadedModel, load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: load_model(str(save_tiny_model(folder / kind, kind)), "cpu") for kind in ("llama", "gpt2", "qwen2")}


@st.composite
def sequences(draw: st.DrawFn) -> list[np.ndarray]:
    """Of few different tokens, which go on from a part of one another, or are equal, or one of another's prefixes."""
    drawn = [np.array([0, 1], np.int32)]
    for _ in range(draw(st.integers(0, 7))):
        start = draw(st.sampled_from(drawn))
        kept = start[: draw(st.integers(0, len(start)))]
        length = draw(st.integers(0 if len(kept) > 1 else 2, 50))
        seed = draw(st.integers(0, 3))
        drawn.append(np.concatenate([kept, np.random.default_rng(seed).integers(0, 4, length)]).astype(np.int32))
    return drawn


@st.composite
def rows_of(draw: st.DrawFn) -> list[Row]:
    """Of such sequences, trained anywhere after their first token, with advantages and temperatures of their own."""
    rows = []
    for number, tokens in enumerate(draw(sequences())):
        rng = np.random.default_rng(draw(st.integers(0, 9)))
        count = draw(st.integers(1, len(tokens) - 1))
        positions = np.sort(rng.choice(np.arange(1, len(tokens)), count, replace=False))
        values = rng.normal(size=(2, count)).astype(np.float32)
        temperature = draw(st.sampled_from([1.0, 0.5]))
        rows.append(Row(tokens, positions, values[0] - 3, values[1], episode=str(number // 2), temperature=temperature))
    return rows


def tree_of(sequences: list[np.ndarray]) -> tuple[list[bytes], PrefixTree]:
    """The keys of distinct sequences, in order, and their tree."""
    keys = sorted({Row(tokens, np.array([len(tokens)])).key for tokens in sequences})
    return keys, build_tree(keys, [0, *itertools.starmap(common_prefix, itertools.pairwise(keys))])


@given(sequences())
def test_a_token_of_a_tree_sees_its_own_sequence_up_to_itself(drawn: list[np.ndarray]) -> None:
    keys, tree = tree_of(drawn)
    places = torch.arange(len(tree.token_ids_T))
    visible = tree.nodes.mask(CPU)(None, None, places[:, None], places)
    for key, path in zip(keys, tree.paths, strict=True):
        tokens = np.frombuffer(key, ">u4")
        assert tree.token_ids_T[path].tolist() == tokens.tolist()
        assert tree.positions_T[path].tolist() == list(range(len(tokens)))
        for depth, place in enumerate(path):
            assert visible[place].nonzero().ravel().tolist() == path[: depth + 1].tolist()
    assert sorted({*itertools.chain(*(path.tolist() for path in tree.paths))}) == places.tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=1)
@given(sequences(), st.sampled_from([1, 2, 6]))
def test_flex_attention_has_the_same_mask(drawn: list[np.ndarray], heads: int) -> None:
    nodes = tree_of(drawn)[1].nodes
    query, key, value = (torch.randn(1, count, nodes.length, 8) for count in (6, heads, heads))
    result, _ = attend(torch.nn.Identity(), query, key, value, None, tree=nodes)
    assert torch.allclose(by_blocks(query, key, value, nodes, None), result.transpose(1, 2), atol=1e-5)


@given(sequences())
def test_what_is_worth_sharing_is_shared(drawn: list[np.ndarray]) -> None:
    """Neighbors in the order of tokens have no beginning in common that is computed twice, but a short one."""
    keys, tree = tree_of(drawn)
    for (first, second), (path, other) in zip(itertools.pairwise(keys), itertools.pairwise(tree.paths), strict=True):
        shared = int((path[: len(other)] == other[: len(path)]).sum())
        assert 0 <= common_prefix(first, second) - shared < MIN_SHARED


@settings(max_examples=8)
@given(st.data())
@pytest.mark.parametrize("kind", slow_after(1, ["llama", "gpt2", "qwen2"]))
def test_a_tree_changes_neither_values_nor_gradients(models: dict[str, LoadedModel], kind: str, data: Any) -> None:
    rows, loaded = data.draw(rows_of()), models[kind]
    compute_logprobs = LogprobComputer(loaded)
    assert compute_logprobs.can_pack
    values, entropy, gradients = results(loaded, compute_logprobs, collate(rows, CPU, packed=True))
    single = [results(loaded, compute_logprobs, collate([row], CPU)) for row in rows]
    for number, (row, (value, alone, _)) in enumerate(zip(rows, single, strict=True)):
        count = len(row.positions)
        assert torch.allclose(values[number, :count], value[0], atol=2e-5)
        assert torch.allclose(entropy[number, :count], alone[0], atol=2e-5)
    summed = [sum(each) for each in zip(*(gradients for _, _, gradients in single), strict=True)]
    assert norm([one - two for one, two in zip(gradients, summed, strict=True)]) <= 1e-5 * norm(summed)


@pytest.mark.parametrize("kind", slow_after(1, ["llama", "qwen2"]))
def test_a_tree_in_bfloat16_is_as_close_to_float32_as_padded_rows(tmp_path: Path, kind: str) -> None:
    folder = str(save_tiny_model(tmp_path, kind))
    rng = np.random.default_rng(0)
    prompt, ends = rng.integers(0, 256, 40), rng.integers(0, 256, (6, 20))
    rows = [Row(np.concatenate([prompt, end]).astype(np.int32), np.arange(40, 60)) for end in ends]
    found = {}
    for dtype, packed in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        loaded = load_model(folder, "cpu", dtype)
        compute_logprobs = LogprobComputer(loaded)
        assert compute_logprobs.can_pack
        module = copy.deepcopy(loaded.module).float().requires_grad_(True)
        batch = collate(rows, CPU, packed=packed)
        values = batch.to_rows(compute_logprobs(module, batch).logprobs_N)
        gradients = torch.autograd.grad(values.square().sum(), [*module.parameters()])
        found[dtype, packed] = (values.detach(), torch.cat([gradient.flatten() for gradient in gradients]))
    for exact, padded, tree in zip(*found.values(), strict=True):
        assert (tree - exact).norm() < max(1.5 * (padded - exact).norm(), 1e-3 * exact.norm())
        assert (tree - exact).norm() < 0.03 * exact.norm()


def test_gradients_in_bfloat16_are_those_of_float32_rounded() -> None:
    nodes = tree_of([np.arange(30), *(np.append(np.arange(30), [50 + number] * 9) for number in range(4))])[1].nodes
    torch.manual_seed(0)
    inputs = [torch.randn(1, count, nodes.length, 8).bfloat16() for count in (6, 2, 2)]
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (each.to(dtype).requires_grad_(True) for each in inputs)
        result, _ = attend(torch.nn.Identity(), query, key, value, None, tree=nodes)
        gradients.append(torch.autograd.grad(result.float().square().sum(), (query, key, value)))
    for exact, rounded in zip(*gradients, strict=True):
        assert rounded.dtype == torch.bfloat16
        assert (rounded - exact).norm() < 0.005 * exact.norm()


@pytest.mark.parametrize(("attention", "packs"), [("sdpa", True), ("eager", False)])
def test_packing_is_judged_by_the_noise_of_the_dtype(attention: str, packs: bool) -> None:
    """That of large logits is above 0.1. `eager` ignores the tree."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=attention)
    module.eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.mul_(16 if parameter.ndim > 1 else 1)
    loaded = LoadedModel(module.bfloat16(), byte_tokenizer(), CPU, torch.bfloat16, 64, "none")
    tokens = np.random.default_rng(0).integers(0, 256, (4, 30)).astype(np.int32)
    tokens[:, :20] = tokens[0, :20]
    rows, compute_logprobs = [Row(each, np.arange(18, 30)) for each in tokens], LogprobComputer(loaded)
    padded, tree = (
        batch.to_rows(compute_logprobs(module, batch).logprobs_N)
        for batch in (collate(rows, CPU, packed=is_packed) for is_packed in (False, True))
    )
    assert (tree - padded).abs().max() > 0.1
    assert compute_logprobs.packs_alike(rows) == packs


def norm(tensors: list[Any]) -> float:
    return float(sum(tensor.square().sum() for tensor in tensors) ** 0.5)


def results(loaded: LoadedModel, compute_logprobs: LogprobComputer, batch: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    module = copy.deepcopy(loaded.module).requires_grad_(True)
    logprobs, entropy = compute_logprobs(module, batch)
    values = batch.to_rows(logprobs)
    return (
        values.detach(),
        batch.to_rows(entropy),
        list(torch.autograd.grad(values.square().sum(), [*module.parameters()])),
    )


SETTINGS: list[dict[str, Any]] = [
    *({"objective": kind, "loss_agg_mode": mode, "loss_scale_factor": 9.0 if mode == "constant" else None}
      for kind in ("clip", "cispo") for mode in ("token", "sequence", "constant")),
    {"importance_sampling_level": "sequence", "old_logprobs": "rollout", "kl": {"beta": 0.1}},
    {"truncated_importance": 2.0, "num_iterations": 2},
    {"gradient_checkpointing": True},
    {"lora": {"rank": 2, "alpha": 4}},
    {"method": "sft"},
    {"method": "kto"},
    {"method": "dpo"},
]  # fmt: skip


SGD = """import torch


def make(parameters, settings):
    return torch.optim.SGD(list(parameters.values()), lr=settings.learning_rate)
"""


@settings(max_examples=1)
@given(rows_of())
@pytest.mark.parametrize(
    "changes", slow_but_at({0, 6, 9, 12}, SETTINGS), ids=lambda changes: "-".join(map(str, changes.values()))
)
def test_three_steps_of_a_method_are_those_of_padded_rows(
    models: dict[str, LoadedModel], folder: Path, changes: dict[str, Any], rows: list[Row]
) -> None:
    """With plain SGD: AdamW turns the sign of gradients near zero into steps."""
    rows = [replace(row, preferred=number % 2 == 0) for number, row in enumerate(rows)]
    if changes.get("method") == "dpo":
        rows = [
            replace(row, pair=str(number), preferred=side) for number, row in enumerate(rows) for side in (True, False)
        ]
        rows = [replace(row, episode="", token_ids=row.token_ids[::-1]) if row.preferred else row for row in rows]
    given = {"optimizer": {"_type": "python", "function": "sgd:make"}, "learning_rate": 0.05, "num_iterations": 3}
    results = {}
    for attention in ("packed", "padded"):
        with tempfile.TemporaryDirectory() as output:
            learner = Learner(models["llama"], Path(output), code=CodeFolder(folder))
            result, _ = train(learner, rows, **given | changes, attention=attention)
            results[attention] = (result.metrics, dict(result.module.named_parameters()))
    (packed, weights), (padded, expected) = results["packed"], results["padded"]
    assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-5)
    assert sum((weights[name] - expected[name]).square().sum() for name in expected) ** 0.5 < 1e-5
    assert packed["row_tokens"] == padded["row_tokens"] >= packed["computed_tokens"]
    assert packed["padding_tokens"] == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of code that jobs may choose."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "sgd.py").write_text(SGD)
    return folder


@given(st.lists(st.lists(st.floats(0, 9), min_size=1, max_size=4), min_size=2, max_size=9))
def test_the_error_of_a_mean_of_clusters(clusters: list[list[float]]) -> None:
    """Of single values it is the usual one; a cluster given twice as one is no more certain."""
    mean, error = mean_of_clusters([(values[0], 1) for values in clusters])
    values = np.array([values[0] for values in clusters])
    assert (mean, error) == pytest.approx((values.mean(), values.std(ddof=1) / len(values) ** 0.5))
    sums = [(sum(values), len(values)) for values in clusters]
    assert mean_of_clusters([(2 * total, 2 * count) for total, count in sums]) == pytest.approx(mean_of_clusters(sums))
    assert mean_of_clusters(sums[:1]) == (pytest.approx(np.mean(clusters[0])), None)


def test_rows_without_advantages_get_no_backward_pass(models: dict[str, LoadedModel], tmp_path: Path) -> None:
    """Weights and metrics are those of a job whose (tiny) penalty gives every row a gradient."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(12):
        tokens = rng.integers(0, 256, 30).astype(np.int32)
        advantages = np.full(10, number % 3, np.float32)
        rows.append(Row(tokens, np.arange(20, 30), np.full(10, -5, np.float32), advantages, episode=str(number)))
    results = [
        train(Learner(models["llama"], tmp_path / str(beta)), rows, kl={"beta": beta}, num_iterations=2)[0]
        for beta in (0.0, 1e-9)
    ]
    skipped, computed = (result.metrics for result in results)
    assert (skipped["rows_without_gradient"], computed["rows_without_gradient"]) == (8, 0)
    for name in ("loss", "grad_norm", "entropy", "clip_fraction", "logprob_gap", "ratio_mean", "tokens"):
        assert skipped[name] == pytest.approx(computed[name], rel=1e-5, abs=1e-7), name
    weights = [dict(result.module.named_parameters()) for result in results]
    # A step is 0.01. Adam scales even rounding up where there is hardly a gradient.
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0])


@pytest.mark.parametrize("objective", ["clip", "cispo"])
def test_a_step_without_any_advantage_is_taken(models: dict[str, LoadedModel], tmp_path: Path, objective: str) -> None:
    """Adam's moments of the job before go on moving the weights."""
    learner, weights = Learner(models["llama"], tmp_path), []
    for advantage in (1, 0):
        advantages = np.full(2, advantage, np.float32)
        row = Row(np.arange(12, dtype=np.int32), np.array([5, 9]), np.full(2, -5, np.float32), advantages)
        result, _ = train(learner, [row], objective=objective)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in result.module.parameters()]).clone())
    assert (result.metrics["grad_norm"], result.metrics["rows_without_gradient"]) == (0.0, 0)
    assert not torch.equal(*weights)


def test_kl_is_measured_on_many_episodes(models: dict[str, LoadedModel], tmp_path: Path) -> None:
    """Although a single one has more tokens than the sample."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(160):
        tokens, advantages = rng.integers(0, 256, 12).astype(np.int32), np.ones(10, np.float32)
        rows.append(Row(tokens, np.arange(2, 12), np.full(10, -5, np.float32), advantages, episode=str(number // 40)))
    result, _ = train(Learner(models["llama"], tmp_path), rows)
    assert result.metrics["kl"] > result.metrics["kl_stderr"] > 0
    result, _ = train(Learner(models["llama"], tmp_path / "all"), rows, kl_rows=len(rows))
    ids = torch.tensor(np.stack([row.token_ids for row in rows])).long()
    with torch.no_grad():
        of_models = [model(ids).logits[:, 1:-1].log_softmax(-1) for model in (result.module, models["llama"].module)]
    new, ref = (logprobs.gather(2, ids[:, 2:, None]) for logprobs in of_models)
    assert result.metrics["reference_gap"] == pytest.approx((new - ref).abs().mean().item(), rel=1e-4)
    assert train(Learner(models["llama"], tmp_path / "one"), rows, kl_rows=1)[0].metrics["kl_stderr"] is None
    assert train(Learner(models["llama"], tmp_path / "none"), rows, kl_rows=0)[0].metrics["kl"] is None


def test_long_prompts_stay_within_the_embedded_positions(models: dict[str, LoadedModel]) -> None:
    """Packed tokens are more than GPT-2's 256 positions."""
    rng = np.random.default_rng(0)
    prompt, ends = rng.integers(0, 256, 200), rng.integers(0, 256, (3, 50))
    rows = [Row(np.concatenate([prompt, end]).astype(np.int32), np.arange(200, 250)) for end in ends]
    loaded = models["gpt2"]
    batches = [collate(rows, CPU, packed=is_packed) for is_packed in (True, False)]
    packed, padded = (batch.to_rows(LogprobComputer(loaded)(loaded.module, batch).logprobs_N) for batch in batches)
    assert batches[0].input_ids_ST.shape == (1, 200 + 3 * 49)
    assert torch.allclose(packed, padded, atol=1e-5)


SCALED = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
INDEXED = MLA | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
OTHERS = {
    "soft-capped scores": FAMILIES["Gemma 2"],
    "chunks": FAMILIES["Llama 4 (text)"],
    "attention by name": Family("DeepSeek-V3.2", "deepseek_v32", INDEXED),
    "its mask": Family("Doge", "doge"),
    "no attention": FAMILIES["Mamba"],
    "frequencies by length": Family("Llama", "llama", {"rope_parameters": SCALED}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_compute_rows_one_by_one(tmp_path: Path, kind: str) -> None:
    family = OTHERS[kind]
    module = AutoModelForCausalLM.from_config(tiny_config(family.model_type, **family.settings))
    module.eval().requires_grad_(False)
    loaded = LoadedModel(module, byte_tokenizer(), CPU, torch.float32, 64, "none")
    tokens, before = torch.arange(60)[None], module.config._attn_implementation
    logits = module(tokens).logits
    assert not LogprobComputer(loaded).can_pack
    assert module.config._attn_implementation == before
    assert torch.equal(module(tokens).logits, logits)
    rows = [Row(np.arange(9, dtype=np.int32) + n, np.array([4, 8]), np.zeros(2), np.ones(2)) for n in (0, 0, 1)]
    result, _ = train(Learner(loaded, tmp_path), rows)
    assert (result.metrics["row_tokens"], result.metrics["computed_tokens"]) == (24, 16)


def test_rows_longer_than_the_window_of_a_model_are_padded(tmp_path: Path) -> None:
    """Since a tree has no windows."""
    loaded = load_model(str(save_tiny_model(tmp_path / "model", "mistral", sliding_window=64)), "cpu")
    rng = np.random.default_rng(0)
    for length in (64, 65):
        prompt, ends = rng.integers(0, 256, 40), rng.integers(0, 256, (2, length - 40))
        tokens = [np.concatenate([prompt, end]).astype(np.int32) for end in ends]
        rows = [Row(each, np.array([42, 60]), np.full(2, -5, np.float32), np.ones(2)) for each in tokens]
        metrics = train(Learner(loaded, tmp_path / str(length)), rows, attention="packed")[0].metrics
        assert (metrics["computed_tokens"] < metrics["row_tokens"]) == (length == 64)


def test_units_stay_together_if_they_fit() -> None:
    """And micro-batches stay within their budget, which counts what rows share once."""
    rng = np.random.default_rng(0)
    rows = []
    for pair in range(40):
        prompt = rng.integers(0, 256, rng.integers(2, 60))
        for _ in range(2 + pair % 3):
            tokens = np.concatenate([prompt, rng.integers(0, 256, rng.integers(2, 20))]).astype(np.int32)
            rows.append(Row(tokens, np.arange(len(prompt), len(tokens)), pair=str(pair)))
    units = group_rows(rows, range(len(rows)))
    for packs, budget in itertools.product((True, False), (100, 200, 1000)):
        packer = Packer(rows, packed=packs)

        def tokens(indices: list[int], packer: Packer = packer) -> int:
            return packer.collate(indices, CPU).input_ids_ST.numel()

        parts = list(packer.micro_batches(units, budget))
        assert sorted(itertools.chain(*parts)) == list(range(len(rows)))
        holds = [any(set(unit) <= set(part) for part in parts) for unit in units]
        assert holds == [tokens(unit) <= budget for unit in units]
        assert sum(holds) > 0
        for part in parts:
            computed, padding = packer.computed_tokens(part)
            assert tokens(part) == computed
            assert padding == (0 if packs else computed - sum(len(key) // 4 for key in {rows[i].key for i in part}))
            assert computed <= budget or len({rows[index].key for index in part}) == 1


def test_a_prompt_longer_than_a_micro_batch_is_computed_once_for_several_rows() -> None:
    """As many as add at most a micro-batch, or the prompt once more; those before a turn of a conversation always."""
    rng = np.random.default_rng(0)

    def rows_of(prompt: int, completions: list[int]) -> list[Row]:
        start = rng.integers(0, 256, prompt)
        tokens = [np.concatenate([start, rng.integers(0, 256, length + 1)]).astype(np.int32) for length in completions]
        return [Row(each, np.arange(prompt, len(each))) for each in tokens]

    def sizes(rows: list[Row], budget: int, *, packed: bool = True, stretches: bool = True) -> list[tuple[int, int]]:
        packer = Packer(rows, packed=packed, stretches=stretches)
        parts = [*packer.micro_batches([[index] for index in range(len(rows))], budget)]
        return [(len(part), packer.computed_tokens(part)[0]) for part in parts]

    four_groups = [row for _ in range(4) for row in rows_of(1500, [70] * 8)]
    assert sizes(four_groups, 600) == [(8, 1500 + 8 * 70)] * 4
    assert sizes(four_groups, 200) == [(3, 1500 + 3 * 70), (3, 1500 + 3 * 70), (2, 1500 + 2 * 70)] * 4
    assert sizes(four_groups, 600, packed=False) == [(1, 1570)] * 32
    assert sizes(four_groups, 600, stretches=False) == [(1, 1570)] * 32
    assert sizes(rows_of(60, [70] * 5), 100) == [(1, 130)] * 5  # two would add 70 to the longest
    assert sizes(rows_of(80, [70] * 5), 100) == [(2, 220), (2, 220), (1, 150)]
    assert sizes(rows_of(8, [70] * 3), 70) == [(1, 78)] * 3  # a prefix that is too short to be shared
    assert sizes(rows_of(100, [70, 70]) + rows_of(100, [70, 70]), 100) == [(2, 240)] * 2

    tokens = rng.integers(0, 256, 3001).astype(np.int32)
    turns = [Row(tokens[: end + 1], np.arange(end - 50, end + 1)) for end in (800, 1400, 2000, 3000)]
    assert sizes(turns, 600) == [(4, 3000)]


@pytest.mark.parametrize("words", [512, 1 << 18])
def test_micro_batches_stretch_where_one_is_computed_at_a_time(tmp_path: Path, words: int) -> None:
    """Workers compute several of a small model at once, of which none may become longer."""
    loaded = load_model(str(save_tiny_model(tmp_path / "model", "llama", vocab_size=words)), "cpu")
    rng = np.random.default_rng(0)
    prompt, ends = rng.integers(0, 256, 40), rng.integers(0, 256, (4, 10))
    tokens = [np.concatenate([prompt, end]).astype(np.int32) for end in ends]
    rows = [Row(each, np.arange(40, 50), np.full(10, -5, np.float32), np.ones(10)) for each in tokens]
    settings = {"attention": "packed", "micro_batch_tokens": 50}
    metrics = train(Learner(loaded, tmp_path / "learner"), rows, **settings)[0].metrics
    assert metrics["row_tokens"] == 4 * 49
    assert metrics["computed_tokens"] == (4 * 49 if words == 512 else 40 + 4 * 9)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_the_learner_counts_activations_as_the_plan_does(models: dict[str, LoadedModel], kind: str) -> None:
    """The plan's three projections and three matrices are one and two in GPT-2."""
    loaded = models[kind]
    shape = model_shape(loaded.module.config.to_dict())
    assert shape is not None
    share = activation_bytes(loaded) / (4 * shape.lora)
    assert share == 1 or (kind == "gpt2" and 0.6 < share < 1)
