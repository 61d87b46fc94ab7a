"""The policy-gradient loss family as pure functions; `docs/reference/losses.md` writes the formulas out.

Shapes: B rows, T tokens of a row (only those where the mask is set count; where it is not, anything may stand).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from insitu.schemas.training_jobs import KLSettings, LossSettings


class PolicyBatch(NamedTuple):
    """What the loss needs besides the policy's own log-probabilities; logarithms are natural.

    `old_BT` of the policy that ratios are taken to, `rollout_BT` as sampled, `ref_BT` of the starting weights (used
    by the penalty only, None without one), `mask_BT` boolean, `weight_B` what one trained token of the row weighs.
    """

    old_BT: Tensor
    rollout_BT: Tensor
    ref_BT: Tensor | None
    advantage_BT: Tensor
    mask_BT: Tensor
    weight_B: Tensor


class PolicyLoss(NamedTuple):
    """The loss, differentiable, and sums over trained tokens for the metrics, detached scalars."""

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    gap: Tensor
    """Of |new - rollout|."""
    sampled_ratio: Tensor
    """Of exp(new - rollout)."""


def row_weights(trained: Sequence[int], episodes: Sequence[str], settings: LossSettings) -> list[float]:
    """What one trained token of each row weighs in the loss of an optimiser step.

    `trained` and `episodes` name every row of the step's whole batch: its number of trained tokens and the episode it
    belongs to ("" is an episode of its own). So a micro-batch is a plain sum of weighted tokens, and any split of the
    batch gives the same loss. A row without trained tokens is left out and its episode counts only by its others.
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
        assert settings.loss_scale_factor is not None  # LossSettings refuses this aggregation without it
        weights = {name: 1 / (counted * settings.loss_scale_factor) for name, count in tokens.items() if count}
    return [weights[name] if count else 0.0 for name, count in zip(names, trained, strict=True)]


def policy_loss(new_BT: Tensor, batch: PolicyBatch, settings: LossSettings) -> PolicyLoss:
    """The loss of some rows of an optimiser step; the losses of all its rows add up to that of the step."""
    mask_BT = batch.mask_BT
    # Before anything else, so that a masked NaN reaches neither a sum nor, times 0, a gradient.
    new_BT = _trained(new_BT, mask_BT)
    old_BT, rollout_BT = _trained(batch.old_BT, mask_BT), _trained(batch.rollout_BT, mask_BT)
    advantage_BT = _trained(batch.advantage_BT, mask_BT)

    ratio_BT = _ratio(new_BT, old_BT, mask_BT, settings)
    token_loss_BT = _objective(new_BT, ratio_BT, advantage_BT, settings)
    if settings.truncated_importance is not None:
        correction_BT = (old_BT - rollout_BT).exp().clamp(max=settings.truncated_importance)
        token_loss_BT = token_loss_BT * correction_BT.detach()
    kl_BT = torch.zeros_like(new_BT)
    if batch.ref_BT is not None:
        kl_BT = kl_estimate(new_BT, _trained(batch.ref_BT, mask_BT), settings.kl)
        if settings.kl.beta > 0:
            token_loss_BT = token_loss_BT + settings.kl.beta * kl_BT

    loss = (_trained(token_loss_BT, mask_BT).sum(1) * batch.weight_B).sum()
    with torch.no_grad():
        off_policy_BT = new_BT - rollout_BT
        return PolicyLoss(
            loss=loss,
            clipped=(_outside(ratio_BT, settings) & mask_BT).sum(),
            kl=_trained(kl_BT, mask_BT).double().sum(),
            gap=off_policy_BT.double().abs().sum(),
            sampled_ratio=_trained(off_policy_BT.double().exp(), mask_BT).sum(),
        )


def kl_estimate(new_BT: Tensor, ref_BT: Tensor, settings: KLSettings) -> Tensor:
    """An estimate for each token of how far the policy has moved from the starting weights, in nats."""
    difference_BT = ref_BT - new_BT
    if settings.estimator == "k1":
        return -difference_BT
    return torch.expm1(difference_BT) - difference_BT


def _trained(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, values_BT, 0.0)


def _ratio(new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, settings: LossSettings) -> Tensor:
    difference_BT = new_BT - old_BT
    if settings.importance_sampling_level == "sequence":
        mean_B1 = difference_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
        difference_BT = mean_B1.expand_as(difference_BT)
    return difference_BT.exp()


def _objective(new_BT: Tensor, ratio_BT: Tensor, advantage_BT: Tensor, settings: LossSettings) -> Tensor:
    if settings.objective == "cispo":
        return -ratio_BT.detach().clamp(settings.cispo_floor, settings.cispo_cap) * advantage_BT * new_BT
    clamped_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_BT = torch.maximum(-advantage_BT * ratio_BT, -advantage_BT * clamped_BT)
    if settings.dual_clip is None:
        return loss_BT
    bounded_BT = torch.minimum(loss_BT, -advantage_BT * settings.dual_clip)
    return torch.where(advantage_BT < 0, bounded_BT, loss_BT)


def _outside(ratio_BT: Tensor, settings: LossSettings) -> Tensor:
    """Where the ratio lies beyond the bounds of the objective."""
    if settings.objective == "cispo":
        return (ratio_BT < settings.cispo_floor) | (ratio_BT > settings.cispo_cap)
    return (ratio_BT < 1 - settings.clip_low) | (ratio_BT > 1 + settings.clip_high)
