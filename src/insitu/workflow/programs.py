"""The programs that episodes run: how each one's process group is ended, and all of them at once."""

import asyncio
import os
import signal
from contextlib import suppress

GRACE = 2.0
"""Seconds between asking a program to end and making it."""
running: set[int] = set()
"""The process groups of programs that have not ended."""


async def end_group(group: int) -> None:
    """End what is left of a process group: ask, and after the grace period make it."""
    try:
        os.killpg(group, signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + GRACE
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
            os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # none is left (macOS: none but zombies)
        pass
    finally:
        _kill(group)
        running.discard(group)


def kill_programs() -> None:
    """End all programs at once, before this process ends without another step."""
    for group in running:
        _kill(group)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
