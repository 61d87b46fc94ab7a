"""Loads a Hugging Face causal language model with its tokenizer."""

import contextlib
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from insitu.algorithms.memory_budget import Workload, memory_budget, model_shape
from insitu.backend.activations import align_activations
from insitu.backend.adapters import speed_up
from insitu.backend.experts import fill_experts
from insitu.backend.packed import pack_linears
from insitu.backend.quantization import quantizer
from insitu.disk.files import available_memory, readable_bytes
from insitu.disk.gguf_files import is_gguf, model_location, weights_location
from insitu.disk.memory import machine_memory
from insitu.disk.model_files import (
    NO_CODE,
    check_adapter,
    check_model,
    check_templates,
    code_problem,
    split_revision,
    stored_model,
)
from insitu.disk.processor import cpu_dtype, processor_words
from insitu.errors import BackendError
from insitu.formats.templates import chosen_template, template_error

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A frozen model in eval mode; `max_length` bounds prompt and completion together."""

    module: nn.Module
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    max_length: int
    source: str
    quantization: str | None = None

    @property
    def vocab_size(self) -> int:
        """Upper bound of the token ids."""
        return int(self.module.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def load_model(
    source: str,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str | None = None,
    chat_template: Path | None = None,
    *,
    frozen: bool = False,
) -> LoadedModel:
    """Loads a folder, GGUF file or hub name; a folder with a PEFT adapter is loaded on top of its base model.

    `chat_template` is a file with the template to use instead of the model's.

    `dtype: auto` is `cpu_dtype` on a CPU and the checkpoint's dtype elsewhere; `frozen`: these weights are not trained.
    For `quantization` see `quantizer`. Raises BackendError if the source is missing or damaged, is not a decoder-only
    language model, or has no chat template.
    """
    quantize = quantizer(quantization) if quantization is not None else None
    torch_device = _device(device)
    check_model(Path(source))
    base, adapter = base_and_adapter(source)
    base = str(Path(base).resolve()) if Path(base).exists() else base  # stored in adapter checkpoints
    config = _config(base)
    has_tokenizer = adapter and (Path(source) / "tokenizer.json").exists()
    tokenizer = _tokenizer(source if has_tokenizer else base, chat_template)
    if dtype == "auto" and torch_device.type == "cpu":
        torch_dtype = DTYPES[cpu_dtype(processor_words(), _parameters(base, config) if frozen else 0)]
    elif dtype == "auto":
        torch_dtype = getattr(config, "dtype", None) or torch.float32
    elif dtype in DTYPES:
        torch_dtype = DTYPES[dtype]
    else:
        raise BackendError(f"dtype is {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    _check_memory(base, config, torch_dtype)
    module = _weights(base, torch_dtype, {"config": config} if is_gguf(base) else {})  # reading it again takes long
    if adapter:
        from peft import PeftModel

        settings = json.loads((Path(source) / "adapter_config.json").read_bytes())
        check_patterns(f"{source}/adapter_config.json", settings, module)
        with wrap_errors(f"the adapter in {source} cannot be put on {base}"), quiet_peft():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            module = PeftModel.from_pretrained(module, source)
        check_experts(f"the adapter in {source} cannot be served", module)
        speed_up(module)
    if quantize is None:
        module.to(torch_device)
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise BackendError(f"the weights of {source} cannot be used: {name} has NaN or infinite values")
    if quantize is not None:
        quantize(module, torch_device)
    else:
        pack_linears(module)
    if torch_device.type == "cpu":
        align_activations(module)
        fill_experts(module)
    module.eval().requires_grad_(False)
    max_length = _max_length(config, tokenizer)
    return LoadedModel(module, tokenizer, torch_device, torch_dtype, max_length, source, quantization)


def _check_memory(source: str, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Raises BackendError if the weights do not fit into this machine, before they are loaded, or downloaded.

    Those for a GPU are loaded on the CPU first.
    """
    stored, machine = stored_model(source), machine_memory()
    shape = model_shape(config.to_dict(), stored.parameters if stored is not None else None)
    if shape is None or machine is None:
        return
    name = str(dtype).removeprefix("torch.")
    weights = memory_budget(shape, Workload(dtype=name, trains=False)).weights
    if weights > machine.available:
        smaller = "a smaller model" if dtype != torch.float32 else "dtype bfloat16, or a smaller model"
        problem = f"the weights of {source} take {readable_bytes(weights)} in {name}"
        free = f"{readable_bytes(machine.available)} of {readable_bytes(machine.total)} of memory are free"
        raise BackendError(f"{problem}, but {free}; use {smaller}")


