"""Walks over models and blocks: keys that do not exist, and references to other blocks."""

from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from insitu.registry import not_found
from insitu.schemas.components import ComponentRef


def unknown_keys(model: type[BaseModel], node: Mapping[str, Any], where: str) -> Iterator[str]:
    """A sentence for every key of `node` that `model`, or a model inside it, does not have."""
    fields = {f.validation_alias or f.alias or n: f for n, f in model.model_fields.items()}
    fields |= {n: f for n, f in model.model_fields.items() if n != "type"}
    allows_more = model.model_config.get("extra") == "allow"
    for key, value in node.items():
        if key not in fields:
            if not allows_more:
                yield not_found(f"{where}: key", str(key), sorted(str(f) for f in fields if f != "reward"))
            continue
        inner = _model_in(fields[key].annotation)
        if inner is None:
            continue
        place = f"{where}.{key}"
        if isinstance(value, dict):
            yield from unknown_keys(inner, value, place)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from unknown_keys(inner, item, f"{place}.{index}")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The one model a field's type mentions, itself or inside a list or an optional; None where there are several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list, tuple):
        models = {m for a in get_args(annotation) if (m := _model_in(a)) is not None}
        return models.pop() if len(models) == 1 else None
    return None


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
