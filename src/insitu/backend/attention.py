"""Attention in a tree of prefixes, as an attention function of transformers.

On a CPU, the causal flash kernel computes each node's attention to itself, several nodes of similar length per call.
One more call per node computes the attention of everything that continues it. The partial results of a token are merged
by the logarithms of their softmax normalizers, as in FlashAttention (Dao et al. 2022, arXiv:2205.14135); the backward
kernel takes the merged result and normalizer. So neither a mask nor a matrix of scores is built. On a GPU, flex
attention with a block mask does the same. At the end: what a model and its configuration say of its attention.

Shapes: H heads, T tokens of all nodes, D head size.
"""

import bisect
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from insitu.backend.model import quiet_transformers

ATTENTION = "insitu"
"""The name of `attend` among the attention functions of transformers."""
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
PADDING = 1.25
"""Maximum length of a node in a call of the causal kernel, as a multiple of the shortest one's."""
FEW_SCORES = 100_000
"""Queries times keys, below which the backward kernel is faster in float32: its products in bfloat16 take longer to
prepare than to compute."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types that mix tokens by attention alone, over keys and values of single tokens."""
_one_thread = threading.Lock()
_CHANGES_SCORES = ("softcap", "s_aux", "position_bias")


class Node(NamedTuple):
    """The tokens from `start` to `stop`; the tokens of its descendants follow, up to `end`."""

    start: int
    stop: int
    end: int


class Batch(NamedTuple):
    """S nodes of similar length for one call: the places of their L tokens, and which of these are not padding."""

    places_SL: Tensor
    valid_SL: Tensor
    is_full: bool


class Nodes:
    """The nodes of a tree. A token attends to itself and to the tokens before it in its node and that node's ancestors.

    In depth-first order that is `(key <= query) & (query < end)`, with the `end` of the key's node.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = sorted(nodes)
        self.continued = [node for node in self.nodes if node.stop < node.end]
        self.batches = list(self._batches())
        self._block_masks: dict[torch.device, Any] = {}

    @functools.cached_property
    def length(self) -> int:
        return max(node.end for node in self.nodes)

    def mask(self, device: torch.device) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
        """The mask function of flex attention: whether a query, by its place, attends to a key."""
        ends = torch.cat([torch.full((node.stop - node.start,), node.end) for node in self.nodes]).to(device)

        def attends(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        return attends

    def block_mask(self, device: torch.device) -> Any:
        """The blocks of the mask with a visible key, for flex attention; made once for all layers."""
        from torch.nn.attention.flex_attention import create_block_mask

        if device not in self._block_masks:
            mask = create_block_mask(self.mask(device), None, None, self.length, self.length, device=device)
            self._block_masks[device] = mask
        return self._block_masks[device]

    def _batches(self) -> Iterator[Batch]:
        by_length = sorted(self.nodes, key=lambda node: node.stop - node.start)
        while by_length:
            shortest = by_length[0].stop - by_length[0].start
            count = bisect.bisect_right(by_length, shortest * PADDING, key=lambda node: node.stop - node.start)
            spans = torch.tensor(by_length[:count])
            places_SL = spans[:, :1] + torch.arange(int((spans[:, 1] - spans[:, 0]).max()))
            valid_SL = places_SL < spans[:, 1:2]
            yield Batch(places_SL.minimum(spans[:, 1:2] - 1), valid_SL, bool(valid_SL.all()))
            by_length = by_length[count:]


class CachedAttention(Protocol):
    """Attention of a forward pass whose earlier keys and values are stored."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Stores new keys and values; returns the result (B, T, H, D)."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree: Nodes | None = None,
    cached: "CachedAttention | None" = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in a `tree`, or over `cached` keys and values; without either, that of `sdpa`.

    Raises ValueError for a model with its own attention mask, or with an option that changes scores.
    """
    if tree is None and cached is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if unknown := [name for name in _CHANGES_SCORES if options.get(name) is not None]:
        raise ValueError(f"{unknown[0]} is not supported")
    if attention_mask is not None and attention_mask.numel() > 1:
        raise ValueError("the model builds its own attention mask")
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in float32 under autocast
    if cached is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return cached.attend(module.layer_idx, query, key, value, scale).to(value.dtype), None  # type: ignore[arg-type]
    assert tree is not None
    return _attend_to_tree(query, key, value, tree, scaling), None


Partial = tuple[Tensor, Tensor]
"""A result of attention (1, H, T, D), and the logarithms of its softmax normalizers (1, H, T)."""


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Attention of each token to itself and those before it."""
    key, value = (_repeated(each, query.shape[1]) for each in (key, value))
    return _forward(query, key, value, 0.0, True, scale=scale)


