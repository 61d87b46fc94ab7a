"""Functions of a workflow: objects that convert inputs, run or stream, and record themselves as steps.

@register_function(config_type=GreeterConfig)
async def greeter(config, builder):
    async def greet(name: str) -> str:
        return f"{config.greeting}, {name}"
    yield FunctionInfo.from_fn(greet, description="Greets")

await (await builder.get_function("greeter")).ainvoke("Ada")
"""

import inspect
import types
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self, Union

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError, create_model
from pydantic_core import to_json

from insitu.capture.ledger import current_call_site
from insitu.errors import InputError, PluginError, WorkflowError, a_type, first_problem
from insitu.registry import decorator
from insitu.schemas.components import FunctionBaseConfig
from insitu.schemas.kinds import FUNCTION
from insitu.wire.json_values import json_form
from insitu.workflow.context import current_episode

Converter = Callable[[Any], Any]


class Arguments(dict[str, Any]):
    """An input that has the fields of a function's schema, also where the function takes any dict."""


@dataclass(frozen=True)
class FunctionInfo:
    """What a function's factory yields: `single_fn`, `stream_fn` or both.

    `converters` are functions of one annotated argument; matching ones take precedence over the built-in conversions.
    """

    single_fn: Callable[..., Awaitable[Any]] | None = None
    stream_fn: Callable[..., AsyncIterator[Any]] | None = None
    input_schema: type[BaseModel] | None = None
    description: str | None = None
    converters: Sequence[Converter] = ()
    single_to_stream_fn: Callable[[Any], AsyncIterator[Any]] | None = None
    stream_to_single_fn: Callable[[AsyncIterator[Any]], Awaitable[Any]] | None = None

    @classmethod
    def from_fn(
        cls,
        fn: Callable[..., Any],
        input_schema: type[BaseModel] | None = None,
        description: str | None = None,
        converters: Sequence[Converter] | None = None,
    ) -> "FunctionInfo":
        """From an asynchronous function, or from an asynchronous generator function, which streams."""
        fields: dict[str, Any] = {
            "input_schema": input_schema,
            "description": description or inspect.getdoc(fn),
            "converters": converters or (),
        }
        either = fn, fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004 (the bound method is wanted)
        if any(map(inspect.isasyncgenfunction, either)):
            return cls(stream_fn=fn, **fields)
        if any(map(inspect.iscoroutinefunction, either)):
            return cls(single_fn=fn, **fields)
        raise PluginError(f"{fn!r} is not a workflow function: it must be declared `async def`")

    @classmethod
    def create(
        cls,
        *,
        single_fn: Callable[..., Awaitable[Any]] | None = None,
        stream_fn: Callable[..., AsyncIterator[Any]] | None = None,
        input_schema: type[BaseModel] | None = None,
        single_output_schema: Any = None,  # the annotations of the functions say the same
        stream_output_schema: Any = None,
        single_to_stream_fn: Callable[[Any], AsyncIterator[Any]] | None = None,
        stream_to_single_fn: Callable[[AsyncIterator[Any]], Awaitable[Any]] | None = None,
        description: str | None = None,
        converters: Sequence[Converter] | None = None,
        **unknown: Any,
    ) -> "FunctionInfo":
        """From a function that returns an answer, one that streams it, or both."""
        if unknown:
            raise PluginError(f"FunctionInfo.create does not know {', '.join(sorted(unknown))}")
        if single_fn is None and stream_fn is None:
            raise PluginError("FunctionInfo.create needs single_fn, stream_fn or both")
        chosen = single_fn, stream_fn, input_schema, description, converters or ()
        return cls(*chosen, single_to_stream_fn, stream_to_single_fn)


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
        try:
            return adapter.validate_json(value)
        except ValidationError:
            with suppress(ValidationError):  # a date or a member of an enumeration, for example, is text itself
                if not is_model(wanted):
                    return adapter.validate_python(value)
            raise
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


