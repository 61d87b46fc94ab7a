"""Spreads training over a CPU's cores: whole micro-batches side by side for a small model, else each operation."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from insitu.backend.model import LoadedModel

T = TypeVar("T")
R = TypeVar("R")

SMALL_MODEL = 5_000_000
"""Parameters below which the operations are too short to be split: threads would wait for one another at each."""


class Workers:
    """`count` micro-batches are computed at a time; what they give is the same whichever thread is faster."""

    def __init__(self, loaded: LoadedModel) -> None:
        cores = os.cpu_count() or 1
        small = sum(parameter.numel() for parameter in loaded.module.parameters()) < SMALL_MODEL
        self.count = cores if small and loaded.device.type == "cpu" else 1
        self._threads = cores // self.count if loaded.device.type == "cpu" else None
        self._pool = ThreadPoolExecutor(self.count, "insitu-training") if self.count > 1 else None

    def map(self, fn: Callable[[T], R], items: Sequence[T], *, in_turn: bool = False) -> list[R]:
        """The results in the order of the items, at most `count` of them; `in_turn` where all draw random numbers."""
        if self._pool is None or len(items) < 2 or in_turn:
            return [fn(item) for item in items]

        def run(item: T) -> R:
            with self.threads():
                return fn(item)

        return list(self._pool.map(run, items))

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """Within the block torch has the threads that training is meant to use, afterwards those it had."""
        before = torch.get_num_threads()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
