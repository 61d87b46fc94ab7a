"""JSON files and lines of any value that a workflow may return."""

import json
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from insitu.disk.files import write_file
from insitu.wire.json_values import json_form


def to_json(value: Any, depth: int = 4) -> Any:
    """A JSON value of anything: models and dataclasses as objects, bytes as base64, unknown objects as text.

    Cyclic and unserializable values become text too; up to `depth` containers around them are kept.
    """
    try:
        return to_jsonable_python(value, fallback=json_form, bytes_mode="base64", inf_nan_mode="null")
    except ValueError:
        if depth and isinstance(value, BaseModel):
            value = dict(value)
        if depth and isinstance(value, dict):
            return {str(key): to_json(part, depth - 1) for key, part in value.items()}
        if depth and isinstance(value, list):
            return [to_json(part, depth - 1) for part in value]
        return json_form(value)


def dump_json(data: Any, option: int = 0) -> bytes:
    """JSON of any value a workflow may return."""
    try:
        return orjson.dumps(data, default=to_json, option=option | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # big integers, lone surrogates, tuple keys, cycles: slower, but nothing may be lost
        ending = "\n" if option & orjson.OPT_APPEND_NEWLINE else ""
        return (json.dumps(to_json(data)) + ending).encode()


def write_json(path: Path, data: Any) -> Path:
    """Replaces a file atomically and synced: a reader never sees half of it."""
    return write_file(path, dump_json(data, orjson.OPT_INDENT_2))
