"""From a file to its live components: trains with them, evaluates or serves the model without training it."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from insitu.builder import Builder
from insitu.collect.datasets import find_dataset, load_dataset
from insitu.collect.episodes import LocalExecutor, executor_of
from insitu.collect.evaluation import EvaluationRun, held_out_config
from insitu.collect.evaluators import check_rows
from insitu.collect.shared_run import RunState, share
from insitu.config import Config, changed_config, requested_config
from insitu.disk.files import check_writable
from insitu.disk.temporary import temporary_folder
from insitu.errors import (
    ConfigError,
    InsituError,
    JobFailed,
    PluginError,
    TrajectoryError,
    describe_error,
    foreign_errors,
    not_found,
)
from insitu.runs.checkpoints import find_checkpoint
from insitu.runs.files import holds_run
from insitu.runs.monitor import MonitorPort
from insitu.runs.reader import RunReader
from insitu.runs.store import OUTPUT_DIR
from insitu.schemas.components import writable
from insitu.schemas.evaluation import EvalInputItem, EvaluationRunConfig, EvaluationRunOutput, EvaluatorBaseConfig
from insitu.schemas.finetuning import (
    FinetuneRunConfig,
    TrainerAdapterConfig,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryBuilderConfig,
)
from insitu.schemas.kinds import EVALUATOR, TRAINER, TRAINER_ADAPTER, TRAJECTORY_BUILDER
from insitu.training.checks import check_model, check_sampling, check_servers, check_token_bridge
from insitu.training.interfaces import ResumableAdapter, ResumableTrainer, SingleJobTrainer, Trainer, TrainerAdapter
from insitu.training.jobs import watched
from insitu.training.loop import LoopTrainer
from insitu.training.memory_plan import MemoryPlan, check_memory
from insitu.training.report import Report, evaluation_table
from insitu.training.trackers import check_trackers, reported
from insitu.wire.json_values import json_form, json_path
from insitu.wire.open_files import raise_file_limit
from insitu.wire.redaction import results_console
from insitu.workflow.event_loop import run_async
from insitu.workflow.llms import check_model_names

logger = logging.getLogger(__name__)
Statuses = list[TrainingJobStatus]


async def run_finetuning(runner: Trainer, resume: bool = False, epochs: int | None = None) -> Statuses:
    """Runs or resumes an initialized trainer for its `epochs` and returns the status of each epoch that trained.

    A trainer may return None for an epoch that trained nothing. Raises JobFailed if a job did not complete, unless it
    is still running and the trainer does not wait for its jobs. Raises TrajectoryError if no epoch trained anything.
    """
    epochs = epochs or runner.run_config.num_epochs
    accepted = {TrainingStatusEnum.COMPLETED}
    if isinstance(runner, SingleJobTrainer):
        accepted |= {TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING}
    run = runner.resume if resume and isinstance(runner, ResumableTrainer) else runner.run
    returned = await asyncio.create_task(run(epochs), name="train")  # what it awaits does not pass through here
    if not isinstance(returned, list | tuple) or [s for s in returned if not isinstance(s, TrainingJobStatus | None)]:
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
    if not isinstance(runner, SingleJobTrainer) and not runner.ended_early and len(statuses) < epochs:
        logger.warning("%d of %d epochs trained nothing", epochs - len(statuses), epochs)
    return statuses


async def finetuning_main(run_config: FinetuneRunConfig | Config, console: Console | None = None) -> Statuses:
    """The command `finetune`, from the file (or what was checked of it) to the last status, with `cleanup`.

    Prints progress to `console`, standard output by default. A run that is complete already is not continued.
    Raises if a job failed, nothing was trained, or a validation failed.
    """
    request = FinetuneRunConfig(config_file=run_config) if isinstance(run_config, Config) else run_config
    config, request = await prepared(request)
    finetuning = config.finetuning
    folder = config.run_dir
    progress = RunReader(folder).progress() if request.resume else None
    if progress is not None and progress.is_complete(finetuning.num_epochs, finetuning.validation):
        done = f"run {progress.run_id} in {folder} is complete after epoch {progress.epoch}"
        if progress.epoch < finetuning.num_epochs:
            done += f" of {finetuning.num_epochs}: its held-out score had not improved any more"
        Report(console or results_console()).note(done)
        return []
    with MonitorPort(config.general.metrics_host, config.general.metrics_port, folder) as port:
        async with (
            ready_run(config, request, console) as ready,
            reported(finetuning.followers, folder),
            port.serving() as url,
        ):
            if url is not None:
                Report(ready.builder.console).note(f"metrics: {url}/metrics")
            statuses = await run_finetuning(ready.trainer, bool(request.resume), finetuning.num_epochs)
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
    section = {"run_configuration": request, "output_dir": output_dir or config.run_dir}
    async with Builder(config, console=console, request=request) as builder:
        with share(builder) as state:
            # the doctor plays the file, whatever it says
            trainer, adapter = await _bound_components(builder, checked=output_dir is None)
            if isinstance(adapter, TrainerAdapter):
                check_memory(adapter.memory_plan(), free=True)
                state.needs = adapter.needs
            async with _cleaned_up(trainer, f"trainers.{config.finetuning.trainer}"):
                await trainer.initialize(writable(config.finetuning.model_copy(update=section)))
                if isinstance(adapter, TrainerAdapter):
                    state.wait_for_policy = adapter.wait_until_reachable
                    builder.trained_policy = await adapter.policy_endpoint()
                    check_model_names(builder)
                async with watched(adapter, state):
                    yield ReadyRun(state, builder, trainer, adapter)


async def check_run(run_config: FinetuneRunConfig) -> tuple[Config, MemoryPlan | None]:
    """Checks what `finetune` checks before it starts anything; of a file that does not train, it and its rows.

    Raises ConfigError or PluginError.
    """
    config, memory = requested_config(run_config), None
    if config.finetuning.enabled:
        config, request = await prepared(run_config, config)
        async with Builder(config, request=request) as builder:
            with share(builder):
                _, adapter = await _bound_components(builder)
                memory = check_memory(adapter.memory_plan() if isinstance(adapter, TrainerAdapter) else None)
    elif run_config.dataset is not None or config.eval.dataset is not None:
        load_dataset(config, run_config.dataset)
    return config, memory


async def prepared(request: FinetuneRunConfig, config: Config | None = None) -> tuple[Config, FinetuneRunConfig]:
    """The checked file and the request, completed for plugins' trainers by the file's `finetuning.validation`.

    Raises ConfigError if their inputs cannot be used.
    """
    config = config or requested_config(request)
    if not config.finetuning.enabled:
        raise ConfigError(f"{config.source}: finetuning.enabled is false; set it to true to train")
    check_trackers(config)
    if isinstance(request.resume, Path) and not holds_run(request.resume):
        raise ConfigError(f"--resume: {request.resume} holds no run that can continue")
    completed = _with_validation(request, config)
    check_writable(config.run_dir, OUTPUT_DIR)
    raise_file_limit()
    await check_inputs(config, request)
    return config, completed


async def _bound_components(builder: Builder, *, checked: bool = True) -> tuple[Trainer, Any]:
    """The trainer, bound to the two components it drives, and its adapter; building them starts nothing."""
    finetuning, request = builder.config.finetuning, builder.request
    trajectory_builder = await builder.get_trajectory_builder(str(finetuning.trajectory_builder))
    try:
        adapter = await builder.get_trainer_adapter(str(finetuning.trainer_adapter))
    except ConfigError as error:
        raise await _with_next(error, builder) from error
    trainer = await builder.get_trainer(str(finetuning.trainer), trajectory_builder, adapter)
    if request is not None and request.resume:
        names = {f"trainers.{finetuning.trainer}": trainer, f"trainer_adapters.{finetuning.trainer_adapter}": adapter}
        for name, component in names.items():
            if not _continues_runs(component):
                raise ConfigError(f"--resume: {name} ({type(component).__name__}) cannot continue a run")
    if checked:
        for check in (check_sampling, check_token_bridge, check_validation):
            check(trainer, builder.config)
        await check_servers(trainer, builder.config)
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
        with foreign_errors(PluginError, where, pass_os_errors=True):
            yield
    except BaseException:  # re-raised
        try:
            await trainer.cleanup()
        except Exception as error:  # must not mask the first error
            logger.warning("%s: cleanup also failed: %s", where, describe_error(error))
        raise
    with foreign_errors(PluginError, f"{where}: cleanup", pass_os_errors=True):
        await trainer.cleanup()


def check_validation(trainer: Trainer, config: Config) -> None:
    """Raises ConfigError for settings of validations that a trainer without the built-in loop would not use."""
    validation = config.finetuning.validation
    if validation is None or (isinstance(trainer, LoopTrainer) and not isinstance(trainer, SingleJobTrainer)):
        return
    for key, default in (("patience", "none"), ("beside", "false")):
        if value := getattr(validation, key):
            problem = f"finetuning.validation.{key} is {str(value).lower()}"
            raise ConfigError(f"{problem}, but {trainer.trainer_config.type} does not support it; allowed: {default}")


def _check_validations(run: RunState, config: Config) -> None:
    """Raises if a validation failed and the trainer ignored it; warns if the trainer never validated."""
    if failed := run.failed_validations:
        raise InsituError(f"{len(failed)} validation(s) failed; the first, {failed[0]}")
    validation, trainer = config.finetuning.validation, config.finetuning.trainer
    if validation is not None and not run.validations:
        logger.warning("validation on %s is configured, but trainers.%s never ran it", validation.dataset, trainer)


def run_finetuning_sync(run_config: FinetuneRunConfig | Config, console: Console | None = None) -> Statuses:
    """`finetuning_main` for callers without an event loop."""
    return run_async(finetuning_main(run_config, console))


async def check_inputs(config: Config, request: FinetuneRunConfig) -> None:
    """Raises for bad inputs before an earlier run is moved aside and a backend is started."""
    json_path(request.result_json_path, "result_json_path")
    builder = config.blocks.get((TRAJECTORY_BUILDER.section, str(config.finetuning.trajectory_builder)))
    rows: list[EvalInputItem] = []
    if not isinstance(builder, TrajectoryBuilderConfig) or builder.needs_dataset:
        rows = load_dataset(config, request.dataset)
    check_rows(config, rows)
    if config.finetuning.validation is not None:
        held_out, reward = held_out_config(config), config.finetuning.reward_function
        try:
            held_out_rows = load_dataset(held_out, config.finetuning.validation.dataset)
            check_rows(held_out, held_out_rows)
            _warn_of_seen(held_out_rows, rows)
        except ConfigError as error:
            raise ConfigError(f"validation: {error}") from error
        if reward is not None and reward.evaluator not in (names := held_out.names(EVALUATOR)):
            what = f"{held_out.source}: the evaluator that gives the reward,"
            sign = "-" * (reward.sign < 0)
            raise ConfigError(not_found(what, reward.name, [sign + name for name in names]))
    async with Builder(config, request=request) as components:
        executor = await executor_of(components, request)
        await executor.check(components)
        if rows and isinstance(executor, LocalExecutor):
            check_model(config)
        await check_parts(components)


def _warn_of_seen(held_out: Sequence[EvalInputItem], rows: Sequence[EvalInputItem]) -> None:
    """Warns of held-out rows that are trained, too."""
    trained = {json.dumps([row.input_obj, row.expected_output_obj], default=json_form) for row in rows}
    seen = [json.dumps([row.input_obj, row.expected_output_obj], default=json_form) in trained for row in held_out]
    if any(seen):
        logger.warning(
            "validation: %d of %d held-out rows are among the training rows: their score does not say what the model "
            "does with rows that it has not seen",
            sum(seen),
            len(seen),
        )


async def check_parts(builder: Builder, *, model: bool = True) -> None:
    """Raises ConfigError if an evaluator's code cannot score, or, with `model`, the backend could not start."""
    config, adapter = builder.config, builder.config.finetuning.trainer_adapter
    for name in config.names(EVALUATOR):
        block = config.block(EVALUATOR, name)
        if isinstance(block, EvaluatorBaseConfig):
            block.check_code(f"eval.evaluators.{name}", config.folder)
    if (
        model
        and adapter is not None
        and isinstance(block := config.block(TRAINER_ADAPTER, adapter), TrainerAdapterConfig)
    ):
        try:
            await asyncio.to_thread(block.check_model, builder)
        except ConfigError as error:
            raise await _with_next(error, builder) from error


