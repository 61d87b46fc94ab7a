"""From a file to a finished run: builds the components, drives the trainer, and takes everything down again."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, TypeVar

from insitu.builder import Builder, RunState
from insitu.config import Config, load_config
from insitu.errors import ConfigError, InsituError, JobFailed, PluginError, TrajectoryError, describe_error
from insitu.evaluation.datasets import load_dataset
from insitu.evaluation.remote import RemoteWorkflow
from insitu.evaluation.result_path import ResultPath
from insitu.evaluation.shared_run import share
from insitu.evaluation.validation import held_out_config
from insitu.gateway.programs import kill_programs
from insitu.interfaces import Trainer
from insitu.registry import EVALUATOR, LLM, TRAINER_ADAPTER, not_found
from insitu.schemas.finetuning import FinetuneRunConfig, TrainingJobStatus, TrainingStatusEnum, ValidationConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_THREADS = 1024
"""For what waits: a thread is made when none is idle. asyncio's own limit goes by the CPUs, 6 threads for two."""


async def run_finetuning(runner: Trainer) -> list[TrainingJobStatus]:
    """Run an initialized trainer for its configured epochs; the status of each epoch that trained.

    Raises JobFailed if a job did not complete, TrajectoryError if no epoch trained anything. A None among what the
    trainer gives stands for an epoch that trained nothing.
    """
    epochs = runner.run_config.num_epochs
    given = await runner.run(epochs)
    if not isinstance(given, list | tuple) or not all(isinstance(s, TrainingJobStatus | None) for s in given):
        raise PluginError(f"{type(runner).__name__}.run gave {given!r:.200}; it must give a list of TrainingJobStatus")
    statuses = [status for status in given if status is not None]
    for status in statuses:
        if status.status is not TrainingStatusEnum.COMPLETED:
            raise JobFailed(
                f"training job {given.index(status) + 1} of {len(given)} (run {status.run_id}, backend "
                f"{status.backend}) is {status.status.value}: {status.message or 'no reason given'}"
            )
    if not statuses:
        raise TrajectoryError(f"no epoch trained anything: {type(runner).__name__}.run({epochs}) gave no job's status")
    if len(statuses) < epochs:
        logger.warning("%d of %d epochs trained nothing", epochs - len(statuses), epochs)
    return statuses


async def finetuning_main(run_config: FinetuneRunConfig) -> list[TrainingJobStatus]:
    """The command `finetune`: everything from the file to the last status. `cleanup` is called whatever happens.

    Raises if a job failed, nothing was trained, or a validation could not be run.
    """
    config = load_config(run_config.config_file, run_config.override)
    check_ready(config)
    finetuning = config.finetuning
    finetuning.validation = _validation(config, run_config)
    finetuning.run_configuration = _run_configuration(config, run_config)
    await _check_inputs(config, run_config)
    async with Builder(config) as builder:
        with share(builder) as run:
            trajectory_builder = await builder.get_trajectory_builder(str(finetuning.trajectory_builder))
            adapter = await builder.get_trainer_adapter(str(finetuning.trainer_adapter))
            trainer = await builder.get_trainer(str(finetuning.trainer), trajectory_builder, adapter)
            async with _cleaned_up(trainer, f"trainers.{finetuning.trainer}"):
                await trainer.initialize(finetuning)
                statuses = await run_finetuning(trainer)
    _check_validations(run, config)
    return statuses


