"""ART's configuration as training settings; what they cannot express is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from insitu.errors import RequestRefused
from insitu.integrations.art.server.trajectories import ArtModel, drop_nulls
from insitu.schemas.training_jobs import TrainingSettings

NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "allow_training_without_logprobs": (False,),
    "grad_accumulation_sequences": (1,),
    "kimi_k2_tau": (0,),
    "kl_penalty_coef": (0,),
    "kl_ref_adapter_path": (),
    "mask_prob_ratio": (False,),
    "max_negative_advantage_importance_sampling_weight": (0,),
    "moe_routing_replay_bundle": (),
    "moe_routing_replay_path": (),
    "moe_routing_replay_strict": (False, True),
    "num_trajectories_learning_rate_multiplier_power": (0,),
    "scale_learning_rate_by_reward_std_dev": (False,),
    "trainer_args.adafactor": (False,),
    "trainer_args.adam_epsilon": (1e-8,),
    "trainer_args.beta": (0,),
    "trainer_args.gradient_accumulation_steps": (1,),
    "trainer_args.label_smoothing_factor": (0,),
    "trainer_args.neftune_noise_alpha": (0,),
    "trainer_args.optim_target_modules": (),
    "peft_args.bias": ("none",),
    "peft_args.init_lora_weights": (True,),
    "peft_args.layers_to_transform": (),
    "peft_args.layers_pattern": (),
    "peft_args.loftq_config": ({},),
    "peft_args.modules_to_save": ([],),
    "peft_args.use_rslora": (False,),
    "init_args.rope_scaling": ({},),
    "init_args.resize_model_vocab": (),
    "chat_template": (),
    "chat_template_path": (),
    "torchtune_args": ({},),
    "tinker_args": ({},),
    "tinker_native_args": ({},),
}
"""Unsupported keys that would change training, with the values that have no effect and are therefore accepted."""
INSTEAD = {
    "kl_penalty_coef": "set beta, which adds a KL penalty to the loss (a key of openpipe-art<0.5.17)",
    "trainer_args.beta": "set beta in the training request",
}
"""What to do instead of setting an unsupported key."""
IGNORED_KEYS = frozenset({"logprob_calculation_chunk_size", "plot_tensors"})
"""Keys of a training request that change how ART computes, but not the result."""
BLOCKS = ("init_args", "engine_args", "peft_args", "trainer_args")


@dataclass(frozen=True)
class TrainPlan:
    """How a batch of groups is trained: the settings, and the options of the conversion to rows.

    `settings.lora` is None without the model's own `peft_args`. Lengths in tokens, None for the default: `max_length`
    of a row, `packed_length` of a packed sequence. `template_kwargs` go to the chat template, `ignored` keys have no
    effect.
    """

    settings: TrainingSettings
    scale_rewards: bool
    advantage_balance: float
    max_length: int | None
    packed_length: int | None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def parse_plan(model: ArtModel, config: Mapping[str, Any], dev_config: Mapping[str, Any]) -> TrainPlan:
    """Raises RequestRefused (422) for unknown, unsupported or invalid settings."""
    reader = _Reader(drop_nulls(config) | drop_nulls(dev_config), model.config)
    unbounded = "epsilon_high" in dev_config and dev_config["epsilon_high"] is None
    settings = {
        **_objective(reader, model.legacy, unbounded),
        **_importance(reader),
        **_optimizer(reader),
        "kl": {"beta": reader.pop("beta", float, 0.0), "estimator": "k3"},
        "loss_agg_mode": "sequence",
        "seed": reader.pop("peft_args.random_state", int, 3407),
        "lora": None,
    }
    if model.config.get("peft_args"):
        settings["lora"] = {
            "rank": reader.pop("peft_args.r", int, 8),
            "alpha": reader.pop("peft_args.lora_alpha", float, 16),
            "dropout": reader.pop("peft_args.lora_dropout", float, 0.0),
            "target_modules": reader.pop("peft_args.target_modules", list, None) or "all-linear",
        }
    balance = reader.pop("advantage_balance", float, 0.0)
    if not -1 <= balance <= 1:
        raise _refused("advantage_balance", balance, "from -1 to 1")
    return TrainPlan(
        settings=_validated(settings),
        scale_rewards=reader.pop("scale_rewards", bool, True),
        advantage_balance=balance,
        max_length=reader.pop("init_args.max_seq_length", int, None),
        packed_length=reader.pop("packed_sequence_length", int, None),
        template_kwargs=reader.pop("chat_template_kwargs", dict, {}),
        ignored=reader.unused(),
    )


class _Reader:
    """Settings of a request, and of the model's `_internal_config` by names like `trainer_args.weight_decay`."""

    def __init__(self, request: Mapping[str, Any], internal: Mapping[str, Any]) -> None:
        self._request = frozenset(request)
        self._settings = dict(request) | {key: value for key, value in internal.items() if key not in BLOCKS}
        for block in BLOCKS:
            values = internal.get(block) or {}
            if not isinstance(values, dict):
                raise _refused(block, values, "an object")
            self._settings |= {f"{block}.{key}": value for key, value in drop_nulls(values).items()}

    def pop(self, key: str, kind: type, default: Any) -> Any:
        value = self._settings.pop(key, default)
        valid = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or value is not True)
        if value is not default and not valid:
            raise _refused(key, value, f"a {kind.__name__}")
        return value

    def unused(self) -> tuple[str, ...]:
        """The keys that were not read. Raises RequestRefused for unknown keys and those that would change training."""
        for key, value in self._settings.items():
            if key in self._request and key not in IGNORED_KEYS | NO_OP_VALUES.keys():
                raise RequestRefused(f"{key} is not a training setting", status=422, param=key, code="unknown_setting")
            if key in NO_OP_VALUES and value not in NO_OP_VALUES[key]:
                values = " or ".join(repr(each) for each in NO_OP_VALUES[key])
                instead = f"; {INSTEAD[key]}" if key in INSTEAD else ""
                raise _refused(key, value, (f"{values}, which has no effect" if values else "none") + instead)
        return tuple(sorted(self._settings.keys() - NO_OP_VALUES.keys()))


