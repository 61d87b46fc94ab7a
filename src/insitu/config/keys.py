"""Walks over models and blocks: keys that do not exist, and references to other blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AliasChoices, AliasPath, BaseModel
from pydantic.fields import FieldInfo

from insitu.registry import not_found
from insitu.schemas.components import ComponentRef


def unknown_keys(model: type[BaseModel], node: Mapping[str, Any], where: str) -> Iterator[str]:
    """A sentence for every key of `node` that `model`, or a model inside it, does not have."""
    fields = {key: f for n, f in model.model_fields.items() for key in _keys(model, n, f)}
    allows_more = model.model_config.get("extra") == "allow"
    for key, value in node.items():
        if key in fields:
            yield from _unknown_in(fields[key].annotation, value, f"{where}.{key}")
        elif not allows_more:
            yield not_found(f"{where}: key", str(key), sorted(f for f in fields if f != "reward"))


def _keys(model: type[BaseModel], name: str, field: FieldInfo) -> list[str]:
    """The keys a field is read from: its aliases, else its name (both where the model says so)."""
    alias = field.validation_alias or field.alias
    if alias is None:
        return [name]
    given = alias.choices if isinstance(alias, AliasChoices) else [alias]
    keys = [str(a.path[0]) if isinstance(a, AliasPath) else a for a in given]
    config = model.model_config
    return [*keys, name] if config.get("populate_by_name") or config.get("validate_by_name") else keys


def _unknown_in(annotation: Any, value: Any, where: str) -> list[str]:
    """The same for a value of a field; where its type allows several models, by the one that fits best."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(unknown_keys(annotation, value, where)) if isinstance(value, dict) else []
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _unknown_in(arguments[0], value, where)
    if origin in (Union, UnionType):
        fitting = [a for a in arguments if _takes(a, value)]
        return min((_unknown_in(a, value, where) for a in fitting), key=len, default=[])
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        return [p for i, item in enumerate(value) for p in _unknown_in(arguments[0], item, f"{where}.{i}")]
    if origin in (dict, Mapping) and isinstance(value, dict):
        return [p for key, item in value.items() for p in _unknown_in(arguments[1], item, f"{where}.{key}")]
    return []


def _takes(annotation: Any, value: Any) -> bool:
    """Whether a mapping or list can be meant by this member of a union."""
    kind = get_origin(annotation) or annotation
    if isinstance(value, list):
        return kind in (Any, Annotated, list, tuple, set, Sequence)
    return kind in (Any, Annotated, dict, Mapping) or (isinstance(kind, type) and issubclass(kind, BaseModel))


def holds_secret(model: type[BaseModel], place: Sequence[int | str]) -> bool:
    """Whether the field at `place` (keys and indices, as pydantic tells them) is one whose value is never shown."""
    if not place:
        return False
    field = next((f for n, f in model.model_fields.items() if place[0] in _keys(model, n, f)), None)
    if field is None:
        return False
    inner = _models_in(field.annotation)
    return "Secret" in str(field.annotation) or any(
        holds_secret(m, place[start:]) for m in inner for start in range(1, len(place))
    )


def _models_in(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {m for a in get_args(annotation) for m in _models_in(a)}


def references(node: Any, where: str) -> Iterator[tuple[str, ComponentRef]]:
    """Every reference to another block inside a validated block, with its place."""
    walk: Callable[[Any, str], Iterator[tuple[str, ComponentRef]]] = references
    if isinstance(node, ComponentRef):
        yield where, node
    elif isinstance(node, BaseModel):
        for name in type(node).model_fields:
            yield from walk(getattr(node, name), f"{where}.{name}")
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from walk(value, f"{where}.{key}")
    elif isinstance(node, list | tuple | set):
        for index, value in enumerate(node):
            yield from walk(value, f"{where}.{index}")
