"""Temporarily raises the log level of a library.

async with suppress_logs("noisy_library", logging.ERROR):
    await noisy()
"""

import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from insitu.errors import ConfigError, not_found


class _Saved(NamedTuple):
    """A logger's settings before the first active suppression that covers it."""

    level: int
    propagate: bool
    effective_level: int


_active: list[tuple[str, int]] = []
_saved: dict[logging.Logger, _Saved] = {}
_lock = threading.Lock()


@asynccontextmanager
async def suppress_logs(prefix: str, level: int | str = logging.ERROR) -> AsyncIterator[None]:
    """Drops records below `level` of the logger `prefix` and its descendants. Never lowers a logger's level.

    The level and `propagate` of every logger are restored afterwards. Suppressions may overlap in concurrent tasks: the
    highest level applies until the last one ends. A logger created in the meantime inherits the level only.
    """
    if isinstance(level, str):
        names = logging.getLevelNamesMapping()
        if level not in names:
            raise ConfigError(not_found("log level", level, names))
        level = names[level]
    suppression = (prefix, level)
    with _lock:
        for logger in (logging.getLogger(prefix), *logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger) and _covers(prefix, logger):
                _saved.setdefault(logger, _Saved(logger.level, logger.propagate, logger.getEffectiveLevel()))
        _active.append(suppression)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _active.remove(suppression)
            _apply()


def _covers(prefix: str, logger: logging.Logger) -> bool:
    return not prefix or f"{logger.name}.".startswith(f"{prefix}.")


def _apply() -> None:
    """Sets every saved logger to the highest active level, or restores it if no suppression covers it any more."""
    for logger, saved in list(_saved.items()):
        active = [(prefix, level) for prefix, level in _active if _covers(prefix, logger)]
        inherits = saved.level == logging.NOTSET and all(logger.name != prefix for prefix, _ in active)
        highest = max([saved.effective_level, *(level for _, level in active)])
        logger.setLevel(saved.level if not active or inherits else highest)
        if not active:
            logger.propagate = saved.propagate
            del _saved[logger]