class Function:
    """A built function: `ainvoke` returns its answer, `astream` yields it in pieces.

    Each invocation pushes FUNCTION_START and FUNCTION_END, and is the active function of everything inside it.
    """

    def __init__(self, name: str, config: FunctionBaseConfig | None, info: FunctionInfo) -> None:
        self.name = name
        self.config = config
        self.description = info.description
        self._info = info
        self._signature = Signature.of(info.single_fn or info.stream_fn, info.input_schema)

    def __repr__(self) -> str:
        return f"<function {self.name}>"

    @property
    def has_single_output(self) -> bool:
        return self._info.single_fn is not None

    @property
    def has_streaming_output(self) -> bool:
        return self._info.stream_fn is not None

    @property
    def input_schema(self) -> type[BaseModel]:
        """A model of the input; for a non-model type, one with a field named after the parameter."""
        return self._signature.schema

    async def ainvoke(self, value: Any = None, to_type: Any = None) -> Any:
        """Runs on `value`, converted to the declared type; the answer is converted to `to_type`, if any."""
        with _Run(self.name, value) as run:
            args, kwargs = self._arguments(value)
            if self._info.single_fn is not None:
                run.result = await self._info.single_fn(*args, **kwargs)
            else:
                assert self._info.stream_fn is not None
                run.result = await self._collect(self._info.stream_fn(*args, **kwargs))
        return run.result if to_type is None else self._convert(run.result, to_type, "answers")

    async def astream(self, value: Any = None, to_type: Any = None) -> AsyncGenerator[Any, None]:
        """Yields the pieces of the answer; a function that does not stream yields its answer as one."""
        if self._info.stream_fn is None and self._info.single_to_stream_fn is None:
            yield await self.ainvoke(value, to_type)
            return
        with _Run(self.name, value) as run:
            args, kwargs = self._arguments(value)
            if self._info.stream_fn is not None:
                stream = self._info.stream_fn(*args, **kwargs)
            else:
                assert self._info.single_fn is not None
                assert self._info.single_to_stream_fn is not None
                stream = self._info.single_to_stream_fn(await self._info.single_fn(*args, **kwargs))
            async with aclosing(run.each(stream)) as pieces:
                async for piece in pieces:
                    yield piece if to_type is None else self._convert(piece, to_type, "streams")

    def text(self, answer: Any) -> str:
        """An answer of this function as text. Raises WorkflowError if it cannot be converted."""
        return str(self._convert(answer, str, "answers"))

    async def _collect(self, stream: AsyncIterator[Any]) -> Any:
        """Joins a stream: text is concatenated, a single piece is the answer, else the list of pieces is."""
        if self._info.stream_to_single_fn is not None:
            return await self._info.stream_to_single_fn(stream)
        pieces = [piece async for piece in stream]
        if pieces and all(isinstance(piece, str) for piece in pieces):
            return "".join(pieces)
        return pieces[0] if len(pieces) == 1 else pieces

    def _arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        signature = self._signature
        if signature.spread:
            model = self._convert(value, signature.schema, "takes")
            return (), {name: getattr(model, name) for name in type(model).model_fields}
        if not signature.parameters:
            return (), {}
        ((name, annotation),) = signature.parameters.items()
        if not value and isinstance(value, Arguments) and signature.declared is None and not is_model(annotation):
            return (), {}
        argument = self._convert(self._unwrapped(value, name, annotation), annotation, "takes")
        return ((), {name: argument}) if signature.by_name else ((argument,), {})

    def _unwrapped(self, value: Any, name: str, annotation: Any) -> Any:
        """The single field of an input in the form of the function's schema (arguments of a tool call, for example)."""
        if not isinstance(value, dict | BaseModel) or is_model(annotation):
            return value
        by_name = isinstance(value, Arguments) and self.input_schema.model_fields.keys() == {name}
        if not by_name and fits(value, annotation):
            return value
        declared = self._signature.declared
        if declared is not None:
            model = self._convert(value, declared, "takes")
            return getattr(model, next(iter(declared.model_fields)))
        return value[name] if isinstance(value, dict) and value.keys() == {name} else value

    def _convert(self, value: Any, wanted: Any, verb: str) -> Any:
        if wanted is Any or wanted is inspect.Parameter.empty or fits(value, wanted):
            return value
        try:
            for converter in self._info.converters:
                hints = list(type_hints(converter).items())
                source, target = hints[0][1] if hints else Any, hints[-1][1] if hints else Any
                if fits(value, source) and target == wanted:
                    return converter(value)
            return convert(value, wanted)
        except (ValueError, TypeError) as error:
            problem = (
                f"function {self.name} {verb} {type_name(wanted)}; a value of type {type(value).__name__} "
                f"cannot be converted: {first_problem(error)}"
            )
            raise (InputError(problem, self.name) if verb == "takes" else WorkflowError(problem)) from error


class _Run:
    """One invocation: a context manager that enters the function and leaves it."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value
        self.result: Any = None

    def __enter__(self) -> Self:
        self._outside = current_call_site.get()
        self._manager = current_episode.get().step_manager
        self._steps = self._manager.enter_function(self._name, self._value)
        self._inside = current_call_site.get()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        current_call_site.set(self._inside)
        self._manager.leave_function(self._steps, self.result, error)
        current_call_site.set(self._outside)

    async def each(self, stream: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Yields the pieces of `stream`, whose code runs inside the function, to a consumer that runs outside."""
        current_call_site.set(self._outside)
        pieces = []
        try:
            while True:
                outside = current_call_site.get()
                current_call_site.set(self._inside)
                try:
                    piece = await anext(stream)
                except StopAsyncIteration:
                    break
                finally:
                    self._inside = current_call_site.get()
                    current_call_site.set(outside)
                pieces.append(piece)
                yield piece
        finally:
            self.result = pieces
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()


def as_function(name: str, config: FunctionBaseConfig, yielded: Any) -> Function:
    """The Function for what a factory yielded: a FunctionInfo, an asynchronous function, or a Function."""
    if isinstance(yielded, Function):
        return yielded
    if not isinstance(yielded, FunctionInfo):
        if not callable(yielded):
            raise PluginError(
                f"functions.{name}: its factory ({config.type}) yielded {a_type(yielded)}; "
                "it must yield a FunctionInfo or an async function"
            )
        yielded = FunctionInfo.from_fn(yielded)
    return Function(name, config, yielded)


register_function = decorator(FUNCTION, finish=as_function)
