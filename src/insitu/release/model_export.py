"""Exports a checkpoint of a run as a Hugging Face folder, a model or an adapter with its card, and uploads it."""

import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from insitu.disk.files import check_free, new_folder
from insitu.disk.gguf_files import model_location, weights_location
from insitu.disk.model_files import NO_CODE, TrainingRecord, check_model, copy_model, read_record
from insitu.errors import BackendError, ConfigError, foreign_errors, format_error, needing
from insitu.release.model_card import CardSubject, model_card

CARD_FILE = "README.md"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*", "adapter_*"]
"""Files of a repository from which libraries load weights."""


class Source(NamedTuple):
    """A checkpoint of a run; its record names the model that training started from."""

    run: Path
    folder: Path
    record: TrainingRecord

    @property
    def is_adapter(self) -> bool:
        return (self.folder / _ADAPTER_FILES[0]).exists()


def open_source(run: Path, folder: Path) -> Source:
    """Raises ConfigError if the folder is not a checkpoint of the backend."""
    record = read_record(folder)
    if record is None:
        raise ConfigError(f"{folder} is not a checkpoint of insitu backend: it has no training.json")
    return Source(run, folder, record)


def export_model(
    source: Source, target: Path, *, merge: bool = False, name: str | None = None, extra: Mapping[str, bytes] = {}
) -> Path:
    """Writes a new folder, complete or not at all; `extra` are further files. `name` is the model's in the card.

    With `merge` an adapter is merged into its base model. Raises ConfigError if `target` has files, BackendError if the
    checkpoint is damaged.
    """
    target = target.resolve()
    check_free(target, "OUT")
    merged = merge and source.is_adapter
    with new_folder(target) as draft:
        if merged:
            check_model(source.folder)
        copy_model(source.folder, draft)
        if merged:
            for file in _ADAPTER_FILES:
                (draft / file).unlink()
            _merge(source.folder, draft)
        subject = CardSubject(name or target.name, source.record, source.is_adapter and not merged)
        (draft / CARD_FILE).write_text(model_card(source.run, subject), encoding="utf-8")
        for file, content in extra.items():
            (draft / file).write_bytes(content)
    return target


def _merge(adapter: Path, target: Path) -> None:
    """Saves the base model with the adapter's changes; they are added in float32 and stored in the base's dtype."""
    with needing("local", "--merge"):
        peft = importlib.import_module("peft")
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    settings = peft.PeftConfig.from_pretrained(adapter)
    base = settings.base_model_name_or_path + (f"@{settings.revision}" if settings.revision else "")
    location, options = weights_location(base)
    with foreign_errors(BackendError, f"{adapter} cannot be merged into {base}"):
        module: Any = transformers.AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32, **options)
        location, options = model_location(base)
        config = transformers.AutoConfig.from_pretrained(location, **options, **NO_CODE)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # GPT-2's transposed projections
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
            module = peft.PeftModel.from_pretrained(module, adapter).merge_and_unload()
    module.to(getattr(config, "dtype", None) or torch.float32).save_pretrained(target)


def check_push(name: str, source: Source, merge: bool) -> None:
    """Raises ConfigError if the upload cannot succeed: a wrong name, a missing package, an adapter of a local model."""
    check_repository(name, "--push")
    if source.is_adapter and not merge:
        check_base(source.record.started_from, "--push", "--merge")


def check_repository(name: str, key: str) -> None:
    """Raises ConfigError naming `key` if it is not the name of a repository, or there is no token of the Hub."""
    hub = _hub()
    try:
        importlib.import_module("huggingface_hub.utils").validate_repo_id(name)
    except ValueError as error:  # huggingface-hub's HFValidationError
        raise ConfigError(f"{key}: {name!r} is not the name of a repository: {error}") from None
    if hub.get_token() is None:
        raise ConfigError(f"{key}: no token of the Hugging Face Hub; set HF_TOKEN or run `hf auth login`")


def check_base(model: str | Path, key: str, merge: str) -> None:
    """Raises ConfigError if those who get an adapter of this model could not get the model; `merge` helps."""
    if (base := Path(model)).is_absolute():  # a model of the Hub has a name with one slash
        raise ConfigError(f"{key}: the adapter's base model {base.name} is on this machine only; add {merge}")


def create_repository(name: str, private: bool = True) -> str:
    """Creates a model repository of the Hub if there is none of this name; returns its URL. Raises BackendError.

    The token is that of the environment or of the user's login.
    """
    try:
        return str(_hub().HfApi(library_name="insitu").create_repo(name, private=private, exist_ok=True))
    except Exception as error:  # huggingface-hub raises its own errors, httpx's and OSError
        raise BackendError(f"the repository {name} cannot be created: {_one_line(error)}") from error


def upload(folder: Path, name: str, message: str) -> None:
    """Uploads the folder as one commit to a model repository; files that are there already are not sent again.

    Weights of an earlier upload are deleted there: beside those of a model, libraries load an adapter. Raises
    BackendError.
    """
    api: Any = _hub().HfApi(library_name="insitu")
    options = {"commit_message": message, "delete_patterns": _WEIGHTS}
    try:
        api.upload_folder(repo_id=name, repo_type="model", folder_path=folder, **options)
    except Exception as error:  # as above
        raise BackendError(f"its upload to {name} failed: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(format_error(error).split())


def _hub() -> Any:
    with needing("local", "an upload"):
        return importlib.import_module("huggingface_hub")
