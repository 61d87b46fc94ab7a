"""Functions of a workflow: objects that convert inputs, run or stream, and record themselves as steps.

@register_function(config_type=GreeterConfig)
async def greeter(config, builder):
    async def greet(name: str) -> str:
        return f"{config.greeting}, {name}"
    yield FunctionInfo.from_fn(greet, description="Greets")

await (await builder.get_function("greeter")).ainvoke("Ada")
"""

import inspect
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from insitu.capture.ledger import Invocation, current_call_site
from insitu.errors import InputError, PluginError, WorkflowError
from insitu.registry import FUNCTION, decorator
from insitu.schemas.components import WORKFLOW, FunctionBaseConfig
from insitu.schemas.steps import IntermediateStepCategory as Category
from insitu.schemas.steps import InvocationNode
from insitu.workflow.context import Context
from insitu.workflow.conversion import Signature, convert, fits, is_model, type_hints, type_name

Converter = Callable[[Any], Any]


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
        description = description or inspect.getdoc(fn)
        common: dict[str, Any] = {"input_schema": input_schema, "description": description}
        called = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004 (the bound method is wanted)
        if inspect.isasyncgenfunction(fn) or inspect.isasyncgenfunction(called):
            return cls(stream_fn=fn, converters=converters or (), **common)
        if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(called):
            return cls(single_fn=fn, converters=converters or (), **common)
        raise PluginError(f"{fn!r} is not a workflow function: it must be declared `async def`")

    @classmethod
    def create(
        cls,
        *,
        single_fn: Callable[..., Awaitable[Any]] | None = None,
        stream_fn: Callable[..., AsyncIterator[Any]] | None = None,
        converters: Sequence[Converter] | None = None,
        **others: Any,
    ) -> "FunctionInfo":
        """From a function that returns an answer, one that streams it, or both."""
        if single_fn is None and stream_fn is None:
            raise PluginError("FunctionInfo.create needs single_fn, stream_fn or both")
        for name in ("single_output_schema", "stream_output_schema"):  # the annotations say the same
            others.pop(name, None)
        known = {"input_schema", "description", "single_to_stream_fn", "stream_to_single_fn"}
        if unknown := others.keys() - known:
            raise PluginError(f"FunctionInfo.create does not know {', '.join(sorted(unknown))}")
        return cls(single_fn=single_fn, stream_fn=stream_fn, converters=converters or (), **others)


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
        argument = self._convert(self._unwrapped(value, name, annotation), annotation, "takes")
        return ((), {name: argument}) if signature.by_name else ((argument,), {})

    def _unwrapped(self, value: Any, name: str, annotation: Any) -> Any:
        """The single field of an input in the form of the function's schema (arguments of a tool call, for example)."""
        if not isinstance(value, dict | BaseModel) or is_model(annotation) or fits(value, annotation):
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
        except (ValidationError, ValueError, TypeError) as error:
            reason: Any = error
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                reason = ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)
            problem = (
                f"function {self.name} {verb} {type_name(wanted)}; a value of type {type(value).__name__} "
                f"cannot be converted: {reason}"
            )
            raise (InputError(problem, self.name) if verb == "takes" else WorkflowError(problem)) from error


class _Run:
    """One invocation: a context manager that enters the function and leaves it."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value
        self._function_step, self._workflow_step = str(uuid.uuid4()), str(uuid.uuid4())
        self.result: Any = None

    def __enter__(self) -> Self:
        self._outside = caller = current_call_site.get()
        node = InvocationNode.model_construct(
            function_id=uuid.uuid4().hex,
            function_name=self._name,
            parent_id=caller.invocation.node.function_id,
            parent_name=caller.invocation.node.function_name,
        )
        invocation = Invocation(node, (*caller.invocation.names, self._name), caller.invocation)
        self._steps = Context.get().intermediate_step_manager
        if self._name == WORKFLOW:
            self._steps.enter_function(self._workflow_step, Category.WORKFLOW, self._name, self._value)
        self._around = current_call_site.get()
        current_call_site.set(self._around._replace(invocation=invocation))
        self._steps.enter_function(self._function_step, Category.FUNCTION, self._name, self._value)
        self._inside = current_call_site.get()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        current_call_site.set(self._inside)
        ended = (self._name, self._value, self.result, error)
        self._steps.leave_function(self._function_step, Category.FUNCTION, *ended)
        if self._name == WORKFLOW:
            current_call_site.set(self._around)
            self._steps.leave_function(self._workflow_step, Category.WORKFLOW, *ended)
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
                f"functions.{name}: its factory ({config.type}) yielded a {type(yielded).__name__}; "
                "it must yield a FunctionInfo or an async function"
            )
        yielded = FunctionInfo.from_fn(yielded)
    return Function(name, config, yielded)


register_function = decorator(FUNCTION, finish=as_function)
