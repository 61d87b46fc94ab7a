"""The learner on tiny models: what a job does to weights, optimiser, checkpoints and metrics."""

import copy
import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import disk_space
from marks import slow_after, slow_but
from model_families import tiny_config
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from insitu.backend.learner.batches import Row, collate, optimizer_steps
from insitu.backend.learner.learner import Learner, Learners
from insitu.backend.learner.logprobs import LogprobComputer, PolicyForward
from insitu.backend.learner.optimizer_loop import learning_rate
from insitu.backend.learner.packing import Packer
from insitu.backend.learner.policy import build_policy
from insitu.backend.model import LoadedModel, load_model
from insitu.disk.model_files import read_record, write_record
from insitu.errors import BackendError, InsituError, JobFailed, RequestRefused
from insitu.schemas.lora import LoRASettings
from insitu.schemas.parts import load_named
from insitu.schemas.training_jobs import TrainingSettings

LORA = {"rank": 4, "alpha": 8}
WHOLE = {**LORA, "modules_to_save": ["lm_head", "model.norm"]}
"""Adapters, and beside them modules that are trained whole."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As the server has it for small models; more only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: load_model(str(save_tiny_model(folder / kind, kind)), "cpu") for kind in ("llama", "gpt2")}


@pytest.fixture
def llama(models) -> LoadedModel:
    return models["llama"]


def reference_logprobs(module, tokens: list[int]) -> torch.Tensor:
    """Logprobs of each token but the first, by one full forward pass of one row."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([tokens])).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def make_rows(module, count=12, seed=0, advantage=None) -> list[Row]:
    """Random rows of several lengths, sampled (as far as their logprobs tell) from `module`; two rows an episode."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        tokens = rng.integers(0, 300, int(rng.integers(6, 30)))
        positions = np.sort(rng.choice(np.arange(1, len(tokens)), int(rng.integers(1, 5)), replace=False))
        logprobs = reference_logprobs(module, tokens.tolist()).numpy()[positions - 1]
        weight = rng.normal() if advantage is None else advantage
        advantages = np.full(len(positions), weight, dtype=np.float32)
        rows.append(Row(tokens.astype(np.int32), positions, logprobs, advantages, f"e{index // 2}"))
    return rows


def train(learner: Learner, rows, **settings):
    steps = learner.run(TrainingSettings(**({"learning_rate": 1e-2} | settings)), rows)
    events = []
    while True:
        try:
            if (event := next(steps)) is not None:
                events.append(event)
        except StopIteration as end:
            return end.value, events


def forget_state(learner: Learner, rows, **settings) -> None:
    """A job that is canceled; the next one begins from the checkpoint."""
    steps = learner.run(TrainingSettings(**({"learning_rate": 1e-2} | settings)), rows)
    next(steps)
    steps.close()


def weights(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("projection", [True, False])
def test_logprobs_are_those_of_a_plain_forward_pass(models, kind, projection):
    """Padded, with rows of the same tokens computed once, and by both ways to the logits."""
    loaded = models[kind]
    rows = make_rows(loaded.module, 8)
    rows += [rows[3], rows[3], rows[0]]
    batch = collate(rows, loaded.device)
    assert len(batch.input_ids_ST) == 8
    compute_logprobs = LogprobComputer(loaded)
    assert compute_logprobs.can_project_selected
    compute_logprobs.can_project_selected = projection
    result = compute_logprobs(loaded.module, batch)
    expected = torch.cat([torch.from_numpy(row.rollout_logprobs) for row in rows])
    assert torch.allclose(batch.to_rows(result.logprobs_N)[batch.mask_BK], expected, atol=1e-5)
    row = rows[0]
    logits = loaded.module(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0]
    entropy = torch.distributions.Categorical(logits=logits[row.positions - 1]).entropy()
    assert torch.allclose(batch.to_rows(result.entropy_N)[0, : len(entropy)], entropy, atol=1e-5)


def test_a_model_that_does_more_than_project_is_projected_in_full(tmp_path):
    torch.manual_seed(0)
    config = tiny_config("gemma2", head_dim=8, final_logit_softcapping=0.5)
    module = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    compute_logprobs = LogprobComputer(LoadedModel(module, None, torch.device("cpu"), torch.float32, 64, "none"))
    assert not compute_logprobs.can_project_selected
    row = Row(np.arange(9, dtype=np.int32), np.array([2, 7]), np.zeros(2), np.zeros(2))
    logprobs = compute_logprobs(module, collate([row], torch.device("cpu"))).logprobs_N
    assert torch.allclose(logprobs, reference_logprobs(module, list(range(9)))[[1, 6]], atol=1e-6)


def test_many_logits_are_computed_in_chunks(llama, monkeypatch):
    rows = make_rows(llama.module)
    batch = collate(rows, llama.device)

    def gradients(*chunks: int) -> tuple[torch.Tensor, ...]:
        module = copy.deepcopy(llama.module).requires_grad_(True)
        result = LogprobComputer(llama, *chunks)(module, batch)
        return (result.logprobs_N, *torch.autograd.grad(result.logprobs_N.sum(), list(module.parameters())))

    whole = gradients()
    for a, b in zip(whole, gradients(320 * 5), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_step_makes_good_rows_likelier(llama, tmp_path):
    before = weights(llama.module)
    learner = Learner(llama, tmp_path)
    rows = make_rows(llama.module)
    for row in rows[:6]:
        row.advantages[:] = 1
    for row in rows[6:]:
        row.advantages[:] = -1
    result, _ = train(learner, rows)

    def mean(module, chosen):
        return np.mean([reference_logprobs(module, row.token_ids.tolist())[row.positions - 1].mean() for row in chosen])

    assert mean(result.module, rows[:6]) > mean(llama.module, rows[:6])
    assert mean(result.module, rows[6:]) < mean(llama.module, rows[6:])
    assert same(weights(llama.module), before), "the served module was changed in place"
    assert not any(p.requires_grad for p in result.module.parameters())


def test_a_sampler_of_other_weights_has_a_smaller_effective_sample_size(llama, tmp_path):
    """Half of the tokens have twice the probability that they were sampled with, so that w is 1 or 2."""
    rows = [replace(row, rollout_logprobs=row.rollout_logprobs.copy()) for row in make_rows(llama.module)]
    tokens = sum(len(row.positions) for row in rows)
    changed = 0
    for row in rows:
        count = min(len(row.positions), tokens // 2 - changed)
        row.rollout_logprobs[:count] -= np.log(2)
        changed += count
    result, _ = train(Learner(llama, tmp_path), rows, token_mask=[0.5, 1.5], num_iterations=2)
    share = changed / tokens
    assert result.metrics["ratio_mean"] == pytest.approx(1 + share, abs=1e-4)
    assert result.metrics["effective_sample_size"] == pytest.approx((1 + share) ** 2 / (1 + 3 * share), abs=1e-4)
    assert result.metrics["masked_share"] == pytest.approx(share, abs=1e-9)


def test_metrics_at_the_first_step_compare_learner_and_sampler(llama, tmp_path):
    rows = make_rows(llama.module)
    result, events = train(Learner(llama, tmp_path), rows, mini_batch_size=4, num_iterations=2)
    metrics = result.metrics
    assert metrics["logprob_gap"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["effective_sample_size"] == pytest.approx(1, abs=1e-5)
    assert "masked_share" not in metrics
    assert metrics["steps"] == 6
    assert metrics["rows"] == 12
    assert metrics["episodes"] == 6
    assert metrics["tokens"] == sum(len(row.positions) for row in rows)
    assert 0 < metrics["entropy"] <= math.log(320)
    assert metrics["kl"] > 0
    assert all(math.isfinite(value) for value in metrics.values())
    described = [event.metrics for event in events if event.metrics]
    assert [each["steps"] for each in described] == [1] * 6
    assert described[0]["clip_fraction"] == 0
    percents = [event.percent for event in events]
    assert percents == sorted(percents)
    assert percents[-1] == 100


def test_two_runs_are_equal_bit_for_bit(llama, tmp_path):
    rows = make_rows(llama.module, 16)
    results = []
    for name in "ab":
        learner = Learner(llama, tmp_path / name)
        for seed in (1, 2):
            result, _ = train(learner, rows, mini_batch_size=8, num_iterations=2, seed=seed, kl={"beta": 0.1})
        results.append(result)
    first, second = results
    assert same(weights(first.module), weights(second.module))
    assert first.metrics | {"seconds": 0} == second.metrics | {"seconds": 0}
    other, _ = train(Learner(llama, tmp_path / "c"), rows, mini_batch_size=8, num_iterations=2, seed=5)
    assert not same(weights(first.module), weights(other.module))


@pytest.mark.slow
@pytest.mark.parametrize("loss_agg_mode", slow_but(["constant"], ["token", "sequence", "constant"]))
def test_the_size_of_micro_batches_changes_nothing(llama, tmp_path, loss_agg_mode):
    rows = make_rows(llama.module, 20)
    ends = []
    for budget in (1, 64, 10_000):
        learner = Learner(llama, tmp_path / str(budget))
        settings = {
            "micro_batch_tokens": budget,
            "loss_agg_mode": loss_agg_mode,
            "loss_scale_factor": 8 if loss_agg_mode == "constant" else None,
            "kl": {"beta": 0.1},
        }
        result, _ = train(learner, rows, learning_rate=1e-3, num_iterations=2, **settings)
        ends.append(result)
    for end in ends[1:]:
        for key in ("loss", "kl", "grad_norm", "entropy"):
            assert end.metrics[key] == pytest.approx(ends[0].metrics[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("lora", slow_after(1, [None, LORA]), ids=["all", "lora"])
def test_recomputed_activations_change_nothing(llama, tmp_path, lora):
    rows = make_rows(llama.module, 16)
    kept, recomputed = (
        train(Learner(llama, tmp_path / str(on)), rows, lora=lora, mini_batch_size=4, gradient_checkpointing=on)[0]
        for on in (False, True)
    )
    ours, theirs = (dict(version.module.named_parameters()) for version in (recomputed, kept))
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-6
    assert not any(module.training for module in recomputed.module.modules())


def test_recomputed_activations_are_not_kept(llama):
    policy, kept = build_policy(llama, None, seed=0), {False: 0, True: 0}
    forward = PolicyForward(policy.module, LogprobComputer(llama))
    batch = Packer(make_rows(llama.module, 4), packed=False).collate([0, 1, 2, 3], llama.device)
    for recomputes in kept:
        policy.checkpoint_activations(recomputes)
        saved = {}

        def pack(tensor, saved=saved):
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(batch)
        weights = {parameter.data_ptr() for parameter in policy.module.parameters()}
        kept[recomputes] = sum(size for pointer, size in saved.items() if pointer not in weights)
    assert kept[True] < 0.5 * kept[False]


def test_a_model_whose_activations_cannot_be_recomputed_is_refused(llama, tmp_path):
    config = tiny_config("gpt_neox_japanese", vocab_size=llama.vocab_size)
    module = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    learner = Learner(replace(llama, module=module), tmp_path)
    with pytest.raises(RequestRefused, match=r"gradient_checkpointing is true, but .* for GPTNeoXJapaneseForCausalLM"):
        learner.verify(TrainingSettings(gradient_checkpointing=True))


def test_a_row_of_no_advantage_and_no_penalty_trains_nothing(llama, tmp_path):
    result, _ = train(Learner(llama, tmp_path), make_rows(llama.module, advantage=0.0))
    assert same(weights(result.module), weights(llama.module))


@pytest.mark.parametrize("lora", slow_after(1, [None, LORA]))
def test_a_job_that_fails_leaves_everything_as_it_was(llama, tmp_path, lora):
    """At the first version and later; a job closed half-way too. The next job then goes as if nothing had been."""
    good, bad = make_rows(llama.module, 16), make_rows(llama.module, 16, advantage=math.inf)
    disturbed, quiet = Learner(llama, tmp_path / "a"), Learner(llama, tmp_path / "b")
    for version in (1, 2):
        with pytest.raises(JobFailed, match="loss is"):
            train(disturbed, good[:8] + bad[8:], lora=lora, mini_batch_size=4)
        half_way = disturbed.run(TrainingSettings(learning_rate=0.1, lora=lora, mini_batch_size=4), good)
        for _ in range(8):
            next(half_way)
        half_way.close()
        assert disturbed.version == version - 1
        a, b = (train(learner, good, lora=lora, mini_batch_size=4)[0] for learner in (disturbed, quiet))
        assert same(weights(a.module), weights(b.module))
    assert sorted(p.name for p in (tmp_path / "a/checkpoints").iterdir()) == ["step_000001", "step_000002"]


@pytest.mark.parametrize(
    ("kind", "lora"),
    slow_after(3, [("gpt2", None), ("gpt2", LORA), ("llama", WHOLE), ("llama", None), ("llama", LORA)]),
)
def test_a_checkpoint_is_a_model_and_training_goes_on_from_it(models, tmp_path, kind, lora):
    loaded = models[kind]
    rows = make_rows(loaded.module)
    settings = {"lora": lora, "kl": {"beta": 0.2}}
    learner = Learner(loaded, tmp_path / "a")
    first, _ = train(learner, rows, **settings)
    second, _ = train(learner, rows, **settings)

    again = load_model(str(first.checkpoint), "cpu")
    tokens = rows[0].token_ids.tolist()
    assert torch.equal(reference_logprobs(again.module, tokens), reference_logprobs(first.module, tokens))
    assert again.tokenizer.chat_template == loaded.tokenizer.chat_template
    resumed = Learner(again, tmp_path / "b")
    result, _ = train(resumed, rows, **settings)
    assert (result.version, result.checkpoint.name) == (1, "step_000002")
    assert torch.equal(reference_logprobs(result.module, tokens), reference_logprobs(second.module, tokens))
    assert result.metrics | {"seconds": 0} == second.metrics | {"seconds": 0}


def test_earlier_versions_come_from_their_checkpoints(llama, tmp_path):
    for lora in (None, LORA):
        learner = Learner(llama, tmp_path / str(lora is None))
        rows = make_rows(llama.module)
        made = [train(learner, rows, lora=lora)[0] for _ in range(3)]
        assert learner.load_version(0) is llama.module
        for result in made:
            assert same(weights(learner.load_version(result.version)), weights(result.module))
        with pytest.raises(RequestRefused, match="version 7 does not exist; available: 0, 1, 2, 3") as refused:
            learner.load_version(7)
        assert refused.value.status == 404
        kept = [(result.checkpoint / "optimizer.safetensors").exists() for result in made]
        assert kept == [False, True, True]
        assert json.loads((made[1].checkpoint / "training.json").read_text())["step"] == 2


def test_adapters_share_the_base_with_what_is_served(llama, tmp_path):
    learner = Learner(llama, tmp_path)
    result, _ = train(learner, make_rows(llama.module), lora=LORA)
    base = {p.data_ptr() for p in llama.module.parameters()}
    trained = {name for name, p in result.module.named_parameters() if p.data_ptr() not in base}
    assert trained
    assert all("lora_" in name for name in trained)
    assert not (set(weights(llama.module)) & trained)
    size = sum(path.stat().st_size for path in result.checkpoint.glob("*.safetensors"))
    assert (result.checkpoint / "adapter_model.safetensors").exists()
    assert size < 200_000


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_modules_are_trained_whole_beside_adapters(llama, tmp_path):
    """As peft does, which reads the checkpoint, also merged."""
    rows = make_rows(llama.module)
    result, _ = train(Learner(llama, tmp_path), rows, lora=WHOLE)
    saved = load_file(result.checkpoint / "adapter_model.safetensors")
    whole = {name: value for name, value in saved.items() if "lora_" not in name}
    assert sorted(whole) == ["base_model.model.lm_head.weight", "base_model.model.model.norm.weight"]
    assert not torch.equal(whole["base_model.model.lm_head.weight"], llama.module.lm_head.weight)
    tokens = rows[0].token_ids.tolist()
    base = AutoModelForCausalLM.from_pretrained(llama.source)
    adapted = PeftModel.from_pretrained(base, result.checkpoint)
    expected = reference_logprobs(adapted, tokens)
    assert torch.allclose(reference_logprobs(result.module, tokens), expected, atol=1e-6)
    assert torch.allclose(reference_logprobs(adapted.merge_and_unload(), tokens), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "tied", "says"),
    [
        ("tail", False, "lora.modules_to_save names tail, but the model has no such module with weights"),
        ("lm_head", True, "lora.modules_to_save names lm_head, but this model's embeddings are tied"),
        ("model", True, "lora.modules_to_save names model, but this model's embeddings are tied"),
        ("s", False, "lora.modules_to_save is .'s'.*: modules_to_save cannot be applied to modules of type"),
    ],
)
def test_modules_that_cannot_be_trained_whole(tmp_path, name, tied, says):
    loaded = load_model(str(save_tiny_model(tmp_path, tie_word_embeddings=tied)), "cpu")
    with pytest.raises(BackendError, match=says):
        build_policy(loaded, LoRASettings(modules_to_save=[name]), seed=0)


@pytest.mark.slow
def test_the_first_job_fixes_the_adapters(llama, tmp_path):
    learner = Learner(llama, tmp_path)
    learner.check(TrainingSettings(lora=LORA))
    result, _ = train(learner, make_rows(llama.module), lora=LORA)
    for other in (None, {"rank": 8, "alpha": 8}):
        with pytest.raises(RequestRefused, match=r'settings\.lora differs.*"rank":4') as refused:
            learner.check(TrainingSettings(lora=other))
        assert refused.value.status == 409
    resumed = Learner(load_model(str(result.checkpoint), "cpu"), tmp_path / "b")
    resumed.check(TrainingSettings(lora=LORA))
    (result.checkpoint / "training.json").unlink()  # as any other peft folder
    foreign = Learner(load_model(str(result.checkpoint), "cpu"), tmp_path / "c")
    foreign.check(TrainingSettings(lora=LORA))
    with pytest.raises(RequestRefused):
        foreign.check(TrainingSettings(lora={"rank": 8, "alpha": 8}))
    train(foreign, make_rows(llama.module), lora=LORA)


def test_training_goes_on_in_another_folder_and_without_the_starting_model(tmp_path, monkeypatch):
    """Adapters over a base given by a relative path, targets named in another order; then all weights."""
    save_tiny_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    rows = make_rows(load_model("base", "cpu").module)
    asked = LORA | {"target_modules": ["v_proj", "q_proj"]}
    adapters, _ = train(Learner(load_model("base", "cpu"), tmp_path / "a"), rows, lora=asked)
    full, _ = train(Learner(load_model("base", "cpu"), tmp_path / "b"), rows)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (adapters.checkpoint / "training.json").unlink()  # as any other peft folder
    train(Learner(load_model(str(adapters.checkpoint), "cpu"), tmp_path / "c"), rows, lora=asked)
    resumed = Learner(load_model(str(full.checkpoint), "cpu"), tmp_path / "d")
    (tmp_path / "base").rename(tmp_path / "moved")
    result, _ = train(resumed, rows)
    assert (result.version, result.metrics["kl"]) == (1, None)
    with pytest.raises(BackendError, match="no folder"):
        train(resumed, rows, kl={"beta": 0.1})


@pytest.mark.parametrize("lora", slow_but([LORA], [None, LORA]))
def test_bfloat16_is_served_and_float32_trained(tmp_path, lora):
    loaded = load_model(str(save_tiny_model(tmp_path / "m")), "cpu", "bfloat16")
    learner = Learner(loaded, tmp_path / "out")
    rows = make_rows(loaded.module)
    first, _ = train(learner, rows, learning_rate=1e-6, lora=lora)
    assert {p.dtype for p in first.module.parameters()} == {torch.bfloat16}
    assert first.metrics["logprob_gap"] < 0.1
    # Steps far below bfloat16's resolution add up in the float32 weights, across a restart too.
    masters = weights(learner._state.policy.module)
    assert {value.dtype for name, value in masters.items() if lora is None or "lora_" in name} == {torch.float32}
    restored = Learner(load_model(str(first.checkpoint), "cpu", "bfloat16"), tmp_path / "b")
    assert same(weights(restored._states.restore(TrainingSettings(lora=lora)).policy.module), masters)


def test_steps_hold_whole_episodes_and_cover_each_pass():
    row = lambda episode: Row(np.zeros(3, np.int32), np.array([1]), np.zeros(1), np.zeros(1), episode)  # noqa: E731
    rows = [row(f"e{index // 3}") for index in range(60)] + [row("") for _ in range(10)]
    steps = optimizer_steps(rows, TrainingSettings(mini_batch_size=20, num_iterations=3))
    assert len(steps) == 12
    assert all(14 <= len(step) <= 21 for step in steps)
    for first in (0, 4, 8):
        assert sorted(itertools.chain(*steps[first : first + 4])) == list(range(70))
    for step in steps:
        for episode in {rows[index].episode for index in step} - {""}:
            assert sum(rows[index].episode == episode for index in step) == 3
    assert steps[:4] != steps[4:8]
    assert steps == optimizer_steps(rows, TrainingSettings(mini_batch_size=20, num_iterations=3))
    assert len(optimizer_steps(rows, TrainingSettings())) == 1
    assert len(optimizer_steps(rows, TrainingSettings(mini_batch_size=20, steps_per_iteration=7))) == 7


def test_micro_batches_stay_within_their_budget():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        length = int(rng.integers(2, 50))
        rows.append(Row(rng.integers(0, 9, length).astype(np.int32), np.array([length - 1]), np.zeros(1), np.zeros(1)))
    rows += rows[:10]
    parts = list(Packer(rows, packed=False).micro_batches([[index] for index in range(50)], 100))
    assert sorted(itertools.chain(*parts)) == list(range(50))
    for part in parts:
        assert len({rows[i].key for i in part}) * max(rows[i].input_length for i in part) <= 100


def test_the_learning_rate_over_a_run():
    def rates(steps, *, schedule="constant", **settings):
        given = TrainingSettings(learning_rate=1.0, **settings)
        return [learning_rate(given, load_named("schedules", schedule), step, steps) for step in range(steps)]

    assert rates(4) == [1, 1, 1, 1]
    assert rates(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert rates(2, schedule="linear", schedule_range=(0.5, 1.0)) == [0.5, 0.25]
    assert rates(4, schedule="cosine") == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    assert rates(5, warmup=0.4) == pytest.approx([0.5, 1, 1, 1, 1])
    assert rates(5, warmup=0.4, schedule="linear") == pytest.approx([0.5, 1, 1, 2 / 3, 1 / 3])


@pytest.mark.parametrize("lora", slow_after(1, [None, LORA, WHOLE]))
def test_a_backend_started_again_continues_its_training(llama, tmp_path, lora):
    """As if it had never stopped; with the model it was told to load, or with the checkpoint it made last."""
    rows = make_rows(llama.module)
    never_stopped = Learners(Learner(llama, tmp_path / "a")).default
    for _ in range(2):
        second, _ = train(never_stopped, rows, lora=lora)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    third, _ = train(never_stopped, rows, lora=lora)

    again = Learners(Learner(llama, tmp_path / "b")).default
    assert (again.version, again.versions) == (2, [0, 1, 2])
    assert same(weights(again.load_version(2)), weights(second.module))
    result, _ = train(again, rows, lora=lora)
    assert (result.version, result.checkpoint.name) == (3, "step_000003")
    assert same(weights(result.module), weights(third.module))

    last = load_model(str(result.checkpoint), "cpu")
    for version in (1, 2):  # started twice more, with the checkpoint as its model
        onwards = Learners(Learner(last, tmp_path / "b")).default
        assert onwards.version == version - 1
        result, _ = train(onwards, rows, lora=lora)
        assert (result.version, result.checkpoint.name) == (version, f"step_00000{3 + version}")
    assert sorted(p.name for p in (tmp_path / "b/checkpoints").iterdir()) == [f"step_00000{n}" for n in range(1, 6)]


def test_two_trainings_are_never_mixed_in_a_folder(llama, models, tmp_path):
    """What would overwrite checkpoints, or number other weights as if they continued them, is refused."""
    rows = make_rows(llama.module)
    trained = {}
    for name in ("here", "elsewhere"):
        learner = Learners(Learner(llama, tmp_path / name)).default
        trained[name] = [train(learner, rows)[0].checkpoint for _ in range(3)]
    content = {path: path.read_bytes() for path in tmp_path.glob("here/checkpoints/*/*")}
    others = [
        (models["gpt2"], r"step_000001 continues step 0 of .*llama, but the loaded model is step 0 of .*gpt2"),
        (load_model(str(trained["here"][0]), "cpu"), r"step_000002 continues step 0 .* loaded model is step 1"),
        (load_model(str(trained["elsewhere"][2]), "cpu"), r"step_000001 continues step 0 .* loaded model is step 3"),
    ]
    for loaded, says in others:
        with pytest.raises(RequestRefused, match=f"{says}.*: load that model, or use another output_dir or name"):
            Learners(Learner(loaded, tmp_path / "here"))
    assert content == {path: path.read_bytes() for path in tmp_path.glob("here/checkpoints/*/*")}
    (trained["here"][1] / "training.json").unlink()
    with pytest.raises(BackendError, match=r"step_000002 is not a checkpoint of this backend: it has no training.json"):
        Learners(Learner(llama, tmp_path / "here"))


def test_a_folder_in_the_place_of_a_checkpoint_is_kept(llama, tmp_path):
    learner = Learner(llama, tmp_path)
    (tmp_path / "checkpoints/step_000001/mine").mkdir(parents=True)
    with pytest.raises(InsituError, match="step_000001 exists already; it is not overwritten"):
        train(learner, make_rows(llama.module))
    assert [path.name for path in (tmp_path / "checkpoints/step_000001").iterdir()] == ["mine"]


@pytest.mark.parametrize("lora", [None, LORA])
def test_checkpoints_have_ordinary_permissions(llama, tmp_path, lora):
    checkpoint = train(Learner(llama, tmp_path), make_rows(llama.module), lora=lora)[0].checkpoint
    (tmp_path / "file").touch()
    ordinary = (tmp_path / "file").stat().st_mode
    assert {path.name: path.stat().st_mode for path in checkpoint.iterdir() if path.stat().st_mode != ordinary} == {}


def test_a_full_disk_fails_the_job_and_keeps_the_weights(llama, tmp_path):
    learner, quiet = Learner(llama, tmp_path / "a"), Learner(llama, tmp_path / "b")
    rows = make_rows(llama.module)
    for each in (learner, quiet):
        train(each, rows)
    with disk_space(20_000), pytest.raises(JobFailed, match=r"step_000002 cannot be written: .*too large.* restored"):
        train(learner, rows)
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == ["step_000001"]
    assert same(*(weights(train(each, rows)[0].module) for each in (learner, quiet)))


def damage(folder: Path, change) -> Path:
    """Changes the tensors of a model or an adapter, as if they had been saved like this."""
    (path,) = (folder / name for name in ("model.safetensors", "adapter_model.safetensors") if (folder / name).exists())
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    if (record := read_record(folder)) is not None:
        write_record(folder, record)
    return folder


def flip_a_bit(path: Path) -> None:
    """In the middle of a file, where a weight is: every library still reads it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("harm", "says"), slow_after(1, [(flip_a_bit, "damaged"), (Path.unlink, "missing")]))
