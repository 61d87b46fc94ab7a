"""How a command ends: by which signals, and with its tasks."""

import asyncio
import signal
from typing import Any


def stop_signals() -> list[signal.Signals]:
    """Returns what a user, a supervisor or a closed terminal sends, the last unless it is ignored, as under nohup."""
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if ends_with_terminal else [])]


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks, and returns when they have ended; what they raise is dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
