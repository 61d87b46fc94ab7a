"""The documented data models of the finetuning harness: its configuration blocks, trajectories and jobs."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from insitu.schemas.components import BaseModelRegistryTag, TypedBaseModel
from insitu.schemas.episodes import ModelCall, TrainingRow

_BOOL = TypeAdapter(bool)
_DOCUMENTED = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class RewardFunctionConfig(BaseModel):
    """Which evaluator gives the reward, and what an episode that failed is worth."""

    model_config = _DOCUMENTED

    name: str
    """A key under `eval.evaluators`."""
    on_failure: float | str = "exclude"
    """`exclude` leaves failed episodes out of their group; a number is the reward they get instead."""

    @field_validator("on_failure")
    @classmethod
    def _exclude_or_number(cls, value: float | str) -> float | str:
        if value == "exclude":
            return value
        try:
            return float(value)
        except ValueError:
            raise ValueError("allowed: exclude, or a number") from None


class TrainerConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trainers`."""

    reward: RewardFunctionConfig | None = None


class TrajectoryBuilderConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trajectory_builders`."""

    reward: RewardFunctionConfig | None = None


class TrainerAdapterConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trainer_adapters`."""

    reward: RewardFunctionConfig | None = None


TrainerConfigT = TypeVar("TrainerConfigT", bound=TrainerConfig)
TrajectoryBuilderConfigT = TypeVar("TrajectoryBuilderConfigT", bound=TrajectoryBuilderConfig)
TrainerAdapterConfigT = TypeVar("TrainerAdapterConfigT", bound=TrainerAdapterConfig)


class CurriculumLearningConfig(BaseModel):
    """Train on the easiest share of the examples first and let the rest in step by step."""

    model_config = _DOCUMENTED

    enabled: bool = False
    """Whether epochs are limited to part of the examples."""
    initial_percentile: float = Field(default=0.3, gt=0, le=1)
    """Share of the examples trained on at first."""
    increment_percentile: float = Field(default=0.2, gt=0, le=1)
    """Share added at each expansion."""
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs between two expansions."""
    min_reward_diff: float = 0.1
    """Groups whose best and worst reward differ by less than this are left out of the epoch's training."""
    sort_ascending: bool = False
    """false begins with the highest mean reward (easy), true with the lowest."""
    random_subsample: float | None = Field(default=None, gt=0, le=1)
    """Share of the remaining groups kept at random, seeded; at least one."""


class FinetuneRunConfig(BaseModel):
    """What the command line of `finetune` adds to the file."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    config_file: Path | BaseModel | Any
    dataset: str | Path | None = None
    result_json_path: str = "$"
    endpoint: str | None = None
    endpoint_timeout: int = 300
    override: tuple[tuple[str, str], ...] = ()
    validation_dataset: str | Path | None = None
    validation_interval: int = Field(default=5, ge=1)
    validation_config_file: str | Path | None = None


class ValidationConfig(BaseModel):
    """A held-out dataset and how often it is run."""

    model_config = _DOCUMENTED

    dataset: str | Path
    """A file of held-out rows; its format is told by its suffix."""
    interval: int = Field(default=5, ge=1)
    """Validate before the first step, every this many epochs, and after the last."""
    config_file: str | Path | None = None
    """A file of its own for validation: its `eval` and `workflow` sections, with the model under training."""
    reps: int = Field(default=1, ge=1)
    """Episodes for each row."""


def _is_true(value: Any) -> bool:
    """As pydantic reads truth values: `${TRAIN}` gives the text "false"."""
    try:
        return _BOOL.validate_python(value)
    except ValidationError:
        return False


class FinetuneConfig(BaseModel):
    """The section `finetuning`."""

    model_config = _DOCUMENTED

    enabled: bool = False
    """The command `finetune` refuses a file in which this is false."""
    trainer: str | None = None
    """A key of `trainers`."""
    trajectory_builder: str | None = None
    """A key of `trajectory_builders`."""
    trainer_adapter: str | None = None
    """A key of `trainer_adapters`."""
    reward_function: RewardFunctionConfig | None = None
    """Where rewards come from; training needs it."""
    target_functions: list[str] = Field(default_factory=lambda: ["<workflow>"], min_length=1)
    """Only model calls made inside these functions are trained; `<workflow>` stands for all of them."""
    target_model: str | None = None
    """Only calls of this model are trained: its key under `llms`, or its model name, with `@step` or without. None:
    those of every llm of type `policy`, or of all llms if there is no such one."""
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    """Which examples an epoch trains on."""
    num_epochs: int = Field(default=1, ge=1)
    """Times episodes are collected and trained on."""
    output_dir: Path = Path("./.tmp/nat/finetuning/")
    """The run's directory, from the working directory; an earlier run in it is moved aside."""
    validation: ValidationConfig | None = None
    """Scores on held-out rows before, during and after training; none: no validation."""
    run_configuration: FinetuneRunConfig | None = None
    """Set from the command line; in the file it is not used, and a warning."""

    @field_validator("output_dir")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        return value.expanduser()

    @model_validator(mode="before")
    @classmethod
    def _names_when_enabled(cls, values: Any) -> Any:
        if isinstance(values, dict) and _is_true(values.get("enabled")):
            missing = [k for k in ("trainer", "trajectory_builder", "trainer_adapter") if not values.get(k)]
            if missing:
                raise ValueError(f"finetuning is enabled but does not name: {', '.join(missing)}")
        return values


