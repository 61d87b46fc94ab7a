"""Uploads an exported model to the Hugging Face Hub."""

import importlib
from pathlib import Path
from typing import Any

from insitu.errors import BackendError, ConfigError, format_error, install_command
from insitu.release.model_export import Source


def check_push(name: str, source: Source, merge: bool) -> None:
    """Raises ConfigError if the upload cannot succeed: a wrong name, a missing package, an adapter of a local model."""
    hub = _hub()
    try:
        importlib.import_module("huggingface_hub.utils").validate_repo_id(name)
    except ValueError as error:  # huggingface-hub's HFValidationError
        raise ConfigError(f"--push: {name!r} is not the name of a repository: {error}") from None
    if hub.get_token() is None:
        raise ConfigError("--push: no token of the Hugging Face Hub; set HF_TOKEN or run `hf auth login`")
    if source.is_adapter and source.local_base and not merge:
        base = Path(source.record.started_from).name
        raise ConfigError(f"--push: the adapter's base model {base} is a folder of this machine; add --merge")


def push(folder: Path, name: str) -> str:
    """Uploads the folder as one commit to a model repository, a private one if it is new; returns its URL.

    The token is that of the environment or of the user's login. Raises BackendError.
    """
    api: Any = _hub().HfApi(library_name="insitu")
    try:
        url = api.create_repo(name, repo_type="model", private=True, exist_ok=True)
        message = f"exported by insitu: {folder.name}"
        api.upload_folder(repo_id=name, repo_type="model", folder_path=folder, commit_message=message)
    except Exception as error:  # huggingface-hub raises its own errors, httpx's and OSError
        reason = format_error(error)
        raise BackendError(f"{folder} is complete, but its upload to {name} failed: {reason}") from error
    return str(url)


def _hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(f"--push needs huggingface-hub: {install_command('local')}") from error
