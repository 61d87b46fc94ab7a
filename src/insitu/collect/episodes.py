"""One episode: attempts at a row until one succeeds or the retries are used up, and the executors that run them.

An `Attempt` is a function of (row, key, options) that returns plain data: `in_process` runs the workflow here,
`RemoteExecutor.attempt` in a workflow service.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ConfigDict

from insitu.advantages.credit import credited_function
from insitu.builder import Builder
from insitu.capture.ledger import CallLedger, calls_in_flight
from insitu.collect.shared_run import RunState
from insitu.collect.watchdog import doing
from insitu.config import Config
from insitu.errors import (
    BackendUnavailable,
    CaptureError,
    ConfigError,
    EpisodeTimeout,
    InsituError,
    WorkflowError,
    describe_error,
    exception_chain,
    format_error,
)
from insitu.registry import register_executor
from insitu.schemas.components import WORKFLOW, ExecutorBaseConfig, FunctionBaseConfig
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus, Needs
from insitu.schemas.evaluation import EvalInputItem, EvaluationRunConfig
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.schemas.kinds import FUNCTION, LLM
from insitu.wire.json_values import value_at
from insitu.workflow.context import EpisodeScope

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_SECONDS = 5.0
"""How long cancelled code may take to clean up; an external agent takes up to 4 s to end its programs."""
_AGENTS_ERRORS = ("BadRequestError", "UnprocessableEntityError")
_TRANSIENT_OPENAI_ERRORS = ("APIConnectionError", "APITimeoutError", "InternalServerError", "RateLimitError")


@dataclass(frozen=True)
class EpisodeOptions:
    """How an episode is run: `timeout` in seconds per attempt, `retries` after transient failures.

    `seed` is the configured one. `training` names the llms (True: all) whose calls are trained, and must have
    what training `needs`. `target_functions` are those whose calls are trained. `result` is the JSONPath of
    the output within the workflow's result; it must match exactly one value. `sampled_from` is the URL of the
    policy's server and the version there, such as `policy@3`, that gets the requests to `policy`; None: the newest one.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    seed: int = 0
    timeout: float | None = None
    retries: int = 0
    training: bool | frozenset[str] = False
    result: str = "$"
    needs: Needs = Needs.TOKEN_IDS
    target_functions: tuple[str, ...] = (WORKFLOW,)
    sampled_from: tuple[str, str] | None = None

    @classmethod
    def of(cls, config: Config, **others: Any) -> "EpisodeOptions":
        return cls(config.general.seed, config.eval.episode_timeout, config.eval.retries, **others)


class AttemptResult(NamedTuple):
    """The episode of one attempt; `transient`: it failed, but another attempt may succeed."""

    episode: Episode
    transient: bool = False


Attempt = Callable[[EvalInputItem, EpisodeKey, EpisodeOptions], Awaitable[AttemptResult]]


async def run_episode(attempt: Attempt, item: EvalInputItem, key: EpisodeKey, options: EpisodeOptions) -> Episode:
    """Runs the workflow on one row. Failures inside it are recorded in the episode, never raised."""
    failed_requests: Counter[str] = Counter()
    requested: Counter[str] = Counter()
    abandoned = 0
    for number in range(options.retries + 1):
        episode, transient = await attempt(item, key._replace(attempt=key.attempt + number), options)
        failed_requests.update(episode.failed_requests)
        requested.update(episode.requested)
        abandoned += episode.abandoned_attempts
        if episode.outcome is EpisodeStatus.OK or not transient:
            break
        logger.info("episode %s failed (%s), attempt %d", episode.key.text(), episode.error, number + 1)
    episode.failed_requests, episode.requested = dict(failed_requests), requested
    episode.abandoned_attempts = abandoned
    if episode.outcome is EpisodeStatus.OK and options.result != "$":
        try:
            episode.output = value_at(options.result, episode.output, "result_json_path")
        except WorkflowError as error:
            episode.output = None
            fail(episode, DropReason.WORKFLOW_ERROR, error)
    return episode


