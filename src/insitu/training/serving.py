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
from insitu.collect.shared_run import RunState
from insitu.config import Config, changed_config, requested_config
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
    config = requested_config(run_config)
    check_open_files(config)
    report = Report(console)
    rows = load_dataset(config, run_config.dataset, run_config.skip_workflow or run_config.skip_completed_entries)
    total = sum(row.output_obj is None for row in rows) * run_config.reps
    if run_config.skip_workflow and checkpoint is not None:
        raise ConfigError("--checkpoint cannot be combined with --skip_workflow, which runs nothing")
    config = starting_from(config, checkpoint, notes)
    run_config = run_config.model_copy(update={"config_file": config, "override": ()})
    async with Builder(config) as builder:
        run = EvaluationRun(run_config, builder, on_episode=lambda _: report.advance())
        async with nullcontext() if run_config.skip_workflow else serve_policy(builder):
            with report.phase("evaluating", total):
                output = await run.run_and_evaluate()
    console.print(evaluation_table(output))
    return output


def starting_from(config: Config, checkpoint: Path | None, notes: Console) -> Config:
    """The file with the weights of `checkpoint` (see `insitu.runs.checkpoints`) as those of its llms of _type policy.

    Prints to `notes` which weights those are, unless `checkpoint` is their folder.
    """
    if checkpoint is None:
        return config
    name = config.finetuning.trainer_adapter
    if name is None or not _serves_policy(config):
        raise ConfigError("--checkpoint is for llms of _type policy; this file has none, or names no trainer adapter")
    weights = find_checkpoint(config, checkpoint, "--checkpoint")
    block = config.block(TRAINER_ADAPTER, name)
    if weights.folder is not None and (not isinstance(block, TrainerAdapterConfig) or block.starts_from is None):
        raise ConfigError(f"--checkpoint: trainer_adapters.{name} does not start a backend (no model)")
    if weights.note is not None:
        Report(notes).note(f"checkpoint: {weights.folder or 'the initial weights'} ({weights.note})")
    if weights.folder is None:
        return config
    return changed_config(config, {(TRAINER_ADAPTER.section, name, "model"): str(weights.folder)})


def _serves_policy(config: Config) -> bool:
    return any(config.block(LLM, name).type == "policy" for name in config.names(LLM))


@asynccontextmanager
async def serve_policy(builder: Builder) -> AsyncIterator[None]:
    """Serves the model under training without training it, if the file has an llm of `_type: policy`."""
    finetuning = builder.config.finetuning
    if not finetuning.trainer_adapter or not _serves_policy(builder.config):
        yield
        return
    adapter = await builder.get_trainer_adapter(finetuning.trainer_adapter)
    with TemporaryDirectory(prefix="insitu-") as scratch:
        await adapter.initialize(finetuning.model_copy(update={"output_dir": Path(scratch)}))
        try:
            async with watched(adapter):
                yield
        finally:
            await builder.aclose()


@asynccontextmanager
async def watched(adapter: Any, run: RunState | None = None) -> AsyncIterator[None]:
    """Cancels the body and raises the adapter's error once its backend is lost, which `run` gets to know first."""
    if not isinstance(adapter, TrainerAdapter):  # a plugin's, which implements only the documented methods
        yield
        return
    watcher = asyncio.create_task(adapter.watch(), name="watch the backend")

    def lost() -> BaseException | None:
        return watcher.exception() if watcher.done() and not watcher.cancelled() else None

    def expire(_: asyncio.Task[None]) -> None:
        if (error := lost()) is not None:
            if run is not None:
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
