"""Waiting for what another process, thread or task does, so that no event tells."""

import asyncio
from collections.abc import Callable
from typing import Any

from processes import HANGS


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANGS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def hang() -> None:
    """Does not end unless it is cancelled. The loop keeps its timer, and thereby a task that nothing else refers to."""
    await asyncio.sleep(10 * HANGS)
