"""The official client library `openpipe-art`, imported when it is needed, and the keys its installed release takes."""

import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from insitu.adapters.art.config import ARTBackendConfig, ARTTrainingConfig
from insitu.errors import ConfigError
from insitu.registry import not_found


def load_art() -> Any:
    """The module `art`, which takes seconds to import; ConfigError saying what to install where that fails."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm fetches a price list when imported
    try:
        return importlib.import_module("art")
    except ImportError as error:
        raise ConfigError(
            f"the ART plugin needs the package openpipe-art and what it stands on: pip install 'insitu[art]' ({error})"
        ) from error


def internal_config(art: Any, backend: ARTBackendConfig) -> dict[str, Any]:
    """ART's `InternalModelConfig`; ConfigError for a key the installed release does not have."""
    given = {
        "init_args": backend.init_args.model_dump(exclude_none=True) if backend.init_args else None,
        "engine_args": backend.engine_args.model_dump(exclude_none=True) if backend.engine_args else None,
        "peft_args": backend.peft_args,
        "trainer_args": backend.trainer_args,
    }
    asked = {name: values for name, values in given.items() if values}
    blocks = {"init_args": "InitArgs", "engine_args": "EngineArgs", "peft_args": "PeftArgs"}
    for name, values in asked.items():
        _check(f"backend.{name}", values, _keys(getattr(art.dev, blocks.get(name, "TrainerArgs"))))
    return asked


def server_config(art: Any, backend: ARTBackendConfig) -> dict[str, Any] | None:
    """ART's `OpenAIServerConfig`, checked like `internal_config`."""
    given = backend.server_config
    if not given:
        return None
    _check("backend.server_config", given, _keys(art.dev.OpenAIServerConfig))
    for name, kind in (("server_args", "ServerArgs"), ("engine_args", "EngineArgs")):
        if name in given:
            _check(f"backend.server_config.{name}", given[name], _keys(getattr(art.dev, kind)))
    return given


def train_config(art: Any, training: ARTTrainingConfig) -> tuple[Any, dict[str, Any]]:
    """The public `TrainConfig` and the one under `art.dev`; every key goes into one of them or is refused by name.

    Keys of the public one that are not given keep the library's own defaults.
    """
    kind = art.types.TrainConfig
    public, further = set(kind.model_fields), _keys(art.dev.TrainConfig)
    given = training.model_dump()
    if "beta" not in public:
        if given["beta"]:
            raise ConfigError(
                f"training.beta is {given['beta']}, but openpipe-art {release()} has no KL penalty in its loss; "
                f"allowed here: 0.0 (its own terms are: {', '.join(sorted(public | further))})"
            )
        del given["beta"]
    _check("training", given, public | further)
    told = {name: _typed(f"training.{name}", given[name], hint) for name, hint in _hints(art, kind) if name in given}
    config = kind(**{name: value for name, value in told.items() if name in public})
    return config, {name: value for name, value in told.items() if name not in public}


def _hints(art: Any, public: Any) -> list[tuple[str, Any]]:
    """What each key of a training may be, so that a wrong value is told before the first episodes are."""
    unnamed = {"MoeRoutingReplayBundle": Any}  # 0.5.18 uses this name without having it
    further = get_type_hints(art.dev.TrainConfig, localns=unnamed)
    own = {name: Annotated[field.annotation, field] for name, field in public.model_fields.items()}
    return [*(further | own).items()]


def _typed(where: str, value: Any, hint: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        said = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"trainer_adapters: {where} is {value!r}: {said} (openpipe-art {release()})") from None


def release() -> str:
    from importlib.metadata import version

    return version("openpipe-art")


def _keys(typed_dict: Any) -> set[str]:
    return set(typed_dict.__required_keys__ | typed_dict.__optional_keys__)


def _check(where: str, given: Any, allowed: Iterable[str]) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"trainer_adapters: {where} must be a mapping")
    allowed = sorted(allowed)
    for name in given:
        if name not in allowed:
            what = f"trainer_adapters: {where}: key"
            raise ConfigError(f"{not_found(what, str(name), allowed)} (openpipe-art {release()})")
