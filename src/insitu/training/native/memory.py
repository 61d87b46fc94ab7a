"""The model of a backend that a run starts, and its memory plan, from the run's file and the files of the model."""

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from insitu.algorithms.memory_budget import CPU_MICRO_BATCH, Workload, model_shape
from insitu.builder import Builder
from insitu.collect.datasets import load_dataset
from insitu.config import Config
from insitu.disk.gguf_files import model_sizes
from insitu.disk.memory import machine_memory
from insitu.disk.model_files import downloaded
from insitu.disk.processor import cpu_dtype, processor_words, usable_cores
from insitu.errors import ConfigError, not_found
from insitu.schemas.config import warn_once
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.kinds import TRAJECTORY_BUILDER
from insitu.schemas.lora import LoRASettings
from insitu.training.episodes_builder import CollectingBuilderConfig
from insitu.training.memory_plan import Epoch, MemoryPlan, kept_versions
from insitu.training.native.config import InsituAdapterConfig, resolve_model

logger = logging.getLogger(__name__)

_NVIDIA = Path("/proc/driver/nvidia/version")
_LETTERS_PER_TOKEN = 4
_AROUND_QUESTION = 64
"""Tokens of a prompt besides the row's question: the template, and instructions."""
_EMBEDDINGS = {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out"}
"""Names of the modules with a vector for each token."""
_COMPLETION = 1024
"""Tokens of a completion if no `max_tokens` limits them."""


def plan_memory(block: InsituAdapterConfig, builder: Builder) -> MemoryPlan | None:
    """The plan for a block with a `model`.

    None if the sizes of the model are unknown, or vLLM or several processes take a part of the memory.
    """
    model, config = resolve_model(str(block.model), builder), builder.config
    stored, key = model_sizes(model), f"trainer_adapters.{config.finetuning.trainer_adapter}"
    shape = model_shape(stored.config, stored.parameters) if stored is not None else None
    if stored is not None and block.training.lora is not None:
        check_targets(block.training.lora.target_modules, stored.modules, f"{key}.training.lora.target_modules")
    if stored is None or shape is None or block.learner.total > 1 or block.sampler.kind != "embedded":
        return None
    on_gpu = block.device.startswith("cuda") or (block.device == "auto" and _NVIDIA.exists())
    training, trainer = block.training, config.trainer
    rows = _rows(builder)
    epoch, prompt, completion = _epoch(config, rows)
    longest = min(block.max_length or shape.max_length, shape.max_length)
    _warn_of_long_question(rows, model, longest)
    for name in sorted(config.trained_llms()):
        if (asked := config.llm(name).request_settings().get("max_tokens") or 0) >= longest:
            room = f"{longest} tokens for prompt and completion together: answers end there"
            warn_once(f"llms.{name}.max_tokens is {asked}, but the model has {room}")
    staleness = trainer.epochs_ahead if trainer is not None else 0
    saved = training.lora.modules_to_save if training.lora is not None else []
    dtype: str = block.dtype
    if dtype == "auto" and on_gpu:
        dtype = shape.dtype or "float32"
    elif dtype == "auto":
        dtype = cpu_dtype(processor_words(), shape.parameters if training.lora is not None else 0)
    workload = Workload(
        dtype=dtype,
        lora_rank=training.lora.rank if training.lora is not None else stored.lora_rank,
        lora_parameters=stored.lora if training.lora is None else _adapted(training.lora, stored.modules),
        whole_embeddings=sum(name.rpartition(".")[2] in _EMBEDDINGS for name in saved),
        quantization=block.quantization,
        micro_batch_tokens=training.micro_batch_tokens if on_gpu else min(training.micro_batch_tokens, CPU_MICRO_BATCH),
        gradient_checkpointing=training.gradient_checkpointing,
        job_tokens=epoch.prompts + epoch.completions,
        concurrency=min(config.max_concurrency, block.max_batch or config.max_concurrency),
        request_tokens=min(prompt + completion, longest),
        prompt_tokens=0 if on_gpu or training.attention == "padded" else prompt,
        kv_memory=block.kv_memory,
        versions=1 + staleness,
        on_gpu=on_gpu,
        cores=usable_cores(),
    )
    finetuning = config.finetuning
    kept = kept_versions(block.keep, finetuning.num_epochs, staleness, keeps_best=finetuning.validation is not None)
    machine = machine_memory() if not on_gpu else None
    return MemoryPlan(key, model, shape, workload, epoch, *kept, config.run_dir, machine)


def check_targets(targets: str | list[str], modules: Collection[str], key: str) -> None:
    """Raises ConfigError if a list names none of a model's modules, as far as files name them.

    Those of experts have other names there, and a tied `lm_head` none.
    """
    names = {module.rpartition(".")[2] for module in modules}
    if isinstance(targets, str) or not names or any(".experts." in module for module in modules):
        return
    if not any(f".{module}".endswith(f".{target}") for module in (*modules, "lm_head") for target in targets):
        raise ConfigError(f"{key}: {not_found('the layer', targets[0], sorted(names))}")


def _adapted(lora: LoRASettings, modules: Mapping[str, int]) -> int | None:
    """The parameters for each rank of adapters in the layers that are named; None: in all layers, or unknown."""
    targets = lora.target_modules
    if targets == "all-linear" or any(".experts." in name for name in modules):
        return None
    pattern = targets if isinstance(targets, str) else rf"(.*\.)?({'|'.join(map(re.escape, targets))})"
    try:
        return sum(size for name, size in modules.items() if re.fullmatch(pattern, name)) or None
    except re.error:  # reported by the backend
        return None


def _warn_of_long_question(rows: Sequence[EvalInputItem], model: str, room: int) -> None:
    """Warns of the longest question, if it alone has more tokens than a prompt may have, by the model's tokenizer."""
    texts = {str(row.id): row.input_obj.strip() for row in rows if isinstance(row.input_obj, str)}
    name, text = max(texts.items(), key=lambda each: len(each[1]), default=("", ""))
    folder = Path(model) if Path(model).is_dir() else downloaded(model)
    if len(text.encode(errors="replace")) < room or folder is None:  # a token is at least a byte
        return
    try:
        from tokenizers import Tokenizer

        count = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)
    except Exception:  # tokenizers is not installed, or raises its own errors for a file that loading reports
        logger.info("the tokens of the rows are unknown", exc_info=True)
        return
    if count >= room:
        whole = f"the model has {room} for prompt and completion together: an agent that passes it on whole will fail"
        warn_once(f"row {name!r}: its question alone has {count} tokens, but {whole}")


