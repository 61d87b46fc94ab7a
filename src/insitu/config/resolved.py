"""A checked file as plain values without its secrets, and how they differ from others and from the defaults."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter

from insitu.config.keys import fields_not_in_file, models_of
from insitu.config.sections import Config, EvalGeneralConfig, GeneralConfig
from insitu.errors import InsituError
from insitu.registry import DATASET, EXECUTOR, KINDS, Kind, registry
from insitu.schemas.finetuning import FinetuneConfig
from insitu.wire.redaction import MASK, hide_url_secrets, is_secret_key, redact

_SINGLE = (DATASET, EXECUTOR)
"""Kinds of which a file has one block, without a name."""
_ANY: TypeAdapter[Any] = TypeAdapter(Any)
_SECTIONS: dict[str, type[BaseModel]] = {
    "general": GeneralConfig,
    "eval.general": EvalGeneralConfig,
    "finetuning": FinetuneConfig,
}


def resolved_config(config: Config) -> dict[str, Any]:
    """Every key with its value, given or default, by section. Secrets are hidden."""
    values: dict[str, Any] = {
        "general": _plain(config.general),
        "eval": {"general": _plain(config.eval)},
        "finetuning": _plain(config.finetuning),
    }
    for (section, name), block in config.blocks.items():
        place = values
        for part in section.split("."):
            place = place.setdefault(part, {})
        place[name] = {"_type": block.type, **_plain(block)}
    return without_secrets(values)


def _plain(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude=fields_not_in_file(type(model)), serialize_as_any=True, fallback=str)


def without_secrets(value: Any, *, secret: bool = False) -> Any:
    """Hides all values below a secret key, and secrets in URLs, however short."""
    if isinstance(value, Mapping):
        return {
            name: without_secrets(inner, secret=secret or is_secret_key(str(name))) for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item, secret=secret) for item in value]
    if secret and not isinstance(value, bool | None) and value != "":
        return MASK
    return hide_url_secrets(redact(value)) if isinstance(value, str) else value


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys of nested settings whose values differ, with both values; None where one has no such key."""
    then, new = dict(leaves(before)), dict(leaves(now))
    return {key: (then.get(key), new.get(key)) for key in {**then, **new} if then.get(key) != new.get(key)}


def nested(settings: Any, key: str) -> Any:
    """The value of a dotted key; None if it is not set."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested settings by dotted key."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `run.json`'s `config` that are not defaults, by dotted key.

    All keys of a component that is not installed here are returned, as its defaults are not known.
    """
    changed: dict[str, Any] = {}
    for section, model in _SECTIONS.items():
        values = dict(nested(config, section) or {})
        for kind in _SINGLE:
            place, _, key = kind.section.rpartition(".")
            block = values.pop(key, None) if place == section else None
            if isinstance(block, Mapping):
                changed |= _changed(block, _model(kind, block.get("type")), f"{kind.section}.")
        changed |= _changed(values, model, f"{section}.")
    for kind in KINDS:
        for name, block in (nested(config, kind.section) or {}).items() if kind not in _SINGLE else ():
            if isinstance(block, Mapping):
                changed |= _changed(block, _model(kind, block.get("_type")), f"{kind.section}.{name}.")
    return changed


def _model(kind: Kind, type_name: Any) -> type[BaseModel] | None:
    """None if the component is not installed here, or cannot be imported."""
    try:
        registration = registry.find(kind, str(type_name))
    except (InsituError, ImportError):
        return None
    return registration.config_type if registration is not None else None


def _changed(values: Mapping[str, Any], model: type[BaseModel] | None, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        field = model.model_fields.get(key) if model is not None else None
        if field is None:
            yield from leaves({key: value}, prefix)
            continue
        default = _ANY.dump_python(
            field.get_default(call_default_factory=True), mode="json", serialize_as_any=True, fallback=str
        )
        if value == default:
            continue
        inner = [each for each in models_of(field.annotation) if isinstance(value, Mapping)]
        fitting = [each for each in inner if value.keys() <= each.model_fields.keys()]
        if fitting:
            yield from _changed(value, fitting[0], f"{prefix}{key}.")
        else:
            yield from leaves({key: value}, prefix)
