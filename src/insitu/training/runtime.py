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
from insitu.collect.evaluation import held_out_config
from insitu.collect.event_loop import run_async
from insitu.collect.shared_run import RunState, share
from insitu.config import Config, requested_config
from insitu.errors import ConfigError, InsituError, JobFailed, PluginError, TrajectoryError, describe_error
from insitu.registry import EVALUATOR, TRAJECTORY_BUILDER, not_found
from insitu.runs.files import holds_run
from insitu.schemas.finetuning import FinetuneRunConfig, TrainingJobStatus, TrainingStatusEnum
from insitu.training.interfaces import ResumableAdapter, ResumableTrainer, SingleJobTrainer, Trainer, TrainerAdapter
from insitu.training.serving import check_open_files, watched
from insitu.training.trackers import check_trackers, reported
from insitu.workflow.llms import check_model_names

logger = logging.getLogger(__name__)


async def run_finetuning(runner: Trainer, resume: bool = False) -> list[TrainingJobStatus]:
    """Runs or resumes an initialized trainer for its epochs and returns the status of each epoch that trained.

    A trainer may return None for an epoch that trained nothing. Raises JobFailed if a job did not complete, unless it
    is still running and the trainer does not wait for its jobs. Raises TrajectoryError if no epoch trained anything.
    """
    epochs = runner.run_config.num_epochs
    accepted = {TrainingStatusEnum.COMPLETED}
    if isinstance(runner, SingleJobTrainer):
        accepted |= {TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING}
    run = runner.resume if resume and isinstance(runner, ResumableTrainer) else runner.run
    returned = await run(epochs)
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
    config, request = await prepared(run_config)
    finetuning = config.finetuning
    async with (
        ready_run(config, request, console) as ready,
        reported(finetuning.report_to, Path(finetuning.output_dir)),
    ):
        statuses = await run_finetuning(ready.trainer, resume=bool(request.resume))
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
    config: Config, request: FinetuneRunConfig, console: Console | None = None, output_dir: Path | None = None
) -> AsyncIterator[ReadyRun]:
    """Builds and initializes the components of a prepared file, and always calls the trainer's `cleanup`.

    They write into `output_dir` instead of the file's, if it is given. Raises the error of a backend that is lost.
    """
    section = {"run_configuration": request, "output_dir": output_dir or config.finetuning.output_dir}
    async with Builder(config, console=console, request=request) as builder:
        with share(builder) as state:
            trainer, adapter = await _bound_components(builder)
            async with _cleaned_up(trainer, f"trainers.{config.finetuning.trainer}"):
                await trainer.initialize(config.finetuning.model_copy(update=section))
                if isinstance(adapter, TrainerAdapter):
                    state.wait_for_policy = adapter.wait_until_reachable
                    builder.trained_policy = await adapter.policy_endpoint()
                    check_model_names(builder, request.endpoint)
                async with watched(adapter, state):
                    yield ReadyRun(state, builder, trainer, adapter)


async def check_run(run_config: FinetuneRunConfig) -> Config:
    """Checks what `finetune` checks before it starts anything; a file that does not train is only read.

    Raises ConfigError or PluginError.
    """
    config = requested_config(run_config)
    if config.finetuning.enabled:
        config, request = await prepared(run_config, config)
        async with Builder(config, request=request) as builder:
            with share(builder):
                await _bound_components(builder)
    return config


async def prepared(request: FinetuneRunConfig, config: Config | None = None) -> tuple[Config, FinetuneRunConfig]:
    """The checked file and the request, completed for plugins' trainers by the file's `finetuning.validation`.

    Raises ConfigError if their inputs cannot be used.
    """
    config = config or requested_config(request)
    if not config.finetuning.enabled:
        raise ConfigError(f"{config.source}: finetuning.enabled is false; set it to true to train")
    check_trackers(config.finetuning.report_to)
    if isinstance(request.resume, Path) and not holds_run(request.resume):
        raise ConfigError(f"--resume: {request.resume} holds no run that can continue")
    completed = _with_validation(request, config)
    check_open_files(config)
    await check_inputs(config, request)
    return config, completed


async def _bound_components(builder: Builder) -> tuple[Trainer, Any]:
    """The trainer, bound to the two components it drives, and its adapter; building them starts nothing."""
    finetuning, request = builder.config.finetuning, builder.request
    trajectory_builder = await builder.get_trajectory_builder(str(finetuning.trajectory_builder))
    adapter = await builder.get_trainer_adapter(str(finetuning.trainer_adapter))
    trainer = await builder.get_trainer(str(finetuning.trainer), trajectory_builder, adapter)
    if request is not None and request.resume:
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


async def check_inputs(config: Config, request: FinetuneRunConfig) -> None:
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


def _with_validation(request: FinetuneRunConfig, config: Config) -> FinetuneRunConfig:
    validation = config.finetuning.validation
    if validation is None:
        return request
    rows = validation.dataset
    if rows is None:
        held_out = held_out_config(config)
        rows = held_out.find_path(dataset_config(held_out).file_path, "validation: eval.general.dataset.file_path")
    values = {"dataset": rows, "interval": validation.interval, "config_file": validation.config_file}
    return request.model_copy(update={f"validation_{name}": value for name, value in values.items()})
