"""What the evaluations inside one finetuning run share: its components, one limit on episodes, and a numbering.

with share(config, builder) as run:
    ...     # every EvaluationRun made in here, by whomever, runs on `builder`
run.failed_validations
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from insitu.builder import Builder
from insitu.config import Config, load_config
from insitu.schemas.evaluation import EvaluationRunConfig
from insitu.workflow.context import current_scope


@dataclass
class Generations:
    """Numbers the episodes of a row over all evaluations that gather for training: no two sample with the same seed."""

    taken: int = 0

    def take(self, count: int) -> int:
        """The first of `count` numbers that nobody else gets."""
        first, self.taken = self.taken, self.taken + count
        return first


@dataclass
class SharedRun:
    """A finetuning run: the checked file, its live components, and what has become of its evaluations.

    `limit` lets `eval.general.max_concurrency` episodes through, whoever started them. `validations` counts held-out
    evaluations; `failed_validations` tells those that gave no reward, even if a trainer takes no notice.
    """

    config: Config
    builder: Builder
    limit: asyncio.Semaphore
    loop: asyncio.AbstractEventLoop
    generations: Generations = field(default_factory=Generations)
    validations: int = 0
    failed_validations: list[str] = field(default_factory=list)

    def is_for(self, asked: EvaluationRunConfig) -> bool:
        """Whether an evaluation is of the run's own file, with the run's overrides or without any."""
        mine = self.config.finetuning.run_configuration
        if asked.config_file is self.config:
            return True
        return (
            mine is not None
            and _same_file(asked.config_file, mine.config_file)
            and tuple(asked.override) in ((), tuple(mine.override))
        )

    def holds_out(self, dataset: str | Path | None) -> bool:
        validation = self.config.finetuning.validation
        return dataset is not None and validation is not None and _same_file(dataset, validation.dataset)


def _same_file(one: Any, other: Any) -> bool:
    if isinstance(one, str | Path) and isinstance(other, str | Path):
        return Path(one).resolve() == Path(other).resolve()
    return one is other


_current: ContextVar[SharedRun | None] = ContextVar("insitu_run", default=None)


def current_run() -> SharedRun | None:
    """The finetuning run that the running code is part of, if any.

    In an event loop of its own (that of a thread, say) code has no part in it: live components belong to their loop.
    """
    run = _current.get()
    return run if run is not None and run.loop is asyncio.get_running_loop() else None


@contextmanager
def share(config: Config, builder: Builder) -> Iterator[SharedRun]:
    """Let all evaluations in here, and in tasks started here, share `builder` and one limit; again: it is the same."""
    outer = current_run()
    if outer is not None and outer.builder is builder:
        yield outer
        return
    run = SharedRun(config, builder, asyncio.Semaphore(config.max_concurrency), asyncio.get_running_loop())
    token = _current.set(run)
    try:
        yield run
    finally:
        _current.reset(token)


@asynccontextmanager
async def components(asked: EvaluationRunConfig, builder: Builder | None) -> AsyncIterator[tuple[Config, Builder]]:
    """The file of an evaluation and live components for it: `builder`, or the run's, or some of its own.

    Inside a run another file is evaluated with the run's `finetuning` section and its live trainer adapter, so that an
    llm of _type policy is the model under training.
    """
    run = current_run()
    if builder is None and run is not None and run.is_for(asked):
        yield run.config, run.builder
        return
    loaded = load_config(asked.config_file, asked.override)
    if builder is not None:
        yield loaded, builder
        return
    if run is not None:
        loaded = replace(loaded, finetuning=run.config.finetuning)
    async with Builder(loaded, parent=run.builder if run is not None else None) as own:
        yield loaded, own


def episode_slot() -> AbstractAsyncContextManager[None]:
    """Waits until the run has room for an episode; outside a run, and within an episode that has its room, at once."""
    run = current_run()
    return nullcontext() if run is None or current_scope() is not None else run.limit
