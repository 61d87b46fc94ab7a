"""From logits to tokens: what the parameters of a request make of its logits, and the draw.

In vLLM's order: bad words, logit_bias and penalties change the logits (`LogitsProcessor`), which are divided by the
temperature; min_p, top_k and top_p then leave out tokens. Log-probabilities are those in between: after temperature,
before tokens are left out.

B are the sequences that sample a token, V is the vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from insitu.backend.inference.sampler import LOGITS_NOT_FINITE, MAX_TOP_LOGPROBS, SamplingParams
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.errors import BackendError
from insitu.schemas.episodes import GREEDY_TEMPERATURE

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_LIKELY, _SMALL_VOCABULARY = 1e-4, 256
"""Probability of the tokens among which `top_p` is tried first, and a vocabulary that is sorted as a whole."""
_SHIFT, _LEAST_EXPONENT = 17, 97
"""The magnitude of a probability leaves out this many bits of a float32; those below 2**-30 have the same."""


SLOT = np.dtype(
    [
        *((name, np.int64) for name in ("token", "position", "index")),
        *(("temperature", np.float64), ("top_p", np.float64), ("seed", np.uint64)),
        *((name, np.int64) for name in ("min_tokens", "top_logprobs", "top_k")),
        ("min_p", np.float64),
    ]
)
"""A sequence: the latest token, its position and that of the next token in the completion, and the sampling params."""


class SamplerOutput(NamedTuple):
    """Sampled tokens, their natural log-probabilities, and (ids, logprobs) of the most likely tokens if requested."""

    tokens: list[int]
    logprobs: list[float]
    top: tuple[list[list[int]], list[list[float]]] | None


class LogitsProcessor:
    """Changes the logits of one sequence before the temperature: bad words, logit_bias, penalties."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], tokenizer: ChatTokenizer, vocab_size: int
    ) -> None:
        self._params = params
        self._bad_words = bad_word_ids(params.bad_words, tokenizer)
        self._bias = tuple(zip(*params.logit_bias, strict=True))
        self._counts_V = torch.zeros(vocab_size if params.has_penalties else 0)
        """How often each token was sampled; the first `_counted` tokens are counted."""
        self._counted = 0
        self._seen_V = torch.zeros(len(self._counts_V), dtype=torch.bool)
        if params.has_penalties:
            self._seen_V[list(prompt)] = True

    @staticmethod
    def is_needed(params: SamplingParams) -> bool:
        return params.has_penalties or bool(params.bad_words or params.logit_bias)

    def apply(self, logits_V: torch.Tensor, output: Sequence[int]) -> None:
        """Changes the logits in place; `output` are the tokens sampled so far."""
        ends = (word[-1] for word in self._bad_words if [*word[:-1]] == [*output[len(output) - len(word) + 1 :]])
        if banned := [*ends]:
            logits_V[banned] = -torch.inf
        if self._bias:
            ids, values = self._bias
            logits_V[list(ids)] += logits_V.new_tensor(values)
        if self._params.has_penalties:
            self._penalize(logits_V, output)

    def _penalize(self, logits_V: torch.Tensor, output: Sequence[int]) -> None:
        """Repetition (Keskar et al. 2019) counts the prompt too; presence and frequency (OpenAI) do not."""
        for token in output[self._counted :]:
            self._counts_V[token] += 1
            self._seen_V[token] = True
        self._counted = len(output)
        counts_V, seen_V = self._counts_V.to(logits_V.device), self._seen_V.to(logits_V.device)
        if (factor := self._params.repetition_penalty) != 1:
            logits_V.copy_(
                torch.where(seen_V, torch.where(logits_V > 0, logits_V / factor, logits_V * factor), logits_V)
            )
        logits_V -= self._params.frequency_penalty * counts_V + self._params.presence_penalty * (counts_V > 0)


def bad_word_ids(words: Sequence[str], tokenizer: ChatTokenizer) -> list[tuple[int, ...]]:
    """The token ids of each word as vLLM takes them: at the start of a text, and after a space if those are as many."""
    sequences: list[tuple[int, ...]] = []
    for word in words:
        alone, spaced = (tuple(tokenizer.encode(prefix + word.lstrip(), False)) for prefix in ("", " "))
        if alone:
            sequences.append(alone)
        if spaced and len(spaced) == len(alone) and spaced[0] != alone[0]:
            sequences.append(spaced)
    return sequences


