"""The folders that `insitu view` has opened, and the runs in them."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from insitu.collect.datasets import WORKFLOW_OUTPUT
from insitu.errors import ConfigError, RequestRefused
from insitu.runs.summary import DEFAULT_FOLDERS, find_runs

_SEARCH_SECONDS = 2.0
"""How long a list of runs is used before the folders are searched again."""
_LISTED = 10


class OpenedFolder:
    """A folder of runs, or a run. Runs are named by their paths relative to `base`; `.` is the folder itself.

    Without `folder`: the default folders in the working directory. Raises ConfigError if the folder does not exist.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"FOLDER: {folder} is not a folder")
        self.base = (folder or Path.cwd()).resolve()
        self._searched: Sequence[Path] = (
            [self.base] if folder is not None else [self.base / name for name in DEFAULT_FOLDERS]
        )
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._found_at = 0.0

    def runs(self) -> dict[str, Path]:
        """The run directories by name, in natural order."""
        with self._lock:
            if time.monotonic() - self._found_at > _SEARCH_SECONDS or not self._found_at:
                self._search()
            return self._found

    def note(self) -> str | None:
        """Why there may be no run."""
        if (self.base / WORKFLOW_OUTPUT).is_file():
            return f"{self.base} is the directory of an evaluation; open that of a finetuning run"
        return None

    def path(self, run: str) -> Path:
        """The directory of a run. Raises RequestRefused (404) unless it is in the opened folders."""
        with self._lock:
            if run not in self._found or not self._found[run].is_dir():
                self._search()
            if run in self._found:
                return self._found[run]
            known = ", ".join(list(self._found)[:_LISTED]) + " ..." * (len(self._found) > _LISTED)
        raise RequestRefused(
            f"{self.base} holds no run {run!r:.200}; available: {known or 'none yet'}",
            status=404,
            param="run",
            code="unknown_run",
        )

    def _search(self) -> None:
        self._found = {os.path.relpath(run, self.base): run for run in find_runs(self._searched)}
        self._found_at = time.monotonic()
