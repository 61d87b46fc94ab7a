"""What ART's configuration says in the terms of our own settings; what it asks for beyond them is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from insitu.backend.art.messages import ArtModel, present
from insitu.errors import RequestRefused
from insitu.schemas.training_jobs import TrainingSettings

NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""What would change training and is not supported, with the values that ask for nothing."""
HARMLESS = frozenset({"logprob_calculation_chunk_size", "plot_tensors"})
"""Terms of a training request that change how ART computes, not what."""
BLOCKS = ("init_args", "engine_args", "peft_args", "trainer_args")


@dataclass(frozen=True)
class Plan:
    """How a batch of groups is trained on: the settings, and what is done before they apply.

    `settings.lora` is none where the model does not ask for adapters of its own. Lengths in tokens, none for the
    default: `max_length` of a row, `packed_length` of a packed sequence. `template` are further variables of the chat
    template, `without_effect` the keys that mean nothing here.
    """

    settings: TrainingSettings
    scale_rewards: bool
    advantage_balance: float
    max_length: int | None
    packed_length: int | None
    template: dict[str, Any] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()


def read_plan(model: ArtModel, config: Mapping[str, Any], dev_config: Mapping[str, Any]) -> Plan:
    """Raises RequestRefused (422) for what cannot be done as asked."""
    asked = _Asked(present(config) | present(dev_config), model.config)
    unbounded = "epsilon_high" in dev_config and dev_config["epsilon_high"] is None
    settings = {
        **_objective(asked, model.generation, unbounded),
        **_importance(asked),
        **_optimizer(asked),
        "kl": {"beta": asked.take("beta", float, 0.0), "estimator": "k3"},
        "loss_agg_mode": "sequence",
        "seed": asked.take("peft_args.random_state", int, 3407),
        "lora": _lora(asked) if model.config.get("peft_args") else None,
    }
    balance = asked.take("advantage_balance", float, 0.0)
    if not -1 <= balance <= 1:
        raise _refused("advantage_balance", balance, "from -1 to 1")
    return Plan(
        settings=_validated(settings),
        scale_rewards=asked.take("scale_rewards", bool, True),
        advantage_balance=balance,
        max_length=asked.take("init_args.max_seq_length", int, None),
        packed_length=asked.take("packed_sequence_length", int, None),
        template=asked.take("chat_template_kwargs", dict, {}),
        without_effect=asked.rest(),
    )


class _Asked:
    """Settings by their names, `trainer_args.weight_decay` for those of the model's `_internal_config`."""

    def __init__(self, given: Mapping[str, Any], internal: Mapping[str, Any]) -> None:
        self._request = frozenset(given)
        self._given = dict(given) | {key: value for key, value in internal.items() if key not in BLOCKS}
        for block in BLOCKS:
            values = internal.get(block) or {}
            if not isinstance(values, dict):
                raise _refused(block, values, "an object")
            self._given |= {f"{block}.{key}": value for key, value in present(values).items()}

    def take(self, key: str, kind: type, default: Any) -> Any:
        value = self._given.pop(key, default)
        fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or value is not True)
        if value is not default and not fits:
            raise _refused(key, value, f"a {kind.__name__}")
        return value

    def rest(self) -> tuple[str, ...]:
        """The keys nobody took. Raises RequestRefused where one would change training, or nobody knows it."""
        for key, value in self._given.items():
            if key in self._request and key not in HARMLESS | NEUTRAL.keys():
                raise RequestRefused(f"{key} is no training setting", status=422, param=key, code="unknown_setting")
            if key in NEUTRAL and value not in NEUTRAL[key]:
                neutral = " or ".join(repr(each) for each in NEUTRAL[key])
                raise _refused(key, value, f"{neutral}, which asks for nothing" if neutral else "none")
        return tuple(sorted(self._given.keys() - NEUTRAL.keys()))


def _objective(asked: _Asked, generation: str, unbounded: bool) -> dict[str, Any]:
    """Releases up to 0.5.4 clip by default, within 0.2; later ones weigh, up to 5.

    `unbounded` where epsilon_high is sent as null, which is not the same as unsent: it is then what epsilon is.
    """
    ppo = asked.take("ppo", bool, generation == "A")
    narrow = ppo or generation == "A"
    epsilon = asked.take("epsilon", float, 0.2 if narrow else 1.0)
    high = asked.take("epsilon_high", float, epsilon if narrow or unbounded else 4.0)
    if ppo:
        return {"objective": "clip", "clip_low": epsilon, "clip_high": high}
    return {"objective": "cispo", "cispo_floor": max(1 - epsilon, 0), "cispo_cap": 1 + high}


def _importance(asked: _Asked) -> dict[str, Any]:
    """Ratios are to what was sampled, or with precalculate_logprobs to what the learner makes of it."""
    recomputed = asked.take("precalculate_logprobs", bool, False)
    truncated = asked.take("truncated_importance_sampling", float, None)
    if truncated is not None and not recomputed:
        raise _refused("truncated_importance_sampling", truncated, "a number where precalculate_logprobs is true")
    return {
        "importance_sampling_level": asked.take("importance_sampling_level", str, "token"),
        "old_logprobs": "recomputed" if recomputed else "rollout",
        "truncated_importance": truncated,
    }


def _optimizer(asked: _Asked) -> dict[str, Any]:
    """With ART's own defaults. The learning rate is that of the request; its model's is without effect there, too."""
    kind = asked.take("trainer_args.optim", str, "adamw")
    if "adamw" not in kind:
        raise _refused("trainer_args.optim", kind, "AdamW in any of its forms")
    return {
        "learning_rate": asked.take("learning_rate", float, 5e-6),
        "betas": (
            asked.take("trainer_args.adam_beta1", float, 0.9),
            asked.take("trainer_args.adam_beta2", float, 0.99),
        ),
        "weight_decay": asked.take("trainer_args.weight_decay", float, 0.1),
        "max_grad_norm": asked.take("trainer_args.max_grad_norm", float, 0.1),
    }


def _lora(asked: _Asked) -> dict[str, Any]:
    return {
        "rank": asked.take("peft_args.r", int, 8),
        "alpha": asked.take("peft_args.lora_alpha", float, 16),
        "dropout": asked.take("peft_args.lora_dropout", float, 0.0),
        "target_modules": asked.take("peft_args.target_modules", list, None) or "all-linear",
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
"""By our own names."""


def _refused(key: str, value: Any, allowed: str) -> RequestRefused:
    return RequestRefused(f"{key} is {value!r}; allowed here: {allowed}", status=422, param=key, code="unsupported")
