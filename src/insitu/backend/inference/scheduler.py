"""Slot scheduler for one weight version: admission, prefill, and one decoding step for all running sequences.

    waiting -> (a slot, and room in the pool) -> prefilling -> (prompt computed, first token) -> running -> finished

Everything here runs in the compute thread. S are the slots, B are the sequences that sample a token, V is the
vocabulary.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher
from torch import nn

from insitu.backend.inference.batch_shapes import BatchShapes
from insitu.backend.inference.batches import SharedRows, Span
from insitu.backend.inference.kv_pool import BLOCK, Block, KVPool, Windows
from insitu.backend.inference.runner import Runner, next_span
from insitu.backend.inference.sampler import MAX_IN_FLIGHT, Completion, OutputDelta, SampledToken
from insitu.backend.inference.sampling import SLOT, LogitsProcessor, SamplerOutput, sample
from insitu.backend.inference.structured import advance, allowed_tokens
from insitu.backend.inference.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class EngineOptions:
    """Limits of the engine.

    `max_length`: tokens of a prompt and its completion. `max_batch`: sequences decoded together. `max_in_flight`:
    sequences running or waiting, from which on requests are refused. `prefill_tokens`: prompt tokens per forward pass.
    `kv_bytes`: keys and values of all versions, None for a share of the free memory; `prefix_bytes` of them for prompts
    that no sequence needs. `kept_versions`: older versions that stay loaded once requested. `threads` of torch: None
    chooses by model size.
    """

    max_length: int
    max_batch: int = 128
    prefill_tokens: int = 512
    kv_bytes: int | None = None
    prefix_bytes: int = 256 * 2**20
    kept_versions: int = 2
    max_in_flight: int = MAX_IN_FLIGHT
    threads: int | None = None


@dataclass(slots=True, eq=False)
class SequenceState(Completion):
    """One in-flight completion. `notify` receives its deltas, or the error that ended it, on the event loop.

    `number` is its place in the order of arrival. `blocks` hold the keys and values of its first tokens, of which
    `computed` are of the prompt; it has paid `paid` bytes for those to come. `sent` counts the tokens already
    delivered; `pending_text` is text not yet delivered. Without `streamed` there is a single delta at the end.
    `matcher` follows the tokens through the request's grammar, if it has one.
    """

    notify: Callable[[OutputDelta | BaseException], None]
    streamed: bool = False
    matcher: LLMatcher | None = None
    number: int = 0
    processor: LogitsProcessor | None = None
    slot: int = -1
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    paid: int = 0
    sent: int = 0
    pending_text: str = ""
    aborted: bool = False


_SAMPLED_LOGITS = 2**20
"""Logits that tokens are sampled from together."""
_ATTENDING = 4
"""Tokens of spans in a batch of prompts, as a multiple of those that differ."""
_MOST_HELD_BACK = 4
"""Batches of prompts for which running sequences wait."""

Delivery = tuple[SequenceState, OutputDelta | BaseException]


@dataclass(eq=False)
class Scheduler:
    """The sequences of every stage for one weight version, and the windows of those that run.

    The running sequences have the first slots. Blocks of prompts and windows are paid from the pool: an admitted
    sequence has paid for its window and for the blocks of its prompt.
    """

    module: nn.Module
    version: int
    shapes: BatchShapes
    tokenizer: ChatTokenizer
    max_length: int
    options: EngineOptions
    pool: KVPool
    make_room: Callable[[], None]
    """Takes the room of the youngest admitted sequence of the pool, which waits again."""

    def __post_init__(self) -> None:
        layout = self.shapes.layout
        self._runner = Runner(self.module, attends_here=self.shapes.attends_here)
        self._block_bytes = BLOCK * layout.token_bytes
        self._logits_bytes = self.shapes.vocab_size * layout.dtype.itemsize
        self.sequences: dict[SequenceState, None] = {}
        """Those of all stages, until their last delta or their end."""
        self.waiting: deque[SequenceState] = deque()
        self.prefilling: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self._windows = Windows(layout)
        self._batches = 0
        """Those of prompts since the latest token of the running sequences."""
        self._slot_S = np.zeros(self.shapes.rows(self.shapes.max_rows), SLOT)

    def reset(self) -> None:
        """Drops all sequences."""
        for sequence in self.sequences:
            self._give_back(sequence)
        self.sequences.clear()
        self.waiting.clear()
        self.prefilling, self.running = [], []
        self._runner.rest(self._windows)
        self._windows = Windows(self.shapes.layout)

    def add(self, sequence: SequenceState) -> None:
        self.sequences[sequence] = None
        self.waiting.append(sequence)

    def drop_aborted(self) -> None:
        aborted = {sequence for sequence in self.sequences if sequence.aborted}  # asked once: more are meanwhile
        for sequence in aborted.intersection(self.running):
            self._release(sequence)
        for sequence in aborted.intersection(self.prefilling):
            self._give_back(sequence)
        self.prefilling = [sequence for sequence in self.prefilling if sequence not in aborted]
        self.waiting = deque(sequence for sequence in self.waiting if sequence not in aborted)
        for sequence in aborted:
            del self.sequences[sequence]

    @property
    def idle(self) -> bool:
        return not self.sequences

    @property
    def first_waiting(self) -> SequenceState | None:
        """The sequence to be admitted next, if there is a slot for it."""
        has_slot = len(self.prefilling) + len(self.running) < self.shapes.max_rows
        return self.waiting[0] if has_slot and self.waiting else None

    def admit(self) -> bool:
        """Admits the first waiting sequence; returns whether there is room for it."""
        sequence = self.waiting[0]
        needed = self._block_bytes + len(sequence.prompt) * self.shapes.layout.token_bytes + self._logits_bytes
        if not self.pool.take(needed):
            return False
        sequence.paid = needed
        self.prefilling.append(self.waiting.popleft())
        return True

    def preempt(self, sequence: SequenceState) -> None:
        """Makes an admitted sequence wait again: what it has is computed again from its tokens."""
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
            self._give_back(sequence)
        else:
            self._release(sequence)
        sequence.computed = 0
        self.waiting.appendleft(sequence)

    def step(self, outputs: list[Delivery]) -> None:
        """Computes one batch of prompts, or one token per running sequence; appends their deltas to `outputs`.

        These take turns. A token for few sequences takes nearly as long as one for many, so that they wait while more
        begin, for a few batches.
        """
        waits = len(self.running) < len(self.prefilling) and self._batches <= _MOST_HELD_BACK
        if self.prefilling and (waits or not self.running or not self._batches):
            self._prefill(outputs)
            self._batches = self._batches + 1 if self.running else 0
        elif self.running:
            self._decode(outputs)
            self._batches = 0
        if self.idle:
            self._runner.rest(self._windows)

    def _prefill(self, outputs: list[Delivery]) -> None:
        """Advances prompts by known blocks and one forward pass over their next spans.

        Of several sequences with the same next span one computes it.
        """
        batch: dict[Hashable, tuple[SequenceState, Span]] = {}
        rows, mates = SharedRows(), []
        for sequence in self.prefilling:
            self._use_known(sequence)
            if sequence.computed == len(sequence.prompt):
                continue
            start, end = next_span(len(sequence.prompt), sequence.computed)
            tokens, key = sequence.prompt[start:end], self._key(sequence, end)
            if key in batch:
                mates.append(sequence)
                continue
            new = rows.missing(tokens, sequence.blocks)
            if not self._fits(start, end, [span for _, span in batch.values()], len(rows.tokens) + new):
                continue
            rows.add(tokens, sequence.blocks)
            span = Span(sequence.prompt, start, tuple(sequence.blocks), Block(self.shapes.layout, end - start))
            batch[key] = sequence, span
        self._forward(batch)
        for sequence in mates:
            self._use_known(sequence)
        if ready := [sequence for sequence in self.prefilling if sequence.computed == len(sequence.prompt)]:
            self.prefilling = [sequence for sequence in self.prefilling if sequence.computed < len(sequence.prompt)]
            self._start_decoding(ready, outputs)

    def _fits(self, start: int, end: int, batch: list[Span], rows: int) -> bool:
        """Whether one more span can be computed together with those of a batch, then of `rows` different tokens."""
        if not batch:
            return True
        lengths = [end - start, *(span.block.length for span in batch)]
        if self.shapes.packs_prompts:  # attention is computed for each span
            return rows <= self.options.prefill_tokens and sum(lengths) <= _ATTENDING * self.options.prefill_tokens
        same_start = start == batch[0].start
        return self.shapes.pads_prompts and same_start and len(lengths) * max(lengths) <= self.options.prefill_tokens

    def _key(self, sequence: SequenceState, end: int) -> Hashable:
        """Cache key of a block. The last block of a prompt has its own, as only it keeps logits."""
        return self, tuple(sequence.prompt[:end]), end == len(sequence.prompt)

    def _use_known(self, sequence: SequenceState) -> None:
        """Uses the blocks of the prompt that are there already."""
        while sequence.computed < len(sequence.prompt):
            _, end = next_span(len(sequence.prompt), sequence.computed)
            block = self.pool.use(self._key(sequence, end))
            if block is None:
                return
            sequence.blocks.append(block)
            sequence.computed = end

    def _forward(self, batch: dict[Hashable, tuple[SequenceState, Span]]) -> None:
        """Computes the blocks in `batch`."""
        logits_NV = self._runner.prefill([span for _, span in batch.values()], self.shapes.least_rows) if batch else ()
        for (key, (sequence, span)), logits_V in zip(batch.items(), logits_NV, strict=True):
            if span.end == len(sequence.prompt):
                span.block.keep_logits(logits_V)
            sequence.paid -= span.block.size  # from now on by the block
            sequence.blocks.append(self.pool.add(key, span.block))
            sequence.computed = span.end

    def _start_decoding(self, ready: list[SequenceState], outputs: list[Delivery]) -> None:
        """Gives complete prompts a window, and samples their first tokens."""
        logits = []
        self._windows.load(len(self.running), [sequence.blocks[-1] for sequence in ready])
        for sequence in ready:
            params, last = sequence.params, len(sequence.prompt) - 1
            logits_V = sequence.blocks[-1].logits_V
            assert logits_V is not None
            logits.append(logits_V)
            sequence.slot = len(self.running)
            self.running.append(sequence)
            self.pool.give(sequence.paid - self._block_bytes)  # of blocks that others had computed
            sequence.paid = self._block_bytes
            if sequence.blocks[-1].length < BLOCK:
                self.pool.drop([sequence.blocks.pop()])
            own = (params.temperature, params.top_p, params.seed, params.min_tokens, params.top_logprobs)
            self._slot_S[sequence.slot] = (0, last, 0, *own, params.top_k, params.min_p)
            if LogitsProcessor.is_needed(params):
                sequence.processor = LogitsProcessor(params, sequence.prompt, self.tokenizer, len(logits_V))
        self._sample(torch.stack(logits), ready, outputs)

    def _decode(self, outputs: list[Delivery]) -> None:
        self._grow()
        count = len(self.running)
        if not count:
            return
        rows = self.shapes.rows(count)
        slot_B = self._slot_S[:rows]
        slot_B["position"][count:] = 0
        blocks = [sequence.blocks for sequence in self.running]
        longest = max(int(slot_B["position"][row]) - len(own) * BLOCK for row, own in enumerate(blocks)) + 1
        self._windows.ensure(rows, longest)
        blocks += [[]] * (rows - count)
        logits_BV = self._runner.decode(self._windows, blocks, slot_B["token"], slot_B["position"])
        self._sample(logits_BV[:count], list(self.running), outputs)

    def _grow(self) -> None:
        """Makes blocks of full windows. Without room for them the youngest sequences of all versions wait again.

        So the oldest always goes on. One alone has room (see `Engine`).
        """
        for sequence in list(self.running):
            full = (len(sequence.blocks) + 1) * BLOCK
            while sequence in self.running and self._slot_S["position"][sequence.slot] == full:
                if not self.pool.take(self._block_bytes):
                    self.make_room()
                    continue
                sequence.paid += self._block_bytes
                block = self._windows.block(sequence.slot)
                block.users = 1
                sequence.blocks.append(block)
                sequence.paid -= self._block_bytes  # from now on by the block
                break

    def _sample(self, logits_BV: torch.Tensor, sequences: list[SequenceState], outputs: list[Delivery]) -> None:
        """Samples a token for each sequence, and appends the deltas to deliver to `outputs`.

        On a CPU a few rows at a time: for large temporary tensors the system would have to find new memory each time.
        """
        count = max(1, _SAMPLED_LOGITS // logits_BV.shape[-1]) if logits_BV.device.type == "cpu" else len(sequences)
        for start in range(0, len(sequences), count):
            part = slice(start, start + count)
            self._sample_rows(logits_BV[part], sequences[part], outputs)

    def _sample_rows(self, logits_BV: torch.Tensor, sequences: list[SequenceState], outputs: list[Delivery]) -> None:
        logits_BV = _processed(logits_BV, sequences)
        slots = [sequence.slot for sequence in sequences]
        slot_B = self._slot_S[slots]
        sampled = sample(logits_BV, slot_B, self._banned(slot_B, sequences))
        new = []
        for row, (sequence, index) in enumerate(zip(sequences, slot_B["index"].tolist(), strict=True)):
            if index < len(sequence.tokens):  # computed again
                sampled.tokens[row] = sequence.tokens.ids[index]
            else:
                new.append(row)
        self._slot_S["token"][slots] = sampled.tokens
        self._slot_S["position"][slots] += 1
        self._slot_S["index"][slots] += 1
        for row in new:
            if (output := self._append(sequences[row], sampled, row)) is not None:
                outputs.append(output)

    def _banned(self, slot_B: np.ndarray, sequences: list[SequenceState]) -> tuple[list[int], list[int]]:
        """(rows, tokens): the tokens that would end sequences that have not reached their `min_tokens`."""
        rows: list[int] = []
        tokens: list[int] = []
        for row in np.flatnonzero(slot_B["index"] < slot_B["min_tokens"]).tolist():
            ends = self.tokenizer.eos_token_ids | sequences[row].params.stop_token_ids
            rows += [row] * len(ends)
            tokens += ends
        return rows, tokens

    def _append(self, sequence: SequenceState, sampled: SamplerOutput, row: int) -> Delivery | None:
        top = None
        if sampled.top is not None and (count := sequence.params.top_logprobs):
            best = zip(sampled.top[0][row][:count], sampled.top[1][row][:count], strict=True)
            top = [(token_id, logprob) for token_id, logprob in best if logprob > -math.inf]
        token = SampledToken(sampled.tokens[row], sampled.logprobs[row], top)
        grammar, matcher = sequence.params.grammar, sequence.matcher
        if grammar and matcher and (refused := advance(matcher, token.id, grammar)):
            self._end(sequence)
            return sequence, refused
        text, finish_reason = sequence.append(token, self.tokenizer, self.max_length)
        if finish_reason is not None:
            self._end(sequence)
        elif not sequence.streamed:
            if text:
                sequence.pending_text += text
            return None
        tokens, sequence.sent = sequence.tokens[sequence.sent :], len(sequence.tokens)
        text, reason = sequence.pending_text + text, sequence.stop_reason
        return sequence, OutputDelta(self.version, text, tokens, finish_reason, reason)

    def _end(self, sequence: SequenceState) -> None:
        self._release(sequence)
        del self.sequences[sequence]

    def _release(self, sequence: SequenceState) -> None:
        """Frees the slot of a running sequence, which the last one gets."""
        slot, last = sequence.slot, self.running.pop()
        if last is not sequence:
            computed = int(self._slot_S["position"][last.slot]) + 1  # of which the last may not be sampled yet
            self._windows.move(last.slot, slot, computed - len(last.blocks) * BLOCK)
            self._slot_S[slot] = self._slot_S[last.slot]
            self.running[slot], last.slot = last, slot
        self._give_back(sequence)

    def _give_back(self, sequence: SequenceState) -> None:
        self.pool.drop(sequence.blocks)
        self.pool.give(sequence.paid)
        sequence.blocks, sequence.paid = [], 0


def _processed(logits_BV: torch.Tensor, sequences: list[SequenceState]) -> torch.Tensor:
    """The logits after what the requests of these sequences change in them, before the temperature."""
    matchers = {row: each.matcher for row, each in enumerate(sequences) if each.matcher is not None}
    processors = {row: each.processor for row, each in enumerate(sequences) if each.processor is not None}
    if not matchers and not processors:
        return logits_BV
    logits_BV = logits_BV.to(torch.float32, copy=True)
    if matchers:
        constrained = [*matchers]
        refused = ~allowed_tokens([*matchers.values()], logits_BV.shape[-1]).to(logits_BV.device)
        if len(constrained) == len(sequences):
            logits_BV.masked_fill_(refused, -torch.inf)
        else:
            logits_BV[constrained] = logits_BV[constrained].masked_fill_(refused, -torch.inf)
    for row, processor in processors.items():
        processor.apply(logits_BV[row], sequences[row].tokens.ids)
    return logits_BV