def _rows(builder: Builder) -> list[EvalInputItem]:
    """The rows that are collected."""
    config, request = builder.config, builder.request
    collecting = _collecting(config)
    if collecting is None or collecting.episodes_from is not None:
        return []
    return load_dataset(config, request.dataset if request is not None else None)


def _collecting(config: Config) -> CollectingBuilderConfig | None:
    block = config.blocks.get((TRAJECTORY_BUILDER.section, str(config.finetuning.trajectory_builder)))
    return block if isinstance(block, CollectingBuilderConfig) else None


def _epoch(config: Config, rows: Sequence[EvalInputItem]) -> tuple[Epoch, int, int]:
    """The tokens of an epoch, of its longest prompt, and of a completion, as far as the file tells."""
    collecting, generations, limit = _collecting(config), 1, None
    if collecting is not None:
        generations, limit = collecting.num_generations, collecting.rows_per_epoch
    letters = max((len(json.dumps(row.input_obj, default=str)) for row in rows), default=0)
    prompt = _AROUND_QUESTION + letters // _LETTERS_PER_TOKEN
    limits = [config.llm(name).request_settings().get("max_tokens") for name in config.trained_llms()]
    completion = max((limit or _COMPLETION for limit in limits), default=_COMPLETION)
    count = min(limit or len(rows), len(rows)) or 1
    return Epoch(count * generations, count * prompt, count * generations * completion), prompt, completion
