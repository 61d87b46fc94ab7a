"""Waiting for what another process or thread does, so that no event tells."""

import asyncio
from collections.abc import Callable
from typing import Any

from processes import HANGS


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANGS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