@asynccontextmanager
async def _cleaned_up(trainer: Trainer, where: str) -> AsyncIterator[None]:
    """Calls `cleanup` in the end, never in place of an error that came before it. What a plugin raises is told."""
    try:
        with _told(where):
            yield
    except BaseException:  # whatever ended it is raised again
        try:
            await trainer.cleanup()
        except Exception as error:  # a plugin's: the first error is the one to be told
            logger.warning("%s: cleanup failed too: %s", where, describe_error(error))
        raise
    with _told(f"{where}: cleanup"):
        await trainer.cleanup()


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Makes what a plugin raises into a PluginError that says where."""
    try:
        yield
    except InsituError:
        raise
    except Exception as error:  # a plugin's code may raise anything
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's sentence says it all
        logger.debug("%s failed", where, exc_info=error)
        raise PluginError(f"{where}: {describe_error(error)}") from error


def _check_validations(run: RunState, config: Config) -> None:
    """Raises if a validation failed and the trainer ignored it; warns if the trainer never validated."""
    if failed := run.failed_validations:
        raise InsituError(f"{len(failed)} validation(s) failed; the first, {failed[0]}")
    finetuning = config.finetuning
    validation = finetuning.validation
    if validation is not None and not run.validations:
        logger.warning(
            "validation on %s is configured, but trainers.%s never ran it", validation.dataset, finetuning.trainer
        )


def run_finetuning_sync(run_config: FinetuneRunConfig) -> list[TrainingJobStatus]:
    """`finetuning_main` for callers without an event loop."""
    return run_async(finetuning_main(run_config))


@asynccontextmanager
async def serve_policy(config: Config, builder: Builder, checkpoint: Path | None = None) -> AsyncIterator[None]:
    """Serve the model under training for a run without training, if the file has an llm of _type policy.

    Its starting weights, or those of the folder `checkpoint`.
    """
    policies = [name for name in config.names(LLM) if config.block(LLM, name).type == "policy"]
    adapter_name = config.finetuning.trainer_adapter
    if policies and adapter_name:
        block = config.block(TRAINER_ADAPTER, adapter_name)
        if checkpoint is not None:
            if getattr(block, "model", None) is None:
                raise ConfigError(
                    f"--checkpoint: trainer_adapters.{adapter_name} starts no backend of its own (no model)"
                )
            block.model = str(config.find_path(checkpoint, "--checkpoint"))  # type: ignore[attr-defined]
        adapter = await builder.get_trainer_adapter(adapter_name)
        with TemporaryDirectory(prefix="insitu-") as scratch:
            await adapter.initialize(config.finetuning.model_copy(update={"output_dir": Path(scratch)}))
            try:
                yield
            finally:
                await builder.aclose()
        return
    if checkpoint is not None:
        raise ConfigError("--checkpoint is for llms of _type policy; this file has none, or names no trainer adapter")
    yield


def check_ready(config: Config) -> None:
    """ConfigError if the file does not ask for training."""
    if not config.finetuning.enabled:
        raise ConfigError(f"{config.source}: finetuning.enabled is false; set it to true to train")


async def _check_inputs(config: Config, asked: FinetuneRunConfig) -> None:
    """Raise for what would only be found later, when an earlier run has been moved aside and a backend started."""
    ResultPath.parse(asked.result_json_path)
    load_dataset(config, asked.dataset)
    if config.finetuning.validation is not None:
        held_out, reward = held_out_config(config), config.finetuning.reward_function
        try:
            load_dataset(held_out, config.finetuning.validation.dataset)
        except ConfigError as error:
            raise ConfigError(f"validation: {error}") from error
        if reward is not None and reward.name not in held_out.names(EVALUATOR):
            raise ConfigError(
                not_found(
                    f"{held_out.source}: the evaluator that gives the reward,", reward.name, held_out.names(EVALUATOR)
                )
            )
    if asked.endpoint is not None:
        async with RemoteWorkflow(asked.endpoint, asked.endpoint_timeout) as remote:
            await remote.check(config.trained_llms())


def _validation(config: Config, asked: FinetuneRunConfig) -> ValidationConfig | None:
    """The file's `finetuning.validation`, with what the command line says in its place."""
    given = {k: getattr(asked, k) for k in asked.model_fields_set}
    options: dict[str, Any] = {
        "dataset": given.get("validation_dataset"),
        "interval": given.get("validation_interval"),
        "config_file": given.get("validation_config_file"),
    }
    options = {k: v for k, v in options.items() if v is not None}
    in_file = config.finetuning.validation
    if in_file is None:
        if options and "dataset" not in options:
            keys = " and ".join(f"finetuning.validation.{key}" for key in options)
            raise ConfigError(f"{keys} given without finetuning.validation.dataset (--validation_dataset)")
        return ValidationConfig(**options) if options else None
    return in_file.model_copy(update=options)


def _run_configuration(config: Config, asked: FinetuneRunConfig) -> FinetuneRunConfig:
    """The command line, with the file's `finetuning.validation` where it does not say otherwise: trainers read both."""
    validation = config.finetuning.validation
    if validation is None:
        return asked
    return asked.model_copy(
        update={
            "validation_dataset": validation.dataset,
            "validation_interval": validation.interval,
            "validation_config_file": validation.config_file,
        }
    )


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it is installed: half the cost of a request on the client's side.

    Agents that block run in threads, as many at once as there are episodes at once.

    Ctrl-C and SIGTERM end it: everything is taken down, then KeyboardInterrupt is raised. The second of them ends the
    process at once, for the first cannot be heard while a workflow blocks the event loop.
    """

    async def stoppable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, "insitu"))
        asked = False

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            if asked:
                os.write(sys.stderr.fileno(), b"interrupted\n")
                kill_programs()
                os._exit(130)  # a backend of ours ends by itself when this process is gone
            asked = True
            loop.call_soon_threadsafe(task.cancel)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, stop)
            signal.signal(signal.SIGTERM, stop)
        return await main

    try:
        import uvloop
    except ModuleNotFoundError:
        run = asyncio.run
    else:
        run = uvloop.run
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run(stoppable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
