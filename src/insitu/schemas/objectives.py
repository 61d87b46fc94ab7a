"""What the objective of a policy gradient is given, and what it returns; both without importing torch.

Shapes: B rows, T trained tokens of the longest row. Values where `mask_BT` is not set are 0.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class TokenBatch(NamedTuple):
    """Some rows of an optimizer step. Only `new_BT`, and `ratio_BT` through it, carry a gradient.

    All logarithms are natural. `ratio_BT` is exp(new - old), per token or of the whole row, as
    `importance_sampling_level` says.
    """

    new_BT: "Tensor"
    """Log-probabilities under the weights being trained."""
    old_BT: "Tensor"
    """Under the weights at the start of the job, or as sampled (`old_logprobs`)."""
    rollout_BT: "Tensor"
    """As sampled."""
    ref_BT: "Tensor | None"
    """Under the reference weights; None without a KL penalty."""
    ratio_BT: "Tensor"
    advantage_BT: "Tensor"
    mask_BT: "Tensor"
    """Boolean: the trained tokens."""
    weight_B: "Tensor"
    """The weight of one trained token of the row in the loss of the step, as `loss_agg_mode` says."""


class TokenLoss(NamedTuple):
    """The loss of each token (B, T), or a scalar: the share of these rows in the loss of the step.

    The losses of tokens are multiplied by `truncated_importance`, get the KL penalty and are added up with `weight_B`;
    a scalar gets the KL penalty only. `metrics` (each B, T) are averaged over the trained tokens of the job.
    """

    loss: "Tensor"
    metrics: "Mapping[str, Tensor]" = MappingProxyType({})
