"""Reports which files of runs change, by looking at their sizes and times twice a second."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from insitu.view.opened import OpenedFolder
from insitu.view.overview import Signature, signature

POLL_SECONDS = 0.5


class Change(NamedTuple):
    """Files of a run that were written, replaced or deleted; `run` is None if the list of runs has changed."""

    run: str | None
    files: list[str]

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


class Watcher:
    """Looks at the runs that are shown while there are clients; all clients share one task."""

    def __init__(self, opened: OpenedFolder) -> None:
        self._opened = opened
        self._clients: dict[asyncio.Queue[Change], frozenset[str]] = {}
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watching(self, runs: Iterable[str]) -> AsyncIterator["asyncio.Queue[Change]"]:
        """Yields a queue of the changes of these runs; of none: of all runs, and of the list of runs."""
        queue: asyncio.Queue[Change] = asyncio.Queue()
        self._clients[queue] = frozenset(runs)
        if self._task is None or self._task.done():  # done: it has failed
            self._task = asyncio.create_task(self._watch(), name="watch runs")
        try:
            yield queue
        finally:
            del self._clients[queue]
            if not self._clients and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _watch(self) -> None:
        """Compares what the files are with what they were; runs until the last client leaves."""
        before = await asyncio.to_thread(self._signatures, self._shown())
        while True:
            await asyncio.sleep(POLL_SECONDS)
            now = await asyncio.to_thread(self._signatures, self._shown())
            for change in _changes(before, now):
                for queue, runs in self._clients.items():
                    if change.run in runs or not runs:
                        queue.put_nowait(change)
            before = now

    def _shown(self) -> set[str] | None:
        """The runs that clients look at, None if one looks at all."""
        shown = self._clients.values()
        return set().union(*shown) if all(shown) else None

    def _signatures(self, shown: set[str] | None) -> dict[str, Signature]:
        found: Mapping[str, Path] = self._opened.runs()
        return {run: signature(path) for run, path in found.items() if shown is None or run in shown}


def _changes(before: Mapping[str, Signature], now: Mapping[str, Signature]) -> Iterable[Change]:
    if before.keys() != now.keys():
        yield Change(None, [])
    for run in before.keys() & now.keys():
        old, new = before[run], now[run]
        if files := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
            yield Change(run, files)
