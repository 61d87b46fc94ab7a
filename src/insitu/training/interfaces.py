"""The components of the training loop that a plugin can replace: trajectory builder, trainer adapter and trainer."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from insitu.advantages.credit import CallAdvantages
from insitu.collect import evaluation as evaluation_runs  # EvaluationRun may be patched: it is looked up when called
from insitu.collect.collector import Observer, Plan
from insitu.collect.evaluation import validate, validation_request
from insitu.collect.shared_run import current_run
from insitu.errors import BackendError, ConfigError
from insitu.runs.replay import StoredRun
from insitu.schemas.components import for_component
from insitu.schemas.episodes import Needs, TrainingRow
from insitu.schemas.evaluation import EvalOutputItem, EvaluationRunOutput
from insitu.schemas.finetuning import (
    CurriculumLearningConfig,
    FinetuneConfig,
    PolicyEndpoint,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from insitu.training.budget import KnownGroups
from insitu.training.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)

C = TypeVar("C", TrajectoryBuilderConfig, TrainerAdapterConfig)


def _rewarded(config: C, run_config: FinetuneConfig) -> C:
    """The configuration, which has the run's reward now; a copy if it cannot be written to."""
    try:
        config.reward = run_config.reward_function
    except ValueError:  # frozen, or a class without such a field
        return config.model_copy(update={"reward": run_config.reward_function})
    return config


