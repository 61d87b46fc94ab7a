"""Slot scheduler for one weight version: admission, prefill, and one decoding step for all running sequences.

    waiting -> (a free slot) -> prefilling -> (prompt computed, first token) -> running -> finished

Everything here runs in the compute thread. S are the slots; those at position 0 are free.
B are the sequences that sample a token, V is the vocabulary.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from torch import nn

from insitu.backend.inference.batch_shapes import BatchShapes
from insitu.backend.inference.runner import Chunk, PrefixCache, Runner, Span, next_span, width_for
from insitu.backend.inference.sampler import MAX_IN_FLIGHT, Completion, OutputDelta, SampledToken
from insitu.backend.inference.sampling import LogitsProcessor, SamplerOutput, SamplingMetadata, sample
from insitu.backend.inference.structured import allowed_tokens
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.errors import BackendError


@dataclass(frozen=True)
class EngineOptions:
    """Limits of the engine.

    `max_length`: tokens of a prompt and its completion. `max_batch`: sequences decoded together. `max_in_flight`:
    sequences running or waiting, from which on requests are refused. `prefill_tokens`: padded prompt tokens per forward
    pass. `prefix_bytes`: prefix cache per weight version. `kept_versions`: older versions that stay loaded once
    requested. `threads` of torch and `schedulers` per version: None chooses by model size.
    """

    max_length: int
    max_batch: int = 128
    prefill_tokens: int = 512
    prefix_bytes: int = 256 * 2**20
    kept_versions: int = 2
    max_in_flight: int = MAX_IN_FLIGHT
    threads: int | None = None
    schedulers: int | None = None


@dataclass(slots=True, eq=False)
class SequenceState(Completion):
    """One in-flight completion. `notify` receives its deltas, or the error that ended it, on the event loop.

    `computed` counts the prompt tokens whose keys and values are in the slot, `sent` the tokens already delivered;
    `pending_text` is text not yet delivered. Without `streamed` there is a single delta at the end. `matcher` follows
    the tokens through the request's grammar, if it has one.
    """

    notify: Callable[[OutputDelta | BaseException], None]
    streamed: bool = False
    matcher: LLMatcher | None = None
    processor: LogitsProcessor | None = None
    slot: int = -1
    computed: int = 0
    sent: int = 0
    pending_text: str = ""
    aborted: bool = False


Delivery = tuple[SequenceState, OutputDelta | BaseException]


_SLOT = np.dtype(
    [
        *((name, np.int64) for name in ("token", "position", "index")),
        *(("temperature", np.float64), ("top_p", np.float64), ("seed", np.uint64)),
        *((name, np.int64) for name in ("min_tokens", "top_logprobs", "top_k")),
        ("min_p", np.float64),
    ]
)
"""A slot: the latest token, its position and that of the next token in the completion, and the sampling params."""


class Scheduler:
    """Slots, prefix cache and the sequences of every stage, for one weight version."""

    def __init__(
        self, module: nn.Module, version: int, shapes: BatchShapes, tokenizer: ChatTokenizer, options: EngineOptions
    ) -> None:
        self.module = module
        self.version = version
        self._shapes = shapes
        self._tokenizer = tokenizer
        self._options = options
        self.reset()

    def reset(self) -> None:
        """Drops all sequences, cached prompts and keys."""
        self.waiting: deque[SequenceState] = deque()
        self.prefilling: list[SequenceState] = []
        self.running: dict[int, SequenceState] = {}
        self._runner = Runner(self.module)
        self._prefixes = PrefixCache(self._options.prefix_bytes)
        size = self._shapes.decode_rows[-1]
        self._free_slots = list(range(size))
        self._slot_S = np.zeros(size, _SLOT)

    def drop_aborted(self) -> None:
        """Forgets waiting sequences that were aborted; those in slots are dropped by their next step."""
        if any(sequence.aborted for sequence in self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.aborted)

    def load(self, sequence: SequenceState, prefix_discount: int) -> int:
        """Number of sequences, less `prefix_discount` if the start of this one's prompt is cached or waiting here."""
        count = len(self.waiting) + len(self.prefilling) + len(self.running)
        first = sequence.prompt[: next_span(len(sequence.prompt), 0).end]
        shared = tuple(first) in self._prefixes or any(s.prompt[: len(first)] == first for s in self.waiting)
        return count - prefix_discount if shared else count

    @property
    def idle(self) -> bool:
        return not (self.running or self.prefilling or self.waiting)

    @property
    def sequences(self) -> list[SequenceState]:
        return [*self.waiting, *self.prefilling, *self.running.values()]

    def step(self, outputs: list[Delivery]) -> None:
        """Computes one prefill batch and one token per running sequence; appends their deltas to `outputs`."""
        while self.waiting and self._free_slots:
            sequence = self.waiting.popleft()
            sequence.slot = heapq.heappop(self._free_slots)
            self.prefilling.append(sequence)
        if self.prefilling:
            outputs += self._prefill()
        if self.running:
            outputs += self._decode()

    def _prefill(self) -> list[Delivery]:
        """Advances prompts by cached spans, then by one forward pass over spans of equal shape.

        Of several sequences with the same next span one computes it; the others find it cached in the next step.
        """
        ready: list[tuple[SequenceState, Chunk]] = []
        batch: dict[tuple[int, ...], tuple[SequenceState, Span]] = {}
        for sequence in [sequence for sequence in self.prefilling if sequence.aborted]:
            self.prefilling.remove(sequence)
            self._release(sequence)
        for sequence in self.prefilling:
            chunk = self._load_cached(sequence)
            if chunk is not None and sequence.computed == len(sequence.prompt):
                ready.append((sequence, chunk))
                continue
            span = next_span(len(sequence.prompt), sequence.computed)
            if self._fits(span, batch):
                batch.setdefault(tuple(sequence.prompt[: span.end]), (sequence, span))
        ready += self._forward(batch)
        done = {id(sequence) for sequence, _ in ready}
        self.prefilling = [s for s in self.prefilling if id(s) not in done]
        return self._start_decoding(ready) if ready else []

    def _load_cached(self, sequence: SequenceState) -> Chunk | None:
        """Copies the cached spans of the prompt into the slot; returns the last one."""
        last = None
        while sequence.computed < len(sequence.prompt):
            span = next_span(len(sequence.prompt), sequence.computed)
            chunk = self._prefixes.get(tuple(sequence.prompt[: span.end]))
            if chunk is None:
                break
            self._runner.cache.ensure(sequence.slot + 1, width_for(span.end))
            self._runner.cache.load(sequence.slot, span.start, chunk)
            sequence.computed, last = span.end, chunk
        return last

    def _fits(self, span: Span, batch: dict[Any, tuple[SequenceState, Span]]) -> bool:
        if not batch:
            return True
        first = next(iter(batch.values()))[1]
        alike = (first.start, first.columns) == (span.start, span.columns)
        return alike and len(batch) < self._shapes.prefill_rows(span.columns)[-1]

    def _forward(self, batch: dict[tuple[int, ...], tuple[SequenceState, Span]]) -> list[tuple[SequenceState, Chunk]]:
        """Computes and caches the spans in `batch`; returns the sequences whose prompt is now complete."""
        if not batch:
            return []
        sequences, spans = zip(*batch.values(), strict=True)
        rows = next(size for size in self._shapes.prefill_rows(spans[0].columns) if size >= len(batch))
        chunks = self._runner.prefill([s.prompt for s in sequences], [s.slot for s in sequences], spans, rows)
        for key, sequence, span, chunk in zip(batch, sequences, spans, chunks, strict=True):
            sequence.computed = span.end
            self._prefixes.put(key, chunk)
        done = zip(sequences, chunks, strict=True)
        return [(sequence, chunk) for sequence, chunk in done if sequence.computed == len(sequence.prompt)]

    def _start_decoding(self, ready: list[tuple[SequenceState, Chunk]]) -> list[Delivery]:
        """Samples the first token of each complete prompt."""
        for sequence, chunk in ready:
            params, last = sequence.params, len(sequence.prompt) - 1
            own = (params.temperature, params.top_p, params.seed, params.min_tokens, params.top_logprobs)
            self._slot_S[sequence.slot] = (0, last, 0, *own, params.top_k, params.min_p)
            self.running[sequence.slot] = sequence
            if LogitsProcessor.is_needed(params):
                sequence.processor = LogitsProcessor(params, sequence.prompt, self._tokenizer, len(chunk.logits_V))
        sequences = [sequence for sequence, _ in ready]
        return self._sample(torch.stack([chunk.logits_V for _, chunk in ready]), sequences)

    def _decode(self) -> list[Delivery]:
        for sequence in [sequence for sequence in self.running.values() if sequence.aborted]:
            self._release(sequence)
        if not self.running:
            return []
        slots = sorted(self.running)
        size = next(size for size in self._shapes.decode_rows if size > slots[-1])
        slot_B = self._slot_S[:size]
        logits_BV = self._runner.decode(slot_B["token"], slot_B["position"], self._shapes.min_width)
        if len(slots) < size:
            logits_BV = logits_BV[torch.tensor(slots, device=logits_BV.device)]
        return self._sample(logits_BV, [self.running[slot] for slot in slots])

    def _sample(self, logits_BV: torch.Tensor, sequences: list[SequenceState]) -> list[Delivery]:
        """Samples a token for each sequence; returns the deltas to deliver."""
        logits_BV = _processed(logits_BV, sequences)
        slots = [sequence.slot for sequence in sequences]
        slot_B = self._slot_S[slots]
        temperature_B, top_p_B, seed_B = slot_B["temperature"], slot_B["top_p"], slot_B["seed"]
        more = self._banned(slot_B, sequences), bool(slot_B["top_logprobs"].any()), slot_B["top_k"], slot_B["min_p"]
        sampled = sample(logits_BV, SamplingMetadata(temperature_B, top_p_B, seed_B, slot_B["index"], *more))
        self._slot_S["token"][slots] = sampled.tokens
        self._slot_S["position"][slots] += 1
        self._slot_S["index"][slots] += 1
        return [output for row, sequence in enumerate(sequences) if (output := self._append(sequence, sampled, row))]

    def _banned(self, slot_B: np.ndarray, sequences: list[SequenceState]) -> tuple[list[int], list[int]]:
        """(rows, tokens): the tokens that would end sequences that have not reached their `min_tokens`."""
        rows: list[int] = []
        tokens: list[int] = []
        for row in np.flatnonzero(slot_B["index"] < slot_B["min_tokens"]).tolist():
            ends = self._tokenizer.eos_token_ids | sequences[row].params.stop_token_ids
            rows += [row] * len(ends)
            tokens += ends
        return rows, tokens

    def _append(self, sequence: SequenceState, sampled: SamplerOutput, row: int) -> Delivery | None:
        top = None
        if sampled.top is not None and (count := sequence.params.top_logprobs):
            best = zip(sampled.top[0][row][:count], sampled.top[1][row][:count], strict=True)
            top = [(token_id, logprob) for token_id, logprob in best if logprob > -math.inf]
        token = SampledToken(sampled.tokens[row], sampled.logprobs[row], top)
        if sequence.matcher is not None and (problem := _advance(sequence.matcher, token.id)):
            self._release(sequence)
            return sequence, BackendError(f"the grammar of a completion cannot be followed further: {problem}")
        text, finish_reason = sequence.append(token, self._tokenizer, self._options.max_length)
        if finish_reason is not None:
            self._release(sequence)
        elif not sequence.streamed:
            if text:
                sequence.pending_text += text
            return None
        tokens = sequence.tokens[sequence.sent :]
        sequence.sent = len(sequence.tokens)
        return sequence, OutputDelta(self.version, sequence.pending_text + text, tokens, finish_reason)

    def _release(self, sequence: SequenceState) -> None:
        self.running.pop(sequence.slot, None)
        self._slot_S["position"][sequence.slot] = 0
        heapq.heappush(self._free_slots, sequence.slot)


def _processed(logits_BV: torch.Tensor, sequences: list[SequenceState]) -> torch.Tensor:
    """The logits after what the requests of these sequences change in them, before the temperature."""
    constrained = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
    changed = [row for row, sequence in enumerate(sequences) if sequence.processor is not None]
    if not constrained and not changed:
        return logits_BV
    logits_BV = logits_BV.to(torch.float32, copy=True)
    if constrained:
        matchers = [matcher for sequence in sequences if (matcher := sequence.matcher) is not None]
        refused = ~allowed_tokens(matchers, logits_BV.shape[-1]).to(logits_BV.device)
        if len(constrained) == len(sequences):
            logits_BV.masked_fill_(refused, -torch.inf)
        else:
            logits_BV[constrained] = logits_BV[constrained].masked_fill_(refused, -torch.inf)
    for row in changed:
        sequence = sequences[row]
        assert sequence.processor is not None
        sequence.processor.apply(logits_BV[row], sequence.tokens.ids)
    return logits_BV


def _advance(matcher: LLMatcher, token_id: int) -> str:
    """Why a matcher cannot continue, if so: the grammar is too complex for the limits of the library."""
    matcher.consume_token(token_id)
    return str(matcher.get_error()).partition("\n")[0]