def _parameters(base: str, config: PreTrainedConfig) -> int:
    """The number of parameters, from the configuration alone."""
    with wrap_errors(f"no model could be made from the config of {base}"), torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device is {name!r}, but torch finds no CUDA device")
    return device


def base_and_adapter(source: str) -> tuple[str, bool]:
    """Source of the full weights, and whether `source` is an adapter for them."""
    folder = Path(source)
    if not folder.exists():
        if source.startswith((".", "/", "~")) or split_revision(source)[0].count("/") > 1:
            raise BackendError(f"there is no folder {source} (looked in {Path.cwd()})")
        return source, False
    if is_gguf(folder):
        return source, False
    if not folder.is_dir():
        problem = "a model is a folder with a config.json, a .gguf file, or a hub name"
        raise BackendError(f"{source} is a file; {problem}")
    if not (folder / "adapter_config.json").exists():
        if not (folder / "config.json").exists():
            names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
            raise BackendError(f"{source} holds neither config.json nor adapter_config.json, but {names}")
        return source, False
    with wrap_errors(f"{folder / 'adapter_config.json'} cannot be read"):
        config = json.loads((folder / "adapter_config.json").read_bytes())
        check_adapter(folder, config)
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:
        raise BackendError(f"{folder / 'adapter_config.json'} names no base model (base_model_name_or_path)")
    relative = folder / base
    if Path(base).exists() or relative.exists():
        return (base if Path(base).exists() else str(relative)), True
    return (f"{base}@{revision}" if revision else base), True


_MATCHING = """import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.fullmatch(pattern, name), re.match(rf"(.*\\.)?({pattern})$", name)
"""
_MATCHING_SECONDS = 2
"""Of a processor, which ordinary patterns take a few thousandths of."""


def check_patterns(where: str, settings: Mapping[str, Any], module: nn.Module) -> None:
    """Raises BackendError for patterns of LoRA adapters that take long for the names of a model's modules.

    In another process: peft would match them in this one, which nothing could interrupt, nor answer requests meanwhile.
    """
    values = [settings.get(key) for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")]
    texts = [text for value in values for text in ([value] if isinstance(value, str) else value or ())]
    patterns = [text for text in texts if re.fullmatch(r"[\w.-]*", str(text)) is None]
    if not patterns:
        return
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MATCHING, str(_MATCHING_SECONDS)],
        input=json.dumps([patterns, [name for name, _ in module.named_modules()]]).encode(),
        check=False,  # peft says what is wrong with a pattern
        stderr=subprocess.DEVNULL,
    )
    if done.returncode < 0:  # the kernel has ended it
        raise BackendError(f"{where}: a pattern takes more than {_MATCHING_SECONDS} s to match: {patterns[0]:.80}")


def check_experts(where: str, module: nn.Module) -> None:
    """Raises BackendError for adapters of experts' stacked weights.

    peft computes them by changing modules during a forward pass, while other threads may use the same modules.
    """
    if any(type(each).__name__ == "ParamWrapper" for each in module.modules()):
        raise BackendError(f"{where}: adapters of the stacked weights of experts are not supported")


