"""The keys of a block: which exist, and which hold secrets or references to other blocks."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, AliasPath, BaseModel, SecretStr
from pydantic.fields import FieldInfo

from insitu.errors import not_found
from insitu.schemas.components import MAY_CHANGE, ComponentRef
from insitu.schemas.finetuning import RewardFunctionConfig


def key_problems(model: type[BaseModel], node: Mapping[str, Any], where: str) -> Iterator[str]:
    """An error message for every key of `node` that `model`, or a model inside it, does not have, and for every truth
    value in place of a number, which pydantic takes for 0 or 1."""
    fields = _fields(model)
    allows_more = model.model_config.get("extra") == "allow"
    for key, value in node.items():
        if key in fields:
            yield from _problems_in(fields[key].annotation, value, f"{where}.{key}")
        elif not allows_more:
            yield not_found(f"{where}: key", str(key), key_names(model))


def key_names(model: type[BaseModel]) -> list[str]:
    """The keys that a file may have of a model."""
    return sorted(_fields(model).keys() - fields_not_in_file(model))


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {key: f for n, f in model.model_fields.items() for key in _keys(model, n, f)}


def takes_reward(model: type[BaseModel]) -> bool:
    """Whether a block has the documented `reward` of components, which holds `finetuning.reward_function`."""
    field = model.model_fields.get("reward")
    return field is not None and field.annotation == RewardFunctionConfig | None


def fields_not_in_file(model: type[BaseModel]) -> set[str]:
    """The fields that a file does not set."""
    return {"type", "run_configuration"} | ({"reward"} if takes_reward(model) else set())


def _keys(model: type[BaseModel], name: str, field: FieldInfo) -> list[str]:
    """The keys a field is read from: its aliases or its name, or both if the model allows it."""
    alias = field.validation_alias or field.alias
    if alias is None:
        return [name]
    aliases = alias.choices if isinstance(alias, AliasChoices) else [alias]
    keys = [str(a.path[0]) if isinstance(a, AliasPath) else a for a in aliases]
    config = model.model_config
    return [*keys, name] if config.get("populate_by_name") or config.get("validate_by_name") else keys


def _problems_in(annotation: Any, value: Any, where: str) -> list[str]:
    """Problems of the value of a field; of a union of models, those of the member that fits best."""
    if isinstance(value, bool):
        kinds = {*_kinds(annotation)}
        takes_it = not kinds & {int, float} or kinds & {bool, Any, object}
        return [] if takes_it else [f"{where} must be a number, not a truth value (got {value})"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(key_problems(annotation, value, where)) if isinstance(value, dict) else []
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _problems_in(arguments[0], value, where)
    if origin in (Union, UnionType):
        candidates = [a for a in arguments if _accepts(a, value)]
        return min((_problems_in(a, value, where) for a in candidates), key=len, default=[])
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        return [p for i, item in enumerate(value) for p in _problems_in(arguments[0], item, f"{where}.{i}")]
    if origin in (dict, Mapping) and isinstance(value, dict):
        return [p for key, item in value.items() for p in _problems_in(arguments[1], item, f"{where}.{key}")]
    return []


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a field's type is made of."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType, Annotated):
        for part in arguments[:1] if origin is Annotated else arguments:
            yield from _kinds(part)
    else:
        yield type(arguments[0]) if origin is Literal else origin or annotation


def _accepts(annotation: Any, value: Any) -> bool:
    """Whether a member of a union can be a mapping or list like `value`."""
    if get_origin(annotation) is Annotated:
        return _accepts(get_args(annotation)[0], value)
    kind = get_origin(annotation) or annotation
    if isinstance(value, list):
        return kind in (Any, list, tuple, set, Sequence)
    return kind in (Any, dict, Mapping) or (isinstance(kind, type) and issubclass(kind, BaseModel))


def holds_secret(model: type[BaseModel], path: Sequence[int | str]) -> bool:
    """Whether the field at `path` (keys and indices, as in pydantic's `loc`), or one that it is in, is a secret."""
    return any("Secret" in str(field.annotation) for field in _fields_on(model, path))


def may_change(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Whether the field at `path`, or one that it is in, is marked as one that a resumed run may change."""
    return any(MAY_CHANGE in field.metadata for field in _fields_on(model, path))


def _fields_on(model: type[BaseModel], path: Sequence[int | str]) -> Iterator[FieldInfo]:
    """The fields that a path leads through, and the one at its end. Indices, and keys of mappings, are no fields."""
    if path and (field := _fields(model).get(str(path[0]))) is not None:
        yield field
        for inner, start in product(models_of(field.annotation), range(1, len(path))):
            yield from _fields_on(inner, path[start:])


def may_be_empty(model: type[BaseModel], path: Sequence[int | str]) -> bool:
    """Whether the field at `path` can be a mapping without keys, which takes the defaults of all."""
    fields = [*_fields_on(model, path)][-1:]
    blocks = [block for field in fields for block in models_of(field.annotation)]
    return bool(blocks) and not any(field.is_required() for block in blocks for field in block.model_fields.values())


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models that occur in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_of(part)]


def secret_values(block: BaseModel) -> Iterator[str]:
    """The values of all secrets inside a validated block."""
    return (value.get_secret_value() for _, value in _values(block, "") if isinstance(value, SecretStr))


def references(block: BaseModel, where: str) -> Iterator[tuple[str, ComponentRef]]:
    """Every reference to another block inside a validated block, with its key."""
    return ((key, value) for key, value in _values(block, where) if isinstance(value, ComponentRef))


def _values(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The values inside a validated block, and the keys of its mappings, each with its dotted key."""
    if isinstance(node, BaseModel):
        for name in type(node).model_fields:
            yield from _values(getattr(node, name), f"{where}.{name}")
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _values(key, where)
            yield from _values(value, f"{where}.{key}")
    elif isinstance(node, list | tuple | set):
        for index, value in enumerate(node):
            yield from _values(value, f"{where}.{index}")
    else:
        yield where, node
