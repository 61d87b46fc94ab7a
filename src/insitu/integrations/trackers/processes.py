"""The processes of trackers: a run starts one for each, which logs each epoch once, from the run's files.

    python -m insitu.integrations.trackers.processes NAME RUN_DIR

Such a process ends when its standard input does, which is when the run ends, even if that is killed.
"""

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import orjson

from insitu.disk.files import write_file
from insitu.disk.folder_lock import FolderLock, end_owner
from insitu.disk.json_files import read_object
from insitu.errors import ConfigError, InsituError
from insitu.integrations.trackers.stream import TrackedFiles
from insitu.runs.files import PROGRESS, RUN, TRACKERS
from insitu.training.trackers import KEY, tracker_class
from insitu.wire.child_process import ChildProcess, last_lines
from insitu.wire.endings import end_tasks
from insitu.wire.redaction import hide_url_secrets, redact, redact_stream, remember_environment

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 10.0
"""How long the end of a run waits for a tracker before it says so."""
ORPHAN_SECONDS = 5.0
"""How long the tracker of an earlier process of the run may take to end, before it is killed."""
_CONNECT_SECONDS = 5.0
_INTERVAL = 1.0
"""Seconds between looks at the files."""
_NICENESS = 19
"""The lowest priority: about 1.5 % of a core that the run wants too."""
_NOTE = "the files of the run have everything"


@asynccontextmanager
async def reported(names: Sequence[str], folder: Path, end_seconds: float | None = None) -> AsyncIterator[None]:
    """Trackers follow the run in `folder` while the body runs. One that fails is reported once, as a warning.

    Each may take `end_seconds` after it, or what its class allows.
    """
    path = _absolute(folder)
    interrupted = asyncio.Event()
    processes = {name: _run_process(name, path, end_seconds, interrupted) for name in names}
    running = [asyncio.create_task(process, name=f"tracker {name}") for name, process in processes.items()]
    running += [asyncio.create_task(_check_server(name), name=f"server of {name}") for name in names]
    try:
        yield
    except BaseException:  # re-raised
        interrupted.set()
        raise
    finally:
        await end_tasks(*running)


async def _check_server(name: str) -> None:
    """Says why a tracker's server cannot be reached: its own client may try for minutes before it says anything."""
    if (url := tracker_class(name).server()) is None:
        return
    own = urlsplit(url)
    proxy = None if proxy_bypass(own.hostname or "") else getproxies().get(own.scheme)
    address = urlsplit(proxy) if proxy else own
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            port = address.port or (443 if address.scheme == "https" else 80)
            _, writer = await asyncio.open_connection(address.hostname, port)
        writer.close()
    except (OSError, ValueError) as error:  # ValueError: what is no URL
        code = getattr(error, "errno", None) or 0
        why = os.strerror(code) if code > 0 else getattr(error, "strerror", None) or str(error) or "no answer"
        logger.warning("%s: %s cannot reach %s: %s; %s", KEY, name, hide_url_secrets(url), why, _NOTE)


async def _run_process(name: str, folder: Path, end_seconds: float | None, interrupted: asyncio.Event) -> None:
    """Runs a tracker's process until it has ended; if cancelled, tells it to end, and kills it if it does not."""
    key, end_seconds = tracker_class(name).key, end_seconds or tracker_class(name).end_seconds
    log = folder / TRACKERS / f"{name}.log"
    command = [sys.executable, "-m", "insitu.integrations.trackers.processes", name, str(folder)]
    try:
        process = ChildProcess(command, log, os.environ, stdin=subprocess.PIPE, append=True)
    except OSError as error:
        logger.warning("%s: %s cannot be started: %s; %s", key, name, error, _NOTE)
        return
    try:
        await process.end()
    except asyncio.CancelledError:
        process.close_input()
        end_seconds = min(end_seconds, _QUIET_SECONDS) if interrupted.is_set() else end_seconds
        await process.end(min(_QUIET_SECONDS, end_seconds))
        if not process.ended and end_seconds > _QUIET_SECONDS:
            logger.warning("%s: the run has ended; %s may take up to %g s more", key, name, end_seconds)
            await process.end(end_seconds)
    finally:
        ended_itself, code = process.ended, process.code or 0
        await asyncio.to_thread(process.kill)
    if not ended_itself:
        logger.warning("%s: %s did not end within %g s after the run; %s", key, name, end_seconds, _NOTE)
    elif code:
        why = " (as when memory runs out)" if code == -signal.SIGKILL else ""
        how = "has failed" if code > 0 else process.outcome() + why
        last = redact((last_lines(log) or ["without a message"])[-1][:300])
        logger.warning("%s: %s %s: %s (%s); %s", key, name, how, last, log, _NOTE)


def _absolute(folder: Path) -> Path:
    """Resolves paths now: the workflow may change the working directory."""
    return folder.absolute()


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


def _only_follower(folder: Path) -> FolderLock:
    """Locks a tracker's folder. A process that follows the run still, although the run has ended, is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FolderLock(folder, KEY, ORPHAN_SECONDS)
    except ConfigError:
        end_owner(folder)
        return FolderLock(folder, KEY, ORPHAN_SECONDS)


def follow(name: str, folder: Path) -> None:
    """Returns when the run has ended. Raises InsituError if it has no file that says which epochs are complete."""
    with _only_follower(folder / TRACKERS / name):
        files, tracked, has_ended = TrackedFiles(folder), None, False
        while not has_ended:
            readable, _, _ = select.select([sys.stdin], [], [], _INTERVAL)
            has_ended = bool(readable)  # nothing is ever written to it
            if tracked is None and (folder / RUN).is_file():
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
