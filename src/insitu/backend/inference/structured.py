"""Structured output: which tokens may come next in a completion that must match a JSON schema, regex, or grammar.

`llguidance` compiles the grammar, follows the tokens, and computes the mask of those that may come next.
"""

import asyncio
import functools
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import llguidance
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from insitu.errors import RequestRefused
from insitu.formats.forced_calls import JSON_OPTIONS

_CACHED_GRAMMARS = 64
_LIMITS = LLParserLimits(max_grammar_size=20_000)
"""The time to compile an object grows with the square of its properties: eight thousand would take a quarter of a
minute, and more than some hundred at once cannot be followed."""

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

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the start of a completion.

        Raises RequestRefused for a grammar that is invalid or not supported.
        """
        if grammar not in self._compiled:
            self._keep(grammar, self.compile(grammar))
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].deep_copy()

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self._compiled[grammar] = matcher
        if len(self._compiled) > _CACHED_GRAMMARS:
            self._compiled.popitem(last=False)

    @functools.cached_property
    def _tokens(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.backend_tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._ends)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Takes up to two seconds. Raises like `matcher`."""
        try:
            matcher = LLMatcher(self._tokens, _source(grammar), log_level=0, limits=_LIMITS)
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise _refused(grammar, " ".join(problem.split())[:500])
        return matcher


class SharedCompiler(GrammarCompiler):
    """Compiles for requests that come together, in a thread: one grammar at a time, of those that wait the shortest.

    A client that sends many long ones delays another's short one by the one that is being compiled.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Iterable[int], vocab_size: int) -> None:
        super().__init__(tokenizer, end_token_ids, vocab_size)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._is_compiling = False

    async def matchers(self, grammars: Iterable[Grammar | None]) -> list[LLMatcher | None]:
        """A matcher for each completion with a grammar. Raises like `matcher`."""
        matchers: list[LLMatcher | None] = []
        for grammar in grammars:
            if grammar is not None and grammar not in self._compiled:
                await self._turn(len(grammar.text))
                # to its end, in its turn: a thread cannot be stopped if the client leaves
                await asyncio.shield(asyncio.create_task(self._compile_in_turn(grammar), name="compile a grammar"))
            matchers.append(None if grammar is None else self.matcher(grammar))
        return matchers

    async def _compile_in_turn(self, grammar: Grammar) -> None:
        try:
            if grammar not in self._compiled:  # others may have waited for the same one
                self._keep(grammar, await asyncio.to_thread(self.compile, grammar))
        finally:
            self._end_turn()

    async def _turn(self, size: int) -> None:
        """Waits until no other grammar is compiled and none of those that wait is shorter."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), mine))
        if not self._is_compiling:
            self._end_turn()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it has got its turn in the same moment
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        self._is_compiling = False
        while self._waiting and not self._is_compiling:
            mine = heapq.heappop(self._waiting)[-1]
            if not mine.done():  # its client has not left
                self._is_compiling = True
                mine.set_result(None)


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


def advance(matcher: LLMatcher, token_id: int, grammar: Grammar) -> RequestRefused | None:
    """Why a matcher of `grammar` cannot continue, if so: it is too complex for the limits of the library."""
    matcher.consume_token(token_id)
    if problem := str(matcher.get_error()).partition("\n")[0]:
        return _refused(grammar, f"the grammar of a completion cannot be followed further: {problem}")
    return None


def _refused(grammar: Grammar, why: str) -> RequestRefused:
    return RequestRefused(f"{grammar.key}: {why}", param=grammar.key, code="unsupported_grammar")
