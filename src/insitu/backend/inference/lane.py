"""The requests that sample from one version of the weights: seats, prompts, and one token for all of them at a time.

    waiting -> (a free slot) -> filling -> (prompt computed, first token) -> active -> finished

Everything here runs in the compute thread. Arrays end in `_S`: one entry a slot.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from insitu.backend.inference.cache import Chunk, PrefixCache
from insitu.backend.inference.runner import Runner, Shapes, Span, next_span, width_for
from insitu.backend.inference.sampling import Draws, Sampled, SamplingParams, sample
from insitu.backend.inference.tokens import ChatTokenizer, StopFinder, TextStream


@dataclass(frozen=True)
class EngineOptions:
    """The engine's sizes.

    `max_length` positions of a prompt and its completion; `max_batch` requests computed together; `prefill_tokens`
    padded prompt tokens in one forward pass; `prefix_bytes` of computed prompts kept, for each version of the weights;
    `kept_versions` older versions that stay loaded once asked for; `threads` of torch, and `lanes` that share a
    version's requests (none: by the model's size).
    """

    max_length: int
    max_batch: int = 128
    prefill_tokens: int = 512
    prefix_bytes: int = 256 * 2**20
    kept_versions: int = 2
    threads: int | None = None
    lanes: int | None = None


@dataclass(slots=True)
class Token:
    """One sampled token; `top` holds the likeliest as (id, logprob), where the request asks for them."""

    id: int
    logprob: float
    top: list[tuple[int, float]] | None = None


@dataclass(slots=True)
class Piece:
    """What a completion grew by: text that is certain, tokens, and at its end why it ended."""

    version: int
    text: str
    tokens: list[Token]
    finish_reason: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One completion under way. `notify` takes each piece, or the error that ended it, on the event loop.

    A request that is not `streamed` gets a single piece, at its end. `computed` counts the prompt tokens whose keys
    and values are in its slot, `sent` the tokens already told, `kept_text` the text that was not.
    """

    prompt: list[int]
    params: SamplingParams
    notify: Callable[[Piece | BaseException], None]
    streamed: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    slot: int = -1
    computed: int = 0
    sent: int = 0
    kept_text: str = ""
    tokens: list[Token] = field(default_factory=list)
    text: TextStream | None = None
    stops: StopFinder | None = None
    cancelled: bool = False

    def grow(self, token: Token, tokenizer: ChatTokenizer, max_length: int) -> tuple[str, str | None]:
        """Take a sampled token: the text that has become certain (where it is followed), and why it ends here if so."""
        self.tokens.append(token)
        if token.id in tokenizer.eos_token_ids and not self.params.ignore_eos:
            return self._last_text(), "stop"
        text = ""
        if self.text is not None and self.stops is not None:
            text = self.stops.add(self.text.add(token.id))
            if self.stops.found:
                return text, "stop"
        if len(self.tokens) >= self.params.max_tokens or len(self.prompt) + len(self.tokens) >= max_length:
            return text + self._last_text(), "length"
        return text, None

    def _last_text(self) -> str:
        if self.text is None or self.stops is None:
            return ""
        return self.stops.add(self.text.finish()) + self.stops.finish()


