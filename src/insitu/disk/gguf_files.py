"""GGUF files as models: one file has weights of few bits, configuration, tokenizer and chat template.

llama.cpp made the format. transformers reads it with the package `gguf`, and restores the weights in full.
"""

import importlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from insitu.disk.model_files import NO_CODE, SAFE_OPTIONS, StoredModel, check_weights, split_revision, stored_model
from insitu.errors import BackendError, install_command

_MAGIC = b"GGUF"
_TEMPLATE = "tokenizer.chat_template"
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Keys of a config.json, and those of the format after the architecture's name."""


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


class GgufHeader(NamedTuple):
    """What a GGUF file says of its model; `sizes` has them under the names of a config.json."""

    chat_template: str | None
    sizes: StoredModel


def model_sizes(source: str) -> StoredModel | None:
    """As `stored_model`, and of a GGUF file. Raises BackendError if that cannot be read."""
    return gguf_header(Path(source)).sizes if is_gguf(source) else stored_model(source)


def gguf_header(file: Path) -> GgufHeader:
    """Raises BackendError if the file cannot be read."""
    check_gguf(file)
    state = file.stat()
    return _header(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)  # reading a vocabulary takes the package seconds
def _header(file: Path, modified: int, size: int) -> GgufHeader:
    reader: Any = importlib.import_module("gguf").GGUFReader
    try:
        opened = reader(file)
        fields = opened.fields
        values = {key: field.contents() for key, field in fields.items() if not key.startswith("tokenizer.ggml.")}
        sizes = {name: values.get(f"{values['general.architecture']}.{key}") for name, key in _SIZES.items()}
        sizes = {name: max(size) if isinstance(size, list) else size for name, size in sizes.items()}  # by layer
        tokens = fields.get("tokenizer.ggml.tokens")
        vocabulary = sizes["vocab_size"] or (len(tokens.data) if tokens is not None else None)
        parameters = sum(int(tensor.n_elements) for tensor in opened.tensors)
        return GgufHeader(values.get(_TEMPLATE), StoredModel({**sizes, "vocab_size": vocabulary}, parameters))
    except Exception as error:  # the package raises anything for files that it cannot read
        raise BackendError(f"{file} cannot be read: {error}") from error
