"""The losses of preference pairs and of desirable or undesirable episodes; `docs/reference/losses.md` has the formulas.

Shapes: P preference pairs, E episodes. The log-probability of a completion (the side of a pair, or an episode) is the
sum over its trained tokens; with `average_logprobs`, their mean.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from insitu.schemas.training_jobs import DPOSettings, KTOSettings


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
