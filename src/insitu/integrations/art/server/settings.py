"""ART's configuration as training settings; what they cannot express is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.errors import RequestRefused
from insitu.integrations.art.server.trajectories import ArtModel, T, drop_nulls
from insitu.schemas.training_jobs import TrainingSettings

NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("allow_training_without_logprobs", "mask_prob_ratio", "peft_args.use_rslora"), (False,)),
    **dict.fromkeys(("scale_learning_rate_by_reward_std_dev", "trainer_args.adafactor"), (False,)),
    **dict.fromkeys(("kimi_k2_tau", "max_negative_advantage_importance_sampling_weight"), (0,)),
    **dict.fromkeys(("kl_penalty_reference_step",), (0,)),
    **dict.fromkeys(("num_trajectories_learning_rate_multiplier_power", "trainer_args.beta"), (0,)),
    **dict.fromkeys(("trainer_args.label_smoothing_factor", "trainer_args.neftune_noise_alpha"), (0,)),
    **dict.fromkeys(("grad_accumulation_sequences", "trainer_args.gradient_accumulation_steps"), (1,)),
    **dict.fromkeys(("kl_penalty_step_lag", "kl_ref_adapter_path", "trainer_args.optim_target_modules"), ()),
    **dict.fromkeys(("moe_routing_replay_bundle", "moe_routing_replay_path"), ()),
    **dict.fromkeys(("chat_template", "chat_template_path", "init_args.resize_model_vocab"), ()),
    **dict.fromkeys(("peft_args.layers_to_transform", "peft_args.layers_pattern"), ()),
    **dict.fromkeys(("torchtune_args", "tinker_args", "tinker_native_args", "init_args.rope_scaling"), ({},)),
    "moe_routing_replay_strict": (False, True),
    "trainer_args.adam_epsilon": (1e-8,),
    "peft_args.bias": ("none",),
    "peft_args.init_lora_weights": (True,),
    "peft_args.loftq_config": ({},),
    "peft_args.modules_to_save": ([],),
}
"""Unsupported keys that would change training, with the values that have no effect and are therefore accepted."""
IGNORED_KEYS = {
    *("logprob_calculation_chunk_size", "plot_tensors", "optimizer_save_interval", "final_training_step"),
    "kl_penalty_source",  # the sampled log-probabilities, or those of the first step's weights: the same policy
}
"""Keys of a training request that change how ART computes, but not the result."""
BLOCKS = ("init_args", "engine_args", "peft_args", "trainer_args")


class ArtSettings(BaseModel):
    """The settings that have an effect here, with ART's defaults; those of a model's blocks as `BLOCK.KEY`.

    Lengths are in tokens, None for the default: `max_length` of a row, `packed_length` of a packed sequence. Only the
    request's learning rate counts; ART ignores the model's, too. Other keys are extra.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    ppo: bool | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    importance_sampling_level: str = "token"
    precalculate_logprobs: bool = False
    truncated_importance_sampling: float | None = None
    beta: float = Field(default=0.0, ge=0)
    kl_penalty_coef: float = Field(default=0.0, ge=0)
    learning_rate: float = 5e-6
    scale_rewards: bool = True
    loss_fn: Literal["cispo", "ppo"] | None = None
    normalize_advantages: bool = True
    advantage_balance: float = 0.0
    packed_length: int | None = Field(default=None, alias="packed_sequence_length")
    template_kwargs: dict[str, Any] = Field(default={}, alias="chat_template_kwargs")
    max_length: int | None = Field(default=None, alias="init_args.max_seq_length")
    optim: str = Field(default="adamw", alias="trainer_args.optim")
    adam_beta1: float = Field(default=0.9, alias="trainer_args.adam_beta1")
    adam_beta2: float = Field(default=0.99, alias="trainer_args.adam_beta2")
    weight_decay: float = Field(default=0.1, alias="trainer_args.weight_decay")
    max_grad_norm: float = Field(default=0.1, alias="trainer_args.max_grad_norm")
    seed: int = Field(default=3407, alias="peft_args.random_state")
    rank: int = Field(default=8, alias="peft_args.r")
    alpha: float = Field(default=16, alias="peft_args.lora_alpha")
    dropout: float = Field(default=0.0, ge=0, le=0, alias="peft_args.lora_dropout")
    target_modules: list[Any] = Field(default=[], alias="peft_args.target_modules")

    def objective(self, legacy: bool, unbounded: bool) -> dict[str, Any]:
        """Releases up to 0.5.7 default to clipping within 0.2, later ones to CISPO with weights up to 5.

        `unbounded`: epsilon_high was sent as null, which means epsilon, not the default.
        """
        by_name = legacy if self.loss_fn is None else self.loss_fn == "ppo"
        ppo = by_name if self.ppo is None else self.ppo
        narrow = ppo or legacy
        low, high = self.epsilon, self.epsilon_high
        low = (0.2 if narrow else 1.0) if low is None else low
        high = (low if narrow or unbounded else 4.0) if high is None else high
        if ppo:
            return {"objective": "clip", "clip_low": low, "clip_high": high}
        return {"objective": "cispo", "cispo_floor": max(1 - low, 0), "cispo_cap": 1 + high}