class Lane:
    """Slots, prompts kept for reuse, and the requests in every stage, all over one version of the weights."""

    def __init__(self, module: nn.Module, version: int, shapes: Shapes, tokens: ChatTokenizer, options: EngineOptions):
        self.module = module
        self.version = version
        self._shapes = shapes
        self._tokens = tokens
        self._options = options
        self.reset()

    def reset(self) -> None:
        """Forget every request, prompt and key; as new."""
        self.waiting: deque[Request] = deque()
        self.filling: list[Request] = []
        self.active: dict[int, Request] = {}
        self._runner = Runner(self.module)
        self._prefixes = PrefixCache(self._options.prefix_bytes)
        size = self._shapes.decode_rows[-1]
        self._free = list(range(size))
        self._token_S = np.zeros(size, dtype=np.int64)
        self._position_S = np.zeros(size, dtype=np.int64)
        self._live_S = np.zeros(size, dtype=bool)
        self._temperature_S = np.ones(size)
        self._top_p_S = np.ones(size)
        self._seed_S = np.zeros(size, dtype=np.uint64)
        self._index_S = np.zeros(size, dtype=np.int64)

    def load(self, request: Request, discount: int) -> int:
        """How many requests there are; less `discount` where the first part of this one's prompt is known already."""
        count = len(self.waiting) + len(self.filling) + len(self.active)
        first = request.prompt[: next_span(len(request.prompt), 0).end]
        known = tuple(first) in self._prefixes or any(r.prompt[: len(first)] == first for r in self.waiting)
        return count - discount if known else count

    @property
    def requests(self) -> list[Request]:
        return [*self.waiting, *self.filling, *self.active.values()]

    def step(self, told: list[tuple[Request, Piece | BaseException]]) -> None:
        """Compute one batch of prompts and one token of everything active; adds what there is to tell to `told`."""
        while self.waiting and self._free:
            request = self.waiting.popleft()
            request.slot = heapq.heappop(self._free)
            self.filling.append(request)
        if self.filling:
            told += self._prefill()
        if self.active:
            told += self._decode()

    def _prefill(self) -> list[tuple[Request, Piece]]:
        """Advance prompts by what has been computed already, then by one forward pass over like parts of several.

        Of requests with the same next part one computes it; the others find it at the next step.
        """
        ready: list[tuple[Request, Chunk]] = []
        batch: dict[tuple[int, ...], tuple[Request, Span]] = {}
        for request in [request for request in self.filling if request.cancelled]:
            self.filling.remove(request)
            self._leave(request)
        for request in self.filling:
            chunk = self._reuse(request)
            if chunk is not None and request.computed == len(request.prompt):
                ready.append((request, chunk))
                continue
            span = next_span(len(request.prompt), request.computed)
            if self._joins(span, batch):
                batch.setdefault(tuple(request.prompt[: span.end]), (request, span))
        ready += self._forward(batch)
        done = {id(request) for request, _ in ready}
        self.filling = [r for r in self.filling if id(r) not in done]
        return self._activate(ready) if ready else []

    def _reuse(self, request: Request) -> Chunk | None:
        """Copy the parts of the prompt that are kept; the last one copied."""
        last = None
        while request.computed < len(request.prompt):
            span = next_span(len(request.prompt), request.computed)
            chunk = self._prefixes.get(tuple(request.prompt[: span.end]))
            if chunk is None:
                break
            self._runner.cache.ensure(request.slot + 1, width_for(span.end))
            self._runner.cache.load(request.slot, span.start, chunk)
            request.computed, last = span.end, chunk
        return last

    def _joins(self, span: Span, batch: dict[Any, tuple[Request, Span]]) -> bool:
        if not batch:
            return True
        first = next(iter(batch.values()))[1]
        alike = (first.start, first.columns) == (span.start, span.columns)
        return alike and len(batch) < self._shapes.prefill_rows(span.columns)[-1]

    def _forward(self, batch: dict[tuple[int, ...], tuple[Request, Span]]) -> list[tuple[Request, Chunk]]:
        """Compute and keep the parts in `batch`; the requests whose prompt is complete now."""
        if not batch:
            return []
        requests, spans = zip(*batch.values(), strict=True)
        rows = next(size for size in self._shapes.prefill_rows(spans[0].columns) if size >= len(batch))
        chunks = self._runner.prefill([r.prompt for r in requests], [r.slot for r in requests], spans, rows)
        for key, request, span, chunk in zip(batch, requests, spans, chunks, strict=True):
            request.computed = span.end
            self._prefixes.put(key, chunk)
        done = zip(requests, chunks, strict=True)
        return [(request, chunk) for request, chunk in done if request.computed == len(request.prompt)]

    def _activate(self, ready: list[tuple[Request, Chunk]]) -> list[tuple[Request, Piece]]:
        """Draw the first token of each complete prompt."""
        for request, _ in ready:
            slot, params = request.slot, request.params
            self.active[slot] = request
            self._live_S[slot] = True
            self._position_S[slot] = len(request.prompt) - 1
            self._temperature_S[slot] = params.temperature
            self._top_p_S[slot] = params.top_p
            self._seed_S[slot] = params.seed
            self._index_S[slot] = 0
        requests = [request for request, _ in ready]
        return self._draw(torch.stack([chunk.logits_V for _, chunk in ready]), requests)

    def _decode(self) -> list[tuple[Request, Piece]]:
        """One token of every active request."""
        for request in [request for request in self.active.values() if request.cancelled]:
            self._leave(request)
        if not self.active:
            return []
        slots = sorted(self.active)
        size = next(size for size in self._shapes.decode_rows if size > slots[-1])
        arrays = self._token_S[:size], self._position_S[:size], self._live_S[:size]
        logits_BV = self._runner.decode(*arrays, self._shapes.least_width)
        if len(slots) < size:
            logits_BV = logits_BV[torch.tensor(slots, device=logits_BV.device)]
        return self._draw(logits_BV, [self.active[slot] for slot in slots])

    def _draw(self, logits_BV: torch.Tensor, requests: list[Request]) -> list[tuple[Request, Piece]]:
        """Draw a token for each of `requests`; what there is to tell of them."""
        slots = [request.slot for request in requests]
        drawn = sample(
            logits_BV,
            Draws(
                self._temperature_S[slots],
                self._top_p_S[slots],
                self._seed_S[slots],
                self._index_S[slots],
                self._banned(requests),
                any(request.params.top_logprobs for request in requests),
            ),
        )
        self._token_S[slots] = drawn.tokens
        self._position_S[slots] += 1
        self._index_S[slots] += 1
        return [told for row, request in enumerate(requests) if (told := self._tell(request, drawn, row))]

    def _banned(self, requests: list[Request]) -> tuple[list[int], list[int]]:
        """End-of-turn tokens of the requests that have not reached their `min_tokens`."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, request in enumerate(requests):
            if len(request.tokens) < request.params.min_tokens:
                for token in self._tokens.eos_token_ids:
                    rows.append(row)
                    tokens.append(token)
        return rows, tokens

    def _tell(self, request: Request, drawn: Sampled, row: int) -> tuple[Request, Piece] | None:
        top = None
        if drawn.top is not None and (count := request.params.top_logprobs):
            top = list(zip(drawn.top[0][row][:count], drawn.top[1][row][:count], strict=True))
        token = Token(drawn.tokens[row], drawn.logprobs[row], top)
        text, finish_reason = request.grow(token, self._tokens, self._options.max_length)
        if finish_reason is not None:
            self._leave(request)
        elif not request.streamed:
            if text:
                request.kept_text += text
            return None
        piece = Piece(self.version, request.kept_text + text, request.tokens[request.sent :], finish_reason)
        request.sent = len(request.tokens)
        return request, piece

    def _leave(self, request: Request) -> None:
        self.active.pop(request.slot, None)
        self._live_S[request.slot] = False
        self._position_S[request.slot] = 0
        heapq.heappush(self._free, request.slot)
