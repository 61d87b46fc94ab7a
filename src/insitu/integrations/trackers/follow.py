"""The process of one tracker: logs each epoch of a run once, from its files.

    python -m insitu.integrations.trackers.follow NAME RUN_DIR

It ends when its standard input does, which is when the run ends, even if that is killed.
"""

import os
import select
import sys
from pathlib import Path
from typing import Any

import orjson

from insitu.disk.files import write_file
from insitu.disk.json_files import read_object
from insitu.errors import InsituError
from insitu.integrations.trackers.stream import TrackedFiles
from insitu.runs.files import PROGRESS, TRACKERS
from insitu.training.trackers import tracker_class
from insitu.wire.redaction import redact_stream, remember_environment

INTERVAL = 1.0
"""Seconds between looks at the files."""
_NICENESS = 19
"""The lowest priority: about 1.5 % of a core that the run wants too."""


class _Tracked:
    """A run in a tracker. What the tracker has of it is in `trackers/NAME.json`, so that a resumed run continues it."""

    def __init__(self, name: str, files: TrackedFiles) -> None:
        run = files.run
        run.folder.mkdir(exist_ok=True)
        self._files = files
        self._state_file = files.folder / TRACKERS / f"{name}.json"
        saved = read_object(self._state_file) if self._state_file.is_file() else {}
        new: dict[str, Any] = {"run_id": run.run_id, "id": None, "epoch": -1}
        self._state = saved if saved.get("run_id") == run.run_id else new
        self.tracker = tracker_class(name)()
        self._save(id=self.tracker.start(run, self._state["id"]))

    def update(self) -> None:
        """Logs the epochs that are new."""
        for step in self._files.steps(self._state["epoch"]):
            self.tracker.log(step)
            self._save(epoch=step.epoch)

    def _save(self, **changes: Any) -> None:
        self._state |= changes
        write_file(self._state_file, orjson.dumps(self._state) + b"\n")


def follow(name: str, folder: Path) -> None:
    """Returns when the run has ended. Raises InsituError if it has no file that says which epochs are complete."""
    files, tracked, has_ended = TrackedFiles(folder), None, False
    while not has_ended:
        readable, _, _ = select.select([sys.stdin], [], [], INTERVAL)
        has_ended = bool(readable)  # nothing is ever written to it
        if tracked is None and files.has_begun:
            tracked = _Tracked(name, files)
        if tracked is not None:
            tracked.update()
    if tracked is not None:
        tracked.tracker.finish(files.status)
    if not files.progress:
        raise InsituError(f"nothing was logged: the trainer of this run writes no {PROGRESS}")


def main(name: str, folder: str) -> None:
    os.nice(_NICENESS)
    remember_environment(os.environ)
    redact_stream(sys.stdout)
    redact_stream(sys.stderr)
    try:
        follow(name, Path(folder))
    except InsituError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
