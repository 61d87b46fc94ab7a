"""Conversion between what a function is given and what it declares, read from its annotations."""

import inspect
import types
import typing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Union

from pydantic import BaseModel, PydanticUserError, TypeAdapter, create_model
from pydantic_core import to_json


@dataclass(frozen=True)
class Signature:
    """What a function takes: its parameters, the model declared for them, and whether that is spread over them.

    A single parameter is given by position unless it is `by_name`.
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
        given = inspect.signature(fn).parameters
        kinds = {parameter.kind for parameter in given.values()}
        for name, parameter in given.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            parameters[name] = hints.get(name, Any)
            defaults[name] = ... if parameter.default is parameter.empty else parameter.default
        spread = len(parameters) > 1 or (declared is not None and inspect.Parameter.VAR_KEYWORD in kinds)
        if declared is not None and not spread:  # a parameter without annotation takes what is declared
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
    """`value` as `wanted`: models and containers to text as JSON, JSON text and dicts to models, else as pydantic."""
    if wanted is str:
        container = isinstance(value, BaseModel | dict | list | tuple)
        return to_json(value, fallback=json_form, bytes_mode="base64").decode() if container else str(value)
    adapter = _adapter(wanted)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, str | bytes) and (is_model(wanted) or not _scalar(wanted)):
        return adapter.validate_json(value)
    return adapter.validate_python(value)


def json_form(value: Any) -> Any:
    """Of what JSON has no form for: numbers and arrays of numpy and torch as numbers and lists, the rest as text."""
    try:
        return value.tolist() if hasattr(value, "tolist") else str(value)
    except Exception:  # a workflow's object may raise anything
        return f"<{type(value).__name__} object>"


@lru_cache(maxsize=512)
def _adapter(wanted: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(wanted, config=None if is_model(wanted) else {"arbitrary_types_allowed": True})
    except PydanticUserError:  # dataclasses and the like bring their own configuration
        return TypeAdapter(wanted)


def _scalar(wanted: Any) -> bool:
    return wanted in (int, float, bool)


def is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def fits(value: Any, kind: Any) -> bool:
    """Whether `value` already is a `kind` (of a generic type only the outer shape, and models inside a list)."""
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
    """The annotations of a callable; text that cannot be resolved (names local to a factory) counts as Any."""
    target = fn if inspect.isroutine(fn) or inspect.isclass(fn) else getattr(fn, "func", None) or type(fn).__call__
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        plain = inspect.unwrap(getattr(target, "__func__", target))
        cells = inspect.getclosurevars(plain).nonlocals if inspect.isfunction(plain) else {}
        known = {**getattr(plain, "__globals__", {}), **cells}
        return {name: _resolve(text, known) for name, text in getattr(plain, "__annotations__", {}).items()}


def _resolve(annotation: Any, known: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, known)  # the plugin's own source text
    except NameError:
        return Any
