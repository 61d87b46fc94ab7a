"""A run as its trainer sees it: its folder and `run.json`, where it continues, its console, plot and figures.

Says what is wrong with an epoch, such as that every group was dropped.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from insitu import __version__
from insitu.advantages.estimator import EstimatedEpoch
from insitu.builder import Builder
from insitu.collect.datasets import find_dataset
from insitu.collect.evaluation import held_out_record, held_out_scoring
from insitu.collect.shared_run import RunState, UsesBuilder, builder_of_run, run_of
from insitu.config import Config
from insitu.config.resolved import code_of, options_of, overrides_of, resolved_config, without_secrets
from insitu.disk.model_files import downloaded, model_digest
from insitu.errors import InsituError, TrajectoryError, install_command
from insitu.preferences.pairs import ALIKE
from insitu.runs import files
from insitu.runs.reader import RunReader
from insitu.runs.records import RunProgress, new_run_id, training_records
from insitu.runs.resume import ResumableRun
from insitu.runs.store import RewardPlot, RunStore
from insitu.schemas.components import FunctionBaseConfig
from insitu.schemas.finetuning import FinetuneConfig, PolicyEndpoint, TrainerConfig, TrainingJobStatus
from insitu.training.checks import check_components
from insitu.training.interfaces import (
    GroupTrainer,
    PairTrainer,
    ResumableTrainer,
    SingleJobTrainer,
    Trainer,
    TrainerAdapter,
    TrajectoryBuilder,
)
from insitu.training.jobs import job_warnings, new_version
from insitu.training.metrics import (
    EpochResult,
    epoch_metrics,
    likely_causes,
    missing_step_rewards,
    one_answer,
    untrained_causes,
    without_variance,
)
from insitu.training.observers import Collected, FirstRewards
from insitu.training.report import Report, counts

_REWARDS = ("avg_reward", "min_reward", "max_reward", "num_trajectories")


class Run(ResumableRun):
    """What each built-in trainer has, and opens when it is initialized."""

    state: RunState
    """What its evaluations share; set by `open`."""

    def __init__(self, prefix: str) -> None:
        super().__init__(new_run_id(prefix))
        self.report = Report(Console(quiet=True))
        self.validations: list[dict[str, Any]] = []
        """`validation_history.json`."""
        self.results: dict[int, EpochResult] = {}
        self._plot: RewardPlot | None = None
        self._warnings: dict[int, list[str]] = {}
        self._says_one_answer = False
        self._causes: list[str] = []
        """Why the latest epoch that trained nothing had no variance."""

    @property
    def id(self) -> str:
        return self.progress.run_id

    async def open(self, trainer: Trainer, builder: Builder, run_config: FinetuneConfig) -> None:
        """Opens the folder, after an earlier run in it was moved aside unless it is continued."""
        folder, adapter = Path(run_config.output_dir), trainer.trainer_adapter
        self.state = run_of(builder)
        self.report = Report(builder.console)
        origin = await asyncio.to_thread(origin_of, builder, trainer.trajectory_builder, folder)
        self.report.notes(await asyncio.to_thread(self.open_folder, folder, builder, origin))
        self.store.keeps_token_ids = "token_ids" not in run_config.redact
        plan = adapter.memory_plan()
        starting = ["starting the backend ..."] * adapter.starts_backend
        self.report.notes([*([plan.summary()] if plan is not None else []), *starting])

    def draws_plot(self) -> None:
        """Has `draw` keep `reward_plot.png` up to date, if matplotlib is installed."""
        if find_spec("matplotlib") is None:
            self.report.note(f"no {files.PLOT}: matplotlib is not installed ({install_command('plots')})")
        else:
            self._plot = RewardPlot(self.store.path / files.PLOT)

    def check_code(self, settings: Mapping[str, Any]) -> None:
        """Reports code of the settings that has changed since the run was started; raises ConfigError unless forced."""
        self.report.notes(self.changed_code(settings))

    async def check_served(self, adapter: TrainerAdapter, *, trains_before: bool, epochs_ahead: int) -> None:
        """Raises BackendError or ConfigError if a run that continues needs weights that the backend does not have."""
        if self.continues:
            self.check_version(_version(await adapter.policy_endpoint()), warms_up=trains_before)
            self.check_versions(epochs_ahead)

    def _record_settings(self, trainer: Trainer, builder: Builder, settings: Mapping[str, Any]) -> None:
        """Writes `run.json`; of a run that continues, what has changed is in its events."""
        trajectories = trainer.trajectory_builder
        origin = origin_of(builder, trajectories, self.store.folder)
        planned = trajectories.episodes_per_epoch
        origin |= {"override": overrides_of(builder.request), "options": options_of(builder.request)}
        self.store.write(files.RUN, run_record(self.id, builder.config, planned, origin, settings))

    async def start(self, trainer: Trainer, builder: Builder, settings: Mapping[str, Any]) -> None:
        """Records the settings of a new run, and plays one row."""
        await asyncio.to_thread(self._record_settings, trainer, builder, settings)
        self.store.record_event("started", insitu=__version__)
        self.report.header(self.id, settings)
        endpoint = await trainer.trainer_adapter.policy_endpoint()
        await self.commit(run_id=self.id, policy_version=_version(endpoint))
        with self.report.phase("playing one row before the first epoch"):
            problem = await trainer.trajectory_builder.rehearse(self.id)
        if problem is not None:
            self.report.note(problem)

    @asynccontextmanager
    async def recorded(self, trainer: Trainer, builder: Builder, settings: Mapping[str, Any]) -> AsyncIterator[None]:
        """Records that the run has started or continues, and how the body, which is the run, has ended."""
        with self.recorded_end():
            if self.continues:
                self.continue_run()
                await asyncio.to_thread(self._record_settings, trainer, builder, settings)
            else:
                await self.start(trainer, builder, settings)
            yield

    def warn(self, epoch: int, problem: str) -> None:
        """Reports what is wrong with an epoch, and records it with its metrics."""
        self.report.note(f"epoch {epoch}: {problem}")
        self._warnings.setdefault(epoch, []).append(problem)

    def watches_rewards(self, trainer: Trainer, epoch: int) -> list[FirstRewards]:
        """An observer of the first epoch, if its episodes are compared by their rewards."""
        is_first = epoch == 1 and isinstance(trainer, GroupTrainer) and trainer.compares_episodes
        return [FirstRewards(self.report)] if is_first else []

    def note_errors(self, epoch: int, collected: Collected) -> None:
        """Warns of the most frequent errors of an epoch's episodes."""
        for error, count in collected.progress.errors.most_common(3):
            self.warn(epoch, f"{count} x {error}")

    def note_rewards(self, epoch: int, collected: Collected) -> None:
        """Adds the rewards of an epoch to `reward_history.json`."""
        self.rewards.append({"epoch": epoch, **{key: collected.metrics[key] for key in _REWARDS}})

    async def record_selection(
        self, trainer: Trainer, epoch: int, collected: Collected, estimated: EstimatedEpoch, seconds: float
    ) -> None:
        """Records what is trained of an epoch that was collected and selected for so many seconds."""
        collection, advantages, reported = estimated
        untrained = untrained_causes(reported)
        for cause in untrained:
            self.warn(epoch, str(cause))
        everything, selected = (chain.from_iterable(each.trajectories) for each in (collected.collection, collection))
        records = training_records(epoch, everything, collection.drop_reasons, advantages, selected)
        self.store.append(files.ADVANTAGES, records)
        await asyncio.to_thread(self.store.sync)
        head = {"epoch": epoch, "timestamp": datetime.now(UTC).isoformat(), "run_id": self.id}
        metrics = head | epoch_metrics(trainer, collected, estimated)
        timings = {"collect": seconds, "train": 0.0, "validate": 0.0}
        self.results[epoch] = result = EpochResult(metrics | {"job": None, "seconds": timings})
        result.add_reported("selection", reported)
        earlier = [line for line in self.rewards if line["epoch"] < epoch]
        same = one_answer(collected.collection.trajectories, earlier)
        if same is not None and any(collection.trajectories) and not self._says_one_answer:
            self.warn(epoch, str(same))
        self._says_one_answer = same is not None
        if not any(collection.trajectories):
            causes = likely_causes(without_variance(collected.collection, collection.drop_reasons), earlier)
            steps = missing_step_rewards(collected.collection.trajectories, collection.drop_reasons)
            self._causes = [*map(str, (*causes, *steps, *untrained))]
            dropped = f"nothing to train on; every group was dropped: {counts(collection.dropped)}"
            self.warn(epoch, "; ".join([dropped, *self._causes]))

    def note_version(self, epoch: int, status: TrainingJobStatus, served: PolicyEndpoint | None) -> int | None:
        """The version served after the epoch's job, with warnings. Raises BackendError if it is not a new one."""
        result = self.results[epoch]
        if result.not_finite:
            self.warn(epoch, f"these metrics are not finite: {', '.join(result.not_finite)}")
        before = result.metrics["policy_version"]
        result.metrics["policy_version"] = version = new_version(epoch, before, served)
        is_newest = result.metrics.get("sampled_version", before) == before  # else a gap is expected
        for warning in job_warnings(status, result.metrics.get("logprob_gap"), served, is_newest=is_newest):
            self.warn(epoch, warning)
        return version

    def record(self, epoch: int, metrics: Mapping[str, Any], curriculum: Mapping[str, Any]) -> None:
        """Writes the line of an epoch, with its warnings."""
        warnings = self._warnings.pop(epoch, None)
        self.store.append(files.METRICS, [{**metrics, **({"warnings": warnings} if warnings else {})}])
        self.store.sync()
        self.store.write(files.REWARDS, self.rewards)
        self.store.write(files.CURRICULUM, curriculum)

    @contextmanager
    def reported_failure(self, epoch: int, num_epochs: int) -> Iterator[None]:
        """Says how to continue a run of which the body, an epoch, fails."""
        try:
            yield
        except BaseException:  # reported, then re-raised
            self.report.end_run()
            self.report.note(
                f"epoch {epoch}/{num_epochs} did not complete; results so far are in {self.store.folder}/ (the "
                "same command with --resume, or call with resume=True, continues the run)"
            )
            raise

    async def draw(self, *, last: bool = False) -> None:
        """Draws the plot, unless that was done a moment ago; the `last` time in any case."""
        if self._plot is not None:
            await (self._plot.finish if last else self._plot.update)(self.rewards, self.validations)

    async def conclude(self, best: Mapping[str, Any] | None) -> None:
        """Draws the plot, and prints the summary with the best validation.

        Raises InsituError if no epoch trained, or a validation failed.
        """
        self.report.end_run()
        await self.draw(last=True)
        self.report.summary(self.validations, best, self.store)
        if not self.jobs:
            dropped = sum((Counter(result.metrics["dropped"]) for result in self.results.values()), Counter[str]())
            raise TrajectoryError(
                f"no epoch trained anything: every group was dropped: {counts(dropped)} "
                f"(per epoch: {self.store.folder / files.METRICS})" + "".join(f"; {cause}" for cause in self._causes)
            )
        if failed := [v for v in self.validations if "error" in v]:
            raise InsituError(
                f"{len(failed)} validation(s) failed; the first, at epoch {failed[0]['epoch']}: {failed[0]['error']}"
            )

    async def close(self) -> None:
        """Draws the plot, also of a run that has failed, and unlocks the folder."""
        self.report.end_run()
        try:
            await self.draw(last=True)
        finally:
            if self._plot is not None:
                self._plot.close()
            self.unlock()


