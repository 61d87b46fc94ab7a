"""The official client library `openpipe-art`: lazy import, and validation of keys against the installed release."""

import importlib
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Annotated, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from insitu.adapters.art.config import ARTBackendConfig, ARTTrainingConfig
from insitu.errors import ConfigError
from insitu.registry import not_found

_ART_TYPES = {
    "init_args": "InitArgs",
    "engine_args": "EngineArgs",
    "peft_args": "PeftArgs",
    "trainer_args": "TrainerArgs",
    "server_args": "ServerArgs",
}
"""Configuration block -> its type in `art.dev`."""


def load_art() -> Any:
    """The module `art`, whose import takes seconds. Raises ConfigError with the install command if it is missing."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing litellm fetches a price list
    try:
        return importlib.import_module("art")
    except ImportError as error:
        raise ConfigError(
            f"the ART plugin needs the package openpipe-art and its dependencies: pip install 'insitu[art]' ({error})"
        ) from error


def internal_config(art: Any, backend: ARTBackendConfig) -> dict[str, Any]:
    """ART's `InternalModelConfig`. Raises ConfigError for a key that the installed release does not have."""
    blocks = {
        "init_args": backend.init_args.model_dump(exclude_none=True) if backend.init_args else None,
        "engine_args": backend.engine_args.model_dump(exclude_none=True) if backend.engine_args else None,
        "peft_args": backend.peft_args,
        "trainer_args": backend.trainer_args,
    }
    config = {name: values for name, values in blocks.items() if values}
    for name, values in config.items():
        _check_keys(f"backend.{name}", values, _keys(getattr(art.dev, _ART_TYPES[name])))
    return config


def server_config(art: Any, backend: ARTBackendConfig) -> dict[str, Any] | None:
    """ART's `OpenAIServerConfig`, validated like `internal_config`."""
    config = backend.server_config
    if not config:
        return None
    _check_keys("backend.server_config", config, _keys(art.dev.OpenAIServerConfig))
    for name in ("server_args", "engine_args"):
        if name in config:
            _check_keys(f"backend.server_config.{name}", config[name], _keys(getattr(art.dev, _ART_TYPES[name])))
    return config


def train_config(art: Any, training: ARTTrainingConfig) -> tuple[Any, dict[str, Any]]:
    """The public `TrainConfig` and `art.dev.TrainConfig`. Raises ConfigError for a key or value neither accepts.

    Unset keys of the public config keep the library's defaults.
    """
    public, dev = set(art.types.TrainConfig.model_fields), _keys(art.dev.TrainConfig)
    options = training.model_dump()
    if "beta" not in public:
        if options["beta"]:
            raise ConfigError(
                f"training.beta is {options['beta']}, but openpipe-art {_release()} has no KL penalty in its loss; "
                f"allowed here: 0.0 (its keys: {', '.join(sorted(public | dev))})"
            )
        del options["beta"]
    _check_keys("training", options, public | dev)
    undefined = {"MoeRoutingReplayBundle": Any}  # 0.5.18 refers to this name without defining it
    hints = get_type_hints(art.dev.TrainConfig, localns=undefined)
    hints |= {name: Annotated[field.annotation, field] for name, field in art.types.TrainConfig.model_fields.items()}
    for name, value in options.items():  # rejects a wrong value before any episode runs
        try:
            options[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            problem = f"training.{name} is {value!r}: {error.errors(include_url=False)[0]['msg']}"
            raise ConfigError(f"trainer_adapters: {problem} (openpipe-art {_release()})") from None
    config = art.types.TrainConfig(**{name: value for name, value in options.items() if name in public})
    return config, {name: value for name, value in options.items() if name not in public}


def _release() -> str:
    return version("openpipe-art")


def _keys(typed_dict: Any) -> set[str]:
    return set(typed_dict.__required_keys__ | typed_dict.__optional_keys__)


def _check_keys(where: str, block: Any, allowed: Iterable[str]) -> None:
    if not isinstance(block, Mapping):
        raise ConfigError(f"trainer_adapters: {where} must be a mapping")
    allowed = sorted(allowed)
    for name in block:
        if name not in allowed:
            what = f"trainer_adapters: {where}: key"
            raise ConfigError(f"{not_found(what, str(name), allowed)} (openpipe-art {_release()})")
