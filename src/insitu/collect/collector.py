"""Collects episodes: rows x generations -> finished episodes, under one concurrency limit.

Training and evaluation both collect here, whether the workflow runs in this process or in a service.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from insitu.builder import Builder
from insitu.collect.episodes import Attempt, EpisodeOptions, run_episode
from insitu.collect.executors import Executor, LocalExecutor, LocalExecutorConfig
from insitu.collect.shared_run import RunState
from insitu.collect.watchdog import Watchdog, doing
from insitu.errors import ConfigError, InsituError, WorkflowError
from insitu.registry import EXECUTOR, FUNCTION, LLM
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, Outcome
from insitu.schemas.evaluation import EvalInputItem, EvaluationRunConfig
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.workflow.context import current_scope
from insitu.workflow.llms import ModelClient

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Task = tuple[EvalInputItem, EpisodeKey]
Finish = Callable[[EvalInputItem, Episode], Awaitable[None]]


async def collect(
    builder: Builder,
    tasks: Sequence[Task],
    options: EpisodeOptions,
    service: FinetuneRunConfig | EvaluationRunConfig | None,
    finish: Finish,
    run: RunState | None,
    limit: int,
    watchdog: Watchdog,
) -> AsyncGenerator[Episode, None]:
    """Runs an episode for each task and yields it after `finish(row, episode)`, in the order of completion.

    At most `limit` episodes are in flight, and no more than `run` has slots. `service` names the `endpoint` of a
    workflow service, if any. `watchdog` knows what is in flight. Close the generator (`aclosing`) to cancel that.
    """

    async def run_task(attempt: Attempt, task: Task) -> Episode:
        row, key = task
        with watchdog.waiting(key.label(), lambda: "all max_concurrency slots are taken"):
            async with _episode_slot(run):
                started = time.monotonic()
                episode = await run_episode(attempt, row, key, options)
                while run is not None and await _server_was_down(episode, run, started):
                    started, key = time.monotonic(), key.replayed(episode.key.attempt)
                    episode = await run_episode(attempt, row, key, options)
            await finish(row, episode)
        return episode

    trained = options.training if isinstance(options.training, frozenset) else ()
    stray_before, outcomes = stray_completions(builder), Counter[Outcome]()
    async with open_workflow(builder, service, trained, run) as attempt:
        async with aclosing(run_limited(tasks, partial(run_task, attempt), limit)) as episodes:
            async for episode in episodes:
                outcomes[episode.outcome] += 1
                yield episode
    for name, count in (stray_completions(builder) - stray_before).items():
        logger.warning(
            "%d completions of llms.%s were requested outside every episode while %d episodes ran: they are not "
            "recorded and not trained. A thread must enter the episode that it works for with Context.activate()",
            count,
            name,
            len(tasks),
        )
    if outcomes.total() != len(tasks):
        raise InsituError(
            f"{len(tasks)} episodes were planned, but {outcomes.total()} have an outcome ({dict(outcomes)}): "
            "this is a fault of insitu"
        )


def stray_completions(builder: Builder) -> Counter[str]:
    """Completions requested outside every episode so far, by key of `llms`."""
    recorders = {llm.name: llm.recorder for llm in builder.built(LLM) if isinstance(llm, ModelClient)}
    stray = Counter({name: recorder.stray_completions for name, recorder in recorders.items()})
    for executor in builder.built(EXECUTOR):
        stray.update(executor.stray_completions)
    return stray


def outside_completions(builder: Builder, server: str) -> int:
    """Completions requested from `server` outside every episode so far, by evaluators too."""
    recorders = [llm.recorder for llm in builder.built(LLM) if isinstance(llm, ModelClient)]
    counts = [Counter({recorder.server: recorder.outside_completions}) for recorder in recorders]
    counts += [executor.outside_completions for executor in builder.built(EXECUTOR)]
    return sum(count for each in counts for url, count in each.items() if url.rstrip("/") == server.rstrip("/"))


async def _server_was_down(episode: Episode, run: RunState, started: float) -> bool:
    """Whether an outage of the model's server, which has ended by now, may have made the episode fail."""
    if episode.reason is not DropReason.BACKEND_ERROR:
        return False
    with doing(lambda: "its model's server does not respond"):
        return await run.wait_for_policy(started)


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
    """Runs attempts where `general.executor` says, or in the service at `endpoint`.

    Raises BackendUnavailable if the service does not respond, ConfigError if it is not a workflow service or lacks one
    of the llms in `trained`, RequestRefused if it may not send requests to the policy.
    """
    # a service runs the workflow of the run, not that of another file
    other_file = run is not None and run.builder is not builder and WORKFLOW in builder.config.names(FUNCTION)
    executor = await executor_of(builder, None if other_file else service)
    async with executor.open(builder, trained, reached=run is not None) as attempt:
        yield attempt


async def executor_of(builder: Builder, service: FinetuneRunConfig | EvaluationRunConfig | None) -> Executor:
    """What runs the episodes: the service at `endpoint`, or what `general.executor` says."""
    if service is None or service.endpoint is None:
        return await builder.get_executor() or LocalExecutor()
    configured = builder.config.general.executor
    if not isinstance(configured, LocalExecutorConfig | None):
        raise ConfigError(
            f"endpoint is {service.endpoint!r}, whose service runs the episodes, but general.executor is "
            f"{configured.type}: leave one of them out"
        )
    block = {"_type": "service", "url": service.endpoint, "timeout": service.endpoint_timeout}
    executor: Executor = await builder.get_executor(block)
    return executor


async def run_limited(
    tasks: Iterable[T], run: Callable[[T], Coroutine[Any, Any, R]], limit: int
) -> AsyncGenerator[R, None]:
    """Yields the results of `run(task)` in the order of completion, with at most `limit` in flight.

    Consumes `tasks` lazily: a result that waits to be taken counts as in flight. An exception of `run`, or closing the
    generator (`aclosing`), cancels what is in flight.
    """
    source = iter(tasks)
    running: dict[asyncio.Task[R], T] = {}
    ended: asyncio.Queue[asyncio.Task[R]] = asyncio.Queue()

    def start() -> None:
        for task in islice(source, limit - len(running)):
            started = asyncio.create_task(run(task), name="episode")
            running[started] = task
            started.add_done_callback(ended.put_nowait)

    try:
        start()
        while running:
            finished = await ended.get()
            task = running.pop(finished)
            if finished.cancelled():  # else it would vanish
                raise WorkflowError(f"{task!r:.200} was cancelled from inside")
            start()
            yield finished.result()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
