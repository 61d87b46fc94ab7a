"""Waiting for what another process, thread or task does, so that no event tells."""

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from processes import HANGS


async def until(holds: Callable[[], Any], every: float = 0.002) -> None:
    """Asks every so many seconds; `holds` may be a coroutine function."""
    async with asyncio.timeout(HANGS):
        while not (await answer if isawaitable(answer := holds()) else answer):  # noqa: ASYNC110
            await asyncio.sleep(every)


async def turns(number: int = 5) -> None:
    """Some turns of the event loop, in which every timer that is due runs."""
    for _ in range(number):
        await asyncio.sleep(0)


async def hang() -> None:
    """Does not end unless it is cancelled. The loop keeps its timer, and thereby a task that nothing else refers to."""
    await asyncio.sleep(10 * HANGS)
