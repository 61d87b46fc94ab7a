"""The memory, disk and time that serving and training a model takes, from its configuration alone.

    model_shape(config.json, parameters)  ->  ModelShape
    memory_budget(shape, workload)        ->  MemoryBudget: bytes of each part, and of a token's keys and values
    remedies(shape, workload)             ->  changes of the settings that take less

The figures are those of the embedded backend in one process. They are estimates from above: real peaks lie up to a
quarter below (measured with SmolLM2-135M; see tests/algorithms/test_memory_budget.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
"""Bytes of a quantized weight, with its part of a scale."""
PROCESS = 600_000_000
"""A backend without a model: Python, torch and transformers."""
CPU_MICRO_BATCH, CHUNK_LOGITS = 2048, 1 << 24
"""Limits of the learner on a CPU: tokens of a micro-batch, of which more are not faster and delay sampling, and logits
that are computed together."""
ACTIVATION_BYTES, LEAST_MICRO_BATCH = 640 << 20, 256
"""Memory of a micro-batch's activations on a CPU that limits its tokens, but not to fewer than these."""
FRAGMENTS = 1.25
"""Memory of activations, as a multiple of their size: what a micro-batch frees does not fit the next one exactly."""
ROUND = 8
"""Micro-batches of a small model that cores share. It does not follow from their number, and so gradients do not."""
SMALL_MODEL = 5_000_000
"""Parameters below which a CPU's operations are too short to be split over threads."""
KV_SHARE = 0.5
"""Default of `kv_memory`, as a share of what the rest leaves free."""
KV_BLOCK = 256
"""Tokens whose keys and values lie together; a sequence takes whole blocks."""
KV_MARGIN = 1024
"""Tokens for which the default has room beside one request, for a prompt that is computed meanwhile, and logits."""
LOGIT_COPIES, SAMPLED_COPIES = 5, 4
"""Float32 tensors of the size of these logits at the peak, in training and in sampling."""
SMALL_MICRO_BATCH, SHORT_REQUEST = 256, 1024
"""Settings to propose where memory is short."""
CORE_OPERATIONS = 40e9
"""Nominal operations per second of a CPU core in float32: what a core with AVX-512 reaches in practice."""
_ALIASES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab": ("vocab_size",),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. `parameters` counts all weights, `linear` those of its layers' matrices, without embeddings
    and LM head; `lora` is the number of LoRA parameters for each rank."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    max_length: int
    parameters: int
    linear: int
    lora: int
    dtype: str | None = None
    """Of the stored weights."""


def model_shape(config: Mapping[str, Any], parameters: int | None = None) -> ModelShape | None:
    """The sizes that a model's configuration states; None if it lacks one. `parameters` is exact if it is known."""
    config = {**config, **(config.get("text_config") or {})}
    sizes = {key: next((config[name] for name in names if config.get(name)), None) for key, names in _ALIASES.items()}
    if not all(isinstance(value, int) for value in sizes.values()):
        return None
    layers, hidden, heads, vocab = (int(sizes[key] or 0) for key in _ALIASES)
    head_size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    intermediate = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim") or 4 * hidden
    if isinstance(intermediate, list):  # by layer
        intermediate = max(intermediate)
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    width = (config.get("moe_intermediate_size") or intermediate) if experts else intermediate
    queries, keys = heads * head_size, kv_heads * head_size
    matrices = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)]
    linear = sum(a * b for a, b in matrices) + max(1, experts) * sum(a * b for a, b in mlp) + experts * hidden
    qkv = config.get("attention_bias") or config.get("qkv_bias") or str(config.get("model_type")).startswith("qwen2")
    biases = (queries + 2 * keys if qkv else 0) + (hidden if config.get("attention_bias") else 0)
    biases += 2 * width + hidden if config.get("mlp_bias") else 0
    norms = 2 * hidden + (2 * head_size if str(config.get("model_type")).startswith("qwen3") else 0)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=width * max(1, config.get("num_experts_per_tok") or 1) if experts else width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab=vocab,
        max_length=config.get("max_position_embeddings") or config.get("n_positions") or 4096,
        parameters=parameters or embeddings + layers * (linear + biases + norms) + hidden,
        linear=layers * linear,
        lora=layers * sum(a + b for a, b in (matrices if experts else matrices + mlp)),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


