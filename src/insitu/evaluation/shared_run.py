"""The finetuning run that evaluations belong to, also those that a plugin starts without naming it.

with share(builder) as run:
    ...     # every EvaluationRun of the same file uses `builder`; one of another file gets a child of it
run.failed_validations
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from insitu.builder import Builder, RunState
from insitu.config import Config, load_config
from insitu.schemas.evaluation import EvaluationRunConfig
from insitu.schemas.finetuning import FinetuneRunConfig

_current: ContextVar[Builder | None] = ContextVar("insitu_run", default=None)


def current_builder() -> Builder | None:
    """The builder of the finetuning run that the running code belongs to.

    None in another event loop (in a thread, say): live components belong to their loop.
    """
    builder = _current.get()
    if builder is None or builder.run is None or builder.run.loop is not asyncio.get_running_loop():
        return None
    return builder


@contextmanager
def share(builder: Builder) -> Iterator[RunState]:
    """Makes `builder` and its run state current for all evaluations started in the body and in its tasks."""
    if builder.run is not None:
        yield builder.run
        return
    builder.run = RunState(asyncio.Semaphore(builder.config.max_concurrency), asyncio.get_running_loop())
    token = _current.set(builder)
    try:
        yield builder.run
    finally:
        _current.reset(token)
        builder.run = None


@asynccontextmanager
async def components(request: EvaluationRunConfig, builder: Builder | None) -> AsyncIterator[tuple[Config, Builder]]:
    """The file of an evaluation and a builder for it: that of the run, a child of it for another file, or a new one.

    A child has the run's `finetuning` section and trainer adapter, so its policy is the model under training.
    """
    builder = builder or current_builder()
    if builder is not None and builder.run is None:
        yield load_config(request.config_file, request.override), builder
        return
    if builder is not None and _is_for(request, builder.config):
        yield builder.config, builder
        return
    loaded = load_config(request.config_file, request.override)
    if builder is not None:
        loaded = replace(loaded, finetuning=builder.config.finetuning)
    async with Builder(loaded, parent=builder) as own:
        yield loaded, own


def _is_for(request: EvaluationRunConfig, config: Config) -> bool:
    """Whether an evaluation is of the run's own file, with the run's overrides or none."""
    run = config.finetuning.run_configuration
    if request.config_file is config:
        return True
    return (
        run is not None
        and _same_file(request.config_file, run.config_file)
        and tuple(request.override) in ((), tuple(run.override))
    )


def is_held_out(dataset: str | Path | None, config: Config) -> bool:
    """Whether a dataset is the run's validation dataset."""
    validation = config.finetuning.validation
    return dataset is not None and validation is not None and _same_file(dataset, validation.dataset)


def _same_file(one: Any, other: Any) -> bool:
    if isinstance(one, str | Path) and isinstance(other, str | Path):
        return Path(one).resolve() == Path(other).resolve()
    return one is other


def evaluation_request(run: FinetuneRunConfig | None, **options: Any) -> EvaluationRunConfig:
    """An evaluation inside a finetuning run: who answers, as the command line says, and `options`."""
    shared = {"result_json_path", "endpoint", "endpoint_timeout"}
    return EvaluationRunConfig(**(run.model_dump(include=shared) if run is not None else {}), **options)