@pytest.mark.parametrize(
    ("lora", "name"),
    slow_but(
        [(None, "model.safetensors"), (LORA, "adapter_model.safetensors")],
        [
            (None, "model.safetensors"),
            (None, "config.json"),
            (None, "tokenizer.json"),
            (LORA, "adapter_model.safetensors"),
            (LORA, "adapter_config.json"),
        ],
    ),
)
def test_a_checkpoint_that_changed_on_the_disk_is_not_loaded(llama, tmp_path, lora, name, says, harm):
    """To be served or trained, by the process that made it or by another one."""
    learner = Learner(llama, tmp_path)
    first, second = (train(learner, make_rows(llama.module), lora=lora)[0].checkpoint for _ in range(2))
    for folder in (first, second):
        harm(folder / name)
    problem = rf"{name} is {says}"
    with pytest.raises(BackendError, match=problem):
        load_model(str(second), "cpu")
    with pytest.raises(BackendError, match=problem):
        learner.load_version(1)
    again = Learners(Learner(llama, tmp_path)).default
    with pytest.raises(BackendError, match=problem):
        again.load_version(again.version)
    forget_state(learner, make_rows(llama.module), lora=lora)
    with pytest.raises(BackendError, match=problem):
        train(learner, make_rows(llama.module), lora=lora)
    assert learner.version == 2