@dataclass(frozen=True)
class TrainPlan:
    """How a batch of groups is trained: `settings` by the learner, the `options` of ART by the conversion to rows.

    `settings.lora` is None without the model's own `peft_args`. `ignored` keys have no effect.
    """

    settings: TrainingSettings
    options: ArtSettings
    ignored: tuple[str, ...]


def parse_plan(model: ArtModel, config: Mapping[str, Any], dev_config: Mapping[str, Any]) -> TrainPlan:
    """Raises RequestRefused (422) for unknown, unsupported or invalid settings."""
    request = drop_nulls(config) | drop_nulls(dev_config)
    art = _validated(ArtSettings, request | _flattened(model.config))
    if not -1 <= art.advantage_balance <= 1:
        raise _refused("advantage_balance", art.advantage_balance, "from -1 to 1")
    if "adamw" not in art.optim:
        raise _refused("trainer_args.optim", art.optim, "any variant of AdamW")
    truncated, recomputed = art.truncated_importance_sampling, art.precalculate_logprobs
    if truncated is not None and not recomputed:
        raise _refused("truncated_importance_sampling", truncated, "a number with precalculate_logprobs: true")
    names = {"importance_sampling_level", "learning_rate", "weight_decay", "max_grad_norm", "seed"}
    lora = art.model_dump(include={"rank", "alpha", "dropout"}) | {"target_modules": art.target_modules or "all-linear"}
    settings = {
        **art.model_dump(include=names),
        **art.objective(model.legacy, "epsilon_high" in dev_config and dev_config["epsilon_high"] is None),
        "old_logprobs": "recomputed" if recomputed else "rollout",  # the sampler's
        "truncated_importance": truncated,
        "kl": _kl(art),
        "loss_agg_mode": "sequence",
        "betas": (art.adam_beta1, art.adam_beta2),
        "lora": lora if model.config.get("peft_args") else None,
    }
    return TrainPlan(_validated(TrainingSettings, settings), art, _ignored(art.model_extra or {}, request))


def _kl(art: ArtSettings) -> dict[str, Any]:
    """`beta` is a term of the loss; `kl_penalty_coef`, of newer releases, shapes the advantages of tokens."""
    if art.beta and art.kl_penalty_coef:
        raise _refused("kl_penalty_coef", art.kl_penalty_coef, "0 with beta")
    if art.kl_penalty_coef:
        return {"beta": art.kl_penalty_coef, "estimator": "k1", "in_reward": True}
    return {"beta": art.beta, "estimator": "k3"}


def _flattened(internal: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration with the keys of its blocks as `BLOCK.KEY`, without nulls."""
    settings = {key: value for key, value in internal.items() if key not in BLOCKS}
    for block in BLOCKS:
        values = internal.get(block) or {}
        if not isinstance(values, dict):
            raise _refused(block, values, "an object")
        settings |= {f"{block}.{key}": value for key, value in drop_nulls(values).items()}
    return settings


def _ignored(extra: Mapping[str, Any], request: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys without effect. Raises RequestRefused for unknown keys and those that would change training."""
    for key, value in extra.items():
        if key in NO_OP_VALUES and value not in NO_OP_VALUES[key]:
            values = " or ".join(map(repr, NO_OP_VALUES[key]))
            instead = "; set beta in the training request" if key == "trainer_args.beta" else ""
            raise _refused(key, value, (f"{values}, which has no effect" if values else "none") + instead)
        if key in request and key not in IGNORED_KEYS | NO_OP_VALUES.keys():
            raise RequestRefused(f"{key} is not a training setting", status=422, param=key, code="unknown_setting")
    return tuple(sorted(extra.keys() - NO_OP_VALUES.keys()))


def _validated(kind: type[T], settings: Mapping[str, Any]) -> T:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]) if first["loc"] else "settings"
        raise _refused(ART_NAMES.get(key, key), first["input"], first["msg"]) from None


ART_NAMES = {
    **dict.fromkeys(("clip_low", "cispo_floor"), "epsilon"),
    **dict.fromkeys(("clip_high", "cispo_cap"), "epsilon_high"),
    **{name: f"trainer_args.{name}" for name in ("weight_decay", "max_grad_norm")},
    "betas": "trainer_args.adam_beta1 or adam_beta2",
    "kl": "beta",
    "lora": "peft_args",
    "truncated_importance": "truncated_importance_sampling",
}
"""ART's names of our settings."""


def _refused(key: str, value: Any, allowed: str) -> RequestRefused:
    return RequestRefused(f"{key} is {value!r}; allowed: {allowed}", status=422, param=key, code="unsupported")
