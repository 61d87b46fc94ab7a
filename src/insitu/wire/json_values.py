"""JSON of any value, the values at a path in it, and large bodies of it."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from insitu.errors import ConfigError, WorkflowError

if TYPE_CHECKING:
    from jsonpath import JSONPath


def json_form(value: Any) -> Any:
    """A JSON form for other objects: numbers and lists for those of numpy and torch, else text."""
    try:
        return value.tolist() if hasattr(value, "tolist") else str(value)
    except Exception:  # a workflow's object may raise anything
        return f"<{type(value).__name__} object>"


JSON_OPTIONS: dict[str, Any] = {"fallback": json_form, "bytes_mode": "base64", "serialize_as_any": True}
"""serialize_as_any keeps fields that a subclass adds to the declared model, such as LangChain's tool calls."""


def to_jsonable(value: Any) -> Any:
    """Converts a value to plain JSON types; objects without a JSON form become text."""
    return to_jsonable_python(value, **JSON_OPTIONS)


def encode(value: Any) -> bytes:
    """JSON of any value a workflow may return; raises ValueError if it is nested too deeply."""
    try:
        return to_json(value, inf_nan_mode="constants", **JSON_OPTIONS)
    except (PydanticSerializationError, UnicodeEncodeError):  # lone surrogates are escaped
        try:
            return json.dumps(to_jsonable(value)).encode()
        except UnicodeEncodeError:  # in a key
            return json.dumps(value, default=json_form).encode()


def decode(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:  # lone surrogates again, or not JSON
        return json.loads(text)


@cache
def json_path(text: str, key: str) -> "JSONPath | None":
    """A JSONPath (RFC 9535); None for `$`, the whole value. Raises ConfigError naming `key` if it is invalid."""
    if text == "$":
        return None
    from jsonpath import JSONPathEnvironment, JSONPathError

    try:
        return JSONPathEnvironment(strict=True).compile(text)  # type: ignore[return-value]  # strict: no compound paths
    except JSONPathError as error:
        raise ConfigError(
            f"{key} {text!r} is not a JSONPath such as $.answer or $.choices[0].text: {error.args[0]}"
        ) from error


def value_at(text: str, result: Any, key: str) -> Any:
    """The value at a path in a model, a container or JSON text; raises WorkflowError unless it is unique."""
    path = json_path(text, key)
    if path is None:
        return result
    if isinstance(result, str | bytes):
        try:
            result = from_json(result)
        except ValueError as error:
            raise WorkflowError(f"{key} {text}: the result {result!r:.80} is not JSON") from error
    values = path.findall(to_jsonable_python(result, fallback=json_form, bytes_mode="base64"))
    if len(values) != 1:
        raise WorkflowError(f"{key} {text} matches {len(values)} values of {result!r:.200}, not one")
    return values[0]


def has_lone_surrogate(text: str) -> bool:
    """Whether a text, as JSON may hold it, cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector while a large body is parsed or built, which is six times faster.

    The collector belongs to the process: keep the block short.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