@dataclass(frozen=True)
class PolicyEndpoint:
    """Where the model under training is served. `model` is the name of the newest weights, `version` their version.

    On servers where that name changes with every version, `current_model` returns the current one.
    """

    base_url: str
    model: str
    api_key: str = "none"
    version: int | None = None
    current_model: Callable[[], str] | None = None


class TrainingStatusEnum(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


class TrainingJobRef(BaseModel):
    """A submitted job: the run it belongs to, the backend that has it, and what finds it again."""

    run_id: str
    backend: str
    metadata: dict[str, Any] | None = None


class TrainingJobStatus(BaseModel):
    """`progress` in percent (0-100), or None where the backend does not say."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = Field(default=None, ge=0, le=100)
    message: str | None = None
    metadata: dict[str, Any] | None = None


class EpisodeItemRole(StrEnum):
    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class EpisodeItem(BaseModel):
    """One message of the readable dialogue; an assistant's needs its logprobs."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _assistant_has_logprobs(self) -> "EpisodeItem":
        if self.role is EpisodeItemRole.ASSISTANT and self.logprobs is None:
            raise ValueError("logprobs must be given for an item of role assistant")
        return self


class OpenAIMessage(BaseModel):
    role: str
    content: str


class DPOItem(BaseModel):
    """One preference: the prompt, the answer that was better and the one that was worse."""

    prompt: list[OpenAIMessage] | str
    chosen_response: str
    rejected_response: str


class Trajectory(BaseModel):
    """One episode as training sees it: the readable dialogue, its reward, and the calls and rows behind it.

    `shaped_rewards` holds a reward for each trained call, in the order they began. `id` names the episode.
    """

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    episode: list[EpisodeItem] | list[DPOItem] = Field(default_factory=list)
    reward: float
    shaped_rewards: list[float] | None = None
    metadata: dict[str, Any] | None = None
    id: str | None = None
    calls: list[ModelCall] = Field(default_factory=list)
    trained_calls: list[int] = Field(default_factory=list)
    """Places in `calls` of those made for the targeted functions and model; the rest is context."""
    rows: list[TrainingRow] = Field(default_factory=list)


class TrajectoryCollection(BaseModel):
    """The groups of one epoch: each inner list holds the trajectories of one example."""

    model_config = ConfigDict(extra="ignore")

    trajectories: list[list[Trajectory]]
    run_id: str
    epoch: int | None = None
    """The epoch they were collected in (1 first)."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """How many episodes were left out, by reason code."""
    mean_reward: float | None = None
    """Of all trajectories that were collected, those included that were left out since."""
