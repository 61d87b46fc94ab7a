"""Settings and states of the backend's training jobs.

A job is uploaded as gzipped JSON lines, settings first, then one line per row:

    {"settings": {"method": "grpo", "learning_rate": 0.001, "clip_low": 0.2, ...}, "num_rows": 2}
    {"token_ids": [1, 5, 7, 2], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -1], "advantages": 1, "episode": "a"}
    {"token_ids": [1, 6, 8, 2], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -2], "advantages": -1, "episode": "b"}

Rows of a preference pair (`method: dpo`) share `pair`; a dialogue as `messages` is rendered with the chat template:

    {"token_ids": [1, 5, 7, 2], "loss_mask": [0, 0, 1, 1], "pair": "p1", "preferred": true}
    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}], "pair": "p1", "preferred": false}

The `Idempotency-Key` header identifies the job (run id and epoch): a key is trained on at most once.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from insitu.schemas.components import Settings
from insitu.schemas.lora import LoRASettings
from insitu.schemas.parts import PYTHON, Objective, Optimizer, Part, Reference, Schedule

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class Retention(Settings):
    """The checkpoints that a backend keeps once a job has completed; it deletes the others.

    The latest version and those that a running request samples from are always kept.
    """

    last: int = Field(default=3, ge=1)
    """Number of latest versions to keep."""
    every: int | None = Field(default=None, ge=1)
    """Also keep the versions that are multiples of this."""
    optimizer: int = Field(default=2, ge=2)
    """Number of latest versions whose optimizer state is kept."""
    snapshots: int | None = Field(default=None, ge=1)
    """Distance of the versions that are written with optimizer state, as in `KeepConfig`."""
    versions: list[int] = Field(default_factory=list)
    """Further versions to keep."""
    after: int = 0
    """Versions up to this one are not touched."""
    loaded: int | None = Field(default=None, ge=0)
    """Number of older versions that stay loaded, of those requested by number; none: 2, of those that were requested
    since they are older."""


class KeepConfig(Settings):
    """The checkpoints of a run to keep; the others are deleted after each training job."""

    last: int = Field(default=3, ge=1)
    """Number of latest versions to keep. The latest two are always kept. With `staleness: K` of the trainer: not less
    than K + 2, which is also the default then."""
    best: bool = True
    """Also keep the version with the best validation score so far."""
    every: int | None = Field(default=None, ge=1)
    """Also keep the versions that are multiples of this, such as 10, 20, 30; 1 keeps all."""
    optimizer: int = Field(default=2, ge=2)
    """Number of latest versions whose optimizer state is kept, so that `insitu runs fork` continues exactly from there.
    It takes twice the space of trained weights in float32."""
    snapshots: int | None = Field(default=None, ge=1)
    """Write every Nth version, with its optimizer state, while the next episodes are collected; the jobs between are
    logged, and trained again where their versions are needed. none: every version of adapters, and of weights that take
    less than 256 MiB with their optimizer state; of others as many as take a twentieth of the work. Those that `every`
    names, the best and the last are always written. With several learner processes, vLLM, a GPU, Python code in
    `training` or a `reference` of a package, every version is, before its job has completed."""


def _check_range(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"[{low:g}, {high:g}] must be [LOW, HIGH] with 0 <= LOW <= 1 <= HIGH")
    return bounds


RatioRange = Annotated[tuple[float, float], AfterValidator(_check_range)]


class KLSettings(Settings):
    """Penalty on the KL divergence from the starting weights."""

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


_OF_OBJECTIVE = {"clip": ("clip_low", "clip_high"), "cispo": ("cispo_floor", "cispo_cap")}


class LossSettings(Settings):
    """Terms of the policy-gradient loss; `docs/reference/losses.md` has the formulas."""

    objective: Objective = "clip"
    """`clip`: PPO's clipped surrogate (arXiv:1707.06347). `cispo`: clipped importance weights (arXiv:2506.13585). Or a
    [function](../guides/extend.md#a-loss) of yours."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`token`: one ratio per token. `sequence`: the geometric mean over the row (GSPO, arXiv:2507.18071)."""
    old_logprobs: Literal["recomputed", "rollout"] = "recomputed"
    """Denominator of the ratio: log-probabilities recomputed by the learner at the start of the job, or those the
    sampler returned."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clamped from below at 1 - clip_low, `clip` only."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clamped from above at 1 + clip_high (above clip_low: DAPO's clip-higher, arXiv:2503.14476), `clip`
    only."""
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
    """Rows on which the metric `kl` is measured if there is no KL penalty; none: 128, fewer with 512 trained tokens,
    and above 5 million parameters [what 3 % of the job's work allows](losses.md#kl-without-a-penalty)."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.loss_agg_mode == "constant" and self.loss_scale_factor is None:
            raise ValueError("loss_agg_mode: constant needs loss_scale_factor (a number of tokens)")
        if self.loss_agg_mode != "constant" and self.loss_scale_factor is not None:
            raise ValueError(f"loss_scale_factor requires loss_agg_mode: constant, not {self.loss_agg_mode}")
        if self.dual_clip is not None and self.objective != "clip":
            raise ValueError(f"dual_clip requires objective: clip, not {self.objective}")
        for objective, keys in _OF_OBJECTIVE.items():
            other = isinstance(self.objective, str) and self.objective in _OF_OBJECTIVE.keys() - {objective}
            for key in keys if other else ():
                if getattr(self, key) != LossSettings.model_fields[key].default:
                    raise ValueError(f"{key} requires objective: {objective}, not {self.objective}")
        if self.corrections and self.old_logprobs == "rollout":
            names = f"{' and '.join(self.corrections)} require{'s' * (len(self.corrections) == 1)}"
            raise ValueError(f"{names} old_logprobs: recomputed; rollout needs no correction")
        return self

    @property
    def corrections(self) -> list[str]:
        """The keys that are set of those that correct for a sampler of other weights, dtype or kernels."""
        names = ("truncated_importance", "token_mask", "sequence_mask")
        return [name for name in names if getattr(self, name) is not None]


class DPOSettings(Settings):
    """Terms of the preference loss, `method: dpo` only."""

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


class KTOSettings(Settings):
    """Terms of the loss of unpaired desirable and undesirable episodes (arXiv:2402.01306), `method: kto` only."""

    beta: float = Field(default=0.1, gt=0)
    """Weight of the log-ratio to the reference."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of desirable episodes (`preferred: true`)."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of undesirable episodes (`preferred: false`)."""
    reference: Reference = "initial"
    """The reference weights: those that training started from, those at the start of the job (`job_start`), or those
    that a [function](../guides/extend.md#a-reference) returns."""


_STALE_CLIP = 0.5
"""Earlier weights are further away than those at the start of the job."""
LORA_LEARNING_RATE = 1e-4
"""The default for adapters, which are small and start at zero."""


class TrainingOptions(LossSettings):
    """Loss and optimizer settings; [losses](losses.md) has the formulas, and the keys of TRL, verl and prime-rl."""

    method: Literal["grpo", "dpo", "kto", "sft"] = "grpo"
    """`grpo`: policy gradients with group-relative advantages (arXiv:2402.03300); the keys of the loss outside of the
    blocks below are this method's. `dpo`: preference pairs. `kto`: episodes that are desirable or not. `sft`: the mean
    negative log-likelihood of the trained tokens."""
    dpo: DPOSettings | None = None
    """`method: dpo` only."""
    kto: KTOSettings | None = None
    """`method: kto` only."""
    optimizer: Optimizer | None = None
    """`adamw`, or a [function](../guides/extend.md#an-optimizer) that makes another one; none: `adamw`."""
    learning_rate: float = Field(default=1e-5, ge=0)
    """Peak learning rate; with `lora` the default is 1e-4. Tiny models need a hundred times as much."""
    schedule: Schedule = "constant"
    """Decay of the learning rate over the run: `constant`, `linear` to 0, `cosine` (half a cosine to 0), or a
    [function](../guides/extend.md#a-schedule) of yours."""
    warmup: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the run during which the learning rate rises linearly from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay, applied to matrices only."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW's decay rates."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""
    mini_batch_size: int | None = Field(default=None, ge=1)
    """Rows per optimizer step (a preference pair has at least two); none: all rows of the job. Rows are split evenly
    into the number of steps that batches of this size would take; the rows of an episode or a pair stay together."""
    num_iterations: int = Field(default=1, ge=1)
    """Passes over the job's rows, each shuffled by the seed."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens computed per forward pass, padding included. More, if a row is longer, and on a CPU if rows share a long
    prompt. Affects memory and speed, not the result."""
    attention: Literal["auto", "packed", "padded"] = "auto"
    """`packed`: computes shared prefixes once, if the model allows it. `auto`: on a CPU, if that saves enough."""
    gradient_checkpointing: bool = False
    """Keeps the inputs of each layer only and recomputes its activations in the backward pass: needs less memory and
    about a third more time, on a CPU up to twice the time, with the same result."""
    compile: bool = False
    """Compiles the layers of the policy with `torch.compile`: the first micro-batch takes minutes, later ones may take
    less time; the result is the same up to rounding. Needs a C++ compiler (on a GPU: Triton)."""
    lora: LoRASettings | None = None
    """Low-rank adapters instead of all weights; fixed by the first job of a backend."""

    @model_validator(mode="after")
    def _check_method(self) -> "TrainingOptions":
        """Refuses what the method ignores, and fills in the defaults of its block."""
        if self.lora is not None and "learning_rate" not in self.model_fields_set:
            self.__dict__["learning_rate"] = LORA_LEARNING_RATE
        if self.compile and self.gradient_checkpointing:
            raise ValueError("compile is true, which excludes gradient_checkpointing: true; allowed: one of them")
        for method, block in (("dpo", DPOSettings), ("kto", KTOSettings)):
            if self.method == method and getattr(self, method) is None:
                self.__dict__[method] = block()
                self.model_fields_set.add(method)
            elif self.method != method and getattr(self, method) is not None:
                raise ValueError(f"{method} requires method: {method}, not {self.method}")
        if self.method != "grpo":
            for key, field in LossSettings.model_fields.items():
                if getattr(self, key) != field.get_default(call_default_factory=True):
                    raise ValueError(f"{key} requires method: grpo, not {self.method}")
        return self

    @property
    def code(self) -> dict[str, Part]:
        """The parts that are Python code, by key."""
        blocks = {"": self, "kl.": self.kl, "dpo.": self.dpo, "kto.": self.kto}
        fields = {f"{prefix}{key}": value for prefix, block in blocks.items() for key, value in block or ()}
        return {key: value for key, value in fields.items() if isinstance(value, Part) and value.type == PYTHON}

    @property
    def reference(self) -> str | Part | None:
        """The weights that the loss compares with; None if it needs none."""
        if self.method == "grpo":
            return (self.kl.reference or "initial") if self.kl.beta > 0 else None
        block = self.dpo or self.kto
        return block.reference if block is not None else None

    def effective(self) -> dict[str, Any]:
        """The settings as JSON, without those that the method ignores."""
        ignored = set() if self.method == "grpo" else set(LossSettings.model_fields)
        return self.model_dump(mode="json", exclude_none=True, exclude=ignored)

    def corrected(self) -> Self:
        """With a correction for episodes of earlier weights; without one, clipped around what was sampled, and wider.

        Of what was tried, it alone neither collapsed nor learned much more slowly (benchmarks/staleness.py).
        """
        if self.method != "grpo" or "old_logprobs" in self.model_fields_set or self.corrections:
            return self
        wider = {"clip_low": _STALE_CLIP, "clip_high": _STALE_CLIP} if self.objective != "cispo" else {}
        unstated = {key: value for key, value in wider.items() if key not in self.model_fields_set}
        return self.model_copy(update={"old_logprobs": "rollout", **unstated})

    def may_be_one_step(self, episodes: int) -> bool:
        """Whether a job of so many episodes is a single optimizer step, unless they have more rows."""
        return self.num_iterations == 1 and (self.mini_batch_size is None or self.mini_batch_size >= episodes)


class TrainingSettings(TrainingOptions):
    """Everything that determines a job's result, except its rows and starting weights."""

    seed: int = 0
    """Seed of the shuffling."""
    steps_per_iteration: int | None = Field(default=None, ge=1)
    """Optimizer steps per pass over the rows; overrides mini_batch_size."""
    schedule_range: tuple[float, float] = (0.0, 1.0)
    """Part of the run this job covers, for the learning-rate schedule: epoch 3 of 10 is (0.2, 0.3)."""

    @model_validator(mode="after")
    def _check_schedule_range(self) -> "TrainingSettings":
        first, last = self.schedule_range
        if not 0 <= first <= last <= 1:
            raise ValueError(f"schedule_range is {[first, last]}; allowed: two ascending numbers between 0 and 1")
        return self


class JobState(BaseModel):
    """Response of `GET /v1/train/jobs/{id}`, and the data of each event."""

    id: str
    status: Literal["pending", "running", "completed", "failed", "canceled"]
    key: str | None = None
    digest: str | None = None
    body_differs: bool = False
    """In the response to a submission: the settings and rows of this key's job have another `digest`."""
    open: bool = False
    """Its rows still come, in parts."""
    progress: float = 0.0
    """Percent."""
    message: str | None = None
    policy_version: int | None = None
    checkpoint: str | None = None
    """Folder of the weights the job produced, which are `policy_version`, once completed."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """By name, as `docs/reference/losses.md` lists them for each method."""
