"""The executor `_type: ray`: attempts at episodes run on workers, and again elsewhere if a worker ends."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from insitu.builder import Builder
from insitu.collect.episodes import Attempt, AttemptResult, EpisodeOptions, fail
from insitu.collect.executors import Executor
from insitu.collect.watchdog import Watchdog, doing
from insitu.errors import InsituError, WorkflowError
from insitu.integrations.ray.cluster import connected
from insitu.integrations.ray.config import RayExecutorConfig
from insitu.integrations.ray.openings import Policy, opening_of
from insitu.integrations.ray.pool import REPORT_SECONDS, WorkerLost, WorkerPool
from insitu.registry import register_executor
from insitu.remote.attempt_records import request_fields, take_line
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, Outcome
from insitu.schemas.evaluation import EvalInputItem
from insitu.wire.json_values import decode, encode

logger = logging.getLogger(__name__)

_LOSSES_TOGETHER = 2
"""An attempt that has lost as many workers gets one without other episodes."""


class RayExecutor(Executor):
    """Runs attempts on the workers of a Ray cluster, which it connects to when it is first used."""

    def __init__(self, config: RayExecutorConfig, builder: Builder) -> None:
        self.config = config
        self._builder = builder
        self._stack = AsyncExitStack()
        self._pool: WorkerPool | None = None
        self._connecting = asyncio.Lock()

    @property
    def stray_completions(self) -> Counter[str]:
        return self._pool.stray if self._pool is not None else Counter()

    @property
    def outside_completions(self) -> Counter[str]:
        return self._pool.outside if self._pool is not None else Counter()

    @property
    def lost_workers(self) -> int:
        return self._pool.lost_workers if self._pool is not None else 0

    async def aclose(self) -> None:
        """Ends the workers and disconnects."""
        self._pool = None
        await self._stack.aclose()

    async def check(self, builder: Builder) -> None:
        """Has one worker load the file."""
        one = self.config.model_copy(update={"workers": 1})
        async with connected(one, builder.config) as cluster:
            opening = opening_of(builder.config, Policy(), cluster.working_dir)
            async with WorkerPool(cluster, 1, REPORT_SECONDS) as pool:
                await pool.open(opening.model_copy(update={"build": False, "targets": []}))

    @asynccontextmanager
    async def open(
        self, builder: Builder, trained: Collection[str] = (), *, reached: bool = False
    ) -> AsyncIterator[Attempt]:
        pool = await self._connected()
        policy = await Policy.of(builder)
        opening = opening_of(builder.config, policy, pool.working_dir)
        await pool.open(opening)

        yield partial(self._attempt, pool, opening.id, policy)

    async def _connected(self) -> WorkerPool:
        async with self._connecting:
            if self._pool is None:
                config = self._builder.config
                cluster = await self._stack.enter_async_context(connected(self.config, config))
                interval = min(REPORT_SECONDS, Watchdog.of(config.eval).interval or REPORT_SECONDS)
                pool = WorkerPool(cluster, config.max_concurrency, interval)
                self._pool = await self._stack.enter_async_context(pool)
        return self._pool

    async def _attempt(
        self,
        pool: WorkerPool,
        opening: str,
        policy: Policy,
        item: EvalInputItem,
        key: EpisodeKey,
        options: EpisodeOptions,
    ) -> AttemptResult:
        """One attempt, made again with the same key if its worker ends."""
        episode, activity, lost = Episode(key, Outcome.OK), pool.activity, None
        try:
            request = encode(request_fields(item, key, options))
        except ValueError as error:  # would fail again
            fail(episode, DropReason.BACKEND_ERROR, error)
            return AttemptResult(episode)
        with doing(lambda: activity()):
            for losses in range(self.config.max_losses + 1):
                try:
                    async with pool.worker(alone=losses >= _LOSSES_TOGETHER) as (worker, number):
                        activity = partial(worker.activity, number)
                        return result_of(key, await worker.attempt(number, opening, policy.current_model(), request))
                except WorkerLost as error:
                    activity, lost = pool.activity, error
        problem = f"its worker has ended {self.config.max_losses + 1} times while it ran (max_losses): {lost}"
        fail(episode, DropReason.WORKFLOW_ERROR, WorkflowError(problem))
        return AttemptResult(episode)


def result_of(key: EpisodeKey, lines: bytes) -> AttemptResult:
    """An attempt from its lines."""
    episode = Episode(key, Outcome.OK)
    for line in lines.splitlines():
        if (end := take_line(episode, decode(line))) is not None:
            return AttemptResult(episode, end.transient)
    raise InsituError(f"a worker has returned episode {key.text()} without its end: this is a fault of insitu")


@register_executor(config_type=RayExecutorConfig)
async def ray_executor(config: RayExecutorConfig, builder: Builder) -> AsyncIterator[RayExecutor]:
    executor = RayExecutor(config, builder)
    try:
        yield executor
    finally:
        await executor.aclose()