def fail(episode: Episode, reason: DropReason, error: BaseException) -> None:
    """Marks an episode as failed."""
    episode.outcome = EpisodeStatus.FAILED
    episode.reason = reason
    episode.error = format_error(error)


class Executor(ABC):
    """Runs attempts at episodes of the workflows of a run; a run has one, which its evaluations share."""

    def __init__(self) -> None:
        self.stray_completions = Counter[str]()
        """Completions that workflows in other processes have requested outside every episode, by key of `llms`."""

    async def check(self, builder: Builder) -> None:
        """Raises ConfigError or BackendError if no episode could be run; called before anything else is started."""
        return

    @abstractmethod
    def open(
        self, builder: Builder, trained: Collection[str] = (), *, reached: bool = False
    ) -> AbstractAsyncContextManager[Attempt]:
        """Attempts that run the workflow of `builder`'s file, with the policy that `builder` knows.

        `trained` names the llms whose calls are trained. `reached`: `check` has succeeded before. Raises
        BackendUnavailable, ConfigError or RequestRefused if no episode can be run.
        """


class LocalExecutorConfig(ExecutorBaseConfig, name="local"):
    """Episodes run in this process, as they do without the block."""


class LocalExecutor(Executor):
    """Runs attempts in this event loop."""

    async def check(self, builder: Builder) -> None:
        config = builder.config
        for name in config.names(FUNCTION):
            where, block = "workflow" if name == WORKFLOW else f"functions.{name}", config.block(FUNCTION, name)
            if isinstance(block, FunctionBaseConfig):
                block.check_code(where, config.folder, config.names(LLM))
                block.check_files(where, config.find_path)

    @asynccontextmanager
    async def open(
        self, builder: Builder, trained: Collection[str] = (), *, reached: bool = False
    ) -> AsyncIterator[Attempt]:
        yield in_process(await builder.get_workflow())


@register_executor(config_type=LocalExecutorConfig)
async def local_executor(config: LocalExecutorConfig, builder: Builder) -> AsyncIterator[LocalExecutor]:
    yield LocalExecutor()


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
    async with executor.open(builder, trained, reached=run is not None and run.is_checked) as attempt:
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


def in_process(workflow: Any) -> Attempt:
    """Attempts that run `workflow` in this event loop."""
    return partial(_attempt, workflow)


async def _attempt(workflow: Any, item: EvalInputItem, key: EpisodeKey, options: EpisodeOptions) -> AttemptResult:
    item = own_copy(item)  # all episodes of the row begin with the same
    scope = EpisodeScope(
        key=key,
        seed=key.seed(options.seed),
        input_message=item.input_obj,
        row=item.full_dataset_entry,
        is_evaluating=True,
        training=options.training,
        needs=options.needs,
        target_functions=options.target_functions,
        sampled_from=options.sampled_from,
        in_flight=calls_in_flight.get(),
    )
    ledger = scope.ledger
    episode = Episode(key, EpisodeStatus.OK, calls=scope.calls, steps=scope.steps, requested=ledger.requested)
    transient = False
    started = time.perf_counter()
    with scope, doing(ledger.activity):
        ran = await isolated(lambda: workflow.ainvoke(item.input_obj), options.timeout)
    error = ran.error
    if ran.timed_out:
        running = "; it ignores its cancellation and still runs" if ran.still_runs else ""
        error = EpisodeTimeout(f"no answer within episode_timeout: {options.timeout:g} s{running}")
    elif ledger.capture_error is not None:
        error = ledger.capture_error
    elif error is None and options.training:
        error = await _shared_worker(ledger)
    if error is not None:
        reason, transient = classify(error)
        if reason in (DropReason.WORKFLOW_ERROR, DropReason.BACKEND_ERROR) and ledger.server_failure is not None:
            reason, transient = DropReason.BACKEND_ERROR, True  # the agent's SDK may raise its own error for it
        fail(episode, reason, error)
        if reason is DropReason.WORKFLOW_ERROR and not isinstance(error, InsituError):
            episode.error = describe_error(error)
        elif reason is DropReason.BACKEND_ERROR and ledger.server_failure is not None:
            episode.error = f"{episode.error} (its model's server: {ledger.server_failure})"
        logger.debug("episode %s", key.text(), exc_info=error)
    else:
        episode.output = ran.value
    episode.seconds = time.perf_counter() - started
    episode.abandoned_attempts = int(ran.still_runs)
    episode.failed_requests = dict(ledger.failed_attempts)
    if scope.rewards.by_call:
        episode.step_rewards = [scope.rewards.by_call.get(call.index, 0.0) for call in episode.calls]
        rewarded = [call.functions for call in episode.calls if call.index in scope.rewards.by_call]
        names = {credited_function(functions, options.target_functions) for functions in rewarded}
        episode.rewarded_functions = sorted(names)
    return AttemptResult(episode, transient)


