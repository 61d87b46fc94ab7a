"""Samples next tokens for a batch: counter-based random numbers per sequence, inverse CDF.

Shapes: B sequences, V vocabulary. A row's token depends only on its logits, sampling params, seed and the number of
tokens it has sampled before, not on the rest of the batch.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from insitu.errors import BackendError

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy; dividing by them would overflow."""
MAX_TEMPERATURE = 1e6
"""Beyond this float32 overflows; the distribution is uniform long before."""
MAX_TOP_LOGPROBS = 20
"""The OpenAI API's limit."""
LOGITS_NOT_FINITE = "the model's logits are not finite: its weights are unusable, or too large for its dtype"

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled. `top_logprobs`: number of most likely tokens reported per token."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_logprobs: int = 0


class GenerationRequest(NamedTuple):
    """One completion to sample."""

    prompt: list[int]
    params: SamplingParams


class SamplingMetadata(NamedTuple):
    """Sampling params of B rows as arrays; `banned` holds (rows, tokens) that must not be sampled in this step."""

    temperature_B: np.ndarray
    top_p_B: np.ndarray
    seed_B: np.ndarray
    index_B: np.ndarray
    banned: tuple[list[int], list[int]] = ([], [])
    want_top_logprobs: bool = False


class SamplerOutput(NamedTuple):
    """Sampled tokens, their natural log-probabilities, and (ids, logprobs) of the most likely tokens if requested."""

    tokens: list[int]
    logprobs: list[float]
    top: tuple[list[list[int]], list[list[float]]] | None


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice number `choice` of a request; choice 0 uses the request's seed."""
    if choice == 0:
        return seed & _MASK
    with np.errstate(over="ignore"):
        return int(_mix(_mix(np.uint64(seed & _MASK)) + np.uint64(choice) * _WEYL))


def uniforms(seed_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
    """A number in [0, 1 - 2**-32] per (seed, index): SplitMix64 (Steele et al. 2014), mixed twice."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seed_B) + (index_B.astype(np.uint64) + np.uint64(1)) * _WEYL)
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32


def sample(logits_BV: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Samples one token per row; logprobs are the model's own, before temperature and top_p.

    Raises BackendError if logits are not finite.
    """
    logits_BV = logits_BV.float()
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    if metadata.banned[0]:
        logits_BV = logits_BV.index_put(tuple(map(torch.tensor, metadata.banned)), logits_BV.new_tensor(-torch.inf))
    tokens_B = _draw(logits_BV, metadata)
    chosen_B = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]
    top: Any = None
    if metadata.want_top_logprobs:
        best = logprobs_BV.topk(min(MAX_TOP_LOGPROBS, logprobs_BV.shape[-1]), dim=-1)
        top = (best.indices.tolist(), best.values.tolist())
    tokens, logprobs = tokens_B.tolist(), chosen_B.tolist()
    if any(map(math.isnan, logprobs)):
        raise BackendError(LOGITS_NOT_FINITE)
    return SamplerOutput(tokens, logprobs, top)


def _draw(logits_BV: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    greedy = metadata.temperature_B < GREEDY_TEMPERATURE
    if greedy.all():
        return logits_BV.argmax(dim=-1)
    device = logits_BV.device
    temperature_B = torch.from_numpy(np.where(greedy, 1.0, metadata.temperature_B).astype(np.float32)).to(device)
    probs_BV = torch.softmax(logits_BV / temperature_B[:, None], dim=-1)
    if (metadata.top_p_B < 1).any():
        # Keeps the smallest set of most likely tokens with mass `top_p` (Holtzman et al. 2020).
        top_p_B1 = torch.from_numpy(metadata.top_p_B).to(device)[:, None]
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.double().cumsum(dim=-1) - sorted_BV.double()
        cut_BV = (before_BV >= top_p_B1) & (top_p_B1 < 1)
        probs_BV = torch.where(torch.zeros_like(cut_BV).scatter(-1, order_BV, cut_BV), 0.0, probs_BV)
    cdf_BV = probs_BV.double().cumsum(dim=-1)
    threshold_B = torch.from_numpy(uniforms(metadata.seed_B, metadata.index_B)).to(device) * cdf_BV[:, -1]
    tokens_B = torch.searchsorted(cdf_BV, threshold_B[:, None], right=True)[:, 0]
    tokens_B = tokens_B.clamp(max=cdf_BV.shape[-1] - 1)  # beyond the last token if logits are not finite
    if greedy.any():
        tokens_B = torch.where(torch.from_numpy(greedy).to(device), logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
