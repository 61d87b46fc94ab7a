"""Limits of our HTTP servers: sizes of JSON, idle connections, open files, memory.

Python objects need up to twenty times the memory of their JSON (`[],[],[]`), so a body is measured before it is parsed.
The C library keeps most of that memory when the objects are freed: glibc up to 64 MiB for each thread that has parsed a
body. So a server has one heap for all threads (`prepare_process`), and returns its free pages after large requests.
"""

import asyncio
import ctypes
import gc
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

import orjson

from insitu.errors import ConfigError, RequestRefused
from insitu.wire.http_format import gc_paused

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
_HUGE_BODY = 2**20
"""Bodies from this size on have their memory returned when their requests have ended."""
_TRIM_SECONDS = 0.5
"""Memory is returned this long after a large request, once for all that end in the meantime."""
_M_ARENA_MAX = -8
"""The option of glibc's `mallopt` that limits the number of heaps."""

T = TypeVar("T")


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


async def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """Runs `parse`, in a thread for large bodies; the memory of huge ones is returned when the task has ended."""
    if len(body) < LARGE_BODY:
        return parse(body)
    if len(body) >= _HUGE_BODY:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_return_memory_soon)
    return await asyncio.to_thread(parse, body)


_returning_soon: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
"""Event loops that are about to return memory."""


def _return_memory_soon(task: asyncio.Task[Any]) -> None:
    loop = task.get_loop()

    def start() -> None:
        _returning_soon.discard(loop)
        threading.Thread(target=_return_memory, name="return memory", daemon=True).start()

    if loop not in _returning_soon:
        _returning_soon.add(loop)
        loop.call_later(_TRIM_SECONDS, start)


def _return_memory() -> None:
    """Frees what failed requests have left in reference cycles, and returns the free pages of glibc's heap."""
    gc.collect()
    if (trim := _libc_function("malloc_trim")) is not None:
        trim(0)


def _libc_function(name: str) -> Callable[..., int] | None:
    """A function of glibc for changing its heap; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function


def prepare_process() -> None:
    """Prepares this process for serving: open files, and one heap. Raises ConfigError if it may open too few files."""
    if (allowed := raise_file_limit()) < MIN_OPEN_FILES:
        problem = f"this process may open {allowed} files (ulimit -n)"
        raise ConfigError(f"{problem}; a server needs at least {MIN_OPEN_FILES}")
    if (mallopt := _libc_function("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, 1)


def raise_file_limit(wanted: int = _WANTED_OPEN_FILES) -> int:
    """Allows this process at least `wanted` open files, or as many as the system lets it; returns how many."""
    try:
        import resource
    except ImportError:  # not on Windows
        return sys.maxsize
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(hard, max(wanted, _WANTED_OPEN_FILES))
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
    except (OSError, ValueError) as error:  # a lower limit of the system
        logger.debug("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted
