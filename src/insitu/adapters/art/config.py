"""Configuration of the ART plugin; extra keys are checked against the installed client library."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.schemas.finetuning import TrainerAdapterConfig, TrainerConfig
from insitu.trajectories.builder import EpisodesBuilderConfig

_OPEN = ConfigDict(extra="allow", use_attribute_docstrings=True)


class ARTTrajectoryBuilderConfig(EpisodesBuilderConfig, name="openpipe_art_traj_builder"):
    """Runs several episodes per dataset row and groups them by row."""

    num_generations: int = Field(default=2, ge=1)
    """Episodes per row and epoch: the group size."""


class InitArgs(BaseModel):
    """How the server loads the model; any key of ART's `InitArgs`."""

    model_config = _OPEN

    max_seq_length: int | None = Field(default=None, ge=1)
    """Maximum length of a training sequence, in tokens."""


class EngineArgs(BaseModel):
    """How the server samples; any key of ART's `EngineArgs`."""

    model_config = _OPEN

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of GPU memory used for sampling."""
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
    """Name of the trained model on the server, and the name it is served under."""
    project: str = Field(default="trainer_project", min_length=1)
    """The model's project. Reusing a project and name continues training that model."""
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    """The model to start from. The server must have it."""
    api_key: str = Field(default="default", repr=False)
    """Sent to the server as a bearer token."""
    delete_old_checkpoints: bool = False
    """Before each training job, delete all checkpoints except the latest and the one with the highest mean reward over
    the episodes it sampled. From ART 0.5.9 on, checkpoints of earlier runs are kept."""
    lost_reply_timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for a new model step after the connection was lost during training, before resubmitting."""
    init_args: InitArgs | None = None
    """How the server loads the model."""
    engine_args: EngineArgs | None = None
    """How the server samples."""
    peft_args: dict[str, Any] | None = None
    """LoRA settings (r, lora_alpha, ...): keys of ART's `PeftArgs`."""
    trainer_args: dict[str, Any] | None = None
    """Optimizer settings (weight_decay, max_grad_norm, ...): keys of ART's `TrainerArgs`."""
    server_config: dict[str, Any] | None = None
    """Inference server settings: log_file, server_args and engine_args of ART's `OpenAIServerConfig`."""


class ARTTrainingConfig(BaseModel):
    """Options per training request: any key of ART's public `TrainConfig` or of `art.dev.TrainConfig`."""

    model_config = _OPEN

    learning_rate: float = Field(default=5e-5, ge=0)
    """Learning rate of the optimizer."""
    beta: float = Field(default=0.0, ge=0)
    """KL penalty coefficient. Must be 0.0 from ART 0.5.17 on, which has no KL penalty."""


class ARTTrainerAdapterConfig(TrainerAdapterConfig, name="openpipe_art_trainer_adapter"):
    """Trains on a server that speaks OpenPipe ART's protocol, such as `insitu backend`."""

    backend: ARTBackendConfig
    """The server and the model."""
    training: ARTTrainingConfig = Field(default_factory=ARTTrainingConfig)
    """Options per training request."""

    @property
    def served_name(self) -> str:
        """The trained model's name, which `finetuning.target_model` may refer to."""
        return self.backend.name


class ARTTrainerConfig(TrainerConfig, name="openpipe_art_trainer"):
    """The training loop for ART servers, which compute the advantages themselves. Has no keys."""