def _config(base: str) -> PreTrainedConfig:
    location, options = model_location(base)
    with wrap_errors(f"no model could be read from {base}"):
        config = AutoConfig.from_pretrained(location, **options, **NO_CODE)
    if getattr(config, "is_encoder_decoder", False) or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        problem = f"{base} is a {config.model_type} model; only decoder-only causal language models are served"
        raise BackendError(problem)
    return config


def _tokenizer(source: str, chat_template: Path | None) -> PreTrainedTokenizerBase:
    location, options = model_location(source)
    with wrap_errors(f"no tokenizer could be read from {source}"):
        tokenizer = AutoTokenizer.from_pretrained(location, **options, **NO_CODE)
    if chat_template is not None:
        with wrap_errors(f"chat_template {chat_template} cannot be read"):
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    check_templates(source, tokenizer.chat_template)
    if not tokenizer.chat_template:
        raise BackendError(
            f"the tokenizer of {source} has no chat template; add chat_template.jinja (or the key chat_template in "
            "tokenizer_config.json), which turns messages into a prompt"
        )
    error = template_error(chosen_template(tokenizer.chat_template))
    if error is not None:
        raise BackendError(f"{chat_template or f'the chat template of {source}'} is no template: {error}")
    if not tokenizer.is_fast:
        raise BackendError(
            f"the tokenizer of {source} has no tokenizer.json; save it with a release of tokenizers first"
        )
    return tokenizer


def _weights(base: str, dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
    with wrap_errors(f"the weights of {base} could not be read"):
        try:
            return complete_model(AutoModelForCausalLM, base, dtype, "sdpa", **options)
        except ValueError:
            return complete_model(AutoModelForCausalLM, base, dtype, "eager", **options)


def complete_model(
    model_class: Any, folder: str | Path, dtype: torch.dtype, attention: str, **options: Any
) -> nn.Module:
    """Raises BackendError if tensors are missing, which transformers would fill with random numbers."""
    location, where = weights_location(folder)
    options |= {**where, "dtype": dtype, "attn_implementation": attention, "output_loading_info": True}
    transformers_logging.disable_progress_bar()
    with quiet_transformers():  # its report of the tensors would hide the messages below
        module, loading = model_class.from_pretrained(location, **options)
    module.name_or_path = split_revision(folder)[0]  # what peft writes as the base; of a file, not its folder
    if missing := sorted(loading["missing_keys"]):
        others = f" and {len(missing) - 1} other tensors are" if len(missing) > 1 else " is"
        raise BackendError(f"the weights of {folder} are incomplete: {missing[0]}{others} missing")
    if unknown := sorted(loading["unexpected_keys"]):
        logger.warning(
            "%s: ignored %d tensors that the model does not have, such as %s", folder, len(unknown), unknown[0]
        )
    return module


def _max_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The smallest stated limit: position embeddings, tokenizer, or positions beyond which scores change otherwise."""
    config = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")
    limits = [*(getattr(config, name, None) for name in names), tokenizer.model_max_length, _rope_limit(config)]
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4 computes it by place, not by position
        limits.append(getattr(config, "floor_scale", None))
    return min((limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**7), default=4096)


def _rope_limit(config: PreTrainedConfig) -> int | None:
    """Positions up to which `longrope` has fixed frequencies; beyond, they depend on the longest row of a batch."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" not in str(rope):
        return None
    return rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free where a model's weights are; None if the system does not say."""
    return available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Logs errors only."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Suppresses peft's warnings about GPT-2's transposed projections, a deprecated transformers attribute, ranks of
    experts' weights, which are refused, and merging adapters into quantized weights, which is not done.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys did not match any targeted module")
        warnings.filterwarnings("ignore", message=".* was instantiated without `get_apply_tensor_subclass`")
        yield


@contextlib.contextmanager
def wrap_errors(message: str) -> Iterator[None]:
    """Turns any exception of a third-party loader into a BackendError with `message`."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:  # third-party loaders raise anything on files they cannot read
        raise BackendError(f"{message}: {code_problem(error) or error}") from error
