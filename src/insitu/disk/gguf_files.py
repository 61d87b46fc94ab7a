"""GGUF files as models: one file has weights of few bits, configuration, tokenizer and chat template.

llama.cpp made the format. transformers reads it with the package `gguf`, and restores the weights in full.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from insitu.disk.model_files import NO_CODE, SAFE_OPTIONS, check_weights, split_revision
from insitu.errors import BackendError, install_command

_MAGIC = b"GGUF"
_TEMPLATE = "tokenizer.chat_template"


def is_gguf(source: str | Path) -> bool:
    """Whether a model is such a file, which must exist."""
    path = Path(source)
    return path.suffix == ".gguf" and path.is_file()


def check_gguf(file: str | Path) -> None:
    """Raises BackendError if the package is missing, or the file is of another kind."""
    if find_spec("gguf") is None:
        raise BackendError(f"{file} needs the package gguf: {install_command('gguf')}")
    with Path(file).open("rb") as opened:
        if (start := opened.read(len(_MAGIC))) != _MAGIC:
            raise BackendError(f"{file} is not a GGUF file: it begins with {start!r}, not {_MAGIC!r}")


def model_location(source: str | Path) -> tuple[str, dict[str, str]]:
    """The folder or Hub name that `from_pretrained` gets for a model, and its options: a GGUF file, or a revision."""
    if not is_gguf(source):
        name, revision = split_revision(source)
        return name, {} if revision is None else {"revision": revision}
    check_gguf(source)
    return str(Path(source).parent), {"gguf_file": Path(source).name}


def weights_location(source: str | Path) -> tuple[str, dict[str, Any]]:
    """The folder or Hub name that `from_pretrained` gets for the weights of a model, and its options.

    Raises BackendError for local weights that are not safetensors or GGUF.
    """
    location, options = model_location(source)
    if "gguf_file" in options:
        transformers: Any = importlib.import_module("transformers")
        if not hasattr(transformers, "GgufConfig"):
            raise BackendError(f"{source} needs transformers 5.19 or later: {install_command('gguf')}")
        return location, {**NO_CODE, **options, "quantization_config": transformers.GgufConfig(dequantize=True)}
    if Path(source).is_dir():
        check_weights(Path(source))
    return location, {**SAFE_OPTIONS, **options}


def gguf_chat_template(file: Path) -> str | None:
    """The chat template of a GGUF file. Raises BackendError if the file cannot be read."""
    check_gguf(file)
    reader: Any = importlib.import_module("gguf").GGUFReader
    try:
        field = reader(file).get_field(_TEMPLATE)
        return str(field.contents()) if field is not None else None
    except Exception as error:  # the package raises anything for files that it cannot read
        raise BackendError(f"{file} cannot be read: {error}") from error
