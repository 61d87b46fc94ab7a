"""Converts values to the types that a function's annotations declare."""

import inspect
import types
import typing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Union

from pydantic import BaseModel, PydanticUserError, TypeAdapter, create_model
from pydantic_core import to_json

from insitu.wire.http_format import json_form


@dataclass(frozen=True)
class Signature:
    """A function's parameters, the model declared for them, and whether its fields are `spread` over them.

    A single parameter is passed by position unless it is `by_name`.
    """

    parameters: dict[str, Any]
    defaults: dict[str, Any]
    declared: type[BaseModel] | None
    spread: bool
    by_name: bool

    @classmethod
    def of(cls, fn: Any, declared: type[BaseModel] | None) -> "Signature":
        hints = type_hints(fn)
        parameters, defaults = {}, {}
        signature = inspect.signature(fn).parameters
        kinds = {parameter.kind for parameter in signature.values()}
        for name, parameter in signature.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            parameters[name] = hints.get(name, Any)
            defaults[name] = ... if parameter.default is parameter.empty else parameter.default
        spread = len(parameters) > 1 or (declared is not None and inspect.Parameter.VAR_KEYWORD in kinds)
        if declared is not None and not spread:  # a parameter without annotation takes the declared model
            parameters = {name: declared if kind is Any else kind for name, kind in parameters.items()}
        return cls(parameters, defaults, declared, spread, inspect.Parameter.KEYWORD_ONLY in kinds)

    @cached_property
    def schema(self) -> type[BaseModel]:
        if self.declared is not None:
            return self.declared
        if len(self.parameters) == 1 and is_model(only := next(iter(self.parameters.values()))):
            return only
        fields: dict[str, Any] = {name: (kind, self.defaults[name]) for name, kind in self.parameters.items()}
        return create_model("Input", __config__={"arbitrary_types_allowed": True}, **fields)


def convert(value: Any, wanted: Any) -> Any:
    """Converts models and containers to JSON text, JSON text and dicts to models, everything else as pydantic does."""
    if wanted is str:
        container = isinstance(value, BaseModel | dict | list | tuple)
        return to_json(value, fallback=json_form, bytes_mode="base64").decode() if container else str(value)
    adapter = _adapter(wanted)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, str | bytes) and (is_model(wanted) or wanted not in (int, float, bool)):
        return adapter.validate_json(value)
    return adapter.validate_python(value)


@lru_cache(maxsize=512)
def _adapter(wanted: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(wanted, config=None if is_model(wanted) else {"arbitrary_types_allowed": True})
    except PydanticUserError:  # dataclasses, for example, have their own configuration
        return TypeAdapter(wanted)


def is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def fits(value: Any, kind: Any) -> bool:
    """Whether `value` is a `kind` already; of generic types only the container, and models in a list, are checked."""
    if kind is Any:
        return True
    if kind is None:
        return value is None
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, member) for member in typing.get_args(kind))
    if origin is typing.Annotated:
        return False
    outer = origin or kind
    if not isinstance(outer, type) or not isinstance(value, outer):
        return False
    inner = typing.get_args(kind)
    return not (isinstance(value, list) and inner and is_model(inner[0])) or all(fits(v, inner[0]) for v in value)


def type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)


def type_hints(fn: Any) -> dict[str, Any]:
    """The annotations of a callable; strings that cannot be resolved (names local to a factory) count as Any."""
    target = fn if inspect.isroutine(fn) or inspect.isclass(fn) else getattr(fn, "func", None) or type(fn).__call__
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        function = inspect.unwrap(getattr(target, "__func__", target))
        cells = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        names = {**getattr(function, "__globals__", {}), **cells}
        return {name: _resolve(text, names) for name, text in getattr(function, "__annotations__", {}).items()}


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)  # the plugin's own source text
    except NameError:
        return Any