@pytest.mark.parametrize(
    ("harm", "says"), slow_but([(Path.unlink, "missing")], [(flip_a_bit, "damaged"), (Path.unlink, "missing")])
)
def test_training_does_not_continue_from_a_damaged_optimizer(llama, tmp_path, caplog, harm, says):
    """The weights can still be served, and training can begin anew with them."""
    learner = Learner(llama, tmp_path / "a")
    checkpoint = train(learner, make_rows(llama.module))[0].checkpoint
    harm(checkpoint / "optimizer.safetensors")
    again = Learners(Learner(llama, tmp_path / "a")).default
    again.load_version(1)
    with pytest.raises(RequestRefused, match=rf"optimizer.safetensors is {says}"):
        again.verify(TrainingSettings())
    with pytest.raises(BackendError, match=rf"optimizer.safetensors is {says}"):
        train(again, make_rows(llama.module))
    (checkpoint / "optimizer.safetensors").unlink(missing_ok=True)
    train(Learner(load_model(str(checkpoint), "cpu"), tmp_path / "b"), make_rows(llama.module))
    assert "step_000001 has no optimizer state" in caplog.text


def test_checkpoints_of_earlier_releases_have_no_digests(llama, tmp_path):
    learner = Learner(llama, tmp_path)
    result, _ = train(learner, make_rows(llama.module))
    path = result.checkpoint / "training.json"
    record = json.loads(path.read_text())
    assert {*record.pop("sha256"), "training.json"} == {each.name for each in result.checkpoint.iterdir()}
    path.write_text(json.dumps(record))
    flip_a_bit(result.checkpoint / "tokenizer_config.json")
    assert same(weights(Learners(Learner(llama, tmp_path)).default.load_version(1)), weights(result.module))


