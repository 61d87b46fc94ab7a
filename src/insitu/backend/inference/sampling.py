"""Draws the next tokens: a counter-based generator for each request, inverse CDF, one call for a whole batch.

Shapes: B requests, V vocabulary. What a row draws depends on its logits, its parameters, its seed and the number of
tokens it has drawn before, and on nothing else in the batch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

GREEDY_BELOW = 1e-5
"""A temperature under this is 0: dividing by it would overflow."""
HOTTEST = 1e6
"""A temperature above this would leave float32; the distribution is uniform long before."""
TOP_LOGPROBS = 20
"""The most alternatives the OpenAI API lets a request ask for."""

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is drawn. `top_logprobs` is how many alternatives are reported for each token (0: none)."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_logprobs: int = 0


class Ask(NamedTuple):
    """One completion to be sampled: of which prompt, and how."""

    prompt: list[int]
    params: SamplingParams


class Draws(NamedTuple):
    """The parameters of B rows, as arrays; `banned` are (row, token) pairs that must not be drawn now."""

    temperature_B: np.ndarray
    top_p_B: np.ndarray
    seed_B: np.ndarray
    index_B: np.ndarray
    banned: tuple[list[int], list[int]] = ([], [])
    alternatives: bool = False


class Sampled(NamedTuple):
    """What was drawn: tokens, their natural log-probabilities, and where asked for the likeliest (ids, logprobs)."""

    tokens: list[int]
    logprobs: list[float]
    top: tuple[list[list[int]], list[list[float]]] | None


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request with `n` > 1; choice 0 keeps the request's own."""
    if choice == 0:
        return seed & _MASK
    with np.errstate(over="ignore"):
        return int(_mix(_mix(np.uint64(seed & _MASK)) + np.uint64(choice) * _WEYL))


def uniforms(seed_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
    """One number in [0, 1 - 2**-32] for each (seed, index): SplitMix64 (Steele et al. 2014), twice mixed."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seed_B) + (index_B.astype(np.uint64) + np.uint64(1)) * _WEYL)
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32


def sample(logits_BV: torch.Tensor, draws: Draws) -> Sampled:
    """Draw one token a row; the reported log-probabilities are of the model itself, untempered and uncut."""
    logits_BV = logits_BV.float()
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    if draws.banned[0]:
        logits_BV = logits_BV.index_put(tuple(map(torch.tensor, draws.banned)), logits_BV.new_tensor(-torch.inf))
    tokens_B = _draw(logits_BV, draws)
    chosen_B = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]
    top: Any = None
    if draws.alternatives:
        best = logprobs_BV.topk(min(TOP_LOGPROBS, logprobs_BV.shape[-1]), dim=-1)
        top = (best.indices.tolist(), best.values.tolist())
    return Sampled(tokens_B.tolist(), chosen_B.tolist(), top)


def _draw(logits_BV: torch.Tensor, draws: Draws) -> torch.Tensor:
    greedy = draws.temperature_B < GREEDY_BELOW
    if greedy.all():
        return logits_BV.argmax(dim=-1)
    device = logits_BV.device
    temperature_B = torch.from_numpy(np.where(greedy, 1.0, draws.temperature_B).astype(np.float32)).to(device)
    probs_BV = torch.softmax(logits_BV / temperature_B[:, None], dim=-1)
    if (draws.top_p_B < 1).any():
        probs_BV = _nucleus(probs_BV, torch.from_numpy(draws.top_p_B).to(device))
    cdf_BV = probs_BV.double().cumsum(dim=-1)
    threshold_B = torch.from_numpy(uniforms(draws.seed_B, draws.index_B)).to(device) * cdf_BV[:, -1]
    tokens_B = torch.searchsorted(cdf_BV, threshold_B[:, None], right=True)[:, 0]
    if greedy.any():
        tokens_B = torch.where(torch.from_numpy(greedy).to(device), logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B


def _nucleus(probs_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of likeliest tokens that holds `top_p` of the mass (Holtzman et al. 2020)."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.double().cumsum(dim=-1) - sorted_BV.double()
    cut_BV = (before_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]
    return torch.where(torch.zeros_like(cut_BV).scatter(-1, order_BV, cut_BV), 0.0, probs_BV)


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
