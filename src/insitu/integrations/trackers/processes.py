"""Starts a process for each tracker of a run, and ends them after it."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from insitu.runs.files import TRACKERS
from insitu.training.trackers import KEY
from insitu.wire.redaction import redact

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""How long trackers may take after the end of a run, all together."""
_TAIL_BYTES = 4096
_NOTE = "the files of the run have everything"


@asynccontextmanager
async def reported(names: Sequence[str], folder: Path, end_seconds: float = END_SECONDS) -> AsyncIterator[None]:
    """Trackers follow the run in `folder` while the body runs. One that fails is reported once, as a warning."""
    path = _absolute(folder)
    running = [asyncio.create_task(_follow(name, path, end_seconds), name=f"tracker {name}") for name in names]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _follow(name: str, folder: Path, end_seconds: float) -> None:
    """Runs a tracker's process until it has ended; if cancelled, tells it to end, and kills it if it does not."""
    log = folder / TRACKERS / f"{name}.log"
    try:
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "insitu.integrations.trackers.follow", name, str(folder)),
                stdin=asyncio.subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
    except OSError as error:
        logger.warning("%s: %s cannot be started: %s; %s", KEY, name, error, _NOTE)
        return
    try:
        await process.wait()
    except asyncio.CancelledError:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(end_seconds):
                await process.wait()
    finally:
        ended_itself = process.returncode is not None
        with contextlib.suppress(ProcessLookupError):  # and what it has started
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if not ended_itself:
        logger.warning("%s: %s did not end within %g s after the run; %s", KEY, name, end_seconds, _NOTE)
    elif process.returncode:
        logger.warning("%s: %s has failed: %s (%s); %s", KEY, name, _last_line(log), log, _NOTE)


def _absolute(folder: Path) -> Path:
    """Resolves paths now: the workflow may change the working directory."""
    return folder.absolute()


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return redact(lines[-1][:300]) if lines else "without a message"
    return "its log cannot be read"
