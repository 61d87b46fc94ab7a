"""Runs a file: builds the components, drives the trainer, and cleans up."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from insitu.builder import Builder
from insitu.collect.collector import executor_of
from insitu.collect.datasets import dataset_config, load_dataset
from insitu.collect.episodes import ResultPath
from insitu.collect.event_loop import run_async
from insitu.collect.shared_run import RunState, share
from insitu.collect.validation import held_out_config
from insitu.config import Config, load_config
from insitu.errors import (
    ConfigError,
    InsituError,
    JobFailed,
    PluginError,
    TrajectoryError,
    describe_error,
)
from insitu.registry import EVALUATOR, TRAJECTORY_BUILDER, not_found
from insitu.runs.files import RUN_FILES
from insitu.schemas.finetuning import (
    FinetuneConfig,
    FinetuneRunConfig,
    TrainingJobStatus,
    TrainingStatusEnum,
    ValidationConfig,
)
from insitu.training.interfaces import ResumableAdapter, ResumableTrainer, SingleJobTrainer, Trainer, TrainerAdapter
from insitu.training.serving import check_open_files, watched
from insitu.training.trackers import check_trackers, reported
from insitu.workflow.policy_names import check_model_names

logger = logging.getLogger(__name__)


async def run_finetuning(runner: Trainer) -> list[TrainingJobStatus]:
    """Runs an initialized trainer for its configured epochs and returns the status of each epoch that trained.

    A trainer may return None for an epoch that trained nothing. Raises JobFailed if a job did not complete, unless it
    is still running and the trainer does not wait for its jobs. Raises TrajectoryError if no epoch trained anything.
    """
    epochs = runner.run_config.num_epochs
    accepted = {TrainingStatusEnum.COMPLETED}
    if isinstance(runner, SingleJobTrainer):
        accepted |= {TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING}
    asked = runner.run_config.run_configuration
    if isinstance(runner, ResumableTrainer) and asked is not None and asked.resume:
        returned = await runner.resume(epochs)
    else:
        returned = await runner.run(epochs)
    if not isinstance(returned, list | tuple) or not all(isinstance(s, TrainingJobStatus | None) for s in returned):
        raise PluginError(f"{type(runner).__name__}.run returned {returned!r:.200}, not a list of TrainingJobStatus")
    statuses = [status for status in returned if status is not None]
    for status in statuses:
        if status.status not in accepted:
            raise JobFailed(
                f"training job {returned.index(status) + 1} of {len(returned)} (run {status.run_id}, backend "
                f"{status.backend}) is {status.status.value}: {status.message or 'no reason given'}"
            )
    if not statuses:
        raise TrajectoryError(f"no epoch trained anything: {type(runner).__name__}.run({epochs}) returned no status")
    if not isinstance(runner, SingleJobTrainer) and len(statuses) < epochs:
        logger.warning("%d of %d epochs trained nothing", epochs - len(statuses), epochs)
    return statuses


async def finetuning_main(run_config: FinetuneRunConfig, console: Console | None = None) -> list[TrainingJobStatus]:
    """The command `finetune`, from the file to the last status. Always calls the trainer's `cleanup`.

    Prints progress to `console`, standard output by default.
    Raises if a job failed, nothing was trained, or a validation failed.
    """
    config = await prepared(run_config)
    finetuning = config.finetuning
    async with (
        ready_run(config, finetuning, console) as ready,
        reported(finetuning.report_to, Path(finetuning.output_dir)),
    ):
        statuses = await run_finetuning(ready.trainer)
    _check_validations(ready.state, config)
    return statuses


class ReadyRun(NamedTuple):
    """The live parts of a run that is ready for its first epoch."""

    state: RunState
    builder: Builder
    trainer: Trainer
    adapter: Any


@asynccontextmanager
async def ready_run(
    config: Config, finetuning: FinetuneConfig, console: Console | None = None
) -> AsyncIterator[ReadyRun]:
    """Builds and initializes the components of a prepared file, and always calls the trainer's `cleanup`.

    `finetuning` is the file's section, or a copy with another `output_dir`. Raises the error of a backend that is lost.
    """
    async with Builder(config, console=console) as builder:
        with share(builder) as state:
            trainer, adapter = await _components(config, builder)
            async with _cleaned_up(trainer, f"trainers.{finetuning.trainer}"):
                await trainer.initialize(finetuning)
                if isinstance(adapter, TrainerAdapter):
                    state.wait_for_policy = adapter.wait_until_reachable
                    builder.trained_policy = await adapter.policy_endpoint()
                    asked = finetuning.run_configuration
                    check_model_names(builder, asked.endpoint if asked is not None else None)
                async with watched(adapter):
                    yield ReadyRun(state, builder, trainer, adapter)


async def check_run(run_config: FinetuneRunConfig) -> Config:
    """Checks what `finetune` checks before it starts anything; a file that does not train is only read.

    Raises ConfigError or PluginError.
    """
    config = load_config(run_config.config_file, run_config.override)
    if not config.finetuning.enabled:
        return config
    config = await prepared(run_config.model_copy(update={"config_file": config, "override": ()}))
    async with Builder(config) as builder:
        with share(builder):
            await _components(config, builder)
    return config


async def prepared(run_config: FinetuneRunConfig) -> Config:
    """The file with the options of the command line; raises ConfigError if its inputs cannot be used."""
    config = load_config(run_config.config_file, run_config.override)
    check_ready(config)
    check_trackers(config.finetuning.report_to)
    if isinstance(run_config.resume, Path):
        if not any((run_config.resume / name).exists() for name in RUN_FILES):
            raise ConfigError(f"--resume: {run_config.resume} holds no run that can continue")
        config.finetuning.output_dir = run_config.resume
    config.finetuning.validation = _validation(config, run_config)
    config.finetuning.run_configuration = _run_configuration(config, run_config)
    check_open_files(config)
    await _check_inputs(config, run_config)
    return config


async def _components(config: Config, builder: Builder) -> tuple[Trainer, Any]:
    """The trainer, bound to the two components it drives, and its adapter; building them starts nothing."""
    finetuning = config.finetuning
    trajectory_builder = await builder.get_trajectory_builder(str(finetuning.trajectory_builder))
    adapter = await builder.get_trainer_adapter(str(finetuning.trainer_adapter))
    trainer = await builder.get_trainer(str(finetuning.trainer), trajectory_builder, adapter)
    asked = finetuning.run_configuration
    if asked is not None and asked.resume:
        names = {f"trainers.{finetuning.trainer}": trainer, f"trainer_adapters.{finetuning.trainer_adapter}": adapter}
        for name, component in names.items():
            if not _continues_runs(component):
                raise ConfigError(f"--resume: {name} ({type(component).__name__}) cannot continue a run")
    return trainer, adapter


def _continues_runs(component: Any) -> bool:
    """A trainer that overrides `run` has to override `resume`, too."""
    if not isinstance(component, ResumableTrainer):
        return isinstance(component, ResumableAdapter)
    resumes, runs = (next(c for c in type(component).__mro__ if name in vars(c)) for name in ("resume", "run"))
    return issubclass(resumes, runs)


@asynccontextmanager
async def _cleaned_up(trainer: Trainer, where: str) -> AsyncIterator[None]:
    """Always runs cleanup without masking an earlier error."""
    try:
        with _naming(where):
            yield
    except BaseException:  # re-raised
        try:
            await trainer.cleanup()
        except Exception as error:  # must not mask the first error
            logger.warning("%s: cleanup also failed: %s", where, describe_error(error))
        raise
    with _naming(f"{where}: cleanup"):
        await trainer.cleanup()


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turns foreign exceptions into a PluginError that names the component."""
    try:
        yield
    except InsituError:
        raise
    except Exception as error:  # a plugin's code may raise anything
        if isinstance(error, OSError) and error.errno is not None:
            raise  # its message is complete
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