def visible(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Attention of each token to all keys; the queries of a head of keys are computed as more tokens of one."""
    groups, tokens = key.shape[1], query.shape[2]
    folded = query.unflatten(1, (groups, -1)).flatten(2, 3)
    result, normalizer = _forward(folded, key, value, 0.0, False, scale=scale)
    return result.unflatten(2, (-1, tokens)).flatten(1, 2), normalizer.unflatten(2, (-1, tokens)).flatten(1, 2)


def merged(first: Partial, second: Partial) -> Partial:
    """Attention to the keys of both."""
    both = torch.logaddexp(first[1], second[1])
    weights = ((each[1] - both).exp()[..., None] for each in (first, second))
    return first[0] * next(weights) + second[0] * next(weights), both


def _repeated(key: Tensor, heads: int) -> Tensor:
    repeats = heads // key.shape[1]
    return key if repeats == 1 else key.transpose(1, 2).repeat_interleave(repeats, 2).transpose(1, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loops depend on the tree
def _attend_to_tree(query: Tensor, key: Tensor, value: Tensor, tree: Nodes, scaling: float | None) -> Tensor:
    if query.device.type != "cpu":
        return by_blocks(query, key, value, tree, scaling).transpose(1, 2)
    key, value = (_repeated(each, query.shape[1]) for each in (key, value))
    return _TreeAttention.apply(query, key, value, tree, scaling).transpose(1, 2)  # type: ignore[no-untyped-call]


def by_blocks(query: Tensor, key: Tensor, value: Tensor, tree: Nodes, scale: float | None) -> Tensor:
    """Flex attention (arXiv:2412.05496), which skips blocks of the mask without a visible key.

    It is compiled except on a CPU, where only the forward pass exists.
    """
    mask = tree.block_mask(query.device)
    is_grouped = query.shape[1] != key.shape[1]
    attention = _flex(query.device.type != "cpu")
    return attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped)


@functools.cache
def _flex(is_compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    attention: Any = flex_attention
    return torch.compile(attention, dynamic=True) if is_compiled else attention


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: Nodes, scale: float | None) -> Tensor:
        merged = torch.empty_like(query.transpose(1, 2), dtype=torch.float32).transpose(1, 2)
        normalizers = torch.empty(1, query.shape[2], query.shape[1]).transpose(1, 2)
        for batch in tree.batches:
            result, normalizer = _forward(*_gather(batch, query, key, value), 0.0, True, scale=scale)
            _scatter(batch, merged, result)
            _scatter(batch, normalizers, normalizer)
        for start, stop, end in tree.continued:
            parts = (query[:, :, stop:end], key[:, :, start:stop], value[:, :, start:stop])
            result, normalizer = _forward(*parts, 0.0, False, scale=scale)
            before = normalizers[:, :, stop:end]
            after = torch.logaddexp(before, normalizer)
            merged[:, :, stop:end] *= (before - after).exp()[..., None]
            merged[:, :, stop:end] += result * (normalizer - after).exp()[..., None]
            normalizers[:, :, stop:end] = after
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, normalizers)
        ctx.tree, ctx.scale = tree, scale
        return merged

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, merged, normalizers = ctx.saved_tensors
        gradients = [torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2) for tensor in (query, key, value)]
        for batch in ctx.tree.batches:
            batched = _gather(batch, gradient, query, key, value, merged, normalizers)
            if not batch.is_full:  # padding repeats a token
                batched[0].mul_(batch.valid_SL[:, None, :, None])
            for total, part in zip(gradients, _gradients(batched, True, ctx.scale), strict=True):
                _scatter(batch, total, part)
        for start, stop, end in ctx.tree.continued:
            queries, keys = (slice(None), slice(None), slice(stop, end)), (slice(None), slice(None), slice(start, stop))
            parts = (gradient[queries], query[queries], key[keys], value[keys], merged[queries], normalizers[queries])
            added = _gradients(parts, False, ctx.scale)
            for total, part, where in zip(gradients, added, (queries, keys, keys), strict=True):
                total[where] += part
        return gradients[0], gradients[1], gradients[2], None, None


def _gradients(parts: Sequence[Tensor], is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values.

    `parts` are the gradient of the result, the queries, keys and values, the result, and its softmax normalizers.
    """
    _, query, key, *_ = parts
    if query.shape[2] * key.shape[2] < FEW_SCORES:
        parts = [each.float() for each in parts]
    return _backward(*parts, 0.0, is_causal, scale=scale)


def _gather(batch: Batch, *tensors: Tensor) -> list[Tensor]:
    """From (1, H, T, ...) to (S, H, L, ...). Copies whole tokens, whose heads are contiguous in memory."""
    places, shape = batch.places_SL.flatten(), batch.places_SL.shape
    return [tensor[0].transpose(0, 1).index_select(0, places).unflatten(0, shape).transpose(1, 2) for tensor in tensors]


def _scatter(batch: Batch, tensor: Tensor, values: Tensor) -> None:
    tokens = values.transpose(1, 2).flatten(0, 1)
    places, valid = batch.places_SL.flatten(), batch.valid_SL.flatten()
    if not batch.is_full:
        places, tokens = places[valid], tokens[valid]
    tensor[0].transpose(0, 1).index_copy_(0, places, tokens.to(tensor.dtype))


def attend_to_trees(module: PreTrainedModel) -> None:
    """Makes the layers of a model that uses `sdpa` call `attend`, which changes nothing without a tree."""
    with _one_thread:
        if module.config._attn_implementation == "sdpa":  # others compute attention in their own way
            with quiet_transformers():
                module.set_attn_implementation(ATTENTION)


def attend_as_before(module: PreTrainedModel) -> None:
    """Undoes `attend_to_trees`."""
    if module.config._attn_implementation == ATTENTION:
        module.set_attn_implementation("sdpa")


def text_config(module: Any) -> Any:
    """Configuration of the language model, also if it is part of a larger model."""
    return module.config.get_text_config()


def layer_types(config: PreTrainedConfig) -> frozenset[str]:
    """Names of transformers for the layers of a text model; none if all are alike."""
    return frozenset(getattr(config, "layer_types", None) or ())


def stateful_layers(module: nn.Module) -> list[str]:
    """Types of layers that mix tokens otherwise than by attention: they have their own layer type, or a convolution."""
    if kinds := layer_types(text_config(module)) - ATTENTION_LAYERS:
        return sorted(kinds)
    parts = ((layer, part) for layer in module.modules() for part in layer.children())
    return sorted({type(layer).__name__ for layer, part in parts if isinstance(part, nn.Conv1d)})


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Tokens that a token attends to in some layers of a text model; None if it is all in each."""
    kinds = layer_types(config)
    in_use = getattr(config, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    return (getattr(config, "sliding_window", None) or None) if in_use else None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
