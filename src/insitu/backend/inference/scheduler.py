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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from insitu.backend.inference.batch_shapes import BatchShapes
from insitu.backend.inference.runner import Chunk, PrefixCache, Runner, Span, next_span, width_for
from insitu.backend.inference.sampler import (
    LOGITS_NOT_FINITE,
    MAX_IN_FLIGHT,
    MAX_TOP_LOGPROBS,
    Completion,
    OutputDelta,
    SampledToken,
    uniforms,
)
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.errors import BackendError
from insitu.schemas.episodes import GREEDY_TEMPERATURE


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
    `pending_text` is text not yet delivered. Without `streamed` there is a single delta at the end.
    """

    notify: Callable[[OutputDelta | BaseException], None]
    streamed: bool = False
    slot: int = -1
    computed: int = 0
    sent: int = 0
    pending_text: str = ""
    aborted: bool = False


Delivery = tuple[SequenceState, OutputDelta]


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


_SLOT = np.dtype(
    [
        *((name, np.int64) for name in ("token", "position", "index")),
        *(("temperature", np.float64), ("top_p", np.float64), ("seed", np.uint64)),
        *(("min_tokens", np.int64), ("top_logprobs", np.int64)),
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

    def step(self, outputs: list[tuple[SequenceState, OutputDelta | BaseException]]) -> None:
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
        for sequence, _ in ready:
            params, last = sequence.params, len(sequence.prompt) - 1
            own = (params.temperature, params.top_p, params.seed, params.min_tokens, params.top_logprobs)
            self._slot_S[sequence.slot] = (0, last, 0, *own)
            self.running[sequence.slot] = sequence
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
        slots = [sequence.slot for sequence in sequences]
        slot_B = self._slot_S[slots]
        temperature_B, top_p_B, seed_B = slot_B["temperature"], slot_B["top_p"], slot_B["seed"]
        more = self._banned(slot_B), bool(slot_B["top_logprobs"].any())
        sampled = sample(logits_BV, SamplingMetadata(temperature_B, top_p_B, seed_B, slot_B["index"], *more))
        self._slot_S["token"][slots] = sampled.tokens
        self._slot_S["position"][slots] += 1
        self._slot_S["index"][slots] += 1
        return [output for row, sequence in enumerate(sequences) if (output := self._append(sequence, sampled, row))]

    def _banned(self, slot_B: np.ndarray) -> tuple[list[int], list[int]]:
        """(rows, tokens): the end-of-turn tokens of sequences that have not reached their `min_tokens`."""
        short = np.flatnonzero(slot_B["index"] < slot_B["min_tokens"])
        if not len(short):
            return [], []
        tokens = list(self._tokenizer.eos_token_ids)
        return np.repeat(short, len(tokens)).tolist(), tokens * len(short)

    def _append(self, sequence: SequenceState, sampled: SamplerOutput, row: int) -> Delivery | None:
        top = None
        if sampled.top is not None and (count := sequence.params.top_logprobs):
            top = list(zip(sampled.top[0][row][:count], sampled.top[1][row][:count], strict=True))
        token = SampledToken(sampled.tokens[row], sampled.logprobs[row], top)
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


def sample(logits_BV: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Samples one token per row; logprobs are after temperature and before top_p, at temperature 0 the model's own.

    Raises BackendError if logits are not finite.
    """
    logits_BV = logits_BV.float()
    if (metadata.temperature_B != 1).any():
        temperature_B = np.where(metadata.temperature_B < GREEDY_TEMPERATURE, 1.0, metadata.temperature_B)
        logits_BV = logits_BV / torch.from_numpy(temperature_B.astype(np.float32)).to(logits_BV.device)[:, None]
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
    """The logits are those after temperature."""
    greedy = metadata.temperature_B < GREEDY_TEMPERATURE
    if greedy.all():
        return logits_BV.argmax(dim=-1)
    device = logits_BV.device
    probs_BV = torch.softmax(logits_BV, dim=-1)
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
