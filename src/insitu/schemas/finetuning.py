"""The documented data models of finetuning: configuration blocks, trajectories and jobs."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from insitu.schemas.components import BaseModelRegistryTag, MayChange, TypedBaseModel, WritableModel
from insitu.schemas.episodes import ModelCall, TrainingRow
from insitu.schemas.evaluation import RunRequest
from insitu.schemas.finetuning_parts import ALLOWED_REWARDS as ALLOWED_REWARDS
from insitu.schemas.finetuning_parts import MAX_REWARD as MAX_REWARD
from insitu.schemas.finetuning_parts import CurriculumLearningConfig as CurriculumLearningConfig
from insitu.schemas.finetuning_parts import HubConfig as HubConfig
from insitu.schemas.finetuning_parts import RewardFunctionConfig as RewardFunctionConfig
from insitu.schemas.finetuning_parts import ValidationConfig as ValidationConfig
from insitu.schemas.finetuning_parts import parse_reward as parse_reward
from insitu.schemas.finetuning_parts import signed as signed
from insitu.schemas.training_jobs import KeepConfig


class TrainerConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trainers`."""

    reward: RewardFunctionConfig | None = None

    @property
    def epochs_ahead(self) -> int:
        """Epochs that are collected while earlier ones train."""
        return 0

    @property
    def warms_up(self) -> bool:
        """Whether something is trained before the first epoch."""
        return False


class TrajectoryBuilderConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trajectory_builders`."""

    reward: RewardFunctionConfig | None = None

    @property
    def needs_dataset(self) -> bool:
        """Whether it runs the workflow on the rows of the dataset."""
        return True


class TrainerAdapterConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trainer_adapters`."""

    reward: RewardFunctionConfig | None = None
    bridges_tokens: ClassVar[bool] = False
    """Whether its backend continues from the tokens of earlier calls, as `token_bridge` of an llm asks."""

    def check_model(self, builder: Any) -> None:
        """Raises ConfigError if the backend could not start with its model; `builder` is that of the file."""

    @property
    def trains_shaped_logits(self) -> bool:
        """Whether it trains calls whose logits the sampler has changed."""
        return False

    @property
    def keeps(self) -> KeepConfig | None:
        """Which checkpoints its backend keeps; None if it does not say."""
        return None

    @property
    def served_name(self) -> str | None:
        """The name its model is served under; None if only the running backend knows it."""
        return None

    @property
    def trains_adapters(self) -> bool:
        """Whether its jobs train LoRA adapters over the weights of `starts_from`."""
        return False

    @property
    def starts_from(self) -> str | None:
        """The model whose weights it serves and trains, its key `model`; None if it does not start the backend."""
        return None


TrainerConfigT = TypeVar("TrainerConfigT", bound=TrainerConfig)
TrajectoryBuilderConfigT = TypeVar("TrajectoryBuilderConfigT", bound=TrajectoryBuilderConfig)
TrainerAdapterConfigT = TypeVar("TrainerAdapterConfigT", bound=TrainerAdapterConfig)


class FinetuneRunConfig(RunRequest):
    """Options of `insitu finetune`."""

    validation_dataset: str | Path | None = None
    validation_interval: int = Field(default=5, ge=1)
    validation_config_file: str | Path | None = None
    resume: bool | Path = False
    """Continue the run in `finetuning.output_dir`, or in this folder; without one there, start a run."""
    force: bool = False
    """Continue although settings have changed that make earlier and later epochs incomparable."""

    @property
    def values(self) -> dict[str, Any]:
        names = {"validation_dataset", "validation_interval", "validation_config_file"}
        given = self.model_dump(mode="json", include=names, exclude_unset=True, exclude_none=True)
        values = {name.replace("_", ".", 1): value for name, value in given.items()}
        output_dir = {"output_dir": str(self.resume)} if isinstance(self.resume, Path) else {}
        return {f"finetuning.{name}": value for name, value in (values | output_dir).items()}


class FinetuneConfig(WritableModel):
    """The section `finetuning`."""

    enabled: bool = False
    """Must be true for `insitu finetune` to run; with `model` it is unless it is set."""
    model: str | None = None
    """The [short form](../guides/train-your-agent.md#the-short-form): the model to train, a folder or a name on the
    Hugging Face Hub, in place of the three keys below, the sections that they name and, if there is one evaluator,
    `reward_function`."""
    training: dict[str, Any] | None = None
    """With `model`: the `training` of its adapter."""
    trainer: str | None = None
    """A key of `trainers`."""
    trajectory_builder: str | None = None
    """A key of `trajectory_builders`."""
    trainer_adapter: str | None = None
    """A key of `trainer_adapters`."""
    reward_function: RewardFunctionConfig | None = None
    """The evaluator that provides rewards; required for training."""
    training_evaluators: list[str] | None = None
    """Further evaluators to run on the episodes of training; their scores are recorded and do not affect training.
    None: all of `eval.evaluators`."""
    target_functions: list[str] = Field(default_factory=lambda: ["<workflow>"], min_length=1)
    """Train only model calls made inside these functions; `<workflow>` selects all calls."""
    target_model: str | None = None
    """Train only calls to this model: its key under `llms`, or its model name, with or without `@step`. None: all llms
    of `_type: policy`, or all llms if there is none."""
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    """Which examples to train on in each epoch."""
    num_epochs: MayChange[int] = Field(default=1, ge=1)
    """Number of epochs; each collects episodes and trains on them."""
    output_dir: MayChange[Annotated[Path, AfterValidator(Path.expanduser)]] = Path("./.tmp/nat/finetuning/")
    """Run directory, relative to the working directory; an earlier run in it is renamed."""
    validation: ValidationConfig | None = None
    """Validation before, during and after training; none: no validation."""
    redact: list[Literal["token_ids"]] = Field(default_factory=list)
    """What is not recorded of model calls. `token_ids`: those of prompts and completions, which decode to texts that
    are hidden elsewhere. An epoch that was interrupted is then collected again, or, once its job was submitted, cannot
    continue (`insitu runs fork` repeats it), and episodes cannot be trained later.
    """
    report_to: MayChange[list[str]] = Field(default_factory=list)
    """Experiment trackers that each epoch is logged to: tensorboard, wandb, mlflow, trackio, or those of plugins."""
    hub: MayChange[HubConfig | None] = None
    """Uploads checkpoints to the Hugging Face Hub from a separate process, without blocking the run."""
    run_configuration: FinetuneRunConfig | None = None
    """For plugins' trainers: what the command line asks. In the file it is not used, and a warning."""

    @property
    def followers(self) -> list[str]:
        """The names of the trackers that follow the run."""
        return list(dict.fromkeys([*self.report_to, *(["hub"] if self.hub is not None else [])]))

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_name_or_different_ones(cls, value: Any) -> Any:
        if isinstance(value, list) and (twice := sorted({str(name) for name in value if value.count(name) > 1})):
            raise ValueError(f"names {', '.join(twice)} twice")
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _names_when_enabled(self) -> Self:
        missing = [key for key in ("trainer", "trajectory_builder", "trainer_adapter") if not getattr(self, key)]
        if self.enabled and missing:
            raise ValueError(f"finetuning is enabled but does not name: {', '.join(missing)}")
        return self


@dataclass(frozen=True)
class PolicyEndpoint:
    """Where the model under training is served. `model` is the name of the newest weights, `version` their version.

    On servers where the name changes with every version, `current_model` returns the current name. `base_model` is the
    name of the model that training started from, `vocab_size` the number of its token ids, and `max_length` how many
    tokens a prompt and its completion may have together. `weights` is a digest of the newest weights; a `logprob_gap`
    above `logprob_tolerance` is more than rounding. `names_versions`: each version has its own name, as
    `policy@3`, until its checkpoint is deleted.
    """

    base_url: str
    model: str
    api_key: str = field(default="none", repr=False)
    version: int | None = None
    current_model: Callable[[], str] | None = None
    base_model: str | None = None
    vocab_size: int | None = None
    max_length: int | None = None
    weights: str | None = None
    logprob_tolerance: float | None = None
    names_versions: bool = False


class TrainingStatusEnum(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


class TrainingJobRef(BaseModel):
    """A submitted job; the adapter may keep what it needs to find the job in `metadata`."""

    run_id: str
    backend: str
    metadata: dict[str, Any] | None = None


class TrainingJobStatus(BaseModel):
    """`progress` in percent, None if unknown."""

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


def text_content(content: Any) -> str:
    """A message's content as text; of a list, its strings and text parts."""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "".join(text for text in texts if isinstance(text, str))
    return "" if content is None else str(content)


def message_text(message: Mapping[str, Any]) -> str:
    """A message as text: its content, then a line `name(arguments)` for each tool call."""
    return "\n".join([*filter(None, [text_content(message.get("content"))]), *tool_call_lines(message)])


def tool_call_lines(message: Mapping[str, Any]) -> list[str]:
    """A line `name(arguments)` for each tool call of a message."""
    calls = [call.get("function") or call.get("custom") or {} for call in message.get("tool_calls") or ()]
    return [f"{call.get('name')}({call.get('arguments', call.get('input'))})" for call in calls]


class EpisodeItem(BaseModel):
    """One message of a conversation; assistant messages require logprobs.

    `logprobs` are those of an OpenAI choice, empty for a message that is only context.
    """

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    metadata: dict[str, Any] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _content_as_text(cls, value: Any) -> Any:
        return text_content(value) if value is None or isinstance(value, list) else value

    @model_validator(mode="after")
    def _assistant_has_logprobs(self) -> "EpisodeItem":
        if self.role is EpisodeItemRole.ASSISTANT and self.logprobs is None:
            raise ValueError("logprobs must be given for an item of role assistant")
        return self


class OpenAIMessage(BaseModel):
    role: str
    content: str


class DPOItem(BaseModel):
    """A preference pair."""

    prompt: list[OpenAIMessage] | str
    chosen_response: str
    rejected_response: str


class Trajectory(BaseModel):
    """One episode: messages, reward, model calls and training rows.

    `shaped_rewards` holds a reward per trained call, in the order they began. `id` names the episode.
    """

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    episode: list[EpisodeItem] | list[DPOItem] = Field(default_factory=list)
    reward: float
    shaped_rewards: list[float] | None = None
    metadata: dict[str, Any] | None = None
    id: str | None = None
    calls: list[ModelCall] = Field(default_factory=list)
    trained_calls: list[int] = Field(default_factory=list)
    """Positions in `calls` of the calls of the targeted functions and model; the others are context."""
    rows: list[TrainingRow] = Field(default_factory=list)


class TrajectoryCollection(BaseModel):
    """The groups of one epoch; each inner list holds the trajectories of one example."""

    trajectories: list[list[Trajectory]]
    run_id: str
    epoch: int | None = None
    """The epoch of collection, from 1."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Number of dropped episodes by reason code."""
    drop_reasons: dict[str, str] = Field(default_factory=dict)
    """Trajectory id -> why it was dropped after collection."""
    mean_reward: float | None = None
    """Mean over all collected trajectories, including those dropped since."""
    parts: dict[str, int] | None = Field(default=None, exclude=True)  # row id -> the part of the job with its group
    streamed: int | None = Field(default=None, exclude=True)  # the planned episodes, if the epoch is streamed

    def without(self, reasons: Mapping[int, str]) -> "TrajectoryCollection":
        """A copy without the trajectories whose id() has a reason, which are counted, and without empty groups."""
        dropped, by_id, groups = Counter(self.dropped), dict(self.drop_reasons), []
        for group in self.trajectories:
            for trajectory in group:
                if (reason := reasons.get(id(trajectory))) is not None:
                    dropped[str(reason)] += 1
                    by_id[str(trajectory.id)] = str(reason)
            if kept := [trajectory for trajectory in group if id(trajectory) not in reasons]:
                groups.append(kept)
        return self.model_copy(update={"trajectories": groups, "dropped": dict(dropped), "drop_reasons": by_id})
