"""The losses of all methods as pure functions; `docs/reference/losses.md` has the formulas.

Shapes: B rows, T tokens per row, P preference pairs, E episodes. Values where the mask is not set are ignored and may
be anything. The log-probability of a completion (the side of a pair, or an episode) is the sum over its trained tokens;
with `average_logprobs`, their mean.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from insitu.errors import BackendError, InsituError, describe_error
from insitu.schemas.parts import TokenBatch, TokenLoss, load_named
from insitu.schemas.training_jobs import DPOSettings, KLSettings, KTOSettings, LossSettings

TokenObjective = Callable[[TokenBatch, LossSettings], Any]
"""The loss of each trained token of some rows: `clip`, `cispo`, or a function of the user. See `TokenLoss`."""


class PolicyBatch(NamedTuple):
    """Inputs of the loss besides the policy's own log-probabilities; all logarithms are natural.

    `old_logprobs_BT`: denominator of the ratio. `rollout_logprobs_BT`: as sampled. `ref_logprobs_BT`: under the
    starting weights, None without a KL penalty. `mask_BT`: boolean, trained tokens. `weight_B`: weight of one trained
    token of the row.
    """

    old_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    ref_logprobs_BT: Tensor | None
    advantage_BT: Tensor
    mask_BT: Tensor
    weight_B: Tensor


class PolicyLoss(NamedTuple):
    """The differentiable loss, and detached sums over trained tokens for the metrics."""

    loss: Tensor
    kl: Tensor
    gap: Tensor
    """Sum of |new - rollout|."""
    sampled_ratio: Tensor
    """Sum of exp(new - rollout)."""
    sampled_ratio_squares: Tensor
    excluded: Tensor
    """Number of tokens that `token_mask` and `sequence_mask` exclude."""
    metrics: dict[str, Tensor]
    """Sums of the objective's own metrics, by name."""


def row_weights(trained: Sequence[int], episodes: Sequence[str], settings: LossSettings) -> list[float]:
    """Weight of one trained token of each row in the loss of an optimizer step.

    `trained` and `episodes` hold the number of trained tokens and the episode of every row of the step; each row with
    episode "" is a separate episode. The loss of a micro-batch is then a weighted sum of its tokens, and any split of
    the step gives the same loss. Rows without trained tokens have weight 0 and are not counted.
    """
    names = [episode or f"\0{index}" for index, episode in enumerate(episodes)]
    tokens: Counter[str] = Counter()
    for name, count in zip(names, trained, strict=True):
        tokens[name] += count
    counted, total = sum(count > 0 for count in tokens.values()), tokens.total()

    def divisor(name: str) -> float:
        if settings.loss_agg_mode == "token":
            return total
        if settings.loss_agg_mode == "sequence":
            return counted * tokens[name]
        assert settings.loss_scale_factor is not None  # LossSettings requires it for this mode
        return counted * settings.loss_scale_factor

    return [1 / divisor(name) if count else 0.0 for name, count in zip(names, trained, strict=True)]