def some(tensors) -> str:
    return next(name for name in sorted(tensors) if "q_proj" in name)


def set_nan(tensors) -> None:
    tensors[some(tensors)][1, 1] = math.nan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop(some(tensors)), r"q_proj.*missing|[Mm]issing.*q_proj|lacks.*q_proj"),
        (set_nan, r"q_proj.* has NaN or infinite values"),
    ],
    ids=["missing", "NaN"],
)
@pytest.mark.parametrize("lora", [None, LORA])
def test_damaged_weights_are_refused_by_name(llama, tmp_path, lora, change, says):
    """By a new process that loads them, and by one that goes back to them."""
    learner = Learner(llama, tmp_path)
    first, second = (train(learner, make_rows(llama.module), lora=lora)[0].checkpoint for _ in range(2))
    for folder in (first, second):
        damage(folder, change)
        with pytest.raises(BackendError, match=says):
            load_model(str(folder), "cpu")
    with pytest.raises(BackendError, match=says):
        learner.load_version(1)
    forget_state(learner, make_rows(llama.module), lora=lora)
    with pytest.raises(BackendError, match=says):
        train(learner, make_rows(llama.module), lora=lora)


def test_tensors_without_a_place_in_the_model_are_reported(tmp_path, caplog):
    folder = damage(save_tiny_model(tmp_path / "m"), lambda tensors: tensors.update(further=torch.zeros(2)))
    load_model(str(folder), "cpu")
    assert f"{folder}: ignored 1 tensors that the model does not have, such as further" in caplog.text


