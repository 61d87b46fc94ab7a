"""Loads a Hugging Face causal language model with its tokenizer."""

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from insitu.errors import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to sample: in eval mode, nothing in it asking for gradients.

    `max_length` is the most positions a prompt and its completion may take together.
    """

    module: nn.Module
    tokenizer: "PreTrainedTokenizerBase"
    device: torch.device
    dtype: torch.dtype
    max_length: int
    source: str

    @property
    def vocabulary(self) -> int:
        """Token ids lie below this."""
        return self.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]


def load_model(source: str, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """The model in a folder or of a hub name; a folder with a PEFT adapter is loaded over the base it names.

    `dtype: auto` is float32 on a CPU and the checkpoint's own type elsewhere. Raises BackendError where the source
    is missing, is not a decoder-only language model, or has no chat template.
    """
    where = _device(device)
    base, adapter = _base_and_adapter(source)
    base = str(Path(base).resolve()) if Path(base).exists() else base  # checkpoints of adapters name it
    config = _config(base)
    tokenizer = _tokenizer(source if adapter and _has_tokenizer(source) else base)
    kind = _dtype(dtype, where, config)
    module = _weights(base, kind)
    if adapter:
        from peft import PeftModel

        with _explained(f"the adapter in {source} cannot be put on {base}"), quiet_peft():
            module = PeftModel.from_pretrained(module, source)
    module.to(where).eval().requires_grad_(False)
    return LoadedModel(module, tokenizer, where, kind, _max_length(config, tokenizer), source)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device is {name!r}, but torch sees no CUDA device here")
    return where


def _dtype(name: str, device: torch.device, config: "PreTrainedConfig") -> torch.dtype:
    if name == "auto":
        stored = getattr(config, "dtype", None)
        return torch.float32 if device.type == "cpu" or stored is None else stored
    if name not in DTYPES:
        raise BackendError(f"dtype is {name!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _base_and_adapter(source: str) -> tuple[str, bool]:
    """Where the full weights lie, and whether `source` is an adapter on top of them."""
    folder = Path(source)
    if not folder.exists():
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise BackendError(f"there is no folder {source} (looked in {Path.cwd()})")
        return source, False
    if not folder.is_dir():
        raise BackendError(f"{source} is a file; a model is a folder with a config.json, or a hub name")
    if not (folder / "adapter_config.json").exists():
        if not (folder / "config.json").exists():
            found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
            raise BackendError(f"{source} holds neither config.json nor adapter_config.json, but {found}")
        return source, False
    with _explained(f"{folder / 'adapter_config.json'} cannot be read"):
        base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not base:
        raise BackendError(f"{folder / 'adapter_config.json'} names no base model (base_model_name_or_path)")
    beside = folder / base
    return (str(beside) if not Path(base).exists() and beside.exists() else base), True


def _config(base: str) -> "PreTrainedConfig":
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with _explained(f"no model could be read from {base}"):
        config = AutoConfig.from_pretrained(base)
    if getattr(config, "is_encoder_decoder", False) or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BackendError(
            f"{base} is a {config.model_type} model; only decoder-only causal language models are served"
        )
    return config


def _tokenizer(source: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    with _explained(f"no tokenizer could be read from {source}"):
        tokenizer = AutoTokenizer.from_pretrained(source)
    if not tokenizer.chat_template:
        raise BackendError(
            f"the tokenizer of {source} has no chat template; add chat_template.jinja (or the key chat_template in "
            "tokenizer_config.json), which turns messages into a prompt"
        )
    if not tokenizer.is_fast:
        raise BackendError(
            f"the tokenizer of {source} has no tokenizer.json; save it with a release of tokenizers first"
        )
    return tokenizer


def _has_tokenizer(source: str) -> bool:
    return (Path(source) / "tokenizer.json").exists()


def _weights(base: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with _explained(f"the weights of {base} could not be read"):
        try:
            return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="sdpa")
        except ValueError:
            return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager")


def _max_length(config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> int:
    """The smallest limit anything states: positions, the tokenizer, and a window that attention would slide over."""
    limits = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds):
        limits.append(getattr(config, "sliding_window", None))
    stated = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**7]
    return min(stated, default=4096)


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Without what peft says of itself: GPT-2's transposed projections found, transformers asked by a name of old."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        yield


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Whatever a library raises while it reads what the user named, as one sentence."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:  # third-party loaders raise anything on files they cannot read
        raise BackendError(f"{what}: {error}") from error
