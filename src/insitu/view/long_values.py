"""Long texts and lists of an answer are sent in parts, so that a message of 10 MB does not keep a page from opening."""

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from insitu.errors import RequestRefused

CUT = "$cut"
"""Key that names the values of its object which are only a beginning: path in the answer, length, digest of a text."""
_LONGEST = 100_000
"""Characters, or tokens, of a value that is sent as a whole."""
_BEGINNING = 20_000
_PART = 1_000_000


def shortened(value: Any, path: tuple[str | int, ...] = ()) -> Any:
    """An answer with only the beginnings of its long texts and of its lists of tokens."""
    if isinstance(value, Mapping):
        cut = {key: _about(each, (*path, key)) for key, each in value.items() if _is_long(key, each)}
        short = {key: each[:_BEGINNING] if key in cut else _inner(key, each, path) for key, each in value.items()}
        return short | ({CUT: cut} if cut else {})
    if isinstance(value, list | tuple):
        return [shortened(each, (*path, index)) for index, each in enumerate(value)]
    if isinstance(value, str) and len(value) > _LONGEST:  # of a list: those of an object are cut above
        return {"text": value[:_BEGINNING], CUT: {"text": _about(value, path)}}
    return value


def _about(value: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
    about = {"path": path, "length": len(value)}
    if isinstance(value, str):
        about["digest"] = hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()
    return about


def _is_long(key: str, value: Any) -> bool:
    return len(value) > _LONGEST if isinstance(value, str) or (key == "tokens" and isinstance(value, list)) else False


def _inner(key: str, value: Any, path: tuple[str | int, ...]) -> Any:
    return value if key == "tokens" else shortened(value, (*path, key))


def part(answer: Any, path: str, offset: int) -> Any:
    """A part of the value at a path, from an offset. Raises RequestRefused (400) if there is none."""
    try:
        for key in orjson.loads(path):
            answer = answer[key]
        return answer[offset : offset + _PART] if isinstance(answer, str | list) else answer
    except (ValueError, TypeError, LookupError):
        problem = f"path is {path!r:.200}, which is nothing there"
        raise RequestRefused(problem, param="path", code="invalid_value") from None