def test_jobs_that_would_fail_are_known_before_they_have_rows(llama, tmp_path):
    def refusal(learner, **settings) -> str:
        with pytest.raises(RequestRefused) as refused:
            learner.verify(TrainingSettings(**settings))
        assert refused.value.status == 409
        return str(refused.value)

    fresh = Learner(llama, tmp_path / "a")
    assert "lora.target_modules is ['nowhere']" in refusal(fresh, lora=LORA | {"target_modules": ["nowhere"]})
    fresh.verify(TrainingSettings(lora=LORA, kl={"beta": 0.1}))
    fresh.verify(TrainingSettings())  # it has fixed nothing
    base = save_tiny_model(tmp_path / "base")
    full, _ = train(Learner(load_model(str(base), "cpu"), tmp_path / "b"), make_rows(llama.module))
    resumed = Learner(load_model(str(full.checkpoint), "cpu"), tmp_path / "c")
    resumed.verify(TrainingSettings(kl={"beta": 0.1}))
    assert "allowed: none (all weights)" in refusal(resumed, lora=LORA)
    with pytest.raises(BackendError, match=r"lora_rank is 4, but all weights of .*step_000001 were trained so far"):
        Learners(Learner(load_model(str(full.checkpoint), "cpu"), tmp_path / "d", default_lora=LoRASettings(**LORA)))
    optimizer = full.checkpoint / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-100])
    assert "optimizer.safetensors is damaged" in refusal(resumed)
    optimizer.unlink()
    base.rename(tmp_path / "moved")
    resumed = Learner(load_model(str(full.checkpoint), "cpu"), tmp_path / "e")
    resumed.verify(TrainingSettings())
    assert "there is no folder" in refusal(resumed, kl={"beta": 0.1})


@pytest.mark.parametrize("attention", ["padded", "packed"])
def test_a_small_models_weights_do_not_depend_on_the_number_of_cores(llama, tmp_path, monkeypatch, attention):
    """A run may continue on another machine."""
    rng, rows = np.random.default_rng(0), []
    for number in range(48):
        prompt, length = [number // 8] * 20, rng.integers(20, 50)
        tokens = np.array([*prompt, *rng.integers(0, 256, length)], np.int32)
        advantages = np.full(length, rng.normal())
        rows.append(Row(tokens, np.arange(20, 20 + length), np.full(length, -5, np.float32), advantages))
    weights = set()
    for cores in (1, 2, 3, 8):
        monkeypatch.setattr("insitu.backend.learner.checkpoints.usable_cores", lambda cores=cores: cores)
        learner = Learner(llama, tmp_path / str(cores))
        train(learner, rows, mini_batch_size=32, attention=attention)
        weights.add((learner.saved.folder / "step_000001/model.safetensors").read_bytes())
    assert len(weights) == 1
