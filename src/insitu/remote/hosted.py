"""Workflows that are built for others: once for each policy that a request may name, and shared by its episodes.

async with aclosing(HostedWorkflow(config, serve_policy)) as hosted:
    result = await hosted.attempt(request)
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from insitu.builder import Builder
from insitu.collect.collector import stray_completions
from insitu.collect.episodes import AttemptResult, fail, in_process
from insitu.config import Config
from insitu.errors import WorkflowError, describe_error
from insitu.remote.attempt_records import Counts, EpisodeRequest, ServedPolicy
from insitu.schemas.episodes import DropReason, Episode, EpisodeStatus
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint

logger = logging.getLogger(__name__)

ServePolicy = Callable[[Builder], AbstractAsyncContextManager[None]]
_MAX_IDLE = 4
"""Number of idle workflows kept for the next episode of their trainer."""
_current_model: ContextVar[str] = ContextVar("insitu_current_model")
"""The trainer's model name, for servers where it changes with every version."""


class _PolicyBuilder(Builder):
    """A builder that resolves llms of `_type: policy` to one trainer's model."""

    def __init__(self, config: Config, policy: ServedPolicy) -> None:
        super().__init__(config)
        current_model = (lambda: _current_model.get(policy.model)) if policy.renamed else None
        self._endpoint = PolicyEndpoint(
            policy.base_url, policy.model, policy.api_key, base_model=policy.base_model, current_model=current_model
        )
        if policy.trained:
            self.trained_policy, self.trained_llms = self._endpoint, frozenset(policy.llms)

    async def policy_endpoint(self) -> PolicyEndpoint:
        return self._endpoint


class _Deployment:
    """The workflow built for one policy; `users` counts its running episodes.

    One task opens the workflow, waits for `close`, and closes it.
    """

    def __init__(self, opened: AbstractAsyncContextManager[Any]) -> None:
        self.users = 0
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self.task = asyncio.create_task(self._live(opened), name="workflow")

    async def _live(self, opened: AbstractAsyncContextManager[Any]) -> None:
        try:
            async with opened as workflow:
                self.ready.set_result(workflow)
                await self._closed.wait()
        except BaseException as error:  # building and closing run user code, which may raise anything
            task = asyncio.current_task()
            if isinstance(error, KeyboardInterrupt) or (task is not None and task.cancelling()):
                raise
            if self._closed.is_set():
                logger.warning("a workflow could not be closed: %s", describe_error(error))
            elif self.ready.done():  # its backend is lost
                logger.warning("a workflow has stopped, the next request builds it again: %s", describe_error(error))
            else:
                problem = WorkflowError(f"the workflow cannot be built: {describe_error(error)}")
                self.ready.set_exception(error if isinstance(error, Exception) else problem)
                self.ready.exception()  # marks it as retrieved: without waiters asyncio would log a warning

    def close(self) -> None:
        self._closed.set()
        if not self.ready.done():
            self.task.cancel()


class HostedWorkflow:
    """The workflow of `config`, built once per policy.

    `serve_policy(builder)` starts the file's own policy model, for requests without a trainer's.
    """

    def __init__(self, config: Config, serve_policy: ServePolicy) -> None:
        self.config = config
        self._builders: WeakKeyDictionary[Builder, ServedPolicy | None] = WeakKeyDictionary()
        """The builders of the workflows in use."""
        self._serve_policy = serve_policy
        self._deployments: OrderedDict[ServedPolicy | None, _Deployment] = OrderedDict()  # most recently used last
        self._closing: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Closes the workflows."""
        for policy in list(self._deployments):
            self._close(policy)
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def episodes(self) -> int:
        """Number of users of the workflows at the moment."""
        return sum(deployment.users for deployment in self._deployments.values())

    @asynccontextmanager
    async def workflow(self, policy: ServedPolicy | None = None) -> AsyncIterator[Any]:
        """The workflow with this policy, built on first use and shared."""
        key = policy and policy.unversioned
        if policy is not None and policy.renamed:
            _current_model.set(policy.model)
        deployment = self._deployments.get(key)
        if deployment is None or deployment.task.done():
            deployment = self._deployments[key] = _Deployment(self._opened(policy))
        self._deployments.move_to_end(key)
        deployment.users += 1
        try:
            yield await asyncio.shield(deployment.ready)  # a cancelled request must not cancel the others
        finally:
            deployment.users -= 1
            failed = deployment.ready.done() and deployment.ready.exception() is not None
            if failed and self._deployments.get(key) is deployment:
                self._close(key)  # the next request tries again
            idle = [k for k, d in self._deployments.items() if not d.users]
            for idle_key in idle[:-_MAX_IDLE]:
                self._close(idle_key)

    @asynccontextmanager
    async def _opened(self, policy: ServedPolicy | None) -> AsyncIterator[Any]:
        builder = Builder(self.config) if policy is None else _PolicyBuilder(self.config, policy)
        async with builder, self._serve_policy(builder) if policy is None else nullcontext():
            self._builders[builder] = policy and policy.unversioned
            yield await builder.get_workflow()

    def _close(self, policy: ServedPolicy | None) -> None:
        deployment = self._deployments.pop(policy)
        deployment.close()
        self._closing.add(deployment.task)
        deployment.task.add_done_callback(self._closing.discard)

    def stray_completions(self, policy: ServedPolicy | None) -> Counts:
        """Completions that the workflow of a policy has requested outside every episode."""
        builders = [each for each, served in self._builders.items() if served == (policy and policy.unversioned)]
        return sum(map(stray_completions, builders), Counter[str]())

    async def attempt(self, body: EpisodeRequest) -> AttemptResult:
        item = EvalInputItem(id=body.key.row_id, input_obj=body.input, full_dataset_entry=body.row)
        async with AsyncExitStack() as stack:
            try:
                workflow = await stack.enter_async_context(self.workflow(body.policy))
            except Exception as error:  # a workflow that cannot be built is not the episode's fault
                episode = Episode(body.key, EpisodeStatus.FAILED)
                fail(episode, DropReason.BACKEND_ERROR, error)
                return AttemptResult(episode)
            return await in_process(workflow)(item, body.key, body.options)