def run_finetuning_sync(run_config: FinetuneRunConfig, console: Console | None = None) -> list[TrainingJobStatus]:
    """`finetuning_main` for callers without an event loop."""
    return run_async(finetuning_main(run_config, console))


def check_ready(config: Config) -> None:
    """Raises ConfigError if training is not enabled."""
    if not config.finetuning.enabled:
        raise ConfigError(f"{config.source}: finetuning.enabled is false; set it to true to train")


async def _check_inputs(config: Config, request: FinetuneRunConfig) -> None:
    """Raises for bad inputs before an earlier run is moved aside and a backend is started."""
    ResultPath.parse(request.result_json_path)
    builder = config.blocks.get((TRAJECTORY_BUILDER.section, str(config.finetuning.trajectory_builder)))
    if getattr(builder, "episodes_from", None) is None:
        load_dataset(config, request.dataset)
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
    async with Builder(config) as components:
        await (await executor_of(components, request)).check(components)


def _validation(config: Config, request: FinetuneRunConfig) -> ValidationConfig | None:
    """The file's `finetuning.validation`, overridden by the command line."""
    given = request.model_dump(include=request.model_fields_set)
    names = ("dataset", "interval", "config_file")
    options = {key: value for key in names if (value := given.get(f"validation_{key}")) is not None}
    in_file = config.finetuning.validation
    if in_file is None:
        if options.keys() == {"interval"}:
            raise ConfigError(
                "finetuning.validation.interval given without finetuning.validation.dataset (--validation_dataset)"
            )
        return ValidationConfig(**options) if options else None
    return in_file.model_copy(update=options)


def _run_configuration(config: Config, request: FinetuneRunConfig) -> FinetuneRunConfig:
    """The command line completed by the file's `finetuning.validation`: plugins' trainers read either."""
    validation = config.finetuning.validation
    if validation is None:
        return request
    rows = validation.dataset
    if rows is None:
        held_out = held_out_config(config)
        rows = held_out.find_path(dataset_config(held_out).file_path, "validation: eval.general.dataset.file_path")
    return request.model_copy(
        update={
            "validation_dataset": rows,
            "validation_interval": validation.interval,
            "validation_config_file": validation.config_file,
        }
    )
