"""Which settings of a recorded configuration differ from their defaults."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter

from insitu.config import EvalGeneralConfig, GeneralConfig
from insitu.config.keys import models_of
from insitu.config.resolved import leaves, nested
from insitu.errors import InsituError
from insitu.registry import DATASET, EXECUTOR, KINDS, Kind, registry
from insitu.schemas.finetuning import FinetuneConfig

_SINGLE = (DATASET, EXECUTOR)
"""Kinds of which a file has one block, without a name."""
_ANY: TypeAdapter[Any] = TypeAdapter(Any)
_SECTIONS: dict[str, type[BaseModel]] = {
    "general": GeneralConfig,
    "eval.general": EvalGeneralConfig,
    "finetuning": FinetuneConfig,
}


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