async def _with_next(error: ConfigError, builder: Builder) -> ConfigError:
    """An error of the trainer adapter with what would be refused next, so that both are changed at once."""
    finetuning = builder.config.finetuning
    try:
        trajectories = await builder.get_trajectory_builder(str(finetuning.trajectory_builder))
        trajectories.check_trainer(await builder.get(TRAINER, str(finetuning.trainer)))
    except ConfigError as other:
        return ConfigError(f"{other}\n{error}")
    return error


def _with_validation(request: FinetuneRunConfig, config: Config) -> FinetuneRunConfig:
    if (validation := config.finetuning.validation) is None:
        return request
    rows = validation.dataset if validation.dataset is not None else find_dataset(held_out_config(config)).file
    values = {"dataset": rows, "interval": validation.interval, "config_file": validation.config_file}
    completed = request.model_copy(update={f"validation_{name}": value for name, value in values.items()})
    completed.model_fields_set.intersection_update(request.model_fields_set)  # what was given is still told apart
    return completed


async def evaluation_main(
    run_config: EvaluationRunConfig, checkpoint: Path | None, console: Console, notes: Console
) -> EvaluationRunOutput:
    """The command `eval`: serves the policy, runs the workflow on the rows and scores it, and prints a table."""
    config = requested_config(run_config)
    raise_file_limit()
    report = Report(console)
    rows = load_dataset(config, run_config.dataset, run_config.skip_workflow or run_config.skip_completed_entries)
    total = sum(row.output_obj is None for row in rows) * run_config.reps
    if run_config.skip_workflow and checkpoint is not None:
        raise ConfigError("--checkpoint cannot be combined with --skip_workflow, which runs nothing")
    config = starting_from(config, checkpoint, notes)
    run_config = run_config.model_copy(update={"config_file": config, "override": ()})
    async with Builder(config) as builder:
        await check_parts(builder, model=config.serves_policy and not run_config.skip_workflow)
        run = EvaluationRun(run_config, builder, on_episode=lambda _: report.advance())
        async with nullcontext() if run_config.skip_workflow else serve_policy(builder):
            with report.phase("evaluating", total):
                output = await run.run_and_evaluate()
    console.print(evaluation_table(output, find_dataset(config, run_config.dataset).label))
    return output


def starting_from(config: Config, checkpoint: Path | None, notes: Console) -> Config:
    """The file with the weights of `checkpoint` (see `insitu.runs.checkpoints`) as those of its llms of _type policy.

    Prints to `notes` which weights those are, unless `checkpoint` is their folder.
    """
    if checkpoint is None:
        return config
    name = config.finetuning.trainer_adapter
    if name is None or not config.serves_policy:
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


@asynccontextmanager
async def serve_policy(builder: Builder) -> AsyncIterator[None]:
    """Serves the model under training without training it, if the file has an llm of `_type: policy`."""
    finetuning = builder.config.finetuning
    if not finetuning.trainer_adapter or not builder.config.serves_policy:
        yield
        return
    adapter = await builder.get_trainer_adapter(finetuning.trainer_adapter)
    async with temporary_folder() as scratch:
        await adapter.initialize(writable(finetuning.model_copy(update={"output_dir": scratch})))
        try:
            async with watched(adapter):
                yield
        finally:
            await builder.aclose()
