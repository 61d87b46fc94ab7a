"""Quiet for a while: keeps a library's log records below a level from being made.

async with suppress_logs("noisy_library", logging.ERROR):
    await noisy()
"""

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from insitu.errors import ConfigError
from insitu.registry import not_found


class _Before(NamedTuple):
    """How a logger was before the first suppression that covers it; `effective` counts for it while there is one."""

    level: int
    propagate: bool
    effective: int


_active: list[tuple[str, int]] = []
_before: dict[logging.Logger, _Before] = {}
_lock = threading.Lock()


@asynccontextmanager
async def suppress_logs(prefix: str, level: int | str = logging.ERROR) -> AsyncIterator[None]:
    """Let the logger `prefix` and those below it make no record below `level`; no logger becomes louder.

    Afterwards each of them has the level and `propagate` it had before, also when suppressions overlap in concurrent
    tasks: then the highest level counts, until the last of them ends. A logger that is created meanwhile inherits the
    silence, and keeps nothing of it.
    """
    if isinstance(level, str):
        names = logging.getLevelNamesMapping()
        if level not in names:
            raise ConfigError(not_found("log level", level, names))
        level = names[level]
    asked = (prefix, level)
    with _lock:
        for logger in _loggers(prefix):
            _before.setdefault(logger, _Before(logger.level, logger.propagate, logger.getEffectiveLevel()))
        _active.append(asked)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _active.remove(asked)
            _apply()


def _loggers(prefix: str) -> Iterator[logging.Logger]:
    """The logger called `prefix` (made if there is none), and all there are below it."""
    own = logging.getLogger(prefix)
    for logger in (own, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and _covers(prefix, logger):
            yield logger


def _covers(prefix: str, logger: logging.Logger) -> bool:
    return not prefix or f"{logger.name}.".startswith(f"{prefix}.")


def _apply() -> None:
    """Give each logger the highest level asked for, or what it had before where nothing is asked any more."""
    for logger, before in list(_before.items()):
        asked = [(prefix, level) for prefix, level in _active if _covers(prefix, logger)]
        inherits = before.level == logging.NOTSET and all(logger.name != prefix for prefix, _ in asked)
        if not asked or inherits:
            logger.setLevel(before.level)
        else:
            logger.setLevel(max(before.effective, *(level for _, level in asked)))
        if not asked:
            logger.propagate = before.propagate
            del _before[logger]
