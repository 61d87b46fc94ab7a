"""The opened folder: the list of its runs, the page of one, and which of their files change."""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from insitu.disk.folder_lock import LOCK_FILE, locked_by
from insitu.errors import ConfigError, RequestRefused
from insitu.runs.files import COLLECTIONS, EVENTS, FINAL_METRICS, METRICS
from insitu.runs.reader import RunReader
from insitu.runs.records import comparable_validations
from insitu.runs.summary import DEFAULT_FOLDERS, RunSummary, find_runs, read_details, read_summary
from insitu.schemas.evaluation import WORKFLOW_OUTPUT

_SEARCH_SECONDS = 2.0
"""How long a list of runs is used before the folders are searched again."""
_LISTED = 10
POLL_SECONDS = 0.5
_PHASES = ("collect", "train", "validate")
RECORDED = (
    *("advantages", "credit", "discount", "on_failure", "targets", "training", "episodes_from", "dataset", "seed"),
    *("source", "insitu", "episodes_per_epoch", "budget", "config"),
)
"""Keys of `run.json` on the page of a run, beside the settings of its file."""

Records = list[dict[str, Any]]
Signature = dict[str, tuple[int, int, int] | str | None]
"""What changes when files of a run do: inode, size and time of each, and the process that has locked it."""


