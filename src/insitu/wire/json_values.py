"""JSON of any value that a workflow may return: objects without a JSON form become text."""

import json
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python


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


def has_lone_surrogate(text: str) -> bool:
    """Whether a text, as JSON may hold it, cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
