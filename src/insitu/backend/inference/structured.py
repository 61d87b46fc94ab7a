"""Structured output: which tokens may come next in a completion that must match a JSON schema, regex, or grammar.

`llguidance` compiles the grammar, follows the tokens, and computes the mask of those that may come next.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import llguidance
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from insitu.errors import RequestRefused
from insitu.formats.forced_calls import JSON_OPTIONS

_CACHED_GRAMMARS = 64

GrammarKind = Literal["json", "regex", "choice", "grammar"]


class Grammar(NamedTuple):
    """What a completion must match: a JSON schema, a regex, one of several texts (a JSON list), or a grammar.

    Grammars are in Lark's syntax as llguidance reads it, or in GBNF. Errors name `key` of the request.
    """

    kind: GrammarKind
    text: str
    key: str = "structured_outputs"


class GrammarCompiler:
    """Compiles grammars for a tokenizer, and keeps the latest ones."""

    def __init__(self, tokenizer: Any, end_token_ids: Iterable[int], vocab_size: int) -> None:
        self._tokenizer, self._ends, self._vocab_size = tokenizer, sorted(end_token_ids), vocab_size
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def __contains__(self, grammar: Grammar) -> bool:
        """Whether it is compiled; otherwise `matcher` takes up to a second."""
        return grammar in self._compiled

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the start of a completion.

        Raises RequestRefused for a grammar that is invalid or not supported.
        """
        matcher = self._compiled.pop(grammar, None) or self._compile(grammar)
        self._compiled[grammar] = matcher
        while len(self._compiled) > _CACHED_GRAMMARS:
            self._compiled.popitem(last=False)
        return matcher.deep_copy()

    @functools.cached_property
    def _tokens(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.backend_tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokens, _source(grammar), log_level=0)
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            text = " ".join(problem.split())[:500]
            raise RequestRefused(f"{grammar.key}: {text}", param=grammar.key, code="unsupported_grammar")
        return matcher


def _source(grammar: Grammar) -> str:
    """The grammar as the library takes it."""
    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)
    return llguidance.grammar_from(grammar.kind, grammar.text)


def allowed_tokens(matchers: Sequence[LLMatcher], vocab_size: int) -> torch.Tensor:
    """The tokens (rows, V) that may come next by each matcher."""
    masks = np.zeros((len(matchers), -(-vocab_size // 32)), np.int32)
    for matcher, address in zip(matchers, range(masks.ctypes.data, 2**63, masks.strides[0]), strict=False):
        matcher.unsafe_compute_mask_ptr(address, masks.strides[0])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def advance(matcher: LLMatcher, token_id: int) -> str:
    """Why a matcher cannot continue, if so: the grammar is too complex for the limits of the library."""
    matcher.consume_token(token_id)
    return str(matcher.get_error()).partition("\n")[0]