def clip(batch: TokenBatch, settings: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate, with an upper bound where the advantage is negative if `dual_clip` is set."""
    ratio_BT, advantage_BT = batch.ratio_BT, batch.advantage_BT
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    loss_BT = torch.maximum(-advantage_BT * ratio_BT, -advantage_BT * ratio_BT.clamp(low, high))
    if settings.dual_clip is not None:
        bounded_BT = torch.minimum(loss_BT, -advantage_BT * settings.dual_clip)
        loss_BT = torch.where(advantage_BT < 0, bounded_BT, loss_BT)
    return TokenLoss(loss_BT, {"clip_fraction": (ratio_BT < low) | (ratio_BT > high)})


def cispo(batch: TokenBatch, settings: LossSettings) -> TokenLoss:
    """Clipped importance weights, which carry no gradient."""
    low, high = settings.cispo_floor, settings.cispo_cap
    loss_BT = -batch.ratio_BT.detach().clamp(low, high) * batch.advantage_BT * batch.new_BT
    return TokenLoss(loss_BT, {"clip_fraction": (batch.ratio_BT < low) | (batch.ratio_BT > high)})


def policy_loss(
    new_BT: Tensor, batch: PolicyBatch, settings: LossSettings, objective: TokenObjective | None = None
) -> PolicyLoss:
    """The loss of some rows of an optimizer step; over all its rows these sum to the loss of the step.

    Without `objective`, it is the one that the settings name.
    """
    mask_BT = batch.mask_BT
    # First, so that a masked NaN reaches neither sums nor (times 0) gradients.
    new_BT = _masked(new_BT, mask_BT)
    old_BT, rollout_BT = _masked(batch.old_logprobs_BT, mask_BT), _masked(batch.rollout_logprobs_BT, mask_BT)
    ref_BT = None if batch.ref_logprobs_BT is None else _masked(batch.ref_logprobs_BT, mask_BT)

    difference_BT = new_BT - old_BT
    if settings.importance_sampling_level == "sequence":
        mean_B1 = difference_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
        difference_BT = mean_B1.expand_as(difference_BT)
    advantage_BT = _masked(batch.advantage_BT, mask_BT)
    if ref_BT is not None and settings.kl.in_reward:
        advantage_BT = advantage_BT - settings.kl.beta * kl_estimate(old_BT, ref_BT, settings.kl)
    inputs = TokenBatch(new_BT, old_BT, rollout_BT, ref_BT, difference_BT.exp(), advantage_BT, mask_BT, batch.weight_B)
    objective = objective or load_named("objectives", str(settings.objective))
    token_loss, metrics = checked_loss(objective(inputs, settings), inputs, settings)
    kept_BT = mask_BT
    if settings.corrections:
        correction_BT, kept_BT = _correction(old_BT - rollout_BT, mask_BT, settings)
        token_loss = token_loss * correction_BT
    kl_BT = torch.zeros_like(new_BT) if ref_BT is None else kl_estimate(new_BT, ref_BT, settings.kl)
    in_loss = ref_BT is not None and settings.kl.beta > 0 and not settings.kl.in_reward
    penalty_BT = settings.kl.beta * kl_BT if in_loss else None

    def total(values_BT: Tensor) -> Tensor:
        return (_masked(values_BT, mask_BT).sum(1) * batch.weight_B).sum()

    if token_loss.ndim == 0:
        loss = token_loss if penalty_BT is None else token_loss + total(penalty_BT)
    else:
        loss = total(token_loss if penalty_BT is None else token_loss + penalty_BT)
    with torch.no_grad():
        off_policy_BT = new_BT - rollout_BT
        sampled_ratio_BT = _masked(off_policy_BT.double().exp(), mask_BT)
        return PolicyLoss(
            loss=loss,
            kl=_masked(kl_BT, mask_BT).double().sum(),
            gap=off_policy_BT.double().abs().sum(),
            sampled_ratio=sampled_ratio_BT.sum(),
            sampled_ratio_squares=sampled_ratio_BT.square().sum(),
            excluded=(mask_BT & ~kept_BT).double().sum(),
            metrics={name: _masked(values.double(), mask_BT).sum() for name, values in metrics.items()},
        )


@torch.no_grad()
def _correction(difference_BT: Tensor, mask_BT: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The factor of each token's loss, from old - rollout; and which tokens the masks keep.

    `token_mask` is that of IcePop (arXiv:2510.18855), `sequence_mask` is of the geometric mean over the row.
    """
    ratio_BT = difference_BT.exp()
    factor_BT, kept_BT = torch.ones_like(ratio_BT), mask_BT
    if settings.sequence_mask is not None:
        mean_B1 = difference_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
        kept_BT = kept_BT & _is_within(mean_B1.exp(), settings.sequence_mask)
    if settings.token_mask is not None:
        factor_BT, kept_BT = ratio_BT, kept_BT & _is_within(ratio_BT, settings.token_mask)
    if settings.truncated_importance is not None:
        factor_BT = ratio_BT.clamp(max=settings.truncated_importance)
    return _masked(factor_BT, kept_BT), kept_BT


def _is_within(ratio: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (ratio >= bounds[0]) & (ratio <= bounds[1])


def checked_loss(result: Any, batch: TokenBatch, settings: LossSettings) -> TokenLoss:
    """What an objective has returned, as a `TokenLoss`. Raises BackendError if it cannot be one."""
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    shape = tuple(batch.new_BT.shape)
    if not isinstance(loss, Tensor) or tuple(loss.shape) not in ((), shape):
        returned = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise BackendError(f"objective: it returned {returned}; allowed: a tensor of shape {shape} or a scalar")
    if loss.ndim == 0 and settings.corrections:
        raise BackendError(f"objective: it returned a scalar, but {settings.corrections[0]} needs a loss per token")
    for name, values in metrics.items():
        if not isinstance(values, Tensor) or tuple(values.shape) != shape:
            raise BackendError(f"objective: the metric {name!r} must be a tensor of shape {shape}")
    return TokenLoss(loss, metrics)


def probe(objective: TokenObjective, settings: LossSettings) -> tuple[str, ...]:
    """The names of an objective's metrics, by a call with a single token, which also shows whether it can be trained.

    Raises BackendError.
    """
    one = torch.zeros(1, 1)
    new_BT = one.clone().requires_grad_()
    batch = TokenBatch(new_BT, one, one, one, new_BT.exp(), one + 1, one == 0, one[0] + 1)
    with torch.random.fork_rng(devices=()):
        try:
            loss, metrics = checked_loss(objective(batch, settings), batch, settings)
        except InsituError:
            raise
        except Exception as error:  # code of the user may raise anything
            raise BackendError(f"objective: {describe_error(error)}") from error
    if not loss.requires_grad:
        raise BackendError("objective: the loss does not depend on new_BT or ratio_BT, so it has no gradient")
    return tuple(metrics)


def kl_estimate(new_BT: Tensor, ref_BT: Tensor, settings: KLSettings) -> Tensor:
    """Per-token estimate of the KL divergence from the starting weights, in nats."""
    difference_BT = ref_BT - new_BT
    if settings.estimator in ("k1", "k1_in_loss"):
        return -difference_BT
    if settings.estimator == "k2":
        return difference_BT.square() / 2
    return torch.expm1(difference_BT) - difference_BT


def _masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, values_BT, 0.0)


def dpo_loss(chosen_P: Tensor, rejected_P: Tensor, settings: DPOSettings) -> Tensor:
    """The preference loss of each pair, from both sides' log-ratios new - ref.

    `sigmoid`: DPO (arXiv:2305.18290), with `label_smoothing` conservative DPO (https://ericmitchell.ai/cdpo.pdf).
    `ipo`: arXiv:2310.12036, eq. 17. `hinge`: SLiC (arXiv:2305.10425) on log-ratios. `robust`: arXiv:2403.00409.
    """
    margin_P = chosen_P - rejected_P
    if settings.loss_type == "ipo":
        return (margin_P - 1 / (2 * settings.beta)).square()
    logits_P = settings.beta * margin_P
    if settings.loss_type == "hinge":
        return relu(1 - logits_P)
    flipped = settings.label_smoothing
    as_labeled_P, as_flipped_P = -logsigmoid(logits_P), -logsigmoid(-logits_P)
    if settings.loss_type == "robust":
        return ((1 - flipped) * as_labeled_P - flipped * as_flipped_P) / (1 - 2 * flipped)
    return (1 - flipped) * as_labeled_P + flipped * as_flipped_P


def kto_loss(ratio_E: Tensor, desirable_E: Tensor, kl: Tensor, settings: KTOSettings) -> Tensor:
    """The loss of each episode, from its log-ratio new - ref (arXiv:2402.01306).

    `kl` is the reference point, an estimate of the KL divergence from the reference; it carries no gradient.
    """
    gain_E = torch.where(desirable_E, ratio_E - kl, kl - ratio_E)
    loss_E = 1 - torch.sigmoid(settings.beta * gain_E)
    return torch.where(desirable_E, settings.desirable_weight * loss_E, settings.undesirable_weight * loss_E)


def mean_of_clusters(clusters: Sequence[tuple[float, int]]) -> tuple[float, float | None]:
    """The mean of values in clusters, given the sum and count of each cluster, and its cluster-robust standard error.

    The error is that of a ratio estimator, by linearization: clusters are independent, values within one need not be.
    None for a single cluster.
    """
    count = sum(each for _, each in clusters)
    mean = math.fsum(total for total, _ in clusters) / count
    if len(clusters) < 2:
        return mean, None
    squares = math.fsum((total - mean * each) ** 2 for total, each in clusters)
    return mean, math.sqrt(squares * len(clusters) / (len(clusters) - 1)) / count