def signature(run: Path) -> Signature:
    """Sizes and times of the files in the directory itself; empty if it is gone."""
    found: Signature = {}
    try:
        for path in run.iterdir():
            if not path.name.startswith(".") and path.is_file():
                stat = path.stat()
                found[path.name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except OSError:  # deleted or renamed meanwhile
        return {}
    found[LOCK_FILE] = locked_by(run)
    return found


class OpenedFolder:
    """A folder of runs, or a run. Lines of the list are read again when files of a run have changed.

    Runs are named by their paths relative to `base`; `.` is the folder itself. Without `folder`: the default folders in
    the working directory. Raises ConfigError if the folder does not exist.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"FOLDER: {folder} is not a folder")
        self.base = (folder or Path.cwd()).resolve()
        self._searched = [self.base] if folder is not None else [self.base / name for name in DEFAULT_FOLDERS]
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._found_at = 0.0
        self._lines: dict[str, tuple[Signature, dict[str, Any]]] = {}

    def runs(self) -> dict[str, Path]:
        """The run directories by name, in natural order."""
        with self._lock:
            if time.monotonic() - self._found_at > _SEARCH_SECONDS or not self._found_at:
                self._search()
            return self._found

    def all_runs(self) -> dict[str, Any]:
        """The answer of `/api/runs`."""
        self._lines = {name: self._line(name, path) for name, path in self.runs().items()}
        lines, note = [line for _, line in self._lines.values()], None
        if not lines and (self.base / WORKFLOW_OUTPUT).is_file():
            note = f"{self.base} is the directory of an evaluation; open that of a finetuning run"
        return {"folder": str(self.base), "runs": lines, "note": note}

    def _line(self, name: str, path: Path) -> tuple[Signature, dict[str, Any]]:
        now = signature(path)
        before = self._lines.get(name)
        return before if before is not None and before[0] == now else (now, _run_line(name, path))

    def path(self, run: str) -> Path:
        """The directory of a run. Raises RequestRefused (404) unless it is in the opened folders."""
        with self._lock:
            if run not in self._found or not self._found[run].is_dir():
                self._search()
            if run in self._found:
                return self._found[run]
            existing = ", ".join(list(self._found)[:_LISTED]) + " ..." * (len(self._found) > _LISTED)
        problem = f"{self.base} holds no run {run!r:.200}; available: {existing or 'none yet'}"
        raise RequestRefused(problem, status=404, param="run", code="unknown_run")

    def _search(self) -> None:
        self._found = {os.path.relpath(run, self.base): run for run in find_runs(self._searched)}
        self._found_at = time.monotonic()


def _run_line(name: str, path: Path) -> dict[str, Any]:
    summary, files = read_summary(path), RunReader(path)
    epochs, events = (files.readable(each, summary.problems) for each in (METRICS, EVENTS))
    return _described(name, path, summary, epochs, summary.problems.attempt(files.validations, []), events)


def _described(
    name: str, path: Path, summary: RunSummary, epochs: Records, validations: Records, events: Records
) -> dict[str, Any]:
    """A run in the list of runs, and on its page."""
    totals: dict[str, Any] = summary.problems.attempt(lambda: _totals(epochs, validations, events), {})
    return {"run": name, "name": path.name, **asdict(summary), **totals}


def _totals(epochs: Records, validations: Records, events: Records) -> dict[str, Any]:
    """Each value is None if it is unknown; `seconds` are those of complete epochs and a validation before the first."""
    scores = [[each["epoch"], each["avg_reward"]] for each in comparable_validations(validations)]
    tokens = [epoch["tokens"] for epoch in epochs if epoch.get("tokens") is not None]
    phases = [(epoch.get("seconds") or {}).get(phase) or 0.0 for epoch in epochs for phase in _PHASES]
    before = (each for each in validations if each["epoch"] == 0 and not each.get("beside"))
    phases += [each["seconds"] for each in before if "seconds" in each]
    return {
        "last_score": scores[-1][1] if scores else None,
        "tokens": sum(tokens) if tokens else None,
        "seconds": sum(phases) if phases else None,
        "started": events[0].get("time") if events else None,
        "scores": scores,
        "rewards": [[epoch.get("epoch"), epoch.get("avg_reward")] for epoch in epochs],
        "last_epochs": epochs[-2:],
    }


def one_run(name: str, path: Path) -> dict[str, Any]:
    """The answer of `/api/run`. Raises RequestRefused (404) if the directory has gone meanwhile."""
    try:
        details = read_details(path)
    except ConfigError as error:
        raise RequestRefused(str(error), status=404, param="run", code="unknown_run") from None
    files, summary, problems = RunReader(path), details.summary, details.summary.problems
    settings: dict[str, Any] = problems.attempt(files.settings, {})
    dropped: dict[str, int] = problems.attempt(lambda: _count_dropped(details.epochs), {})
    return {
        "run": name,
        **asdict(details),
        "summary": _described(name, path, summary, details.epochs, details.validations, details.events),
        **{key: settings.get(key) for key in RECORDED},
        "dropped": dropped,
        "collections": files.readable(COLLECTIONS, problems),
        "final_metrics": problems.attempt(lambda: files.object(FINAL_METRICS), None),
        "problems": problems,
    }


def _count_dropped(epochs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    dropped = sum((Counter(epoch.get("dropped") or {}) for epoch in epochs), Counter[str]())
    return dict(dropped.most_common())


class Change(NamedTuple):
    """Files of a run that were written, replaced or deleted; `run` is None if the list of runs has changed."""

    run: str | None
    files: list[str]


class Watcher:
    """Looks at the runs that are shown while there are clients; all clients share one task."""

    def __init__(self, opened: OpenedFolder) -> None:
        self._opened = opened
        self._clients: dict[asyncio.Queue[Change], frozenset[str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._seen: dict[str, Signature] = {}
        self._looking = asyncio.Lock()

    @asynccontextmanager
    async def watching(self, runs: Iterable[str]) -> AsyncIterator["asyncio.Queue[Change]"]:
        """Yields a queue of the changes of these runs from now on; of none: of all runs, and of the list of runs."""
        queue: asyncio.Queue[Change] = asyncio.Queue()
        self._clients[queue] = frozenset(runs)
        try:
            async with self._looking:
                if self._task is None or self._task.done():  # done: it has failed
                    self._seen = {}
                    self._task = asyncio.create_task(self._watch(), name="watch runs")
                self._seen = await self._look() | self._seen
            yield queue
        finally:
            del self._clients[queue]
            if not self._clients and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _watch(self) -> None:
        """Compares what the files are with what they were; runs until the last client leaves."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            async with self._looking:
                now = await self._look()
                for change in _changes(self._seen, now):
                    for queue, runs in self._clients.items():
                        if change.run in runs or not runs:
                            queue.put_nowait(change)
                self._seen = now

    async def _look(self) -> dict[str, Signature]:
        """The files of the runs that clients look at; of all runs if one of them looks at all."""
        chosen = [*self._clients.values()]

        def read() -> dict[str, Signature]:
            found = self._opened.runs()
            return {run: signature(path) for run, path in found.items() if any(not c or run in c for c in chosen)}

        return await asyncio.to_thread(read)


def _changes(before: Mapping[str, Signature], now: Mapping[str, Signature]) -> Iterable[Change]:
    if before.keys() != now.keys():
        yield Change(None, [])
    for run in before.keys() & now.keys():
        old, new = before[run], now[run]
        if files := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
            yield Change(run, files)
