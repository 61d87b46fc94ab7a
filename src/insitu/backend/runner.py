"""Runs the model's own forward pass on prompts and on next tokens, in shapes whose rows do not depend on each other.

Matrix kernels choose their blocking by the number of rows, so the same row can come out different in its last bits in
a batch of another size. `Shapes` finds out on the model itself which batch sizes agree bit for bit, and only these are
used; so what a request samples does not depend on the company it happens to be in.

Shapes: R rows, C columns (tokens a row), T positions looked at, V vocabulary.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from insitu.backend.cache import Chunk, Plan, SlotCache
from insitu.errors import BackendError

logger = logging.getLogger(__name__)

MAX_COLUMNS = 256
COLUMNS = (16, 32, 48, 64, 96, 128, 192, MAX_COLUMNS)
"""A prompt is computed 256 tokens at a time, its rest in the narrowest of these that holds it."""
MIN_WIDTH = 64


class Span(NamedTuple):
    """The part of a prompt that one forward pass computes: tokens [start, end) in `columns` columns."""

    start: int
    end: int
    columns: int


def next_span(prompt_length: int, done: int) -> Span:
    """The part after the first `done` tokens; fixed by the prompt alone, so every request computes it alike."""
    end = min(prompt_length, done + MAX_COLUMNS)
    return Span(done, end, next(c for c in COLUMNS if c >= end - done))


def width_for(length: int) -> int:
    """Positions to look at for a longest row of `length`: few different values, so that shapes recur."""
    width = MIN_WIDTH
    while width < length:
        width *= 2
    return width if width <= 256 else -(-length // 256) * 256


class Runner:
    """One version of the weights and its key-value storage."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.device = next(module.parameters()).device
        self.cache = SlotCache(text_config(module).num_hidden_layers)
        self._dtype = _dtype_of(module)
        parameters = inspect.signature(_innermost(module).forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], spans: Sequence[Span], rows: int
    ) -> list[Chunk]:
        """Compute a span of each prompt into its slot, in a batch filled up to `rows`; one chunk for each prompt.

        The spans agree in `start` and `columns`. Tokens stand at the right of their row, so that the last one is
        always in the last column; the columns before them are filling.
        """
        start, columns = spans[0].start, spans[0].columns
        self.cache.ensure(max(slots) + 1, width_for(start + columns))
        tokens_RC = np.zeros((rows, columns), dtype=np.int64)
        position_RC = np.zeros((rows, columns), dtype=np.int64)
        write_RC = np.full((rows, columns), self.cache.length, dtype=np.int64)
        slot_R = np.full(rows, slots[0], dtype=np.int64)
        slot_R[: len(slots)] = slots
        filling_R = np.full(rows, columns - 1, dtype=np.int64)
        for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
            filling_R[row] = first = columns - (span.end - start)
            tokens_RC[row, first:] = prompt[start : span.end]
            position_RC[row, first:] = write_RC[row, first:] = range(start, span.end)
        positions = self._tensor(position_RC)
        if start == 0:
            hidden = self._hidden_at_first(self._tensor(filling_R), columns)
        else:
            hidden = torch.arange(start + columns, device=self.device) > positions[..., None]
        fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
        rows_R = self._tensor(slot_R)
        self.cache.plan = Plan(rows_R[:, None], self._tensor(write_RC), rows_R, start + columns, fresh)
        logits_RV = self._forward(self._tensor(tokens_RC), positions, hidden)
        return [Chunk(fresh, row, span.end - start, logits_RV[row]) for row, span in enumerate(spans)]

    def decode(self, token_B: np.ndarray, position_B: np.ndarray, live_B: np.ndarray) -> torch.Tensor:
        """The logits (B, V) after one more token in each of the first B slots; rows that are not live are filling."""
        width = width_for(int(position_B.max()) + 1)
        self.cache.ensure(len(token_B), width)
        write_B = np.where(live_B, position_B, self.cache.length)
        positions = self._tensor(position_B)[:, None]
        rows = torch.arange(len(token_B), device=self.device)[:, None]
        self.cache.plan = Plan(rows, self._tensor(write_B)[:, None], slice(len(token_B)), width)
        hidden = torch.arange(width, device=self.device) > positions[..., None]
        return self._forward(self._tensor(token_B)[:, None], positions, hidden)

    def _forward(self, tokens_RC: torch.Tensor, position_RC: torch.Tensor, hidden_RCT: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden_RCT.shape, device=self.device, dtype=self._dtype)
        mask.masked_fill_(hidden_RCT, torch.finfo(self._dtype).min)
        output = self.module(
            input_ids=tokens_RC,
            position_ids=position_RC,
            attention_mask=mask[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **self._last_only,
        )
        return output.logits[:, -1]

    def _hidden_at_first(self, filling_R: torch.Tensor, columns: int) -> torch.Tensor:
        """(R, C, C): at a prompt's start a row sees its own columns only; a filling column sees itself."""
        column = torch.arange(columns, device=self.device)
        seen_RCT = (column <= column[:, None]) & (column >= filling_R[:, None, None])
        return ~(seen_RCT | (column == column[:, None]))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


class Shapes:
    """The batch sizes in use: found out once for a model, valid for all versions of its weights."""

    def __init__(self, module: nn.Module, max_rows: int, prefill_tokens: int) -> None:
        self._module = module
        self._exact = next(module.parameters()).device.type == "cpu"
        self._prefill_tokens = prefill_tokens
        self._prefill_rows: dict[int, tuple[int, ...]] = {}
        self._vocabulary = text_config(module).vocab_size
        self.decode_rows = self._agreeing("decode", self._probe_decode, max_rows)

    def prefill_rows(self, columns: int) -> tuple[int, ...]:
        """Allowed numbers of prompts computed together, ascending."""
        if columns not in self._prefill_rows:
            most = max(1, self._prefill_tokens // columns)
            self._prefill_rows[columns] = self._agreeing(
                f"prefill of {columns}", lambda rows, row: self._probe_prefill(columns, rows, row), most
            )
        return self._prefill_rows[columns]

    def _agreeing(self, what: str, probe: Callable[[int, int], torch.Tensor], most: int) -> tuple[int, ...]:
        """Of the powers of two up to `most`, those whose first and last row come out as the largest's do."""
        sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
        if not self._exact:
            return tuple(sizes)
        with torch.inference_mode():
            reference = probe(most, 0)
            if not torch.equal(reference, probe(most, most - 1)):
                logger.warning("%s: rows of one batch differ in their last bits; sampling is not reproducible", what)
            agreeing = [s for s in sizes[:-1] if all(torch.equal(reference, probe(s, row)) for row in {0, s - 1})]
        logger.debug("%s: batch sizes %s of %s agree bit for bit", what, [*agreeing, most], sizes)
        return (*agreeing, most)

    def _probe_decode(self, size: int, row: int) -> torch.Tensor:
        """The logits of one request in row `row` of `size` others, each at another position."""
        random = np.random.default_rng(size + row)
        runner = Runner(self._module)
        prompt = _probe_prompt(self._vocabulary, 12)
        runner.cache.ensure(size, MIN_WIDTH)
        runner.prefill([prompt], [row], [next_span(len(prompt), 0)], 1)
        for layer in runner.cache.slot_layers:
            others = torch.arange(runner.cache.slots) != row
            for stored in (layer.keys, layer.values):
                stored[others] = torch.randn_like(stored[others])
        token_B = random.integers(0, self._vocabulary, size)
        position_B = random.integers(0, MIN_WIDTH - 1, size)
        token_B[row], position_B[row] = prompt[0], len(prompt)
        return runner.decode(token_B, position_B, np.ones(size, dtype=bool))[row]

    def _probe_prefill(self, columns: int, size: int, row: int) -> torch.Tensor:
        """Logits, keys and values of one prompt in row `row` of `size` others, flattened."""
        random = np.random.default_rng(size + row)
        prompts = [random.integers(0, self._vocabulary, random.integers(1, columns + 1)).tolist() for _ in range(size)]
        prompts[row] = _probe_prompt(self._vocabulary, columns - 1)
        spans = [Span(0, len(prompt), columns) for prompt in prompts]
        chunk = Runner(self._module).prefill(prompts, range(size), spans, size)[row]
        stored = [t[row, :, -chunk.length :].flatten() for pair in chunk.layers for t in pair]
        return torch.cat([chunk.logits_V, *stored])


def check_fits(module: nn.Module) -> None:
    """Raise BackendError where prompts and steps computed over this cache are not what the plain model computes."""
    name = text_config(module).model_type
    prompt = _probe_prompt(text_config(module).vocab_size, 21)
    device = next(module.parameters()).device
    try:
        with torch.inference_mode():
            plain_TV = module(input_ids=torch.tensor([prompt], device=device)).logits[0].float()
            runner = Runner(module)
            chunk = runner.prefill([prompt[:-1]], [1], [next_span(len(prompt) - 1, 0)], 2)[0]
            token, position = np.array([0, prompt[-1]]), np.array([0, len(prompt) - 1])
            step_V = runner.decode(token, position, np.array([False, True]))[1]
            served_2V = torch.stack([chunk.logits_V, step_V]).float()
            error = (served_2V - plain_TV[-2:]).abs().max() / plain_TV[-2:].abs().max().clamp_min(1e-6)
    except Exception as failure:  # a model that is not built for this can fail in any way
        raise BackendError(f"{name} models cannot be served here: {failure}") from failure
    allowed = 1e-3 if _dtype_of(module) == torch.float32 else 0.1
    if not error < allowed:
        raise BackendError(
            f"{name} models cannot be served here: with cached keys and values the logits are off by {error:.2g} "
            f"(allowed {allowed:g}), so the model keeps a state of another kind"
        )


def _probe_prompt(vocabulary: int, length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, vocabulary, length).tolist()


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def text_config(module: Any) -> Any:
    """The configuration of the language model, where it is part of something larger too."""
    return module.config.get_text_config()


def _innermost(module: Any) -> nn.Module:
    """The transformers model itself, below a PEFT wrapper."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module
