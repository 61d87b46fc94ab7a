"""The loss family against reference values, finite differences, and the properties it promises."""

import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import forked_python
from pydantic import ValidationError

from insitu.backend.learner.losses import PolicyBatch, clip, dpo_loss, kto_loss, policy_loss, probe, row_weights
from insitu.errors import BackendError
from insitu.schemas.training_jobs import DPOSettings, KTOSettings, LossSettings, TrainingSettings

ROOT = Path(__file__).parents[3]
VECTORS = ROOT / "tests/data/loss_vectors.json"


def made_settings(aggregation, **settings):
    return LossSettings(**aggregation, **settings)


aggregations = st.sampled_from(
    [{"loss_agg_mode": "token"}, {"loss_agg_mode": "sequence"}, {"loss_agg_mode": "constant", "loss_scale_factor": 16}]
)
loss_settings = st.builds(
    made_settings,
    objective=st.just("clip"),
    importance_sampling_level=st.sampled_from(["token", "sequence"]),
    clip_low=st.sampled_from([0.1, 0.2]),
    clip_high=st.sampled_from([0.2, 0.28]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    truncated_importance=st.sampled_from([None, 1.05, 2.0]),
    token_mask=st.sampled_from([None, (0.9, 1.1)]),
    sequence_mask=st.sampled_from([None, (0.97, 1.03)]),
    kl=st.fixed_dictionaries(
        {"beta": st.sampled_from([0.0, 0.04, 0.5]), "estimator": st.sampled_from(["k1_in_loss", "k2", "k3"])}
    ),
    aggregation=aggregations,
) | st.builds(
    made_settings,
    objective=st.just("cispo"),
    cispo_cap=st.sampled_from([1.0, 5.0]),
    importance_sampling_level=st.sampled_from(["token", "sequence"]),
    aggregation=aggregations,
    kl=st.fixed_dictionaries({"beta": st.sampled_from([0.0, 0.1])}),
)
seeds = st.integers(0, 2**31)


def random_inputs(seed: int, rows: int = 6, tokens: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = lambda scale: torch.randn(rows, tokens, generator=generator, dtype=torch.float64) * scale  # noqa: E731
    old = -noise(1).abs()
    return {
        "new": old + noise(0.4),
        "old": old,
        "rollout": old + noise(0.1),
        "ref": old + noise(0.2),
        "advantage": noise(1),
        "mask": torch.rand(rows, tokens, generator=generator) < 0.7,
    }


def loss_of(inputs, episodes, config, new=None, rows=None):
    """The loss of `rows` (all) of the optimiser step that `inputs` are, whose weights come from the whole step."""
    weights = row_weights(inputs["mask"].sum(1).tolist(), episodes, config)
    rows = range(len(episodes)) if rows is None else rows
    batch = PolicyBatch(
        inputs["old"][rows],
        inputs["rollout"][rows],
        inputs["ref"][rows] if config.kl.beta else None,
        inputs["advantage"][rows],
        inputs["mask"][rows],
        torch.tensor(weights, dtype=torch.float64)[rows],
    )
    return policy_loss((inputs["new"] if new is None else new)[rows], batch, config)


def numbers(result):
    return [*result[:-1], *result.metrics.values()]


def gradient_of(inputs, episodes, config):
    new = inputs["new"].clone().requires_grad_()
    return torch.autograd.grad(loss_of(inputs, episodes, config, new).loss, new)[0]


def own(count: int) -> list[str]:
    return [""] * count


def test_reference_values():
    """The script that checks any such file passes on ours, in values and gradients to 1e-6."""
    done = subprocess.run([forked_python(), ROOT / "scripts/check_losses.py", VECTORS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   loss") == 9
    assert done.stdout.count("ok   advantages") == 5
    assert done.stdout.count("ok   dpo") == 1


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: d["losses"]["ppo_clip_seq_mean"].update(value=0.16834), "FAIL loss ppo_clip_seq_mean"),
        (lambda d: d["losses"]["gspo_seq_mean"]["grad_new_logp"][3].__setitem__(0, 1e-5), "FAIL loss gspo_seq_mean"),
        (lambda d: d["losses"]["gspo_seq_mean"]["grad_new_logp"][3].__setitem__(0, math.nan), "nan"),
        (lambda d: d["losses"]["dr_grpo_const16"]["params"].update(cliphigh=1), "cliphigh"),
        (lambda d: d["losses"]["dr_grpo_const16"]["params"].update(advantage="grpo"), "advantage 'grpo' is unknown"),
        (lambda d: d["advantages"]["rloo"].__setitem__(2, 0.0), "FAIL advantages rloo"),
        (lambda d: d.pop("rollout_logp"), "FAIL loss tis_cap2_token_mean"),
        (lambda d: d["dpo"].update(sigmoid_loss=0.95856), "FAIL dpo sigmoid_loss"),
        (lambda d: d["dpo"]["grad_chosen"].__setitem__(1, -0.0124), "FAIL dpo sigmoid_loss"),
        (lambda d: (d.pop("losses"), d.pop("advantages"), d.pop("dpo")), "none of the blocks"),
    ],
)
def test_the_check_fails_on_a_wrong_file(tmp_path, damage, problem, capsys, monkeypatch):
    data = json.loads(VECTORS.read_text())
    damage(data)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_losses

    assert not check_losses.check(data)
    assert problem in capsys.readouterr().out


@settings(max_examples=20, deadline=None)
@given(loss_settings, seeds)
def test_gradient_is_the_finite_difference(config, seed):
    inputs = random_inputs(seed)
    episodes = own(6)
    gradient = gradient_of(inputs, episodes, config)
    direction = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    if config.objective == "cispo":  # its weight carries no gradient: hold it, and differentiate the rest by hand
        inputs["old"] = inputs["new"].clone()
        gradient = gradient_of(inputs, episodes, config)
        weights = torch.tensor(row_weights(inputs["mask"].sum(1).tolist(), episodes, config), dtype=torch.float64)
        expected = -inputs["advantage"]
        if config.kl.beta:
            expected = expected + config.kl.beta * (1 - (inputs["ref"] - inputs["new"]).exp())
        assert torch.allclose(gradient, expected * weights[:, None] * inputs["mask"], atol=1e-12)
        return
    step = 1e-6
    ahead, behind = (loss_of(inputs, episodes, config, inputs["new"] + s * direction).loss for s in (step, -step))
    slope = (gradient * direction).sum()
    # A kink (a clip bound, dual clip) within a step of this point would break the difference, not the gradient.
    here = loss_of(inputs, episodes, config).loss
    if abs((ahead - here) - (here - behind)) < 1e-9:
        assert ((ahead - behind) / (2 * step)).item() == pytest.approx(slope.item(), abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(loss_settings, seeds, st.permutations(range(6)), st.integers(1, 5))
def test_a_micro_batch_split_changes_nothing(config, seed, order, cut):
    inputs, episodes = random_inputs(seed), ["a", "a", "b", "", "b", ""]
    whole = loss_of(inputs, episodes, config)
    first, second = (loss_of(inputs, episodes, config, rows=list(part)) for part in (order[:cut], order[cut:]))
    for a, b, total in zip(*map(numbers, (first, second, whole)), strict=True):
        assert (a + b).item() == pytest.approx(total.item(), abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    loss_settings.filter(lambda c: c.importance_sampling_level == "token" and c.sequence_mask is None),
    seeds,
    st.integers(1, 4),
)
def test_an_episode_weighs_the_same_however_it_is_cut(config, seed, cut):
    """Row 0 becomes two rows that hold its first `cut` tokens and the rest; the others stay."""
    inputs = random_inputs(seed)
    parts = {name: torch.cat([value[:1], value]) for name, value in inputs.items()}
    parts["mask"] = parts["mask"].clone()
    parts["mask"][0, cut:] = False
    parts["mask"][1, :cut] = False
    whole, split = ["a", "b", "c", "", "d", "d"], ["a", "a", "b", "c", "", "d", "d"]
    assert loss_of(parts, split, config).loss.item() == pytest.approx(
        loss_of(inputs, whole, config).loss.item(), abs=1e-12
    )
    gradient = gradient_of(parts, split, config)
    rejoined = torch.cat([gradient[:1] + gradient[1:2], gradient[2:]])
    assert torch.allclose(rejoined, gradient_of(inputs, whole, config), atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(loss_settings, seeds, st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_what_is_masked_reaches_neither_value_nor_gradient(config, seed, poison):
    inputs = random_inputs(seed)
    poisoned = {
        name: value if name == "mask" else torch.where(inputs["mask"], value, poison) for name, value in inputs.items()
    }
    results = loss_of(inputs, own(6), config), loss_of(poisoned, own(6), config)
    for clean, dirty in zip(*map(numbers, results), strict=True):
        assert clean.item() == dirty.item()
    gradient = gradient_of(poisoned, own(6), config)
    assert torch.equal(gradient, gradient_of(inputs, own(6), config))
    assert not gradient[~inputs["mask"]].any()


@settings(max_examples=20, deadline=None)
@given(loss_settings, seeds)
def test_rows_without_trained_tokens_are_not_counted(config, seed):
    inputs = random_inputs(seed)
    inputs["mask"][2] = False
    kept = [0, 1, 3, 4, 5]
    without = {name: value[kept] for name, value in inputs.items()}
    assert loss_of(inputs, own(6), config).loss.item() == pytest.approx(
        loss_of(without, own(5), config).loss.item(), abs=1e-12
    )
    # and neither is an untrained row of an episode that has others
    assert row_weights([3, 0, 2], ["a", "a", "b"], config)[::2] == row_weights([3, 2], ["a", "b"], config)


def test_the_ratio_of_a_sequence_is_its_rows_own():
    """Two rows of one episode keep their own ratios; the aggregation alone joins them."""
    inputs = random_inputs(0, rows=2)
    inputs["mask"][:] = True
    config = LossSettings(importance_sampling_level="sequence", loss_agg_mode="sequence", clip_low=1, clip_high=100)
    ratios = (inputs["new"] - inputs["old"]).mean(1).exp()
    expected = -(ratios[:, None] * inputs["advantage"]).sum() / 10
    assert loss_of(inputs, ["a", "a"], config).loss.item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("corrections", "factors"),
    [
        ({"token_mask": [0.45, 2.2]}, [[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]),
        ({"token_mask": [0.45, 2.2], "truncated_importance": 1.5}, [[0.5, 1.5, 0.0], [1.0, 0.0, 0.0]]),
        ({"token_mask": [0, 1]}, [[0.5, 0.0, 0.0], [1.0, 0.25, 0.0]]),
        ({"sequence_mask": [0.6, 1.01]}, [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        ({"sequence_mask": [0.4, 1]}, [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]),
        ({"sequence_mask": [0.6, 1.01], "truncated_importance": 1.5}, [[0.5, 1.5, 0.0], [0.0, 0.0, 0.0]]),
        ({"sequence_mask": [0.4, 1], "token_mask": [0.3, 3]}, [[0.5, 2.0, 0.0], [1.0, 0.0, 0.0]]),
    ],
)
def test_corrections_weigh_and_leave_out_tokens(corrections, factors):
    """Ratios to the sampler of 1/2 and 2 (geometric mean 1) in the first row, of 1 and 1/4 (1/2) in the second."""
    if factors is None:
        with pytest.raises(
            ValidationError, match=r"sequence_mask\n  .* \[0\.5, 0\.9\] must be \[LOW, HIGH\] with 0 <= LOW"
        ):
            LossSettings(**corrections)
        return
    old = torch.full((2, 3), -2.0, dtype=torch.float64)
    ratios = torch.tensor([[0.5, 2.0, math.nan], [1.0, 0.25, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]] * 2)
    inputs = {"new": old, "old": old, "rollout": old - ratios.log(), "ref": old, "advantage": old * 0 + 3, "mask": mask}
    config = LossSettings(**corrections)
    result = loss_of(inputs, own(2), config)
    factors = torch.tensor(factors, dtype=torch.float64)
    assert result.loss.item() == pytest.approx(-3 * factors.sum().item() / 4, abs=1e-12)
    assert torch.allclose(gradient_of(inputs, own(2), config), -3 * factors / 4, atol=1e-12)
    assert result.excluded.item() == 4 - (factors > 0).sum()
    assert result.sampled_ratio_squares.item() == pytest.approx(1 / 4 + 4 + 1 + 1 / 16)


def test_a_mask_is_a_range_around_1():
    with pytest.raises(ValidationError, match=r"\[0\.5, 0\.9\] must be \[LOW, HIGH\] with 0 <= LOW <= 1 <= HIGH"):
        LossSettings(sequence_mask=[0.5, 0.9])


def test_corrections_need_recomputed_log_probabilities():
    for corrections, named in (
        ({"token_mask": [0.45, 2.2]}, "token_mask requires"),
        ({"truncated_importance": 2, "sequence_mask": [0, 2]}, "truncated_importance and sequence_mask require"),
    ):
        with pytest.raises(ValidationError, match=f"{named} old_logprobs: recomputed; rollout needs no correction"):
            LossSettings(old_logprobs="rollout", **corrections)


def test_metrics_are_sums_over_trained_tokens():
    nan = math.nan
    old = torch.zeros(2, 3, dtype=torch.float64)
    new = torch.tensor([[math.log(1.5), math.log(1.1), nan], [math.log(0.5), nan, nan]], dtype=torch.float64)
    rollout = new - 0.25
    batch = PolicyBatch(old, rollout, old, torch.ones_like(old), ~new.isnan(), torch.ones(2, dtype=torch.float64))
    result = policy_loss(new, batch, LossSettings())
    assert result.metrics["clip_fraction"] == 2
    assert result.gap.item() == pytest.approx(0.75)
    assert result.sampled_ratio.item() == pytest.approx(3 * math.exp(0.25))
    k3 = sum(1 / ratio - 1 + math.log(ratio) for ratio in (1.5, 1.1, 0.5))
    assert result.kl.item() == pytest.approx(k3)
    assert policy_loss(new, batch, LossSettings(objective="cispo", cispo_cap=1.2)).metrics == {"clip_fraction": 1}


ratios = st.lists(st.tuples(st.floats(-300, 300), st.floats(-300, 300)), min_size=1, max_size=5)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@settings(max_examples=20, deadline=None)
@given(ratios, st.sampled_from([0.05, 0.5, 2.0]), st.sampled_from([0.0, 0.1, 0.4]))
def test_preference_losses_are_their_formulas(drawn, beta, smoothing):
    chosen, rejected = (torch.tensor(side, dtype=torch.float64) for side in zip(*drawn, strict=True))
    formulas = {
        "sigmoid": lambda h: (1 - smoothing) * softplus(-beta * h) + smoothing * softplus(beta * h),
        "robust": lambda h: (
            ((1 - smoothing) * softplus(-beta * h) - smoothing * softplus(beta * h)) / (1 - 2 * smoothing)
        ),
        "ipo": lambda h: (h - 1 / (2 * beta)) ** 2,
        "hinge": lambda h: max(0.0, 1 - beta * h),
    }
    for loss_type, formula in formulas.items():
        flipped = {"label_smoothing": smoothing} if loss_type in ("sigmoid", "robust") else {}
        config = DPOSettings(beta=beta, loss_type=loss_type, **flipped)
        expected = [formula(a - b) for a, b in drawn]
        assert dpo_loss(chosen, rejected, config).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    # With preferences that are flipped with that probability, the robust loss is the plain one on average.
    robust, plain = DPOSettings(beta=beta, loss_type="robust", label_smoothing=smoothing), DPOSettings(beta=beta)
    mean = (1 - smoothing) * dpo_loss(chosen, rejected, robust) + smoothing * dpo_loss(rejected, chosen, robust)
    assert torch.allclose(mean, dpo_loss(chosen, rejected, plain), rtol=1e-9, atol=1e-9)


def test_a_row_of_one_token_has_its_ratio_as_the_mean():
    old_BT = torch.tensor([[0.0], [math.log(1.15)]], dtype=torch.float64)
    zeros = torch.zeros_like(old_BT)
    inputs = PolicyBatch(old_BT, zeros, None, zeros + 1, zeros == 0, torch.ones(2, dtype=torch.float64))
    assert policy_loss(old_BT, inputs, LossSettings(sequence_mask=(0.9, 1.1))).excluded == 1


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda new_BT: None, "it returned NoneType; allowed: a tensor of shape (1, 1) or a scalar"),
        (lambda new_BT: (new_BT, {"a": 1.0}), "the metric 'a' must be a tensor of shape (1, 1)"),
        (lambda new_BT: (new_BT, {"a": new_BT.sum()}), "the metric 'a' must be a tensor of shape (1, 1)"),
        (lambda new_BT: new_BT.detach(), "has no gradient"),
    ],
)
def test_what_an_objective_may_return(returned, problem):
    with pytest.raises(BackendError, match=re.escape(problem)):
        probe(lambda batch, settings: returned(batch.new_BT), LossSettings())
    assert probe(lambda batch, settings: (batch.new_BT, {"a": batch.new_BT}), LossSettings()) == ("a",)


def test_an_objective_that_sums_its_tokens_itself_gets_the_same_penalty():
    config, zeros = LossSettings(kl={"beta": 0.5}), torch.zeros(2, 3, dtype=torch.float64)
    new_BT = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight_B = torch.tensor([0.2, 0.7], dtype=torch.float64)
    inputs = PolicyBatch(zeros, zeros, zeros, zeros + 1, zeros == 0, weight_B)
    summed = policy_loss(new_BT, inputs, config, lambda batch, _: (clip(batch, config).loss.sum(1) * weight_B).sum())
    torch.testing.assert_close(summed.loss, policy_loss(new_BT, inputs, config).loss)
    assert summed.kl > 0.1


def test_a_kl_penalty_has_the_gradient_of_a_divergence_except_for_k1_in_the_loss():
    """Expected exactly: a row for each token of a vocabulary, weighted by its probability under the policy."""
    logits, ref_logits = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    policy, reference = (torch.distributions.Categorical(logits=each) for each in (logits, ref_logits))

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def of_penalty(**kl) -> torch.Tensor:
        new_B1 = policy.logits[:, None]
        old_B1, none_B1 = new_B1.detach(), torch.zeros(7, 1, dtype=torch.float64)
        inputs = PolicyBatch(old_B1, old_B1, reference.logits[:, None], none_B1, none_B1 == 0, policy.probs.detach())
        return gradient(policy_loss(new_B1, inputs, LossSettings(kl={"beta": 1.0, **kl})).loss)

    kl_divergence = torch.distributions.kl_divergence
    forward, backward = gradient(kl_divergence(policy, reference)), gradient(kl_divergence(reference, policy))
    assert forward.abs().max() > 0.1
    for kl, expected in (
        ({"estimator": "k1_in_loss"}, torch.zeros_like(forward)),
        ({"estimator": "k1", "in_reward": True}, forward),
        ({"estimator": "k2"}, forward),
        ({"estimator": "k3"}, backward),
    ):
        torch.testing.assert_close(of_penalty(**kl), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kl", "problem"),
    [
        ({"beta": 0.1, "estimator": "k1"}, "estimator: k1 as a term of the loss restrains nothing, as its expected gr"),
        ({"beta": 0.1, "estimator": "k1_in_loss", "in_reward": True}, "k1_in_loss excludes in_reward: true; allowed"),
    ],
)
def test_a_kl_penalty_that_restrains_nothing_is_refused(kl, problem):
    with pytest.raises(ValueError, match=problem):
        LossSettings(kl=kl)
    assert LossSettings(kl={"estimator": "k1"}).kl.beta == 0  # measured only


@settings(max_examples=20, deadline=None)
@given(ratios, st.floats(0, 50), st.sampled_from([0.05, 0.5]))
def test_kto_is_its_formula(drawn, kl, beta):
    config = KTOSettings(beta=beta, desirable_weight=1.3, undesirable_weight=0.6)
    values = torch.tensor([value for pair in drawn for value in pair], dtype=torch.float64)
    is_good = torch.arange(len(values)) % 2 == 0
    losses = kto_loss(values, is_good, torch.tensor(kl, dtype=torch.float64), config)
    for value, good, loss in zip(values.tolist(), is_good.tolist(), losses.tolist(), strict=True):
        gain = value - kl if good else kl - value
        expected = (1.3 if good else 0.6) * (1 - 1 / (1 + math.exp(-beta * gain)))
        assert loss == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loss_type", ["sigmoid", "robust", "ipo", "hinge"])
def test_large_margins_have_finite_gradients(loss_type):
    chosen = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    loss = dpo_loss(chosen, torch.zeros(3), DPOSettings(beta=1.0, loss_type=loss_type)).sum()
    (gradient,) = torch.autograd.grad(loss, chosen)
    assert gradient.isfinite().all()
    assert gradient[1] < 0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"method": "ppo"}, "'grpo', 'dpo', 'kto' or 'sft'"),
        ({"dpo": {}}, "dpo requires method: dpo, not grpo"),
        ({"method": "dpo", "kto": {"beta": 1}}, "kto requires method: kto, not dpo"),
        ({"method": "dpo", "clip_low": 0.1}, "clip_low requires method: grpo, not dpo"),
        ({"method": "sft", "kl": {"beta": 0.1}}, "kl requires method: grpo, not sft"),
        (
            {"method": "dpo", "dpo": {"loss_type": "ipo", "label_smoothing": 0.1}},
            "loss_type: sigmoid or robust, not ipo",
        ),
        ({"method": "dpo", "dpo": {"label_smoothing": 0.5}}, "less than 0.5"),
        ({"objective": "cispo", "clip_high": 0.28}, "clip_high requires objective: clip, not cispo"),
        ({"cispo_cap": 3}, "cispo_cap requires objective: cispo, not clip"),
        ({"loss_scale_factor": 9}, "loss_scale_factor requires loss_agg_mode: constant, not token"),
        ({"method": "dpo", "dpo": {"preference_loss_weight": 0}}, "are both 0"),
        ({"method": "dpo", "dpo": {"beta": 0}}, "greater than 0"),
        ({"method": "kto", "kto": {"betta": 1}}, "kto.betta"),
        ({"method": "sft", "sft": {}}, "sft"),
    ],
)
def test_settings_of_other_methods_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        TrainingSettings.model_validate(given)


@pytest.mark.parametrize("method", ["grpo", "dpo", "kto", "sft"])
def test_settings_come_back_as_they_were_sent(method):
    sent = TrainingSettings(method=method)
    for dumped in (sent.effective(), sent.model_dump(mode="json")):
        assert TrainingSettings.model_validate(dumped) == sent
    assert ("clip_low" in sent.effective()) == (method == "grpo")