def own_copy(item: EvalInputItem) -> EvalInputItem:
    """A copy whose row and answer nobody else can change."""
    own, copies = item.model_copy(), dict[int, Any]()
    for name in ("input_obj", "expected_output_obj", "full_dataset_entry", "output_obj"):
        own.__dict__[name] = _copied(own.__dict__[name], copies)
    return own


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Containers are copied once each, as `deepcopy` does; objects, which cannot all be copied, are not."""
    if type(value) not in (dict, list) or id(value) in copies:
        return copies.get(id(value), value)
    own = copies[id(value)] = value.copy()
    for key, each in [*own.items()] if type(value) is dict else enumerate(value):
        if type(each) in (dict, list):
            own[key] = _copied(each, copies)
    return own


async def _shared_worker(ledger: CallLedger) -> CaptureError | None:
    """An error if a task that made calls of the episode outlives it: it may have made them for other episodes."""
    running = ledger.running_callers()
    for _ in range(3 if running else 0):  # tasks that are just ending
        await asyncio.sleep(0)
    for task in running:
        if not task.done() or (not task.cancelled() and task.exception() is not None):
            work = getattr(task.get_coro(), "__qualname__", task.get_name())
            return CaptureError(
                f"the task {work} made model calls and still runs after the episode, so they may belong to others: "
                "a worker that serves several episodes must enter each of them with Context.activate()"
            )
    return None


class Ran(NamedTuple, Generic[T]):
    """The value or the error of foreign code; `still_runs`: it has ignored its cancellation."""

    value: T | None = None
    error: BaseException | None = None
    timed_out: bool = False
    still_runs: bool = False


async def isolated(work: Callable[[], Awaitable[T]], limit: float | None = None) -> Ran[T]:
    """Runs code of an agent or evaluator in a separate task, for at most `limit` seconds.

    Returns any exception that it raises, including SystemExit, KeyboardInterrupt, and a CancelledError caused by other
    code, such as a cancel scope entered in one episode and cancelled in another. Raises CancelledError only if the
    calling task is cancelled. Code that ignores its cancellation is left behind after `CANCEL_GRACE_SECONDS`.
    """

    async def run() -> Ran[T]:
        try:
            return Ran(await work())
        except BaseException as error:  # user code may raise anything
            return Ran(error=error)

    task = asyncio.create_task(run(), name="isolated")
    try:
        await asyncio.wait({task}, timeout=limit)
    finally:  # it has ended, its time is over, or the calling task is being cancelled
        timed_out = not task.done()
        if timed_out:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_SECONDS)
    if not task.done():
        logger.warning("%r ignores its cancellation; it is left behind", work)
        return Ran(timed_out=True, still_runs=True)
    if task.cancelled():  # before it began
        return Ran(error=asyncio.CancelledError(), timed_out=timed_out)
    return task.result()._replace(timed_out=timed_out)


def classify(error: BaseException) -> tuple[DropReason, bool]:
    """The reason code of a failed episode, and whether the failure is transient."""
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
            if not names.isdisjoint(_AGENTS_ERRORS):
                return DropReason.WORKFLOW_ERROR, False
            return DropReason.BACKEND_ERROR, not names.isdisjoint(_TRANSIENT_OPENAI_ERRORS)
    return DropReason.WORKFLOW_ERROR, False
