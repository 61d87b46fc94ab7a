"""Settings of the losses; `docs/reference/losses.md` has the formulas."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from insitu.schemas.parts import Objective, Reference

SETTINGS = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, frozen=True)


def _check_range(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"[{low:g}, {high:g}] must be [LOW, HIGH] with 0 <= LOW <= 1 <= HIGH")
    return bounds


RatioRange = Annotated[tuple[float, float], AfterValidator(_check_range)]


class KLSettings(BaseModel):
    """Penalty on the KL divergence from the starting weights."""

    model_config = SETTINGS

    beta: float = Field(default=0.0, ge=0)
    """Coefficient of the penalty; 0 disables it and saves the forward pass of the starting weights."""
    estimator: Literal["k1", "k2", "k3", "k1_in_loss"] = "k3"
    """With d = ref - new: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (http://joschu.net/blog/kl-approx.html).
    As a term of the loss, k1 restrains nothing: its expected gradient on the policy's samples is 0. So it is allowed
    with `in_reward` only; `k1_in_loss` is that term all the same."""
    in_reward: bool = False
    """Subtracts beta k from the advantage of each token, without gradient, rather than adding it to the loss (verl's
    `use_kl_in_reward`). k1 is then the unbiased choice."""
    reference: Reference | None = None
    """The reference weights: `initial` (those that training started from), `job_start`, or those that a
    [function](../guides/extend.md#a-reference) returns; none: `initial`."""

    @model_validator(mode="after")
    def _check_estimator(self) -> Self:
        if self.beta and self.estimator == "k1" and not self.in_reward:
            problem = "estimator: k1 as a term of the loss restrains nothing, as its expected gradient is 0"
            raise ValueError(f"{problem}; allowed: k2 or k3, k1 with in_reward: true, or k1_in_loss if it is intended")
        if self.estimator == "k1_in_loss" and self.in_reward:
            raise ValueError("estimator: k1_in_loss excludes in_reward: true; allowed: k1, k2, k3")
        return self


class LossSettings(BaseModel):
    """Terms of the policy-gradient loss; `docs/reference/losses.md` has the formulas."""

    model_config = SETTINGS

    objective: Objective = "clip"
    """`clip`: PPO's clipped surrogate (arXiv:1707.06347). `cispo`: clipped importance weights (arXiv:2506.13585). Or a
    [function](../guides/extend.md#a-loss) of yours."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`token`: one ratio per token. `sequence`: the geometric mean over the row (GSPO, arXiv:2507.18071)."""
    old_logprobs: Literal["recomputed", "rollout"] = "recomputed"
    """Denominator of the ratio: log-probabilities recomputed by the learner at the start of the job, or those the
    sampler returned."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clamped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clamped from above at 1 + clip_high (above clip_low: DAPO's clip-higher, arXiv:2503.14476)."""
    cispo_floor: float = Field(default=0.0, ge=0)
    """Lower bound of the importance weight, `cispo` only."""
    cispo_cap: float = Field(default=5.0, gt=0)
    """Upper bound of the importance weight, `cispo` only."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss in units of -A where A < 0 (arXiv:1912.09729), `clip` only."""
    truncated_importance: float | None = Field(default=None, gt=0)
    """Cap of exp(old - rollout), the correction for a sampler whose probabilities differ from the learner's."""
    token_mask: RatioRange | None = None
    """[LOW, HIGH], such as [0.5, 2]: a token's loss is multiplied by exp(old - rollout), and 0 where this lies outside
    (IcePop, arXiv:2510.18855)."""
    sequence_mask: RatioRange | None = None
    """[LOW, HIGH], such as [0.99, 1.01]: the loss of a row is 0 if the geometric mean of exp(old - rollout) over its
    tokens lies outside."""
    kl: KLSettings = Field(default_factory=KLSettings)
    """Penalty on the KL divergence from the starting weights."""
    loss_agg_mode: Literal["token", "sequence", "constant"] = "token"
    """`token`: mean over all trained tokens. `sequence`: mean over episodes of their token mean.
    `constant`: sum / (episodes x loss_scale_factor) (Dr. GRPO, arXiv:2503.20783)."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Divisor for `loss_agg_mode: constant`, in tokens."""
    kl_rows: int | None = Field(default=None, ge=0)
    """Rows on which the metric `kl` is measured if there is no KL penalty; none: 128, fewer with 512 trained tokens."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.loss_agg_mode == "constant" and self.loss_scale_factor is None:
            raise ValueError("loss_agg_mode: constant needs loss_scale_factor (a number of tokens)")
        if self.dual_clip is not None and self.objective != "clip":
            raise ValueError(f"dual_clip requires objective: clip, not {self.objective}")
        if self.corrections and self.old_logprobs == "rollout":
            names = f"{' and '.join(self.corrections)} require{'s' * (len(self.corrections) == 1)}"
            raise ValueError(f"{names} old_logprobs: recomputed; rollout needs no correction")
        return self

    @property
    def corrections(self) -> list[str]:
        """The keys that are set of those that correct for a sampler of other weights, dtype or kernels."""
        names = ("truncated_importance", "token_mask", "sequence_mask")
        return [name for name in names if getattr(self, name) is not None]


class DPOSettings(BaseModel):
    """Terms of the preference loss, `method: dpo` only."""

    model_config = SETTINGS

    beta: float = Field(default=0.1, gt=0)
    """Weight of the log-ratio to the reference: the implicit reward of a completion is beta x (new - ref)."""
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """`sigmoid`: DPO (arXiv:2305.18290). `ipo`: squared distance to 1 / (2 beta) (arXiv:2310.12036). `hinge`: SLiC's
    (arXiv:2305.10425). `robust`: unbiased if a share `label_smoothing` of the preferences is flipped
    (arXiv:2403.00409)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of flipped preferences: `sigmoid` (conservative DPO) and `robust` only."""
    average_logprobs: bool = False
    """Compares the mean log-probability per token of the two sides, not the sum."""
    preference_loss_weight: float = Field(default=1.0, ge=0)
    """Weight of the preference loss."""
    sft_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen sides' mean negative log-likelihood per token."""
    reference: Reference = "initial"
    """The reference weights: those that training started from, those at the start of the job (`job_start`), or those
    that a [function](../guides/extend.md#a-reference) returns."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing requires loss_type: sigmoid or robust, not {self.loss_type}")
        if self.preference_loss_weight == self.sft_loss_weight == 0:
            raise ValueError("preference_loss_weight and sft_loss_weight are both 0; allowed: at least one above 0")
        return self


class KTOSettings(BaseModel):
    """Terms of the loss of unpaired desirable and undesirable episodes (arXiv:2402.01306), `method: kto` only."""

    model_config = SETTINGS

    beta: float = Field(default=0.1, gt=0)
    """Weight of the log-ratio to the reference."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of desirable episodes (`preferred: true`)."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of undesirable episodes (`preferred: false`)."""
    reference: Reference = "initial"
    """The reference weights: those that training started from, those at the start of the job (`job_start`), or those
    that a [function](../guides/extend.md#a-reference) returns."""
