"""glibc's allocator: one arena for all threads, free pages that go back to the system, and large blocks by mmap."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt`."""
_LARGE = 1 << 20
_MOST = 32 << 20
"""glibc raises the mmap threshold up to this by itself, as large blocks are freed."""


def use_one_arena() -> None:
    """Otherwise each thread has an arena, and the others cannot use what it frees."""
    _set(_ARENA_MAX, 1)


def return_free_pages() -> None:
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


@contextmanager
def mmap_large_blocks() -> Iterator[None]:
    """Blocks of 1 MiB or more that are allocated here get pages by mmap, and return them when freed.

    In the heap, gaps between blocks that stay are lost: until 2.39 glibc leaves what is cut off an aligned block where
    it is not merged with the block once that is freed (its bug 30723). mmap costs time: see "A training job of a real
    model" in benchmarks/RESULTS.md.
    """
    _set(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        _set(_MMAP_THRESHOLD, _MOST)
        _set(_TRIM_THRESHOLD, 2 * _MOST)  # glibc no longer adapts it once one is set


def _set(parameter: int, value: int) -> None:
    if (mallopt := _function("mallopt")) is not None:
        mallopt(parameter, value)


def _function(name: str) -> Callable[..., int] | None:
    """A function of glibc; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
