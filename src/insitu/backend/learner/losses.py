"""The policy-gradient loss family as pure functions; `docs/reference/losses.md` has the formulas.

Shapes: B rows, T tokens per row. Values where the mask is not set are ignored and may be anything.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from insitu.schemas.training_jobs import KLSettings, LossSettings


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
    clipped: Tensor
    kl: Tensor
    gap: Tensor
    """Sum of |new - rollout|."""
    sampled_ratio: Tensor
    """Sum of exp(new - rollout)."""


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
    counted = sum(count > 0 for count in tokens.values())
    if settings.loss_agg_mode == "token":
        weights = {name: 1 / tokens.total() for name, count in tokens.items() if count}
    elif settings.loss_agg_mode == "sequence":
        weights = {name: 1 / (counted * count) for name, count in tokens.items() if count}
    else:
        assert settings.loss_scale_factor is not None  # LossSettings requires it for this mode
        weights = {name: 1 / (counted * settings.loss_scale_factor) for name, count in tokens.items() if count}
    return [weights[name] if count else 0.0 for name, count in zip(names, trained, strict=True)]


def policy_loss(new_BT: Tensor, batch: PolicyBatch, settings: LossSettings) -> PolicyLoss:
    """The loss of some rows of an optimizer step; over all its rows these sum to the loss of the step."""
    mask_BT = batch.mask_BT
    # First, so that a masked NaN reaches neither sums nor (times 0) gradients.
    new_BT = _masked(new_BT, mask_BT)
    old_BT, rollout_BT = _masked(batch.old_logprobs_BT, mask_BT), _masked(batch.rollout_logprobs_BT, mask_BT)
    advantage_BT = _masked(batch.advantage_BT, mask_BT)

    difference_BT = new_BT - old_BT
    if settings.importance_sampling_level == "sequence":
        mean_B1 = difference_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
        difference_BT = mean_B1.expand_as(difference_BT)
    ratio_BT = difference_BT.exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.objective == "cispo":
        low, high = settings.cispo_floor, settings.cispo_cap
        token_loss_BT = -ratio_BT.detach().clamp(low, high) * advantage_BT * new_BT
    else:
        token_loss_BT = torch.maximum(-advantage_BT * ratio_BT, -advantage_BT * ratio_BT.clamp(low, high))
        if settings.dual_clip is not None:
            bounded_BT = torch.minimum(token_loss_BT, -advantage_BT * settings.dual_clip)
            token_loss_BT = torch.where(advantage_BT < 0, bounded_BT, token_loss_BT)
    if settings.truncated_importance is not None:
        correction_BT = (old_BT - rollout_BT).exp().clamp(max=settings.truncated_importance)
        token_loss_BT = token_loss_BT * correction_BT.detach()
    kl_BT = torch.zeros_like(new_BT)
    if batch.ref_logprobs_BT is not None:
        kl_BT = kl_estimate(new_BT, _masked(batch.ref_logprobs_BT, mask_BT), settings.kl)
        if settings.kl.beta > 0:
            token_loss_BT = token_loss_BT + settings.kl.beta * kl_BT

    loss = (_masked(token_loss_BT, mask_BT).sum(1) * batch.weight_B).sum()
    with torch.no_grad():
        off_policy_BT = new_BT - rollout_BT
        return PolicyLoss(
            loss=loss,
            clipped=(((ratio_BT < low) | (ratio_BT > high)) & mask_BT).sum(),
            kl=_masked(kl_BT, mask_BT).double().sum(),
            gap=off_policy_BT.double().abs().sum(),
            sampled_ratio=_masked(off_policy_BT.double().exp(), mask_BT).sum(),
        )


def kl_estimate(new_BT: Tensor, ref_BT: Tensor, settings: KLSettings) -> Tensor:
    """Per-token estimate of the KL divergence from the starting weights, in nats."""
    difference_BT = ref_BT - new_BT
    if settings.estimator == "k1":
        return -difference_BT
    return torch.expm1(difference_BT) - difference_BT


def _masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, values_BT, 0.0)
