"""Limits of our HTTP servers: sizes of JSON, idle connections, open files.

Python objects need up to twenty times the memory of their JSON (`[],[],[]`), so a body is measured before it is parsed.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import orjson

from insitu.errors import ConfigError, RequestRefused
from insitu.http_format import gc_paused

logger = logging.getLogger(__name__)

MAX_VALUES = 2**20
"""Commas and brackets in a request to a model, which count the values: more than the tokens of any prompt."""
MAX_DEPTH = 128
"""Levels of nesting. Parsers read deeper ones that writers and templates then fail on."""
LARGE_BODY = 2**16
"""Bodies from this size on are parsed in a thread, so that they do not hold up other responses."""
IDLE_SECONDS = 75.0
"""A connection without a request is closed after this long."""
BODY_SECONDS = 60.0
"""A request is refused if no more of its body arrives for this long."""
MIN_OPEN_FILES = 256
"""A server with fewer runs out of them with a few dozen clients."""
_WANTED_OPEN_FILES = 65536


def parse_json(body: bytes, *, max_values: int = MAX_VALUES, loads: Callable[[bytes], Any] = orjson.loads) -> Any:
    """Raises RequestRefused if the body is not JSON (400), or has too many values (413) or levels (400)."""
    brackets = body.count(b"[") + body.count(b"{")
    if (separators := brackets + body.count(b",")) > max_values:
        problem = f"the body has {separators} commas and brackets; allowed: {max_values}"
        raise RequestRefused(problem, status=413, code="too_large")
    try:
        with gc_paused() if len(body) >= LARGE_BODY else nullcontext():
            data = loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from None
    if brackets > MAX_DEPTH and _is_too_deep(data):
        problem = f"the body is nested more than {MAX_DEPTH} levels deep"
        raise RequestRefused(problem, code="malformed_json")
    return data


def _is_too_deep(data: Any) -> bool:
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [child for each in lists for child in each]
        if not level:
            return False
    return True


def raise_file_limit() -> None:
    """Allows this process as many open files as the system lets it; raises ConfigError if those are too few."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _WANTED_OPEN_FILES if hard == unlimited else min(hard, _WANTED_OPEN_FILES)
    if soft != unlimited and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:
            logger.debug("the limit of open files stays at %d: %s", soft, error)
    if soft != unlimited and soft < MIN_OPEN_FILES:
        raise ConfigError(f"this process may open {soft} files (ulimit -n); a server needs at least {MIN_OPEN_FILES}")