def _objective(reader: _Reader, legacy: bool, unbounded: bool) -> dict[str, Any]:
    """Releases up to 0.5.7 default to clipping within 0.2, later ones to CISPO with weights up to 5.

    `unbounded`: epsilon_high was sent as null, which means epsilon, not the default.
    """
    ppo = reader.pop("ppo", bool, legacy)
    narrow = ppo or legacy
    epsilon = reader.pop("epsilon", float, 0.2 if narrow else 1.0)
    high = reader.pop("epsilon_high", float, epsilon if narrow or unbounded else 4.0)
    if ppo:
        return {"objective": "clip", "clip_low": epsilon, "clip_high": high}
    return {"objective": "cispo", "cispo_floor": max(1 - epsilon, 0), "cispo_cap": 1 + high}


def _importance(reader: _Reader) -> dict[str, Any]:
    """Ratios use the sampler's log-probabilities, or with precalculate_logprobs recomputed ones."""
    recomputed = reader.pop("precalculate_logprobs", bool, False)
    truncated = reader.pop("truncated_importance_sampling", float, None)
    if truncated is not None and not recomputed:
        raise _refused("truncated_importance_sampling", truncated, "a number with precalculate_logprobs: true")
    return {
        "importance_sampling_level": reader.pop("importance_sampling_level", str, "token"),
        "old_logprobs": "recomputed" if recomputed else "rollout",
        "truncated_importance": truncated,
    }


def _optimizer(reader: _Reader) -> dict[str, Any]:
    """With ART's defaults. Only the request's learning rate counts; ART ignores the model's, too."""
    optimizer = reader.pop("trainer_args.optim", str, "adamw")
    if "adamw" not in optimizer:
        raise _refused("trainer_args.optim", optimizer, "any variant of AdamW")
    return {
        "learning_rate": reader.pop("learning_rate", float, 5e-6),
        "betas": (
            reader.pop("trainer_args.adam_beta1", float, 0.9),
            reader.pop("trainer_args.adam_beta2", float, 0.99),
        ),
        "weight_decay": reader.pop("trainer_args.weight_decay", float, 0.1),
        "max_grad_norm": reader.pop("trainer_args.max_grad_norm", float, 0.1),
    }


def _validated(settings: dict[str, Any]) -> TrainingSettings:
    try:
        return TrainingSettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]) if first["loc"] else "settings"
        raise _refused(ART_NAMES.get(key, key), first["input"], first["msg"]) from None


ART_NAMES = {
    "clip_low": "epsilon",
    "clip_high": "epsilon_high",
    "cispo_floor": "epsilon",
    "cispo_cap": "epsilon_high",
    "kl": "beta",
    "truncated_importance": "truncated_importance_sampling",
    "betas": "trainer_args.adam_beta1 or adam_beta2",
    "weight_decay": "trainer_args.weight_decay",
    "max_grad_norm": "trainer_args.max_grad_norm",
    "lora": "peft_args",
}
"""ART's names of our settings."""


def _refused(key: str, value: Any, allowed: str) -> RequestRefused:
    return RequestRefused(f"{key} is {value!r}; allowed: {allowed}", status=422, param=key, code="unsupported")
