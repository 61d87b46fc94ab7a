"""Serves the model under training, and evaluates it without training it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from insitu.builder import Builder
from insitu.collect.datasets import load_dataset
from insitu.collect.evaluation import EvaluationRun
from insitu.collect.executors import LocalExecutorConfig
from insitu.collect.shared_run import current_run
from insitu.config import Config, load_config
from insitu.errors import BackendError, ConfigError, TrajectoryError
from insitu.registry import FUNCTION, LLM, TRAINER_ADAPTER
from insitu.runs.checkpoints import find_checkpoint
from insitu.schemas.evaluation import EvaluationRunConfig, EvaluationRunOutput
from insitu.schemas.finetuning import TrainerAdapterConfig
from insitu.training.interfaces import TrainerAdapter
from insitu.training.report import Report, evaluation_table
from insitu.wire.http_server import raise_file_limit

_EXIT_NOTICE_SECONDS = 1.0
_OWN_FILES = 40
"""Open files of a run, or of its backend, besides those of its episodes."""


async def evaluation_main(
    run_config: EvaluationRunConfig, checkpoint: Path | None, console: Console, notes: Console
) -> EvaluationRunOutput:
    """The command `eval`: serves the policy, runs the workflow on the rows and scores it, and prints a table."""
    config = load_config(run_config.config_file, run_config.override)
    check_open_files(config)
    report = Report(console)
    rows = load_dataset(config, run_config.dataset, run_config.skip_workflow or run_config.skip_completed_entries)
    total = sum(row.output_obj is None for row in rows) * run_config.reps
    if run_config.skip_workflow and checkpoint is not None:
        raise ConfigError("--checkpoint cannot be combined with --skip_workflow, which runs nothing")
    run_config = run_config.model_copy(update={"config_file": config, "override": ()})
    async with Builder(config) as builder:
        run = EvaluationRun(run_config, builder, on_episode=lambda _: report.advance())
        async with nullcontext() if run_config.skip_workflow else serve_policy(config, builder, checkpoint, notes):
            with report.phase("evaluating", total):
                output = await run.run_and_evaluate()
    console.print(evaluation_table(output))
    return output


@asynccontextmanager
async def serve_policy(
    config: Config, builder: Builder, checkpoint: Path | None = None, notes: Console | None = None
) -> AsyncIterator[None]:
    """Serves the model under training without training it, if the file has an llm of `_type: policy`.

    Serves its initial weights, or those of `checkpoint` (see `insitu.runs.checkpoints`). Prints to `notes`
    which weights those are, unless `checkpoint` is their folder.
    """
    policies = [name for name in config.names(LLM) if config.block(LLM, name).type == "policy"]
    adapter_name = config.finetuning.trainer_adapter
    if policies and adapter_name:
        block = config.block(TRAINER_ADAPTER, adapter_name)
        if checkpoint is not None:
            assert isinstance(block, TrainerAdapterConfig)
            found = find_checkpoint(config, checkpoint, "--checkpoint")
            started = block.starting_from(str(found.folder)) if found.folder else block
            if started is None:
                raise ConfigError(f"--checkpoint: trainer_adapters.{adapter_name} does not start a backend (no model)")
            config.blocks[TRAINER_ADAPTER.section, adapter_name] = started
            if found.note is not None and notes is not None:
                Report(notes).note(f"checkpoint: {found.folder or 'the initial weights'} ({found.note})")
        adapter = await builder.get_trainer_adapter(adapter_name)
        with TemporaryDirectory(prefix="insitu-") as scratch:
            await adapter.initialize(config.finetuning.model_copy(update={"output_dir": Path(scratch)}))
            try:
                async with watched(adapter):
                    yield
            finally:
                await builder.aclose()
        return
    if checkpoint is not None:
        raise ConfigError("--checkpoint is for llms of _type policy; this file has none, or names no trainer adapter")
    yield


@asynccontextmanager
async def watched(adapter: Any) -> AsyncIterator[None]:
    """Cancels the body and raises the adapter's error once its backend is lost."""
    if not isinstance(adapter, TrainerAdapter):  # a plugin's, which implements only the documented methods
        yield
        return
    watcher = asyncio.create_task(adapter.watch(), name="watch the backend")

    def lost() -> BaseException | None:
        return watcher.exception() if watcher.done() and not watcher.cancelled() else None

    def expire(_: asyncio.Task[None]) -> None:
        if (error := lost()) is not None:
            if (run := current_run()) is not None:
                run.lost = error
            limit.reschedule(0.0)

    try:
        async with asyncio.timeout(None) as limit:
            watcher.add_done_callback(expire)
            try:
                yield
            except (BackendError, TrajectoryError):  # requests can fail before the end of the process is known
                await asyncio.wait([watcher], timeout=_EXIT_NOTICE_SECONDS)
                raise
            finally:
                watcher.remove_done_callback(expire)
    except Exception:  # re-raised, unless it follows from the loss of the backend
        if (error := lost()) is not None:
            raise error from None
        raise
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def check_open_files(config: Config) -> None:
    """Raises ConfigError if the configured concurrency needs more open files than the system lets this process have."""
    if not isinstance(config.general.executor, LocalExecutorConfig | None):
        return  # it opens none for an episode
    blocks = (config.block(FUNCTION, name) for name in config.names(FUNCTION))
    per_episode = max((getattr(block, "files_per_episode", 1) for block in blocks), default=1)
    episodes = config.max_concurrency
    needed = _OWN_FILES + per_episode * episodes
    allowed = raise_file_limit(2 * needed)  # twice: agents may use several connections
    if allowed < needed:
        most = max(0, (allowed - _OWN_FILES) // per_episode)
        raise ConfigError(
            f"eval.general.max_concurrency is {episodes}, which needs {needed} open files, but this process is allowed "
            f"{allowed}: raise the limit (ulimit -n {needed}) or set max_concurrency to at most {most}"
        )