def sample(
    logits_BV: torch.Tensor, slot_B: np.ndarray, banned: tuple[list[int], list[int]] = ([], [])
) -> SamplerOutput:
    """Samples one token per row; logprobs are after temperature and before top_p, at temperature 0 the model's own.

    `banned` holds (rows, tokens) that must not be sampled in this step. Raises BackendError if logits are not finite.
    """
    logits_BV = logits_BV.float()
    temperature_B = slot_B["temperature"]
    if (temperature_B != 1).any():
        temperature_B = np.where(temperature_B < GREEDY_TEMPERATURE, 1.0, temperature_B)
        logits_BV = logits_BV / torch.from_numpy(temperature_B.astype(np.float32)).to(logits_BV.device)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    if banned[0]:
        logits_BV = logits_BV.index_put(tuple(map(torch.tensor, banned)), logits_BV.new_tensor(-torch.inf))
    tokens_B = _draw(logits_BV, slot_B)
    chosen_B = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]
    top: Any = None
    if slot_B["top_logprobs"].any():
        best = logprobs_BV.topk(min(MAX_TOP_LOGPROBS, logprobs_BV.shape[-1]), dim=-1)
        top = (best.indices.tolist(), best.values.tolist())
    tokens, logprobs = tokens_B.tolist(), chosen_B.tolist()
    if any(map(math.isnan, logprobs)):
        raise BackendError(LOGITS_NOT_FINITE)
    return SamplerOutput(tokens, logprobs, top)


