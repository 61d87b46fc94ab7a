"""Collects episodes: rows x generations -> finished episodes, under one concurrency limit.

Training and evaluation both collect here, whether the workflow runs in this process or in a service.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import TypeVar

from insitu.builder import Builder
from insitu.errors import WorkflowError
from insitu.evaluation.episodes import Attempt, EpisodeOptions, in_process, is_own_cancellation, run_episode
from insitu.evaluation.remote import RemoteWorkflow
from insitu.evaluation.shared_run import RunState
from insitu.registry import FUNCTION, LLM
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import Episode, EpisodeKey
from insitu.schemas.evaluation import EvalInputItem, EvaluationRunConfig
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.workflow.context import current_scope

T = TypeVar("T")
R = TypeVar("R")

Task = tuple[EvalInputItem, EpisodeKey]
Finish = Callable[[EvalInputItem, Episode], Awaitable[None]]


async def collect(
    builder: Builder,
    tasks: Iterable[Task],
    options: EpisodeOptions,
    service: FinetuneRunConfig | EvaluationRunConfig | None,
    finish: Finish,
    run: RunState | None,
    limit: int,
) -> AsyncGenerator[Episode, None]:
    """Runs an episode for each task and yields it after `finish(row, episode)`, in the order of completion.

    At most `limit` episodes are in flight, and no more than `run` has slots. `service` names the `endpoint` of a
    workflow service, if any. Close the generator (`aclosing`) to cancel what is in flight.
    """

    async def run_task(attempt: Attempt, task: Task) -> Episode:
        row, key = task
        async with _episode_slot(run):
            episode = await run_episode(attempt, row, key, options)
        await finish(row, episode)
        return episode

    trained = options.training if isinstance(options.training, frozenset) else ()
    async with open_workflow(builder, service, trained, run) as attempt:
        async with aclosing(run_limited(tasks, partial(run_task, attempt), limit)) as episodes:
            async for episode in episodes:
                yield episode


def _episode_slot(run: RunState | None) -> AbstractAsyncContextManager[object]:
    """Waits for one of the run's episode slots; an episode started within an episode shares its slot."""
    return nullcontext() if run is None or current_scope() is not None else run.episode_slots


@asynccontextmanager
async def open_workflow(
    builder: Builder,
    service: FinetuneRunConfig | EvaluationRunConfig | None,
    trained: Collection[str] = (),
    run: RunState | None = None,
) -> AsyncIterator[Attempt]:
    """Runs attempts in this process, or in the service at `endpoint`.

    Raises BackendUnavailable if the service does not respond, ConfigError if it is not a workflow service or lacks one
    of the llms in `trained`, RequestRefused if it may not send requests to the policy.
    """
    config = builder.config
    # a service runs the workflow of the run, not that of another file
    own_workflow = run is not None and run.builder is not builder and WORKFLOW in config.names(FUNCTION)
    if service is None or service.endpoint is None or own_workflow:
        yield in_process(await builder.get_workflow())
        return
    async with RemoteWorkflow(service.endpoint, service.endpoint_timeout) as remote:
        if any(config.block(LLM, name).type == "policy" for name in config.names(LLM)):
            remote.policy = await builder.policy_endpoint()
        await remote.check(trained, reached=run is not None)  # a finetuning run checks the service before it begins
        yield remote.attempt


class _End:
    """Follows the last result."""


_END = _End()


async def run_limited(tasks: Iterable[T], run: Callable[[T], Awaitable[R]], limit: int) -> AsyncGenerator[R, None]:
    """Yields the results of `run(task)` in the order of completion, with at most `limit` in flight.

    Consumes `tasks` lazily, waits for whichever task ends first, and pauses while `limit` results wait to be taken.
    An exception of `run`, or closing the generator (`aclosing`), cancels what is in flight.
    """
    results: asyncio.Queue[R | _End] = asyncio.Queue(maxsize=limit)
    source = iter(tasks)

    async def work() -> None:
        for task in source:
            try:
                result = await run(task)
            except asyncio.CancelledError as error:
                if is_own_cancellation(error):
                    raise
                raise WorkflowError(f"{task!r:.200} was cancelled from inside") from error  # else it would vanish
            await results.put(result)

    async def supervise() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(limit):
                    group.create_task(work())
        finally:
            await results.put(_END)

    supervisor = asyncio.create_task(supervise(), name="episodes")
    try:
        while not isinstance(result := await results.get(), _End):
            yield result
        await supervisor
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        supervisor.cancel()
        while not results.empty():
            results.get_nowait()
        await asyncio.gather(supervisor, return_exceptions=True)