@dataclass(frozen=True)
class Workload:
    """What runs on a model. `dtype` is that of the served weights.

    `request_tokens` is the length of a prompt with its completion, `prompt_tokens` of a prompt that rows of a job
    share; `job_tokens` is the number of tokens that a training job computes; `versions` are the trained versions that
    are loaded to sample from, besides the starting weights. Without `trains`, the model is only served.
    `lora_parameters` are those of the adapters for each rank; None: of adapters in all layers. `whole_embeddings`: how
    many of the embeddings and the head are trained whole beside adapters. Each of the `cores` may compute a micro-batch
    of a small model. A CPU samples in bfloat16 with a packed copy of the matrices, and keys and values in float32.
    """

    dtype: str = "float32"
    trains: bool = True
    lora_rank: int | None = None
    lora_parameters: int | None = None
    whole_embeddings: int = 0
    quantization: str | None = None
    micro_batch_tokens: int = CPU_MICRO_BATCH
    gradient_checkpointing: bool = False
    job_tokens: int = CPU_MICRO_BATCH
    concurrency: int = 8
    request_tokens: int = 1024
    prompt_tokens: int = 256
    kv_memory: int | None = None
    versions: int = 1
    on_gpu: bool = False
    cores: int = 1


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of each part at the peak of a training job; `kv_token`: of the keys and values of one token."""

    workload: Workload
    weights: int
    trained: int
    gradients: int
    optimizer: int
    served: int
    activations: int
    logits: int
    kv_token: int
    packed: int = 0
    process: int = PROCESS

    @property
    def fixed(self) -> int:
        """All but keys and values."""
        learner = self.trained + self.gradients + self.optimizer + self.activations
        return self.process + self.weights + self.packed + learner + self.served + self.logits

    @property
    def kv_request(self) -> int:
        """In whole blocks: a full last one is followed by another."""
        return self.kv_token * KV_BLOCK * (self.workload.request_tokens // KV_BLOCK + 1)

    @property
    def kv_wanted(self) -> int:
        """For all requests at once; with less, some wait."""
        return self.workload.concurrency * self.kv_request

    @property
    def needed(self) -> int:
        """The least that works: keys and values of one request at a time, or as much as `kv_memory` reserves."""
        return self.fixed + (self.workload.kv_memory or self.kv_request)

    def expected(self, available: int) -> int:
        """The peak: with keys and values for all requests at once, or as many as fit."""
        room = max(self.kv_request, available - self.fixed)
        return self.fixed + (self.workload.kv_memory or min(self.kv_wanted, room))

    @property
    def checkpoint_weights(self) -> int:
        """Size of the file with a version's weights. The optimizer state takes as much on disk as in memory."""
        return self.trained if self.workload.lora_rank is not None else self.weights

    def kv_bytes(self, available: int) -> int:
        """Limit of keys and values if so much memory is free before the model is loaded; enough for one request."""
        least = self.kv_request + KV_MARGIN * self.kv_token
        return self.workload.kv_memory or max(int(KV_SHARE * (available - self.fixed)), least)


