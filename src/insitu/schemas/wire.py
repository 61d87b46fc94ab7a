"""A training job as it travels from an adapter to a backend: gzipped JSON lines, the settings first, then the rows.

    {"settings": {"method": "grpo", "learning_rate": 0.001, "clip_low": 0.2, ...}, "num_rows": 2}
    {"token_ids": [1, 5, 7, 2], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -1], "advantages": 1, "episode": "a"}
    {"token_ids": [1, 6, 8, 2], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -2], "advantages": -1, "episode": "b"}

The header `Idempotency-Key` names the job (run id and epoch): the same key never trains twice.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_SETTINGS = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class KLSettings(BaseModel):
    """A penalty that holds the policy near the starting weights."""

    model_config = _SETTINGS

    beta: float = Field(default=0.0, ge=0)
    """Weight of the penalty; 0 turns it off and spares the pass through the starting weights."""
    estimator: Literal["k1", "k3"] = "k3"
    """With d = ref - new: k1 = -d, k3 = exp(d) - d - 1 (Schulman, http://joschu.net/blog/kl-approx.html)."""


class LoRASettings(BaseModel):
    """Train low-rank adapters instead of all weights (Hu et al., arXiv:2106.09685)."""

    model_config = _SETTINGS

    rank: int = Field(default=16, ge=1)
    """Of the two matrices whose product is added to each weight."""
    alpha: float = Field(default=32, gt=0)
    """The product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapters' inputs set to 0 while training: then ratios and the gap to the sampler are off by it, and
    results depend on micro_batch_tokens."""
    target_modules: str | list[str] = "all-linear"
    """The layers that get adapters: their names or the ends of them, or `all-linear`."""


class LossSettings(BaseModel):
    """The terms of the policy-gradient loss; `docs/reference/losses.md` writes them out."""

    model_config = _SETTINGS

    objective: Literal["clip", "cispo"] = "clip"
    """`clip`: PPO's clipped surrogate (arXiv:1707.06347). `cispo`: clipped importance weights (arXiv:2506.13585)."""
    level: Literal["token", "sequence"] = "token"
    """Whose ratio: each token's, or the row's geometric mean (GSPO, arXiv:2507.18071)."""
    ratio_to: Literal["start", "sampled"] = "start"
    """The policy that the ratio is taken to: the learner's at the start of the job, or the sampler's as it said."""
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
    """Cap of exp(old - rollout), which corrects for a sampler that differs from the learner."""
    kl: KLSettings = Field(default_factory=KLSettings)
    """The penalty on moving away from the starting weights."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """`token`: mean over all trained tokens. `sequence`: mean over episodes of their token mean.
    `constant`: sum / (episodes x constant) (Dr. GRPO, arXiv:2503.20783)."""
    constant: float | None = Field(default=None, gt=0)
    """The divisor of aggregation `constant`, in tokens."""

    @model_validator(mode="after")
    def _belongs_together(self) -> "LossSettings":
        if self.aggregation == "constant" and self.constant is None:
            raise ValueError("aggregation: constant needs the key constant (a number of tokens)")
        if self.dual_clip is not None and self.objective != "clip":
            raise ValueError(f"dual_clip belongs to objective: clip, not to {self.objective}")
        if self.truncated_importance is not None and self.ratio_to == "sampled":
            raise ValueError(
                "truncated_importance belongs to ratio_to: start; to the sampled ones nothing is to correct"
            )
        return self


class TrainingOptions(LossSettings):
    """What a user may set: the block `training` of the adapter."""

    method: Literal["grpo"] = "grpo"
    """The family of losses: policy gradients with group-relative advantages (arXiv:2402.03300)."""
    learning_rate: float = Field(default=5e-5, ge=0)
    """AdamW's, at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over the run: not at all, straight to 0, or along half a cosine to 0."""
    warmup: float = Field(default=0.0, ge=0, lt=1)
    """Share of the run over which the learning rate rises from 0 first."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, of matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of a greater norm are scaled down to it."""
    batch_rows: int | None = Field(default=None, ge=1)
    """Rows of one optimiser step, none: all rows of the job. They are cut evenly into as many steps as batches of this
    size would fill; the rows of an episode stay together."""
    passes: int = Field(default=1, ge=1)
    """Times the job's rows are gone through, shuffled anew by the seed."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Padded tokens computed at once; changes memory and speed, not the result."""
    lora: LoRASettings | None = None
    """Low-rank adapters instead of all weights; fixed by the first job of a backend."""

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each of the two is at least 0 and below 1")
        return betas


class TrainingSettings(TrainingOptions):
    """Everything a job's result depends on besides its rows and the weights it starts from."""

    seed: int = 0
    """Of the shuffling."""
    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps of a pass, in place of what batch_rows makes of the number of rows."""
    progress: tuple[float, float] = (0.0, 1.0)
    """The part of the whole run this job is, for the schedule: epoch 3 of 10 is (0.2, 0.3)."""

    @model_validator(mode="after")
    def _progress_in_order(self) -> "TrainingSettings":
        first, last = self.progress
        if not 0 <= first <= last <= 1:
            raise ValueError(f"progress is {list(self.progress)}; allowed: two numbers in order between 0 and 1")
        return self


class JobState(BaseModel):
    """What `GET /v1/train/jobs/{id}` answers, and each event carries."""

    model_config = ConfigDict(extra="ignore")

    id: str
    status: Literal["pending", "running", "completed", "failed", "canceled"]
    key: str | None = None
    progress: float = 0.0
    """Percent."""
    message: str | None = None
    policy_version: int | None = None
    """Of the weights the job made, once it is completed."""
    checkpoint: str | None = None
    """The folder those weights lie in."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """loss, kl, entropy, grad_norm, clip_fraction, tokens, rows, episodes, steps, learning_rate, logprob_gap,
    ratio_mean, seconds. Without a KL penalty kl is measured after the last step, on at most 128 rows."""
