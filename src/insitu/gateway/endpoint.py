"""The endpoint of an episode: its address, what its dialects remember, and how much it may send."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from insitu.capture.ledger import CallLedger, CallSite
from insitu.errors import BackendUnavailable, InsituError, RequestRefused, WorkflowError
from insitu.formats.dialects import Dialect
from insitu.gateway.proxy import MAX_BODY
from insitu.wire.paced_connections import Pace

MAX_REQUESTS = 256
"""Requests that an episode may have at once."""
MAX_HELD = 8 * MAX_BODY
"""Bytes of bodies that an episode may have at once."""
MAX_RECORDED = 2**30
"""Bytes of requests to a model that an episode may send in all, for each choice: they are kept until it ends."""
RATE, BURST = 100.0, 1000
"""Requests a second of an episode, whatever they ask for, once it has made so many: further ones wait their turn, so
that an agent that floods the gateway holds up itself and not its neighbours."""


@dataclass
class EpisodeEndpoint:
    """The base URLs for one episode's agent; they are valid until the episode ends."""

    key: str = field(repr=False)
    address: str
    site: CallSite = field(repr=False)
    ledger: CallLedger = field(repr=False)
    memories: dict[Dialect, dict[str, Any]] = field(default_factory=dict, repr=False)
    """What each dialect keeps from one request of the episode to the next."""
    failure: str | None = None
    """Why the latest call failed, if the model's server was at fault."""
    sessions: list[str] = field(default_factory=list, repr=False)
    """Values of `X-Session-ID` that are this episode's; see `Gateway.add_session`."""
    pace: Pace = field(default_factory=partial(Pace, RATE, BURST), repr=False)
    remembered: int = field(default=0, repr=False)
    """Bytes, of values in memory, of the longest request that a dialect may have kept: a small body may continue it."""
    _recorded: int = field(default=0, repr=False)
    _requests: int = field(default=0, repr=False)
    _held: int = field(default=0, repr=False)

    def note_failure(self, failure: str | None) -> None:
        self.failure = failure

    def error(self, message: str) -> InsituError:
        """The error of an episode that has failed, perhaps because its model has."""
        if self.failure:
            return BackendUnavailable(f"{message} (its model: {self.failure})")
        return WorkflowError(message)

    def record(self, size: int) -> None:
        """Raises RequestRefused if the episode has sent too much."""
        self._recorded += size
        if self._recorded > MAX_RECORDED:
            allowed = f"{MAX_RECORDED >> 20} MiB for each choice of its requests"
            raise RequestRefused(f"this episode has sent too much; allowed: {allowed}", status=413, code="too_large")

    @contextmanager
    def request(self, most: int) -> Iterator[Callable[[int], None]]:
        """Counts a request as in flight, with `most` bytes until the yielded function gets its size.

        Raises RequestRefused if the episode has too many, or has sent too much before.
        """
        self.record(0)  # at once, before anything is read or translated
        held = most

        def hold(size: int) -> None:
            nonlocal held
            self._held += size - held
            held = size

        if self._requests >= MAX_REQUESTS or self._held + most > MAX_HELD:
            allowed = f"{MAX_REQUESTS} requests, and {MAX_HELD >> 20} MiB of bodies"
            raise RequestRefused(f"this episode has too many requests; allowed at once: {allowed}", status=429)
        self._requests += 1
        self._held += most
        try:
            yield hold
        finally:
            self._requests -= 1
            self._held -= held

    @property
    def openai_url(self) -> str:
        return f"{self.address}/e/{self.key}/v1"

    @property
    def anthropic_url(self) -> str:
        return f"{self.address}/e/{self.key}"
