"""Counts what an epoch's episodes left behind: completions that belong to none of them, and code that still runs."""

from collections import Counter
from typing import NamedTuple

import aiohttp

from insitu.builder import Builder
from insitu.collect.collector import outside_completions, stray_completions
from insitu.registry import EXECUTOR
from insitu.schemas.episodes import Episode
from insitu.schemas.finetuning import PolicyEndpoint

_COMPLETED, _STARTED = "vllm:request_success_total", "process_start_time_seconds"
_TIMEOUT = aiohttp.ClientTimeout(total=10)


class Leftovers(NamedTuple):
    """Of one epoch; the field names are keys of `training_metrics.jsonl`."""

    stray_completions: int
    """Requested through the run's own clients, but outside every episode and evaluator."""
    unknown_completions: int | None
    """Sampled by the policy's server, but not requested by the run; None if it does not count them or was restarted, if
    a process that runs episodes has ended, or if a plugin's builder runs episodes without reporting them."""
    abandoned_attempts: int
    """Attempts at episodes whose code ignored its cancellation."""


class _Count(NamedTuple):
    completed: int
    started: float | None
    """When the server's process was started, in seconds of its clock; None if it does not say so."""


class PolicyTraffic:
    """Finds completions of the policy that belong to no episode: `start`, `add` each episode, `finish`.

    The server counts what it has completed in a metric of vLLM, which `insitu backend` has too. The run knows what its
    episodes and evaluators have requested. The rest was requested by an agent's own client, or by another program.
    """

    def __init__(self, builder: Builder, served: PolicyEndpoint | None) -> None:
        self._builder = builder
        self._served = served
        self._episodes: Counter[str] = Counter()
        self._abandoned = 0
        self._has_episodes = False
        self._stray_before = 0
        self._outside_before = 0
        self._served_before: _Count | None = None
        self._lost_before = 0

    async def start(self) -> None:
        self._stray_before, self._lost_before = self._stray(), self._lost_workers()
        self._outside_before, self._served_before = self._outside(), await self._count()

    def add(self, episode: Episode) -> None:
        self._has_episodes = True
        self._episodes.update({_normal(url): count for url, count in episode.requested.items()})
        self._abandoned += episode.abandoned_attempts

    async def finish(self) -> tuple[Leftovers, str | None]:
        """The counts, and a warning if the server has completed more than was requested."""
        stray = self._stray() - self._stray_before
        after = await self._count()
        before = self._served_before
        is_complete = self._lost_workers() == self._lost_before
        if (
            not is_complete
            or not self._has_episodes
            or after is None
            or before is None
            or self._served is None
            or after.started != before.started
        ):
            return Leftovers(stray, None, self._abandoned), None
        server = _normal(self._served.base_url)
        completed = after.completed - before.completed
        requested = self._episodes[server] + self._outside() - self._outside_before
        unknown = max(0, completed - requested)  # less than 0: a failed request may not have been completed
        warning = (
            f"{unknown} of the {completed} completions of {server} were not requested by an episode: they are not "
            "recorded and not trained. Does the agent use its own client, or does another program use the server?"
        )
        return Leftovers(stray, unknown, self._abandoned), warning if unknown else None

    def _stray(self) -> int:
        return stray_completions(self._builder).total()

    def _lost_workers(self) -> int:
        return sum(executor.lost_workers for executor in self._builder.built(EXECUTOR))

    def _outside(self) -> int:
        """Completions that were requested outside every episode through the run's own clients."""
        return outside_completions(self._builder, self._served.base_url) if self._served is not None else 0

    async def _count(self) -> _Count | None:
        """The server's metrics; None if it has none, or no server responds."""
        if self._served is None:
            return None
        url = _normal(self._served.base_url).removesuffix("/v1") + "/metrics"
        headers = {"Authorization": f"Bearer {self._served.api_key}"}
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers) as session:
                async with session.get(url) as response:
                    text = await response.text() if response.status == 200 else ""
            samples = [line.rpartition(" ") for line in text.splitlines()]
            completed = [float(value) for name, _, value in samples if name.startswith(_COMPLETED)]
            started = [float(value) for name, _, value in samples if name == _STARTED]
            return _Count(int(sum(completed)), started[0] if started else None) if completed else None
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return None


def _normal(url: str) -> str:
    return url.rstrip("/")
