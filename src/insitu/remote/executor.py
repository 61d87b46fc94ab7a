"""Executors that send attempts to workflow services; `_type: service`, of `--endpoint`, to those at given addresses."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from pydantic import Field

from insitu.builder import Builder
from insitu.capture.ledger import calls_in_flight
from insitu.collect.episodes import Attempt, AttemptResult, EpisodeOptions, Executor, classify, fail
from insitu.collect.watchdog import doing
from insitu.errors import BackendUnavailable, EpisodeTimeout, RequestRefused, WorkflowError
from insitu.registry import register_executor
from insitu.remote.attempt_records import Counts, ServedPolicy, read_result, request_fields
from insitu.remote.client import EPISODES, ServiceLost, ServiceSession
from insitu.remote.pool import RemoteService, ServicePool
from insitu.schemas.components import ExecutorBaseConfig
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus
from insitu.schemas.evaluation import EvalInputItem
from insitu.wire.connection import Retry
from insitu.workflow.llms import policy_named_by

_LOSSES_TOGETHER = 2
"""An attempt that has lost as many services gets one without other episodes."""
_TIMEOUT_KEYS = "general.executor.timeout, or --endpoint_timeout"
_WORKFLOW = "workflow"
"""The id of the only workflow that a service has."""

CurrentPolicy = Callable[[], ServedPolicy | None]
"""Returns the model under training, under the name it has now."""


class RemoteExecutor(Executor):
    """Runs attempts in the services of a pool, and again in others if a service is lost, up to `max_losses` times.

    `timeout` is in seconds per attempt.
    """

    def __init__(self, pool: ServicePool, max_losses: int, timeout: float | None = None) -> None:
        super().__init__()
        self.pool = pool
        self._max_losses = max_losses
        self._timeout = timeout

    async def close(self) -> None:
        """Ends the services, or the connections to them."""
        await self.pool.close()

    async def attempt(
        self, workflow: str, policy: CurrentPolicy, item: EvalInputItem, key: EpisodeKey, options: EpisodeOptions
    ) -> AttemptResult:
        """One attempt at an opened workflow, made again with the same key if its service is lost."""
        pool, calls, lost, session = self.pool, calls_in_flight.get(), None, None
        activity = pool.activity
        started, request = time.monotonic(), request_fields(item, key, options)
        error: Exception
        try:
            with doing(lambda: activity()):
                async with asyncio.timeout(self._timeout):
                    for losses in range(self._max_losses + 1):
                        try:
                            async with pool.service(alone=losses >= _LOSSES_TOGETHER) as service:
                                session = service.sessions[workflow]
                                activity = partial(session.activity, number := session.new_number())
                                with calls.in_progress() if calls is not None else nullcontext():
                                    answer = await session.attempt(number, request | {"policy": policy()})
                                return read_result(key, answer)
                        except ServiceLost as loss:
                            activity, lost, session = pool.activity, loss, None
            times = self._max_losses + 1
            error = WorkflowError(f"its worker has ended {times} times while it ran (max_losses): {lost}")
        except TimeoutError:
            if session is None or session.is_silent:
                what = f"the attempt {pool.activity()}" if session is None else f"{session.name} is silent"
                error = BackendUnavailable(f"{what} ({self._timeout:g} s)")
            else:
                error = EpisodeTimeout(f"no answer within {self._timeout:g} s ({_TIMEOUT_KEYS})")
        except (BackendUnavailable, RequestRefused, ValueError, KeyError, TypeError) as failure:
            error = failure
        episode = Episode(key, EpisodeStatus.FAILED, seconds=time.monotonic() - started)
        reason, transient = classify(error)
        if reason is DropReason.WORKFLOW_ERROR and not isinstance(error, WorkflowError):  # the service has refused it
            reason = DropReason.BACKEND_ERROR
        fail(episode, reason, error)
        return AttemptResult(episode, transient)


async def policy_of_run(builder: Builder) -> Callable[[], ServedPolicy | None]:
    """Returns a function that gives the current address and name of the policy; None if no llm uses the policy."""
    config, endpoint = builder.config, None
    if config.serves_policy:
        endpoint = await builder.policy_endpoint()
    elif any(policy_named_by(name, config.llm(name), builder) for name in config.trained_llms()):
        endpoint = builder.trained_policy
    trained = config.trained_llms() if builder.trained_policy is not None else None
    return lambda: ServedPolicy.of(endpoint, trained) if endpoint is not None else None


class ServiceExecutorConfig(ExecutorBaseConfig, name="service"):
    """Episodes run in workflow services (`insitu serve`), as with `--endpoint`."""

    url: str | list[str] = Field(min_length=1)
    """The address of the service; a password in it is its token. With several addresses, an episode runs in the service
    that has the fewest, and in another one if that is lost."""
    timeout: float = 300.0
    """Seconds per attempt."""
    max_losses: int = Field(default=3, ge=0)
    """How often an attempt is made again because the connection to its service is lost."""


class AddressedService(RemoteService):
    """The workflow service at an address, with one session for all collections."""

    def __init__(self, url: str, count: Callable[[Counts], object]) -> None:
        super().__init__(capacity=math.inf)
        self._session = ServiceSession(url, on_lost=self.note_lost, on_counts=count)
        self.name = self._session.name

    async def start(self) -> None:
        await self.connect(self._session)

    async def open(self, workflow: str, description: Any) -> None:
        self.sessions[workflow] = self._session


@register_executor(config_type=ServiceExecutorConfig)
class ServiceExecutor(RemoteExecutor):
    """Runs attempts in the workflow services at the addresses of the file."""

    def __init__(self, config: ServiceExecutorConfig, builder: Builder) -> None:
        super().__init__(ServicePool("workflow service"), config.max_losses, config.timeout)
        self.config = config
        self._urls = [config.url] if isinstance(config.url, str) else config.url
        self.pool.starters = [partial(AddressedService, url, self.stray_completions.update) for url in self._urls]

    async def check(self, builder: Builder) -> None:
        await self._check(builder.config.trained_llms(), None, reached=False)

    @asynccontextmanager
    async def open(
        self, builder: Builder, trained: Collection[str] = (), *, reached: bool = False
    ) -> AsyncIterator[Attempt]:
        policy = await policy_of_run(builder)
        served = policy()
        count = await self._check(trained, served.base_url if served is not None else None, reached=reached)
        await self.pool.open(_WORKFLOW, None, count, self.config.timeout)
        yield partial(self.attempt, _WORKFLOW, policy)

    async def _check(self, trained: Collection[str], policy_url: str | None, *, reached: bool) -> int:
        """Returns how many services are ready for episodes; raises if none is, or if one is the wrong one.

        Retries transient errors, and refused connections too if they have been `reached` before.
        """

        async def check(url: str) -> BackendUnavailable | None:
            try:
                async with ServiceSession(url) as session:
                    await session.check(trained, policy_url)
            except BackendUnavailable as error:
                return error
            return None

        async def check_all() -> int:
            errors = [error for error in await asyncio.gather(*map(check, self._urls)) if error is not None]
            if len(errors) == len(self._urls):
                raise errors[0]
            return len(self._urls) - len(errors)

        retry = Retry("the workflow service", self.config.timeout, key=_TIMEOUT_KEYS)
        retry.reached = reached
        return await retry(f"GET {EPISODES}", check_all)
