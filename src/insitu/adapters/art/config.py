"""The blocks of the ART plugin; keys beyond their own are checked against the installed client library."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.schemas.finetuning import TrainerAdapterConfig, TrainerConfig
from insitu.trajectories.builder import EpisodesBuilderConfig

_OPEN = ConfigDict(extra="allow", use_attribute_docstrings=True)


class ARTTrajectoryBuilderConfig(EpisodesBuilderConfig, name="openpipe_art_traj_builder"):
    """Runs several episodes per row, grouped by row, for training with ART."""

    num_generations: int = Field(default=2, ge=1)
    """Episodes per row and epoch (the group size)."""


class InitArgs(BaseModel):
    """Options for loading the model: any key of ART's `InitArgs`."""

    model_config = _OPEN

    max_seq_length: int | None = Field(default=None, ge=1)
    """Maximum length of a training sequence, in tokens."""


class EngineArgs(BaseModel):
    """Options of the inference engine: any key of ART's `EngineArgs`."""

    model_config = _OPEN

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of GPU memory available for sampling."""
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Number of GPUs per copy of the model."""


class ARTBackendConfig(BaseModel):
    """An ART server and the model to train on it."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    ip: str
    """Host name or IP address of the server."""
    port: int = Field(ge=1, le=65535)
    """Port of the server."""
    name: str = Field(default="trainer_run", min_length=1)
    """Name of the trained model on the server, under which it is also served."""
    project: str = Field(default="trainer_project", min_length=1)
    """Project of the model. Reusing project and name continues training the same model."""
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    """Model to start from; the server must have it."""
    api_key: str = Field(default="default", repr=False)
    """Bearer token for the server."""
    delete_old_checkpoints: bool = False
    """Before each training, delete all checkpoints except the latest and the one whose episodes had the highest mean
    reward. With ART 0.5.9 or later, checkpoints of earlier runs are kept."""
    lost_reply_patience: float = Field(default=600.0, gt=0)
    """How long to poll the model's step, in seconds, after the connection broke during training, before the same
    request is sent again."""
    init_args: InitArgs | None = None
    """Options for loading the model."""
    engine_args: EngineArgs | None = None
    """Options of the inference engine."""
    peft_args: dict[str, Any] | None = None
    """LoRA options (r, lora_alpha ...): keys of ART's `PeftArgs`."""
    trainer_args: dict[str, Any] | None = None
    """Optimizer options (weight_decay, max_grad_norm ...): keys of ART's `TrainerArgs`."""
    server_config: dict[str, Any] | None = None
    """Options of the inference server: `log_file`, `server_args` and `engine_args` of ART's `OpenAIServerConfig`."""


class ARTTrainingConfig(BaseModel):
    """Options of each training request: any key of ART's public `TrainConfig` and of the one in `art.dev`."""

    model_config = _OPEN

    learning_rate: float = Field(default=5e-5, ge=0)
    """Learning rate."""
    beta: float = Field(default=0.0, ge=0)
    """KL penalty weight. ART 0.5.17 and later have no penalty and accept only 0.0."""


class ARTTrainerAdapterConfig(TrainerAdapterConfig, name="openpipe_art_trainer_adapter"):
    """Trains on a server that speaks OpenPipe ART's protocol, such as `insitu backend`."""

    backend: ARTBackendConfig
    """The ART server and the model to train."""
    training: ARTTrainingConfig = Field(default_factory=ARTTrainingConfig)
    """Options of each training request."""

    @property
    def served_name(self) -> str:
        """The trained model's name, for what names the model in `finetuning.target_model`."""
        return self.backend.name


class ARTTrainerConfig(TrainerConfig, name="openpipe_art_trainer"):
    """Collects, filters, trains and validates, epoch by epoch; advantages are the ART server's. It has no keys."""
