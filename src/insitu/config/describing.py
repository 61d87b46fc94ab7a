"""Configuration models in words: the types, bounds and defaults of their keys, for the reference and `insitu info`."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from insitu.config.keys import fields_not_in_file, models_of
from insitu.schemas.components import ComponentRef

TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", Path: "path", SecretStr: "string"}
BOUNDS = {Ge: "at least {}", Gt: "above {}", Le: "at most {}", Lt: "below {}"}


def shown_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields that a file sets, by their keys there."""
    hidden = fields_not_in_file(model)
    return {field.alias or name: field for name, field in model.model_fields.items() if name not in hidden}


def type_text(annotation: Any) -> str:
    """Describes a type in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in TYPE_NAMES:
        return TYPE_NAMES[annotation]
    if origin in (Union, UnionType):
        alternatives = (part for part in parts if part not in (NoneType, *redundant_types(parts)))
        return " or ".join(dict.fromkeys(type_text(part) for part in alternatives))
    if origin is Annotated:
        return type_text(parts[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in parts)
    if origin is list:
        return f"list of {type_text(parts[0])}s"
    if origin is tuple:
        return f"list of {len(parts)} {type_text(parts[0])}s"
    if isinstance(annotation, type) and issubclass(annotation, ComponentRef):
        return f"name under `{annotation.section}`"
    return "block" if annotation is Any or origin is dict or models_of(annotation) else str(annotation)


def redundant_types(parts: tuple[Any, ...]) -> tuple[type, ...]:
    """A path may be written as a string; naming both types would be redundant."""
    return (str,) if Path in parts else ()


def bounds(field: FieldInfo) -> str:
    """Formats the bounds of a number, as in `, at least 1`."""
    parts = []
    for limit in field.metadata:
        template = BOUNDS.get(type(limit))
        if template is not None:
            parts.append(", " + template.format(f"{getattr(limit, type(limit).__name__.lower()):g}"))
    return "".join(parts)


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if value in ("", SecretStr("")):
        return "empty"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`".replace("'", '"')


def description(model: type[BaseModel]) -> str:
    """The docstring of the class or its nearest base with one; empty if it only names the section."""
    text = next(" ".join(kind.__doc__.split()) for kind in model.__mro__ if kind.__doc__)
    return "" if text.startswith(("The section", "The block")) else text