class TrajectoryBuilder(ABC):
    """Runs the workflow and turns its episodes into trajectories, grouped by example."""

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # documented: None before initialize

    async def initialize(self, run_config: FinetuneConfig) -> None:
        self.run_config = run_config
        self.trajectory_builder_config = _rewarded(self.trajectory_builder_config, run_config)

    makes_pairs = False
    """Whether its trajectories are preference pairs, which are compared already."""
    collects_itself: ClassVar[bool] = True
    """Whether an epoch is collected by `start_run` and `finalize` only."""
    stored: StoredRun | None = None
    """The recorded episodes that it uses instead of running the workflow."""

    @property
    def episodes_per_epoch(self) -> int | None:
        """Number of episodes per epoch, for progress bars; None if unknown."""
        return None

    @property
    def plans_episodes(self) -> bool:
        """Whether `episodes_per_epoch` episodes are planned for each epoch."""
        return False

    def streaming_obstacle(self) -> str | None:
        """Why the rows of an epoch are not known before it is complete; None if they are."""
        return None

    def settings(self) -> dict[str, Any]:
        """What decides which episodes an epoch has, for the header of the run."""
        return {}

    def plan(self, run_id: str, epoch: int, known: KnownGroups | None = None) -> Plan | None:
        """What an epoch collects; None: `start_run` and `finalize` collect it. `known`: the groups, if recorded."""
        return None

    def expect(self, plan: Plan, observers: Sequence[Observer]) -> None:  # noqa: B027 - optional
        """Called before `start_run`, which then collects this plan of its epoch, with these observers."""

    def check_trainer(self, trainer: "Trainer") -> None:  # noqa: B027 - optional
        """Raises ConfigError if the trajectories are not what a trainer trains."""

    async def rehearse(self, run_id: str) -> str | None:
        """Called once before the first epoch, to find faults early. Returns a warning; raises if nothing can train."""
        return None

    async def run_eval(self) -> EvaluationRunOutput:
        """Runs one rollout per dataset row and scores it; each call produces one more generation per row.

        Concurrent calls share the run's components and concurrency limit; each writes to its own `generation_<n>`
        folder under `eval.general.output_dir`.
        """
        request = self.run_config.run_configuration
        if request is None:
            raise ConfigError("run_eval() needs finetuning.run_configuration, which the finetune command sets")
        output = await evaluation_runs.EvaluationRun(request.evaluation(training=True)).run_and_evaluate()
        items = getattr(getattr(output, "eval_input", None), "eval_input_items", ())  # a plugin's may lack them
        if failed := [item for item in items if item.error is not None]:  # a plugin might drop them silently
            counted, first = f"{len(failed)} of {len(items)}", failed[0]
            logger.warning("%s episodes failed; first failure (row %r): %s", counted, first.id, first.error)
        return output

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts collecting and returns immediately."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Waits for the collection to finish and returns its trajectories."""

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float:
        """The reward of a scored item. Unscored items are dropped before; 0.0 is only the documented fallback."""
        return float(output_item.score) if output_item.score is not None else 0.0

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Logs metrics of the collection."""


class TrainerAdapter(ABC):
    """Submits trajectories to a training backend and tracks its jobs."""

    starts_backend = False
    """Whether `initialize` starts a backend, which can take minutes."""
    backend_url: str | None = None
    """Of a backend that runs already and is known to return what training needs."""

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # documented: None before initialize

    async def initialize(self, run_config: FinetuneConfig) -> None:
        self.run_config = run_config
        self.adapter_config = _rewarded(self.adapter_config, run_config)

    async def policy_endpoint(self) -> PolicyEndpoint | None:
        """Where the policy being trained is served; None if unknown."""
        return None

    @property
    def needs(self) -> Needs:
        """What a job needs of each call that it trains. The default is what the endpoint gives, which may be text."""
        return Needs.GIVEN

    def training_settings(self) -> dict[str, Any]:
        """The settings of a training job, shown in the header of the run."""
        return {}

    def serving_settings(self) -> dict[str, Any]:
        """How the model is served, shown in the header of the run."""
        return {}

    def memory_plan(self) -> MemoryPlan | None:
        """What the backend that the adapter starts needs of this machine; None if there is none, or it is unknown."""
        return None

    @property
    def backend_pid(self) -> int | None:
        """The process of the backend, if the adapter has started it; its weights are of no use to anybody else."""
        return None

    async def wait_until_reachable(self, since: float) -> bool:
        """Waits while the backend does not respond; returns whether it had to, or the backend was restarted `since`.

        `since` is a time of `time.monotonic()`.
        Raises BackendUnavailable if the backend does not come back. The default returns False immediately.
        """
        return False

    async def watch(self) -> None:
        """Raises BackendError as soon as the backend is lost; runs from `initialize` to the end of the run.

        An adapter that cannot detect this returns, as the default does.
        """
        return

    def correct_staleness(self) -> None:  # noqa: B027 - optional
        """Lets the loss allow for episodes of earlier weights if the file does not say how; called before the start."""

    async def prepare_staleness(self, staleness: int, *, pinned: bool) -> None:  # noqa: B027 - optional
        """Called before the first epoch of a run that collects so many epochs ahead, from `pinned` versions.

        The last `staleness` + 2 versions must then be kept and, if they are pinned, be served side by side. Raises
        ConfigError if that is impossible.
        """

    async def check_settings(self) -> None:
        """Raises ConfigError if the backend would refuse a job with these settings. Called before the first epoch.

        The default asks whether the backend is healthy.
        """
        if not await self.is_healthy():
            where = f"trainer_adapters.{self.run_config.trainer_adapter}"
            raise BackendError(f"{where}: the backend is not healthy; is_healthy() returned false")

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Whether the backend responds and can train."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a training job on these trajectories."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """The job's current status; works after it has ended too."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Waits for the job and returns its final status. `poll_interval`: seconds between polls, if it is polled."""

    @abstractmethod
    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Logs metrics of the job."""


class RewardAdapter(TrainerAdapter):
    """Adapter of a backend that computes advantages from rewards, and ignores those sent with the trajectories."""

    needs = Needs.TOKEN_IDS


class RowAdapter(TrainerAdapter):
    """Adapter of a backend that trains token rows and keeps the checkpoints of several versions."""

    needs = Needs.TOKEN_IDS

    @abstractmethod
    async def submit_rows(
        self, rows: Sequence[TrainingRow], run_id: str, name: str, overrides: dict[str, Any]
    ) -> TrainingJobRef:
        """Starts a job on rows that are not an epoch's; `overrides` replace settings of the adapter.

        The job is idempotent by run and `name`.
        """

    @abstractmethod
    def note_best(self, version: int | None) -> None:
        """Called with the version that has the best validation score so far: its checkpoint must not be deleted."""


class StreamingAdapter(TrainerAdapter):
    """Adapter of a backend that computes parts of an epoch's job while the others are still collected.

    It opens the job, adds each part once, in any order, and `submit` closes it. If anything fails in between, `submit`
    sends the epoch whole, which trains the same weights.
    """

    @abstractmethod
    def streaming_obstacle(self, episodes: int) -> str | None:
        """Why nothing of a job of so many episodes can be computed before they are complete; None if something can."""

    @abstractmethod
    async def open_job(self, run_id: str, epoch: int, num_parts: int, episodes: int) -> None:
        """Opens the job of an epoch with so many planned episodes."""

    @abstractmethod
    async def add_part(self, number: int, trajectories: TrajectoryCollection) -> None:
        """Sends a part, numbered from 0: what is trained of its groups."""

    @abstractmethod
    async def abandon_job(self) -> None:
        """Cancels the open job, if there is one. Does not raise if that fails."""


class ResumableAdapter(TrainerAdapter):
    """Adapter whose `initialize` continues with the weights of an earlier process, and that trains no epoch twice."""

    @abstractmethod
    async def find(self, run_id: str, epoch: int, version: int | None) -> TrainingJobRef | None:
        """The job of an epoch that an earlier process may have submitted, to train `version` of the weights.

        Returns None if the job can be submitted: the backend has none for the epoch, or answers a second submission
        with the job that it has.
        """


class Trainer(ABC):
    """Drives a trajectory builder and a trainer adapter through the epochs of a run."""

    own_metrics: Callable[[Sequence[tuple[Trajectory, CallAdvantages]]], dict[str, float]] | None = None
    """More figures of what an epoch trains, for `training_metrics.jsonl`."""
    ended_early = False
    """Whether `run` has returned before the last epoch, as the held-out score did not improve any more."""

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
        await self.trajectory_builder.initialize(for_component(run_config))
        await self.trainer_adapter.initialize(for_component(run_config))

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects one epoch and submits it for training; returns None if there was nothing to train on."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Runs `num_epochs` epochs and returns the final job status of each; None for one that trained nothing."""

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The metrics of a run."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Releases the run's resources; also called if `initialize` failed."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Logs metrics of an epoch."""

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Scores the held-out dataset with the current model. Seeds are the same in every call.

        If validation fails, the metrics contain `error` and no reward, or the exception propagates. Either way the
        failure is recorded and the finetuning run fails.
        """
        request, run = self.run_config.run_configuration, current_run()
        validation_request(self.run_config, request)  # raises: without a dataset, no validation has failed
        failed = run.failed_validations if run is not None else []
        try:
            metrics = await validate(self.run_config, request, epoch)
        except Exception as error:  # recorded too, in case the trainer swallows the exception
            failed.append(f"at epoch {epoch}: {error}")
            raise
        if "error" in metrics:
            failed.append(f"at epoch {epoch}: {metrics['error']}")
        return {**metrics, "dataset_type": "validation"}

    def budget_obstacle(self) -> str | None:
        """Why it learns from episodes that a rollout budget saves, in words that follow the key; None: it does not."""
        return f": {self.trainer_config.type} also trains rows whose episodes have equal rewards; leave it out"

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """Returns the groups to train on in this epoch."""
        raise NotImplementedError("trainers that support curriculum learning must override apply_curriculum_learning")

    def get_curriculum_state(self) -> dict[str, Any]:
        """A JSON-serializable copy of the state."""
        return {k: sorted(v) if isinstance(v, set) else v for k, v in self._curriculum_state.items()}


class ResumableTrainer(Trainer):
    """Trainer that continues runs with `--resume`."""

    @abstractmethod
    async def resume(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Continues the run in `output_dir` to its last epoch, or starts one; returns what `run` does."""


class GroupTrainer(Trainer):
    """Trainer that compares the episodes of a row with one another, all sampled from the served weights."""

    @property
    def compares_episodes(self) -> bool:
        """Whether it learns nothing from a row with a single episode."""
        return True

    def budget_obstacle(self) -> str | None:
        return None


class PairTrainer(Trainer):
    """Trainer on preference pairs."""


class SingleJobTrainer(Trainer):
    """Trainer with one job for all epochs, which need not have ended when `run` returns."""
