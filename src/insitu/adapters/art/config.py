"""The blocks of the ART plugin; keys beyond their own are checked against the installed client library."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.schemas.finetuning import TrainerAdapterConfig, TrainerConfig
from insitu.trajectories.builder import EpisodesBuilderConfig

_OPEN = ConfigDict(extra="allow", use_attribute_docstrings=True)


class ARTTrajectoryBuilderConfig(EpisodesBuilderConfig, name="openpipe_art_traj_builder"):
    """Several episodes for each row, grouped by row, as ART trains them."""

    num_generations: int = Field(default=2, ge=1)
    """Episodes for each row and epoch: the size of a group."""


class InitArgs(BaseModel):
    """How the server loads the model; any key of ART's `InitArgs`."""

    model_config = _OPEN

    max_seq_length: int | None = Field(default=None, ge=1)
    """Longest sequence that is trained, in tokens."""


class EngineArgs(BaseModel):
    """How the server samples; any key of ART's `EngineArgs`."""

    model_config = _OPEN

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that sampling may take."""
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """GPUs that one copy of the model is spread over."""


class ARTBackendConfig(BaseModel):
    """An ART server, and the model on it that is trained."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    ip: str
    """The server's address: a host name or number."""
    port: int = Field(ge=1, le=65535)
    """The server's port."""
    name: str = Field(default="trainer_run", min_length=1)
    """The trained model's name on the server; it is served under it."""
    project: str = Field(default="trainer_project", min_length=1)
    """The project it belongs to. The same project and name again goes on with the same model."""
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    """The model it starts from; the server must have it."""
    api_key: str = Field(default="default", repr=False)
    """Sent to the server as a bearer token."""
    delete_old_checkpoints: bool = False
    """Before each training, delete all checkpoints but the latest and the one with the highest mean reward."""
    lost_reply_patience: float = Field(default=600.0, gt=0)
    """Seconds for which a server that lost its connection to us while it trained is watched for its step to move,
    before it is given the same training again."""
    init_args: InitArgs | None = None
    """How the server loads the model."""
    engine_args: EngineArgs | None = None
    """How the server samples."""
    peft_args: dict[str, Any] | None = None
    """The adapters that are trained (r, lora_alpha ...): keys of ART's `PeftArgs`."""
    trainer_args: dict[str, Any] | None = None
    """The optimiser (weight_decay, max_grad_norm ...): keys of ART's `TrainerArgs`."""
    server_config: dict[str, Any] | None = None
    """The inference server: log_file, server_args and engine_args of ART's `OpenAIServerConfig`."""


class ARTTrainingConfig(BaseModel):
    """What each training is told: any key of ART's `TrainConfig`, the public one and the one under `art.dev`."""

    model_config = _OPEN

    learning_rate: float = Field(default=5e-5, ge=0)
    """Of the optimiser."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty. Releases of ART from 0.5.17 on have none: there, 0.0 is all that is allowed."""


class ARTTrainerAdapterConfig(TrainerAdapterConfig, name="openpipe_art_trainer_adapter"):
    """Trains on a server that speaks the protocol of OpenPipe ART, `insitu backend` among them."""

    backend: ARTBackendConfig
    """The server and the model."""
    training: ARTTrainingConfig = Field(default_factory=ARTTrainingConfig)
    """What each training is told."""

    @property
    def served_name(self) -> str:
        """The trained model's name, for what names the model in `finetuning.target_model`."""
        return self.backend.name


class ARTTrainerConfig(TrainerConfig, name="openpipe_art_trainer"):
    """Collects, filters, trains and validates, epoch by epoch; advantages are the ART server's. It has no keys."""
