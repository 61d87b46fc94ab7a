"""The finetuning run that evaluations belong to, also those that a plugin starts without naming it.

with share(builder) as run:
    ...     # every EvaluationRun of the same file uses `builder`; one of another file gets a child of it
run.failed_validations
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from insitu.builder import Builder, builder_at_work
from insitu.collect.watchdog import Watchdog
from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu.schemas.episodes import EpisodeKey, Needs
from insitu.schemas.evaluation import EvaluationRunConfig


@dataclass
class RunState:
    """A finetuning run as its evaluations see it, whether the trainer or a plugin starts them.

    `episode_slots` limits the episodes in flight. `validations` counts held-out evaluations; `failed_validations`
    describes those without a score.
    `wait_for_policy(since)` waits while the server of the model under training does not respond; it returns whether it
    had to, or the server was restarted since that `time.monotonic()`. An outage may last longer than the agent's client
    retries, and must not use up the epoch's episodes. It raises BackendUnavailable if the server does not come back.
    `is_checked`: what runs the episodes has been reached before. `needs`: what the trainer adapter needs of a call.
    `unscored` names evaluators that have failed to score an episode of training. `episodes_in_flight` have one of the
    slots.
    """

    builder: Builder
    loop: asyncio.AbstractEventLoop
    episode_slots: asyncio.Semaphore
    watchdog: Watchdog
    generations: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of a row's episodes for training, so that no two collections sample it with the same seed."""
    validations: int = 0
    failed_validations: list[str] = field(default_factory=list)
    wait_for_policy: Callable[[float], Awaitable[bool]] | None = None
    is_checked: bool = False
    needs: Needs = Needs.TOKEN_IDS
    unscored: set[str] = field(default_factory=set)
    episodes_in_flight: set[EpisodeKey] = field(default_factory=set)

    @classmethod
    def of(cls, builder: Builder, *, is_checked: bool = False) -> "RunState":
        """The state of a new run, in the running event loop."""
        config = builder.config
        watchdog = Watchdog(config.eval.stall_warning, config.eval.stall_timeout)
        slots = asyncio.Semaphore(config.max_concurrency)
        return cls(builder, asyncio.get_running_loop(), slots, watchdog, is_checked=is_checked)

    def evaluates(self, request: EvaluationRunConfig) -> bool:
        """Whether an evaluation is of the run's own file, with the run's overrides or none."""
        own = self.builder.request
        return request.config_file is self.builder.config or (
            own is not None
            and _same_file(request.config_file, own.config_file)
            and request.override in ((), own.override)
        )

    def is_held_out(self, dataset: str | Path | None) -> bool:
        """Whether a dataset is the run's validation dataset."""
        validation, request = self.builder.config.finetuning.validation, self.builder.request
        if dataset is None or validation is None:
            return False
        return _same_file(dataset, validation.dataset) or (
            request is not None and _same_file(dataset, request.validation_dataset)
        )


_current: ContextVar[RunState | None] = ContextVar("insitu_run", default=None)


def current_run() -> RunState | None:
    """The finetuning run that the running code belongs to.

    None in another event loop (in a thread, say): live components belong to their loop.
    """
    run = _current.get()
    return run if run is not None and run.loop is asyncio.get_running_loop() else None


def run_of(builder: Builder) -> RunState:
    """The state of the current finetuning run, or of a new run of `builder`."""
    return current_run() or RunState.of(builder)


def builder_of_run() -> Builder | None:
    """The builder of the running factory, or else of the current finetuning run."""
    try:
        run = current_run()
    except RuntimeError:  # no event loop: a component constructed by hand
        return None
    return builder_at_work() or (run.builder if run is not None else None)


class UsesBuilder:
    """A component that needs the run's builder, which is passed, or else found when it is first needed."""

    _given_builder: Builder | None = None

    @cached_property
    def _builder(self) -> Builder:
        builder = self._given_builder or builder_of_run()
        if builder is None:
            name = type(self).__name__
            raise ConfigError(f"{name} is used outside a finetuning run: pass {name}(..., builder=...)")
        return builder

    @cached_property
    def _full_config(self) -> Config:
        return self._builder.config


@contextmanager
def share(builder: Builder) -> Iterator[RunState]:
    """Makes the run of `builder` current for all evaluations started in the body and in its tasks."""
    run = current_run()
    if run is not None and run.builder is builder:
        yield run
        return
    run = RunState.of(builder, is_checked=True)
    token = _current.set(run)
    try:
        yield run
    finally:
        _current.reset(token)


@asynccontextmanager
async def config_and_builder(
    request: EvaluationRunConfig, builder: Builder | None
) -> AsyncIterator[tuple[Config, Builder]]:
    """The file of an evaluation and a builder for it: `builder`, else that of the run, a child of it, or a new one.

    A child evaluates another file with the run's `finetuning` section and trainer adapter, so that its policy is the
    model under training.
    """
    run = current_run()
    if builder is None and run is not None and run.evaluates(request):
        yield run.builder.config, run.builder
        return
    loaded = load_config(request.config_file, request.override)
    if builder is not None:
        yield loaded, builder
        return
    if run is not None:
        loaded = replace(loaded, finetuning=run.builder.config.finetuning)
    async with Builder(loaded, parent=run.builder if run is not None else None) as own:
        yield loaded, own


def _same_file(one: Any, other: Any) -> bool:
    if isinstance(one, str | Path) and isinstance(other, str | Path):
        return Path(one).resolve() == Path(other).resolve()
    return one is other
