"""Connections of an agent that are not read for a while once parsing them has taken too much of the event loop's time.

A body in chunks of one byte takes a thousand times as long to parse as one in a piece, before anything of it can be
counted or refused.
"""

import asyncio
import time
from typing import Any

SHARE = 0.2
"""Of the loop's time, that a listener's connections may be parsed in."""
BURST = 0.02
"""Seconds of parsing before that."""


class Pace:
    """Lets `rate` units pass a second, after `burst` at once: the generic cell rate algorithm (ITU-T I.371)."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._ahead_until = 0.0

    def spend(self, units: float, now: float) -> None:
        self._ahead_until = max(self._ahead_until, now) + units / self._rate

    def wait(self, now: float) -> float:
        """Seconds until more may pass."""
        return max(0.0, self._ahead_until - now - self._burst / self._rate)

    async def turn(self) -> None:
        """Waits until one more unit may pass."""
        now = time.monotonic()
        self.spend(1, now)
        if (seconds := self.wait(now)) > 0:
            await asyncio.sleep(seconds)


class PacedConnection:
    """Is the protocol of a server, with aiohttp's `_reading_paused` and `_buffer_paused`, but for what it reads."""

    def __init__(self, server: Any, parsing: Pace) -> None:
        self._server, self._parsing = server, parsing
        self._transport: Any = None
        self._unread = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.connection_made(transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def data_received(self, data: bytes) -> None:
        began = time.monotonic()
        if (seconds := self._parsing.wait(began)) > 0:
            self._unread += data
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, self._continue)
            return
        self._server.data_received(data)
        self._parsing.spend(time.monotonic() - began, began)

    def _continue(self) -> None:
        if self._transport.is_closing():
            return
        data, self._unread = self._unread, b""
        if not (self._server._reading_paused or self._server._buffer_paused):  # by aiohttp, which then resumes it
            self._transport.resume_reading()
        if data:
            self.data_received(data)
