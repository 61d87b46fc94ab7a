"""Configuration of the ART plugin, and its validation against the installed release of `openpipe-art`."""

import importlib
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_pascal

from insitu.errors import ConfigError, needing, not_found
from insitu.schemas.components import MayChange
from insitu.schemas.finetuning import TrainerAdapterConfig, TrainerConfig
from insitu.training.episodes_builder import EpisodesBuilderConfig

_BLOCKS = ("init_args", "engine_args", "peft_args", "trainer_args", "server_args")
"""Configuration blocks whose types in `art.dev` have the same names: `InitArgs`."""


class _Open(BaseModel):
    """Extra keys are checked against the release."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ARTTrajectoryBuilderConfig(EpisodesBuilderConfig, name="openpipe_art_traj_builder"):
    """Runs several episodes per dataset row and groups them by row."""

    ignores_unknown_keys = True

    num_generations: int = Field(default=2, ge=1)
    """Episodes per row and epoch: the group size."""


class InitArgs(_Open):
    """How the server loads the model; any key of ART's `InitArgs`."""

    max_seq_length: int | None = Field(default=None, ge=1)
    """Maximum length of a training sequence, in tokens."""


class EngineArgs(_Open):
    """How the server samples; any key of ART's `EngineArgs`."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of GPU memory used for sampling."""
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Number of GPUs per copy of the model."""


class ARTBackendConfig(BaseModel):
    """An ART server and the model to train on it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    ip: MayChange[str]
    """Host name or IP address of the server."""
    port: MayChange[int] = Field(ge=1, le=65535)
    """Port of the server."""
    name: str = Field(default="trainer_run", min_length=1)
    """Name of the trained model on the server, and the name it is served under."""
    project: str = Field(default="trainer_project", min_length=1)
    """The model's project. Reusing a project and name continues training that model."""
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    """The model to start from. The server must have it."""
    api_key: str = Field(default="default", repr=False)
    """Sent to the server as a bearer token."""
    delete_old_checkpoints: MayChange[bool] = False
    """Before each training job, delete all checkpoints except the latest and the one with the highest mean reward over
    the episodes it sampled. From ART 0.5.9 on, checkpoints of earlier runs are kept."""
    lost_reply_timeout: MayChange[float] = Field(default=600.0, gt=0)
    """Seconds to wait for a new model step after the connection was lost during training, before resubmitting."""
    read_timeout: MayChange[float] = Field(default=60.0, gt=0)
    """Seconds without data from the server after which a request has failed, except while it trains."""
    retry_timeout: MayChange[float] = Field(default=600.0, ge=0)
    """Seconds for which a request is retried while the server does not respond, is overloaded (429) or fails (5xx)."""
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


class ARTTrainingConfig(_Open):
    """Options per training request: any key of ART's public `TrainConfig` or of `art.dev.TrainConfig`."""

    learning_rate: float = Field(default=5e-5, ge=0)
    """Learning rate of the optimizer."""
    beta: float = Field(default=0.0, ge=0)
    """KL penalty coefficient. Releases from 0.5.17 on have it as `kl_penalty_coef`, which it is sent as."""


class ARTTrainerAdapterConfig(TrainerAdapterConfig, name="openpipe_art_trainer_adapter"):
    """Trains on a server that speaks OpenPipe ART's protocol, such as `insitu backend`."""

    ignores_unknown_keys = True

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

    ignores_unknown_keys = True


def load_art() -> Any:
    """The module `art`, whose import takes seconds. Raises ConfigError with the install command if it is missing."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing litellm fetches a price list
    with needing("art", "the ART plugin"):
        return importlib.import_module("art")


def model_configs(art: Any, backend: ARTBackendConfig) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """ART's `InternalModelConfig` and, if there is one, `OpenAIServerConfig`.

    Raises ConfigError for a key that the installed release does not have.
    """
    blocks = backend.model_dump(exclude_none=True, include={*_BLOCKS})
    internal = {name: values for name, values in blocks.items() if values}
    _check_blocks(art, "backend", internal)
    server = backend.server_config or None
    if server is not None:
        _check_keys("backend.server_config", server, _keys(art.dev.OpenAIServerConfig))
        _check_blocks(art, "backend.server_config", {name: server[name] for name in _BLOCKS if name in server})
    return internal, server


def train_config(art: Any, training: ARTTrainingConfig) -> tuple[Any, dict[str, Any]]:
    """The public `TrainConfig` and `art.dev.TrainConfig`. Raises ConfigError for a key or value neither accepts.

    Unset keys of the public config keep the library's defaults.
    """
    public, dev = set(art.types.TrainConfig.model_fields), _keys(art.dev.TrainConfig)
    options = training.model_dump()
    if "beta" not in public and (beta := options.pop("beta")):  # from 0.5.17 on
        if options.get("kl_penalty_coef"):
            problem = f"training.beta is {beta!r}, but training.kl_penalty_coef is the same option"
            raise ConfigError(f"trainer_adapters: {problem} in openpipe-art {_release()}: set one of them")
        options["kl_penalty_coef"] = beta
    if "kl_penalty_coef" not in public and (coefficient := options.pop("kl_penalty_coef", None)):
        problem = f"training.kl_penalty_coef is {coefficient!r}, but openpipe-art {_release()} has no such option"
        raise ConfigError(f"trainer_adapters: {problem}; set training.beta")
    _check_keys("training", options, public | dev)
    # 0.5.18 refers to this name without defining it.
    hints = get_type_hints(art.dev.TrainConfig, localns={"MoeRoutingReplayBundle": Any})
    hints |= {name: Annotated[field.annotation, field] for name, field in art.types.TrainConfig.model_fields.items()}
    for name, value in options.items():  # rejects a wrong value before any episode runs
        try:
            options[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            problem = f"training.{name} is {value!r}: {error.errors(include_url=False)[0]['msg']}"
            raise ConfigError(f"trainer_adapters: {problem} (openpipe-art {_release()})") from None
    config = art.types.TrainConfig(**{name: value for name, value in options.items() if name in public})
    return config, {name: value for name, value in options.items() if name not in public}


def _release() -> str:
    return version("openpipe-art")


def _keys(typed_dict: Any) -> set[str]:
    return set(typed_dict.__required_keys__ | typed_dict.__optional_keys__)


def _check_blocks(art: Any, where: str, blocks: Mapping[str, Any]) -> None:
    for name, values in blocks.items():
        _check_keys(f"{where}.{name}", values, _keys(getattr(art.dev, to_pascal(name))))


def _check_keys(where: str, block: Any, allowed: Iterable[str]) -> None:
    if not isinstance(block, Mapping):
        raise ConfigError(f"trainer_adapters: {where} must be a mapping")
    allowed = sorted(allowed)
    for name in block:
        if name not in allowed:
            problem = not_found(f"trainer_adapters: {where}: key", str(name), allowed)
            raise ConfigError(f"{problem} (openpipe-art {_release()})")
