"""Running episodes: one episode with its attempts, and many under one concurrency limit.

Who makes an attempt is replaceable: an `Attempt` is a function of (row, key, rules) that gives plain data.
`in_process` runs the workflow here, `insitu.evaluation.remote` has a service run it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pydantic import ConfigDict

from insitu.config import WORKFLOW, credited_function
from insitu.errors import (
    BackendUnavailable,
    CaptureError,
    EpisodeTimeout,
    InsituError,
    WorkflowError,
    describe_error,
    exception_chain,
    format_error,
)
from insitu.evaluation.result_path import ResultPath
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, Outcome
from insitu.schemas.evaluation import EvalInputItem
from insitu.workflow.context import EpisodeScope
from insitu.workflow.steps import OnStep

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_PASSING_OPENAI_ERRORS = ("APIConnectionError", "APITimeoutError", "InternalServerError", "RateLimitError")


@dataclass(frozen=True)
class EpisodeRules:
    """How an episode is run: `timeout` in seconds for each attempt, `retries` after passing failures.

    `seed` is the configured one. `training` names the llms (True: all) whose servers are asked for logprobs and token
    ids; an answer without logprobs is an error, one without token ids only with `needs_token_ids`.
    `target_functions` are those whose calls are trained. `result` takes the output from the workflow's answer; none:
    the answer is the output.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    seed: int = 0
    timeout: float | None = None
    retries: int = 0
    training: bool | frozenset[str] = False
    result: ResultPath | None = None
    needs_token_ids: bool = True
    target_functions: tuple[str, ...] = (WORKFLOW,)


class Attempted(NamedTuple):
    """An attempt that has ended; `passing`: it failed for a reason that another attempt may not meet."""

    episode: Episode
    passing: bool = False


Attempt = Callable[[EvalInputItem, EpisodeKey, EpisodeRules], Awaitable[Attempted]]


async def run_episode(attempt: Attempt, item: EvalInputItem, key: EpisodeKey, rules: EpisodeRules) -> Episode:
    """Run the workflow on one row; what goes wrong inside it is told by the episode, never raised."""
    failed_requests: Counter[str] = Counter()
    for number in range(rules.retries + 1):
        episode, passing = await attempt(item, key._replace(attempt=key.attempt + number), rules)
        failed_requests.update(episode.failed_requests)
        if episode.outcome is Outcome.OK or not passing:
            break
        logger.info("episode %s failed (%s), attempt %d", episode.key.text(), episode.error, number + 1)
    episode.failed_requests = dict(failed_requests)
    if episode.outcome is Outcome.OK and rules.result is not None:
        try:
            episode.output = rules.result.take(episode.output)
        except WorkflowError as error:
            episode.output = None
            fail(episode, DropReason.WORKFLOW_ERROR, error)
    return episode


def fail(episode: Episode, reason: DropReason, error: BaseException) -> None:
    """Mark an episode as failed, `error` told by its name, message and cause."""
    episode.outcome = Outcome.FAILED
    episode.reason = reason
    episode.error = format_error(error)


def in_process(workflow: Any, on_step: OnStep | None = None) -> Attempt:
    """Attempts that run `workflow` in this event loop; `on_step` gets each step as it happens."""
    return partial(_attempt, workflow, on_step)


async def _attempt(
    workflow: Any, on_step: OnStep | None, item: EvalInputItem, key: EpisodeKey, rules: EpisodeRules
) -> Attempted:
    scope = EpisodeScope(
        key=key,
        seed=key.seed(rules.seed),
        input_message=item.input_obj,
        row=item.full_dataset_entry,
        is_evaluating=True,
        training=rules.training,
        needs_token_ids=rules.needs_token_ids,
        target_functions=rules.target_functions,
        on_step=on_step,
    )
    episode = Episode(key, Outcome.OK, calls=scope.calls, steps=scope.steps)
    passing = False
    started = time.perf_counter()
    try:
        with scope.activate():
            async with asyncio.timeout(rules.timeout) as limit:
                output = await workflow.ainvoke(item.input_obj)
            if limit.expired():
                raise TimeoutError  # the workflow caught its cancellation and went on
        if scope.ledger.capture_error is not None:
            raise scope.ledger.capture_error
        episode.output = output
    except (Exception, BaseExceptionGroup, SystemExit, asyncio.CancelledError) as error:  # user code: its failure
        if being_cancelled(error):
            raise
        if isinstance(error, TimeoutError) and limit.expired():
            error = EpisodeTimeout(f"no answer within episode_timeout: {rules.timeout:g} s")
        elif scope.ledger.capture_error is not None:
            error = scope.ledger.capture_error
        reason, passing = classify(error)
        fail(episode, reason, error)
        if reason is DropReason.WORKFLOW_ERROR and not isinstance(error, InsituError):
            episode.error = describe_error(error)
        logger.debug("episode %s", key.text(), exc_info=error)
    episode.seconds = time.perf_counter() - started
    episode.failed_requests = dict(scope.ledger.failed_attempts)
    episode.calls.sort(key=lambda call: call.index)  # recorded in the order of their ends
    if scope.rewards.by_call:
        episode.step_rewards = [scope.rewards.by_call.get(call.index, 0.0) for call in episode.calls]
        rewarded = [call.functions for call in episode.calls if call.index in scope.rewards.by_call]
        names = {credited_function(functions, rules.target_functions) for functions in rewarded}
        episode.rewarded_functions = sorted(names)
    return Attempted(episode, passing)


def being_cancelled(error: BaseException) -> bool:
    """Whether `error` comes of someone cancelling this task, and not of a cancelled task that user code waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def classify(error: BaseException) -> tuple[DropReason, bool]:
    """The reason code of a failed episode, and whether another attempt may help."""
    for cause in exception_chain(error):
        if isinstance(cause, EpisodeTimeout):
            return DropReason.TIMEOUT, True
        if isinstance(cause, CaptureError):
            return DropReason.CAPTURE_ERROR, False
        if isinstance(cause, BackendUnavailable):
            return DropReason.BACKEND_ERROR, True
        kind = type(cause)
        if kind.__module__.partition(".")[0] == "openai":
            names = {base.__name__ for base in kind.__mro__}
            return DropReason.BACKEND_ERROR, not names.isdisjoint(_PASSING_OPENAI_ERRORS)
    return DropReason.WORKFLOW_ERROR, False


class _End:
    """Comes after the last result."""


_END = _End()


async def run_limited(tasks: Iterable[T], run: Callable[[T], Awaitable[R]], limit: int) -> AsyncGenerator[R, None]:
    """The results of `run(task)` for all tasks, as they come, at most `limit` of them in flight.

    Consumes `tasks` lazily, waits for whichever task ends first, and stops when `2 * limit` results wait to be taken.
    An exception of `run`, or closing the iterator (`aclosing`), cancels what is in flight.
    """
    results: asyncio.Queue[R | _End] = asyncio.Queue(maxsize=limit)
    source = iter(tasks)

    async def work() -> None:
        for task in source:
            try:
                result = await run(task)
            except asyncio.CancelledError as error:
                if being_cancelled(error):
                    raise
                raise WorkflowError(f"{task!r:.200} was cancelled from inside") from error  # else it would just vanish
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