def _draw(logits_BV: torch.Tensor, slot_B: np.ndarray) -> torch.Tensor:
    """The logits are those after temperature."""
    greedy = slot_B["temperature"] < GREEDY_TEMPERATURE
    if greedy.all():
        return logits_BV.argmax(dim=-1)
    probs_BV = torch.softmax(logits_BV, dim=-1)
    uniform_B = uniforms(slot_B["seed"], slot_B["index"])
    tokens_B, left = _draw_of_nucleus(probs_BV, slot_B, uniform_B)
    if len(left) == len(probs_BV):
        tokens_B = _inverse(truncated(probs_BV, slot_B), uniform_B)
    elif len(left):
        rows = torch.from_numpy(left).to(probs_BV.device)
        tokens_B[rows] = _inverse(truncated(probs_BV[rows], slot_B[left]), uniform_B[left])
    if greedy.any():
        tokens_B = torch.where(torch.from_numpy(greedy).to(probs_BV.device), logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B


class _Candidates:
    """The chosen entries of some rows, padded: K are those of a row, in the order of the tokens."""

    def __init__(self, probs_RV: np.ndarray, chosen_RV: np.ndarray) -> None:
        row_N, token_N = np.divmod(np.flatnonzero(chosen_RV), probs_RV.shape[1])
        count_R = np.bincount(row_N, minlength=len(probs_RV))
        column_N = np.arange(len(row_N)) - (np.cumsum(count_R) - count_R)[row_N]
        self.token_RK = np.zeros((len(probs_RV), max(1, count_R.max())), np.int64)
        self.probs_RK = np.zeros(self.token_RK.shape, probs_RV.dtype)
        self.token_RK[row_N, column_N] = token_N
        self.probs_RK[row_N, column_N] = probs_RV[row_N, token_N]

    def cut(self, before_R: np.ndarray, mass_R: np.ndarray) -> np.ndarray:
        """Sets those outside the smallest set of most likely tokens with a mass to 0; `before_R` lies in likelier ones.

        Returns the rows whose mass is reached.
        """
        order_RK = np.argsort(-self.probs_RK, axis=1, kind="stable")
        sorted_RK = np.take_along_axis(self.probs_RK, order_RK, 1).astype(np.float64)
        total_RK = before_R[:, None] + np.cumsum(sorted_RK, axis=1)
        is_cut_RK = np.empty_like(order_RK, dtype=bool)
        np.put_along_axis(is_cut_RK, order_RK, total_RK - sorted_RK >= mass_R[:, None], 1)
        self.probs_RK[is_cut_RK] = 0
        return total_RK[:, -1] >= mass_R


def _draw_of_nucleus(
    probs_BV: torch.Tensor, slot_B: np.ndarray, uniform_B: np.ndarray
) -> tuple[torch.Tensor, np.ndarray]:
    """Tokens of the rows with `top_p` alone, found without sorting a large vocabulary; the other rows.

    They are the ones that `truncated` gives. Most rows have their mass in tokens that are likely. Of the others, the
    masses by magnitude tell in which magnitude the last kept token lies. A GPU sorts all rows instead.
    """
    mass_B = slot_B["top_p"]
    is_plain = (mass_B < 1) & (slot_B["min_p"] <= 0) & (slot_B["top_k"] <= 0)
    tokens_B = probs_BV.new_zeros(len(probs_BV), dtype=torch.long)
    if not is_plain.any() or probs_BV.device.type != "cpu" or probs_BV.shape[-1] <= _SMALL_VOCABULARY:
        return tokens_B, np.arange(len(probs_BV))
    rows, nothing_B = np.flatnonzero(is_plain), np.zeros(len(probs_BV))
    probs = probs_BV.numpy()
    likely = _Candidates(probs, probs >= _LIKELY)
    is_reached = likely.cut(nothing_B, mass_B)
    kept_BK = torch.from_numpy(likely.probs_RK)
    tokens_B[:] = torch.from_numpy(likely.token_RK).gather(-1, _inverse(kept_BK, uniform_B)[:, None])[:, 0]
    if len(flat := rows[~is_reached[rows]]):
        tokens_B[flat] = _inverse(_nucleus_of_flat(probs_BV[flat], mass_B[flat]), uniform_B[flat])
    return tokens_B, np.flatnonzero(~is_plain)


def _nucleus_of_flat(probs_RV: torch.Tensor, mass_R: np.ndarray) -> torch.Tensor:
    """`truncated` for rows whose `top_p` holds many tokens."""
    # The leading bits of a positive float grow with it: its exponent, and the first bits of its mantissa.
    most = 127 - _LEAST_EXPONENT << 23 - _SHIFT  # of 1; NaN is above
    magnitude_RV = (probs_RV.view(torch.int32) >> _SHIFT).sub_(_LEAST_EXPONENT << (23 - _SHIFT)).clamp_(0, most)
    masses_RM = probs_RV.new_zeros(len(probs_RV), 1 + most, dtype=torch.float64)
    masses_RM.scatter_add_(1, magnitude_RV.long(), probs_RV.double())
    above_RM = masses_RM.flip(1).cumsum(1).flip(1)  # of a magnitude and the greater ones
    last_R = (above_RM >= torch.from_numpy(mass_R)[:, None]).sum(1) - 1
    before_R = (above_RM - masses_RM).gather(1, last_R.clamp(min=0)[:, None])[:, 0].numpy()
    magnitudes, last = magnitude_RV.numpy(), last_R.numpy()[:, None]
    within = _Candidates(probs_RV.numpy(), magnitudes == last)
    within.cut(before_R, mass_R)
    kept_RV = torch.where(magnitude_RV > last_R[:, None], probs_RV, 0.0)
    return kept_RV.scatter_add_(1, torch.from_numpy(within.token_RK), torch.from_numpy(within.probs_RK))


def _inverse(probs_BV: torch.Tensor, uniform_B: np.ndarray) -> torch.Tensor:
    """The first index at which the cumulative probability exceeds this share of the whole."""
    cdf_BV = probs_BV.double().cumsum(dim=-1)
    threshold_B = torch.from_numpy(uniform_B).to(probs_BV.device) * cdf_BV[:, -1]
    index_B = torch.searchsorted(cdf_BV, threshold_B[:, None], right=True)[:, 0]
    return index_B.clamp(max=cdf_BV.shape[-1] - 1)  # beyond the last one if logits are not finite


def truncated(probs_BV: torch.Tensor, slot_B: np.ndarray) -> torch.Tensor:
    """The probabilities with those of tokens that are left out as 0; the others are not scaled."""

    def column(values_B: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values_B).to(probs_BV.device)[:, None]

    min_p_B, top_k_B, top_p_B = slot_B["min_p"], slot_B["top_k"], slot_B["top_p"]
    if (min_p_B > 0).any():
        least_B1 = probs_BV.amax(dim=-1, keepdim=True) * column(min_p_B.astype(np.float32))
        probs_BV = torch.where(probs_BV < least_B1, 0.0, probs_BV)
    if (top_k_B > 0).any():
        size = probs_BV.shape[-1]
        count_B = np.where(top_k_B > 0, np.minimum(top_k_B, size), size)
        best_BK = probs_BV.topk(int(count_B.max()), dim=-1).values
        probs_BV = torch.where(probs_BV < best_BK.gather(-1, column(count_B - 1)), 0.0, probs_BV)
    if (top_p_B < 1).any():
        # Keeps the smallest set of most likely tokens with mass `top_p` (Holtzman et al. 2020), of what is left.
        top_p_B1 = column(top_p_B)
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
        cumulative_BV = sorted_BV.double().cumsum(dim=-1)
        mass_B1 = torch.where(column((min_p_B > 0) | (top_k_B > 0)), cumulative_BV[:, -1:], 1.0)
        cut_BV = (cumulative_BV - sorted_BV.double() >= top_p_B1 * mass_B1) & (top_p_B1 < 1)
        probs_BV = torch.where(torch.zeros_like(cut_BV).scatter(-1, order_BV, cut_BV), 0.0, probs_BV)
    return probs_BV


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


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
