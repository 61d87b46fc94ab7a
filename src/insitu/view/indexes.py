"""The indexes of the runs that are looked at, which are kept up to date in threads."""

import logging
import threading
from collections import Counter
from pathlib import Path

from insitu.runs.index import RunIndex
from insitu.view.lists import Lists
from insitu.view.pages import EpisodePages

logger = logging.getLogger(__name__)

_MOST = 4
"""Runs whose index is kept."""
_PATIENCE = 0.25
"""Seconds to wait for a refresh: long enough for what a run has written since the last one."""
_GROUPS_SECONDS = 10.0
"""How long to wait for the groups, of which 100,000 are read in this time: a page without them would be wrong."""


class IndexedRun:
    """The index of a run, and what is read with it."""

    def __init__(self, path: Path) -> None:
        self.index = RunIndex(path)
        self.lists = Lists(self.index)
        self.pages = EpisodePages(self.index)
        self._lock = threading.Lock()
        self._refresh: threading.Thread | None = None
        self._again = False
        """Whether files may have changed since the refresh that is running has read them."""

    def refresh(self) -> None:
        """Reads what was appended. A refresh that takes longer continues in its thread, one at a time."""
        with self._lock:
            running, self._again = self._refresh, self._refresh is not None
            if running is None:
                self._refresh = threading.Thread(target=self._run, name="index a run", daemon=True)
                self._refresh.start()
            thread = self._refresh
        self.index.groups_known.wait(_GROUPS_SECONDS)
        if thread is not None and (running is None or self.index.complete):
            thread.join(_PATIENCE)

    def _run(self) -> None:
        while True:
            try:
                self.index.refresh()
            except Exception:  # a page shows what is indexed, and the next request tries again
                logger.exception("%s cannot be indexed", self.index.files.folder)
            with self._lock:
                if not self._again:
                    self._refresh = None
                    return
                self._again = False

    def close(self) -> None:
        self.index.close()


class Indexes:
    """The runs that were looked at last. An index that requests use is closed after them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[Path, IndexedRun] = {}
        self._users: Counter[IndexedRun] = Counter()

    def open(self, run: Path) -> IndexedRun:
        """The index of a run, refreshed, until `release`."""
        with self._lock:
            indexed = self._runs.pop(run, None) or IndexedRun(run)
            self._runs[run] = indexed
            self._users[indexed] += 1
            oldest = [self._runs.pop(path) for path in [*self._runs][:-_MOST]]
            unused = [each for each in oldest if not self._users[each]]
        for each in unused:
            each.close()
        indexed.refresh()
        return indexed

    def release(self, indexed: IndexedRun) -> None:
        with self._lock:
            self._users[indexed] -= 1
            in_use = self._users[indexed] or indexed in self._runs.values()
            if not self._users[indexed]:
                del self._users[indexed]
        if not in_use:
            indexed.close()

    def problems(self, run: Path) -> list[str]:
        """What is damaged in a run, as far as it was indexed."""
        with self._lock:
            indexed = self._runs.get(run)
        return [] if indexed is None else indexed.index.problems

    def close(self) -> None:
        with self._lock:
            runs = {*self._runs.values(), *self._users}
            self._runs.clear()
        for run in runs:
            run.close()