def memory_budget(shape: ModelShape, workload: Workload) -> MemoryBudget:
    size, lora = BYTES.get(workload.dtype, 4), workload.lora_rank
    weights = shape.parameters * size
    if workload.quantization is not None:
        weights = int((shape.parameters - shape.linear) * size + shape.linear * QUANTIZED[workload.quantization])
    packs = workload.dtype == "bfloat16" and not workload.on_gpu
    packed = 0
    if packs and workload.quantization is None:
        packed = size * (shape.linear + shape.vocab * shape.hidden)
        if workload.trains and lora is None:
            packed *= 1 + workload.versions
    trained = 0
    if workload.trains:
        saved = workload.whole_embeddings * shape.vocab * shape.hidden
        trained = shape.parameters if lora is None else (workload.lora_parameters or shape.lora) * lora + saved
    limit = workload.micro_batch_tokens
    if shape.parameters >= SMALL_MODEL and not workload.gradient_checkpointing:
        limit = min(limit, max(LEAST_MICRO_BATCH, ACTIVATION_BYTES // (size * shape.lora)))  # inputs and outputs
    longest = workload.request_tokens  # a row is not split, and others that share its prompt are added
    longest += min(workload.prompt_tokens, longest, limit)
    at_once = min(workload.cores, ROUND) if shape.parameters < SMALL_MODEL and not workload.on_gpu else 1
    tokens = min(workload.job_tokens, at_once * max(limit, longest)) if workload.trains else 0
    logits = LOGIT_COPIES * min(tokens, at_once * (CHUNK_LOGITS // shape.vocab)) + SAMPLED_COPIES * workload.concurrency
    return MemoryBudget(
        workload,
        weights=weights,
        trained=4 * trained,
        gradients=4 * trained + (8 * shape.vocab * shape.hidden if trained and lora is None else 0),  # of two uses
        optimizer=8 * trained,
        served=size * trained * workload.versions,
        activations=int(FRAGMENTS * size * tokens * _activations(shape, checkpointing=workload.gradient_checkpointing)),
        logits=4 * logits * shape.vocab,
        packed=packed,
        kv_token=2 * (BYTES["float32"] if packs else size) * shape.layers * shape.kv_heads * shape.head_size,
    )


def _activations(shape: ModelShape, *, checkpointing: bool) -> int:
    """Numbers that are kept of each token from the forward to the backward pass."""
    layer = 8 * shape.hidden + 2 * shape.head_size * (shape.heads + 2 * shape.kv_heads) + 4 * shape.intermediate
    return shape.layers * shape.hidden + layer if checkpointing else shape.layers * layer


class Remedy(NamedTuple):
    """Settings of a file, in its words, and the bytes that are needed with them."""

    settings: str
    needed: int


def remedies(shape: ModelShape, workload: Workload) -> list[Remedy]:
    """Changes that take less memory, each alone; the last one is all of them together."""
    changes: list[tuple[str, dict[str, Any]]] = []
    if workload.trains and workload.lora_rank is None:
        changes.append(("training.lora: {rank: 16}", {"lora_rank": 16}))
    if workload.dtype == "float32":
        changes.append(("dtype: bfloat16", {"dtype": "bfloat16"}))
    if workload.quantization is None:
        lora = "" if workload.lora_rank is not None else " with training.lora: {rank: 16}"
        changes.append((f"quantization: nf4{lora}", {"quantization": "nf4", "lora_rank": workload.lora_rank or 16}))
    if workload.trains and not workload.gradient_checkpointing:
        changes.append(("training.gradient_checkpointing: true", {"gradient_checkpointing": True}))
    if workload.trains and workload.micro_batch_tokens > SMALL_MICRO_BATCH:
        text = f"training.micro_batch_tokens: {SMALL_MICRO_BATCH}"
        changes.append((text, {"micro_batch_tokens": SMALL_MICRO_BATCH}))
    if workload.request_tokens > SHORT_REQUEST:
        changes.append((f"max_length: {SHORT_REQUEST}", {"request_tokens": SHORT_REQUEST}))
    if workload.versions > 1:
        changes.append(("staleness: 0", {"versions": 1}))
    if workload.kv_memory is not None:
        changes.append(("no kv_memory", {"kv_memory": None}))
    if workload.concurrency > 1:
        changes.append(("eval.general.max_concurrency: 1", {"concurrency": 1}))
    everything = {key: value for _, values in changes for key, value in values.items()}
    changes.append((", ".join(dict.fromkeys(part for text, _ in changes for part in text.split(" with "))), everything))
    return [Remedy(text, memory_budget(shape, replace(workload, **values)).needed) for text, values in changes]


def operations(shape: ModelShape, *, sampled: int, trained: int, lora: bool) -> float:
    """Floating-point operations of an epoch, from the number of tokens that are computed to sample, and to train."""
    return 2.0 * shape.parameters * (sampled + (2 if lora else 3) * trained)
