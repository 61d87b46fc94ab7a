"""What the parameters of a request added to the logits of a completion: its tokens are followed once more.

The learner adds the same, so that its log-probabilities are those of the distribution sampled from.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from insitu.backend.inference.sampler import SamplingParams, eos_token_ids
from insitu.backend.inference.sampling import LogitsProcessor
from insitu.backend.inference.structured import Grammar, GrammarCompiler, allowed_tokens
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.model import LoadedModel
from insitu.errors import JobFailed

NAMES = ("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "grammar")
"""What is added to logits, whatever these are."""


class ShapedCompletion(NamedTuple):
    """The trained tokens of a completion, their places among the N of a micro-batch, and what shaped their logits."""

    shaping: str
    tokens: list[int]
    places: list[int]


def shaping_text(params: dict[str, Any]) -> str:
    """The SamplingParams that are added to logits, as text; empty if none has an effect."""
    defaults = SamplingParams(0, 0)
    effective = {name: params[name] for name in NAMES if params[name] != getattr(defaults, name)}
    return json.dumps(effective) if effective else ""


def shaping_kinds(shaping: str, completions: Sequence[np.ndarray], kinds: dict[tuple[str, int], int]) -> np.ndarray:
    """A number for each trained token of a row, equal where shaping and the start of the completion are."""
    return np.concatenate(
        [np.full(len(each), kinds.setdefault((shaping, int(each[0])), len(kinds) + 1)) for each in completions]
    )


class LogitOffsets:
    """Computes what was added to the logits of trained tokens; -inf for tokens that were not allowed."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._params = functools.lru_cache(1024)(_params)

    def add_to(self, logits_NV: Tensor, shaped: Sequence[ShapedCompletion], first: int) -> Tensor:
        """The logits of the tokens from the place `first` on with what was added to them."""
        part, offsets = range(first, first + len(logits_NV)), dict[int, Tensor]()
        for completion in shaped:
            if any(place in part for place in completion.places):
                pairs = zip(completion.places, self._offsets(completion), strict=True)
                offsets |= {place - first: offset_V for place, offset_V in pairs if place in part}
        if not offsets:
            return logits_NV
        offset_NV = torch.zeros(logits_NV.shape, device=logits_NV.device)
        offset_NV[[*offsets]] = torch.stack([*offsets.values()]).to(logits_NV.device)
        return logits_NV.float() + offset_NV

    def _offsets(self, completion: ShapedCompletion) -> Iterator[Tensor]:
        params, size = self._params(completion.shaping), self._loaded.vocab_size
        processor = LogitsProcessor(params, (), self._tokenizer, size)
        matcher = None if params.grammar is None else self._grammars.matcher(params.grammar)
        for place, token in enumerate(completion.tokens):
            offset_V = torch.zeros(size)
            if matcher is not None:
                offset_V.masked_fill_(~allowed_tokens([matcher], size)[0], -torch.inf)
            processor.apply(offset_V, completion.tokens[:place])
            if offset_V[token] == -torch.inf:
                problem = f"token {place} of a completion is {token}, which its request does not allow"
                raise JobFailed(f"shaping: {problem}; was it sampled by another tokenizer or server?")
            if matcher is not None:
                matcher.consume_token(token)
            yield offset_V

    @functools.cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self._loaded.tokenizer, eos_token_ids(self._loaded.module))

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._loaded.tokenizer, self._tokenizer.eos_token_ids, self._loaded.vocab_size)


def _params(shaping: str) -> SamplingParams:
    values: dict[str, Any] = json.loads(shaping)
    for name in ("logit_bias", "bad_words"):
        values[name] = tuple(tuple(each) if isinstance(each, list) else each for each in values.get(name, ()))
    if "grammar" in values:
        values["grammar"] = Grammar(*values["grammar"])
    return SamplingParams(0, 0, **values)
