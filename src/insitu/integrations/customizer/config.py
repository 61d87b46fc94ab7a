"""Configuration of the NeMo Customizer plugin."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from insitu.schemas.components import MayChange
from insitu.schemas.finetuning import TrainerAdapterConfig, TrainerConfig
from insitu.training.preference_builders import (
    DPOTrajectoryBuilderConfig as DPOTrajectoryBuilderConfig,  # documented here
)

_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
"""What both stores accept as the name of a namespace, a dataset or a deployment."""


class _Tolerant(BaseModel):
    """Ignores keys that it does not have."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)


class DPOSpecificHyperparameters(_Tolerant):
    """Hyperparameters of preference training."""

    ref_policy_kl_penalty: float = Field(default=0.1, ge=0)
    """Strength of the pull towards the reference model: the β of DPO."""
    preference_loss_weight: float = Field(default=1.0, ge=0)
    """Weight of the preference loss."""
    preference_average_log_probs: bool = False
    """Average the log-probabilities over the tokens of a response instead of summing them."""
    sft_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of a supervised loss on the chosen responses; 0: none."""


class NeMoCustomizerHyperparameters(_Tolerant):
    """Hyperparameters of a customization job."""

    training_type: Literal["dpo", "sft"] = "dpo"
    """`dpo`: preference pairs. `sft`: the chosen responses only, as prompt and completion."""
    finetuning_type: Literal["lora", "all_weights"] = "all_weights"
    """What is trained: a LoRA adapter or all weights."""
    epochs: int = Field(default=3, ge=1)
    """Passes over the training records."""
    batch_size: int = Field(default=4, ge=1)
    """Records per optimizer step."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Learning rate of the optimizer."""
    dpo: DPOSpecificHyperparameters = Field(default_factory=DPOSpecificHyperparameters)
    """Used with `training_type: dpo` only."""


class NIMDeploymentConfig(_Tolerant):
    """The NIM that serves the trained model."""

    image_name: str = Field(default="nvcr.io/nim/meta/llama-3.1-8b-instruct", min_length=1)
    """Container image."""
    image_tag: str = Field(default="latest", min_length=1)
    """Tag of the image."""
    gpu: int = Field(default=1, ge=0)
    """Number of GPUs."""
    deployment_name: str | None = Field(default=None, pattern=_NAME)
    """Name of the deployment, which must be free; none: that of the trained model."""
    description: str = "Fine-tuned model deployment"
    """Description of the deployment."""


class NeMoCustomizerTrainerAdapterConfig(TrainerAdapterConfig, name="nemo_customizer_trainer_adapter"):
    """Trains with NVIDIA NeMo Customizer: uploads the records, submits a job, and can deploy the trained model."""

    model_config = ConfigDict(allow_inf_nan=False)
    ignores_unknown_keys = True

    entity_host: str
    """Base URL of the NeMo services: Entity Store, Customizer and Deployment Management."""
    datastore_host: str
    """Base URL of the NeMo Data Store, without `/v1/hf`."""
    namespace: str = Field(pattern=_NAME)
    """Namespace of the dataset, the job and the trained model."""
    customization_config: str = Field(min_length=1)
    """The customization configuration to train with, as in `meta/llama-3.1-8b-instruct@v1.0.0+A100`."""
    hf_token: MayChange[str] = Field(default="", repr=False)
    """Token for the Data Store; empty: none is sent."""
    dataset_name: str = Field(default="nat-dpo", pattern=_NAME)
    """Name of the dataset. The names of the job and of the trained model are this and a suffix of the run; so is that
    of the dataset if another run has taken the name."""
    dataset_output_dir: Path | None = None
    """Folder for copies of the uploaded files; none: `dataset` in `finetuning.output_dir`."""
    create_namespace_if_missing: bool = True
    """Create the namespace in the Entity Store and in the Data Store if it does not exist."""
    hyperparameters: NeMoCustomizerHyperparameters = Field(default_factory=NeMoCustomizerHyperparameters)
    """Hyperparameters of the job."""
    use_full_message_history: bool = False
    """true: a prompt is sent as its list of messages. false: as text, the content of its last message."""
    validation_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Fraction of the turns whose pairs are used for validation; at least one turn. A turn is never in both files."""
    deploy_on_completion: MayChange[bool] = False
    """Deploy the trained model, and wait until it is served."""
    deployment_config: MayChange[NIMDeploymentConfig] = Field(default_factory=NIMDeploymentConfig)
    """How the trained model is deployed."""
    poll_interval_seconds: MayChange[float] = Field(default=30.0, gt=0)
    """Seconds between status requests for a job or a deployment."""
    deployment_timeout_seconds: MayChange[float] = Field(default=1800.0, gt=0)
    """Seconds after which a deployment that is not ready has failed."""
    max_consecutive_status_failures: MayChange[int] = Field(default=3, ge=1, le=10)
    """Number of status requests that may fail in a row before the run gives up; the job continues."""
    request_timeout: MayChange[float] = Field(default=60.0, gt=0)
    """Seconds without an answer, or without progress of an upload, after which a request has failed."""
    retry_timeout: MayChange[float] = Field(default=600.0, ge=0)
    """Seconds for which a request is retried while a service does not respond, is overloaded (429) or fails (5xx).
    Status requests are limited by `max_consecutive_status_failures` instead."""

    @field_validator("entity_host", "datastore_host")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"is {value!r}; it must begin with http:// or https://")
        return value.rstrip("/").removesuffix("/v1/hf")


class NeMoCustomizerTrainerConfig(TrainerConfig, name="nemo_customizer_trainer"):
    """Collects preference pairs, then trains once on all of them.

    `finetuning.num_epochs` has no effect: `num_runs` is the number of collections, and `epochs` among the
    hyperparameters of the adapter the number of passes over the pairs.
    """

    ignores_unknown_keys = True

    num_runs: int = Field(default=1, ge=1)
    """Number of collections, each over the dataset of `eval.general`."""
    continue_on_collection_error: bool = False
    """Go on if a collection fails, as long as another one succeeds."""
    deduplicate_pairs: bool = True
    """Keep one of several pairs with the same prompt, chosen and rejected response."""
    max_pairs: int | None = Field(default=None, ge=1)
    """Maximum number of pairs, a seeded random sample; none: all."""
    wait_for_completion: MayChange[bool] = True
    """Wait for the job. With false, the run ends with its submission; with true and `--resume` it waits for the job."""
