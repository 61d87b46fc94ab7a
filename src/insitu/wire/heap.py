"""glibc's heap: one for all threads, whose free pages go back to the system; large blocks can stay out of it."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt`."""
_LARGE = 1 << 20
_LARGEST = 32 << 20
"""What the threshold of pages of their own grows to by itself, as blocks are freed."""


def share_heap() -> None:
    """All threads use one heap: in one for each, what a thread frees is lost to others."""
    _set(_ARENA_MAX, 1)


def return_free_pages() -> None:
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


@contextmanager
def large_blocks_outside(enabled: bool) -> Iterator[None]:
    """Meanwhile, blocks of 1 MiB or more have pages of their own, which are free as soon as the block is.

    In the heap, gaps between blocks that stay are lost: until 2.39 glibc leaves what is cut off an aligned block where
    it is not merged with the block once that is freed (its bug 30723). Such pages take time: a training job that
    recomputes layers takes half of the memory and 5 to 15 % more CPU time.
    """
    if enabled:
        _set(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        if enabled:
            _set(_MMAP_THRESHOLD, _LARGEST)
            _set(_TRIM_THRESHOLD, 2 * _LARGEST)  # as glibc would, which no longer does once a threshold is set


def _set(parameter: int, value: int) -> None:
    if (mallopt := _function("mallopt")) is not None:
        mallopt(parameter, value)


def _function(name: str) -> Callable[..., int] | None:
    """A function of glibc; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