class RunTrainer(UsesBuilder, ResumableTrainer):
    """Trainer with a `Run`; a subclass names its `training.method`."""

    method = "grpo"
    run_prefix = "insitu_run"
    computes_advantages = False
    """Whether it decides what each row weighs, so that the backend must not."""

    def __init__(self, trainer_config: TrainerConfig, builder: Builder | None = None, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._given_builder = builder or builder_of_run()
        self._run = Run(self.run_prefix)

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        await super().bind_components(trajectory_builder, trainer_adapter)
        self._given_builder = self._given_builder or builder_of_run() or Builder()  # outside a run: without a file
        check_components(self, self.method, computes_advantages=self.computes_advantages)

    async def cleanup(self) -> None:
        await self._run.close()

    @property
    def run_id(self) -> str:
        return self._run.id

    @property
    def store(self) -> RunStore:
        return self._run.store


class Stage(Protocol):
    """What a run does once, before its first epoch."""

    def is_pending(self, progress: RunProgress) -> bool:
        """Whether no earlier process has done so."""

    async def run(self, run: Run, adapter: TrainerAdapter) -> None: ...


def _version(endpoint: PolicyEndpoint | None) -> int | None:
    return endpoint.version if endpoint is not None else None


def check_collected(trainer: Trainer, epoch: int, collected: Collected, folder: Path) -> None:
    """Raises TrajectoryError if nothing that was collected can be trained.

    For trainers with a job per epoch, pairs without a difference are no failure.
    """
    pairs, collection = isinstance(trainer, PairTrainer), collected.collection
    may_be_alike = pairs and not isinstance(trainer, SingleJobTrainer)
    if any(collection.trajectories) or (may_be_alike and not ALIKE.isdisjoint(collection.dropped)):
        return
    first = [f"most often {error}" for error, _ in collected.progress.errors.most_common(1)]
    raise TrajectoryError(
        f"epoch {epoch}: no {'preference pair' if pairs else 'episode'} can be trained on; dropped: "
        + "; ".join([counts(collection.dropped), *first])
        + f" (all of them: {folder / files.EPISODES})"
    )


def settings_of(trainer: Trainer, config: Config, num_epochs: int, selection: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what an epoch trains on, and how; `selection` are those of the trainer itself."""
    builder, reward = trainer.trajectory_builder, trainer.run_config.reward_function
    on_failure = reward.on_failure if reward else None
    settings = {"epochs": num_epochs, "seed": config.general.seed, **selection, "on_failure": on_failure}
    settings |= builder.settings() | trainer.trainer_adapter.serving_settings()
    llms = {name: config.llm(name).request_settings() for name in sorted(config.trained_llms())}
    if bridged := [name for name, llm in llms.items() if llm.get("token_bridge")]:
        settings["token_bridge"] = bridged
    for block in config.blocks.values():
        settings |= block.run_settings() if isinstance(block, FunctionBaseConfig) else {}
    if training := trainer.trainer_adapter.training_settings():
        settings["training"] = without_secrets(training)
    return settings


def origin_of(builder: Builder, trajectory_builder: TrajectoryBuilder, folder: Path) -> dict[str, Any]:
    """What later uses of the run in `folder` need to know: rows and model, which calls it trains, and where from."""
    stored, config, finetuning = trajectory_builder.stored, builder.config, builder.config.finetuning
    if stored is not None:
        dataset = stored.files.settings().get("dataset")
    else:
        path = builder.request.dataset if builder.request is not None else None
        has_rows = path is not None or config.eval.dataset is not None  # a plugin's builder may need none
        dataset = find_dataset(config, path, builder.moved).record() if has_rows else None
    llms, model = sorted(config.trained_llms()), finetuning.target_model
    return {
        "dataset": dataset,
        "held_out": held_out_record(config, builder.moved),
        "held_out_scoring": held_out_scoring(config, builder.moved),
        "starting_model": _starting_model(folder),
        "targets": {"functions": finetuning.target_functions, "model": model, "llms": llms},
        "episodes_from": stored and {"run": str(stored.folder), "epochs": [*stored.epochs], "reward": stored.reward},
    }


def _starting_model(folder: Path) -> dict[str, str | None] | None:
    """The model that the run's own backend started from, if it has one: with a digest, or its commit on the Hub."""
    if not RunReader(folder).own_backend:
        return None
    model = Path(RunReader(folder).started_from())
    if model.exists():
        return {"file": str(model), "sha256": model_digest(model)}
    snapshot = downloaded(str(model))
    return {"file": str(model), "sha256": None, "commit": None if snapshot is None else snapshot.name}


def run_record(
    run_id: str, config: Config, planned: int | None, origin: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `run.json`; `planned` is the number of episodes of an epoch, if known."""
    source = Path(config.source)  # absolute, for commands that read the run in another directory
    return {
        "run_id": run_id,
        "insitu": __version__,
        "source": str(source.absolute()) if source.is_file() else str(source),
        "episodes_per_epoch": planned,
        "given": resolved_config(config, given=True),
        **origin,
        **settings,
        "code": code_of(config),
        "config": resolved_config(config),
    }
