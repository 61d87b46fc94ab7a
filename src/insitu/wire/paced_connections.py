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


class Parsing:
    """How long the connections of a listener, together, have been parsed: the generic cell rate algorithm."""

    _ahead_until = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next is read."""
        return max(0.0, self._ahead_until - now - BURST / SHARE)

    def spend(self, began: float, ended: float) -> None:
        self._ahead_until = max(self._ahead_until, began) + (ended - began) / SHARE


class PacedConnection(asyncio.Protocol):
    """Passes what comes to the protocol of a server, which has aiohttp's `_reading_paused` and `_buffer_paused`."""

    def __init__(self, server: Any, parsing: Parsing) -> None:
        self._server, self._parsing = server, parsing
        self._transport: Any = None
        self._unread = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connection_lost(error)

    def eof_received(self) -> bool | None:
        kept: bool | None = self._server.eof_received()
        return kept

    def pause_writing(self) -> None:
        self._server.pause_writing()

    def resume_writing(self) -> None:
        self._server.resume_writing()

    def data_received(self, data: bytes) -> None:
        began = time.monotonic()
        if (seconds := self._parsing.wait(began)) > 0:
            self._unread += data
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, self._continue)
            return
        self._server.data_received(data)
        self._parsing.spend(began, time.monotonic())

    def _continue(self) -> None:
        if self._transport.is_closing():
            return
        data, self._unread = self._unread, b""
        if not (self._server._reading_paused or self._server._buffer_paused):  # by aiohttp, which then resumes it
            self._transport.resume_reading()
        if data:
            self.data_received(data)
