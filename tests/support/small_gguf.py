"""A GGUF file with the first layers and tokens of the real model, which loads in a second."""

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
from real_model import CACHE, real_gguf

_LAYERS, _TOKENS = 2, 1024
_SET_BY_WRITER = ("GGUF.", "general.architecture", "llama.block_count", "llama.vocab_size")


def save_small_gguf(file: Path) -> Path:
    """Writes the file, which is made once per machine: reading that of the whole model takes seconds."""
    made = CACHE / f"first-{_LAYERS}-layers-{_TOKENS}-tokens.gguf"
    if not made.is_file():
        draft = made.with_suffix(f".{os.getpid()}")
        _write(draft)
        draft.rename(made)
    return Path(shutil.copy(made, file))


def _write(file: Path) -> None:
    """The weights are those of the whole model's file, in blocks of four bits."""
    reader = gguf.GGUFReader(real_gguf())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_vocab_size(_TOKENS)
    tokens: set[str] = set()
    for field in reader.fields.values():
        if field.name.startswith(_SET_BY_WRITER):
            continue
        value: Any = field.contents()
        if field.name == "tokenizer.ggml.tokens":
            tokens = {*value[:_TOKENS]}
        if field.name == "tokenizer.ggml.merges":
            value = [pair for pair in value if {*pair.split(" "), pair.replace(" ", "")} <= tokens]
        elif field.name.startswith("tokenizer.ggml.") and isinstance(value, list):
            value = value[:_TOKENS]
        writer.add_key_value(field.name, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "0"
        if int(layer) < _LAYERS:
            data = tensor.data[:_TOKENS] if tensor.name == "token_embd.weight" else tensor.data
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
