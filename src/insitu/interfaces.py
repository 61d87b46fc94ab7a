"""The three parts of the loop that a plugin may replace: what gathers episodes, what trains, what drives both."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from insitu.algorithms.statistics import mean_ci95
from insitu.errors import ConfigError
from insitu.evaluation.evaluators import number, scores_by_row
from insitu.evaluation.run import EvaluationRun
from insitu.evaluation.shared import current_run
from insitu.schemas.evaluation import EvalOutputItem, EvaluationRunConfig, EvaluationRunOutput
from insitu.schemas.finetuning import (
    CurriculumLearningConfig,
    FinetuneConfig,
    PolicyEndpoint,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)

logger = logging.getLogger(__name__)


class TrajectoryBuilder(ABC):
    """Runs the workflow and makes what it did into trajectories, grouped by example."""

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # documented: None before initialize

    async def initialize(self, run_config: FinetuneConfig) -> None:
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    @property
    def episodes_per_epoch(self) -> int | None:
        """Episodes in an epoch, for progress bars; None if unknown."""
        return None

    async def run_eval(self) -> EvaluationRunOutput:
        """The workflow once on each row of the run's dataset, scored: another generation with each call.

        May be called several times at once: the calls share the run's components and its limit on episodes, and each
        writes into a folder of its own, `generation_<n>` in `eval.general.output_dir`.
        """
        asked = self.run_config.run_configuration
        if asked is None:
            raise ConfigError("run_eval() needs finetuning.run_configuration, which the finetune command sets")
        config = EvaluationRunConfig(
            config_file=asked.config_file,
            dataset=asked.dataset,
            result_json_path=asked.result_json_path,
            endpoint=asked.endpoint,
            endpoint_timeout=asked.endpoint_timeout,
            override=asked.override,
        )
        output = await EvaluationRun(config, training=True).run_and_evaluate()
        _warn_of_failures(output)
        return output

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Begin to collect; returns at once."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Wait for what was begun, and give its trajectories."""

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float:
        """The reward of a scored item; 0.0 without a score, but unscored items are left out before this is asked."""
        return float(output_item.score) if output_item.score is not None else 0.0

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell how collecting went."""


class TrainerAdapter(ABC):
    """Submits trajectories to a training backend and follows its jobs."""

    computes_advantages = False
    """Whether the backend computes the advantages from rewards, so that advantages computed here would be lost."""

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # documented: None before initialize

    async def initialize(self, run_config: FinetuneConfig) -> None:
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    async def policy_endpoint(self) -> PolicyEndpoint | None:
        """Where the model it trains is served; None if the adapter does not know."""
        return None

    def training_settings(self) -> dict[str, Any]:
        """The settings of a training job, for the header of the run."""
        return {}

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Whether the backend responds and can train."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Begin a training job on these trajectories."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """How the job stands; also after it has ended."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The job's final status; `poll_interval` in seconds, where polling is needed."""

    @abstractmethod
    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell how the job went."""


class Trainer(ABC):
    """Drives a trajectory builder and a trainer adapter through the epochs of a run."""

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        self.trainer_config = trainer_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # documented: None before initialize
        self.curriculum_config: CurriculumLearningConfig = None  # type: ignore[assignment]
        self.trajectory_builder: TrajectoryBuilder = None  # type: ignore[assignment]
        self.trainer_adapter: TrainerAdapter = None  # type: ignore[assignment]
        self._curriculum_state: dict[str, Any] = None  # type: ignore[assignment]

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    async def initialize(self, run_config: FinetuneConfig) -> None:
        self.run_config = run_config
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = {
            "current_percentile": self.curriculum_config.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            "included_groups": set(),
        }
        await self.trajectory_builder.initialize(run_config)
        await self.trainer_adapter.initialize(run_config)

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collect and submit one epoch; None when it trained nothing."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """The whole run: a final status for each epoch."""

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """What is known of a run."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Release what the run holds; also called when `initialize` failed."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record an epoch."""

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Score the held-out dataset with the model as it is; a failure is told under `error`, never as a reward.

        Each call samples the same answers, as far as the model is the same. A finetune run in which one failed fails.
        """
        asked, reps = self.run_config.run_configuration, 1
        if asked is None or asked.validation_dataset is None:
            raise ConfigError("validation needs a dataset: finetuning.validation.dataset or --validation_dataset")
        if self.run_config.validation is not None:
            reps = self.run_config.validation.reps
        config = EvaluationRunConfig(
            config_file=asked.validation_config_file or asked.config_file,
            dataset=asked.validation_dataset,
            result_json_path=asked.result_json_path,
            endpoint=asked.endpoint,
            endpoint_timeout=asked.endpoint_timeout,
            reps=reps,
            override=() if asked.validation_config_file else asked.override,
            write_output=False,
        )
        run = current_run()
        failed = [] if run is None else run.failed_validations
        try:
            output = await EvaluationRun(config, training=False).run_and_evaluate()
            metrics = validation_metrics(output, self.run_config, epoch)
        except Exception as error:  # whatever it is: a trainer that takes no notice has not validated all the same
            failed.append(f"at epoch {epoch}: {error}")
            raise
        if "error" in metrics:
            failed.append(f"at epoch {epoch}: {metrics['error']}")
        return metrics

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The part of the collection this epoch trains on."""
        raise NotImplementedError("a trainer that uses curriculum learning overrides apply_curriculum_learning")

    def get_curriculum_state(self) -> dict[str, Any]:
        """A copy of the state that JSON can hold."""
        return {k: sorted(v) if isinstance(v, set) else v for k, v in self._curriculum_state.items()}


def _warn_of_failures(output: EvaluationRunOutput) -> None:
    """A plugin sees failed episodes in the items, and may leave them out without a word: say it here."""
    items = output.eval_input.eval_input_items
    failed = [item for item in items if item.error is not None]
    if failed:
        logger.warning(
            "%d of %d episodes failed; the first, of row %r: %s", len(failed), len(items), failed[0].id, failed[0].error
        )


def validation_metrics(output: EvaluationRunOutput, run_config: FinetuneConfig, epoch: int) -> dict[str, Any]:
    """One line of `validation_history.json` from an evaluation's output."""
    reward = run_config.reward_function
    results = dict(output.evaluation_results)
    if reward is None or reward.name not in results:
        raise ConfigError(
            f"validation has no evaluator called {reward.name if reward else None!r}; it has: {[*results]}"
        )
    dropped: Counter[str] = Counter()
    for failed in (item for item in output.eval_input.eval_input_items if item.error is not None):
        dropped[failed.reason or "workflow_error"] += 1
    for item in results[reward.name].eval_output_items:
        _, reason, _ = number(item)
        if reason is not None:
            dropped[str(reason)] += 1
    scores = scores_by_row(results[reward.name])
    if not scores:
        return {"epoch": epoch, "error": f"no example could be scored: {dict(dropped)}", "dropped": dict(dropped)}
    means = [sum(of_row) / len(of_row) for of_row in scores.values()]
    estimate = mean_ci95(means)
    return {
        "epoch": epoch,
        "avg_reward": estimate.mean,
        "min_reward": min(min(s) for s in scores.values()),
        "max_reward": max(max(s) for s in scores.values()),
        "num_examples": sum(len(s) for s in scores.values()),
        "ci95": [estimate.low, estimate.high],
        "dropped": dict(dropped),
    }
